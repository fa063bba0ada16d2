//! Attention over whole sequences by candle's operations in f64, and the same through a context on ranks.

use super::random;
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::softmax;
use ringspan::kernel::{Buckets, Dropout, RelativeBias};
use ringspan::{Documents, Mask, Score, World};
use ringspan_candle::{AttentionInputs, Context, ContextBuilder, QkvFormat};

type Failure = Box<dyn std::error::Error + Send + Sync>;

pub(crate) const HEADS: usize = 4;
pub(crate) const KV_HEADS: usize = 2;
const DIM: usize = 8;
const V_DIM: usize = 6;

/// T5's buckets in these tests: 8 of them, of which the last starts at distance 12.
const BUCKETS: usize = 8;
const MAX_DISTANCE: usize = 12;

/// The terms of a score besides the mask.
#[derive(Clone)]
pub(crate) struct Terms {
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
    pub(crate) alibi: bool,
    /// T5's buckets: bidirectional or causal.
    pub(crate) buckets: Option<bool>,
    pub(crate) sinks: bool,
    /// The heads of a bias: 1 or all.
    pub(crate) bias_heads: Option<usize>,
    pub(crate) dropout: Option<f32>,
}

impl Default for Terms {
    fn default() -> Self {
        let scale = 1.0 / (DIM as f32).sqrt();
        Self { scale, softcap: None, alibi: false, buckets: None, sinks: false, bias_heads: None, dropout: None }
    }
}

/// A test case: sequences, the mask between their tokens, and tensors for them.
pub(crate) struct Case {
    /// The lengths of the documents of each batch row, for queries and for keys.
    queries: (Vec<Vec<usize>>, usize),
    keys: (Vec<Vec<usize>>, usize),
    pub(crate) mask: Mask,
    /// The mask as a rule: whether query `i` of a document sees key `j`.
    sees: fn(usize, usize) -> bool,
    pub(crate) terms: Terms,
    dtype: DType,
    /// A factor on queries, keys and values.
    factor: f64,
}

/// The results that are compared, by name.
pub(crate) type Results = Vec<(&'static str, Tensor)>;

impl Case {
    /// Self-attention of documents that are packed into rows of `len` tokens from the left.
    pub(crate) fn new(rows: &[&[usize]], len: usize, mask: Mask, sees: fn(usize, usize) -> bool) -> Self {
        let rows: Vec<Vec<usize>> = rows.iter().map(|row| row.to_vec()).collect();
        Self {
            queries: (rows.clone(), len),
            keys: (rows, len),
            mask,
            sees,
            terms: Terms::default(),
            dtype: DType::F32,
            factor: 1.0,
        }
    }

    pub(crate) fn causal(rows: &[&[usize]], len: usize) -> Self {
        Self::new(rows, len, Mask::causal(), |i, j| j <= i)
    }

    /// Cross attention to other documents, as many as there are of queries.
    pub(crate) fn with_keys(self, rows: &[&[usize]], len: usize) -> Self {
        Self { keys: (rows.iter().map(|row| row.to_vec()).collect(), len), ..self }
    }

    pub(crate) fn with(self, terms: Terms) -> Self {
        Self { terms, ..self }
    }

    pub(crate) fn in_bf16(self) -> Self {
        Self { dtype: DType::BF16, ..self }
    }

    pub(crate) fn scaled(self, factor: f64) -> Self {
        Self { factor, ..self }
    }

    fn score(&self) -> Score {
        let terms = &self.terms;
        let relative = match terms.buckets {
            // The table is an input of its own, so these zeros are not read.
            Some(bidirectional) => Some(RelativeBias::Buckets(Buckets {
                table: vec![0.0; HEADS * BUCKETS],
                count: BUCKETS,
                max_distance: MAX_DISTANCE,
                bidirectional,
            })),
            None => terms.alibi.then(|| RelativeBias::Alibi { slopes: slopes().to_vec() }),
        };
        let dropout = terms.dropout.map(|rate| Dropout { rate, seed: 77, first_head: 0, first_query: 0 });
        Score { softcap: terms.softcap, relative, dropout, ..Score::new(terms.scale) }
    }

    /// The inputs: q, k, v, the gradient of the output, sinks, bias and bucket table. Without a factor, numbers are exact in bf16.
    fn inputs(&self) -> [Tensor; 7] {
        let (batch, queries, keys) = (self.queries.0.len(), self.queries.1, self.keys.1);
        let scaled = |dims: &[usize], seed| (random(dims, seed) * self.factor).expect("a product");
        [
            scaled(&[batch, queries, HEADS, DIM], 1),
            scaled(&[batch, keys, KV_HEADS, DIM], 2),
            scaled(&[batch, keys, KV_HEADS, V_DIM], 3),
            random(&[batch, queries, HEADS, V_DIM], 4),
            random(&[HEADS], 5),
            random(&[batch, queries, self.terms.bias_heads.unwrap_or(1), keys], 6),
            random(&[HEADS, BUCKETS], 7),
        ]
    }

    /// Output and gradients in f64, by candle's operations on whole sequences.
    pub(crate) fn expected(&self) -> Results {
        self.by_candle().expect("attention by candle's operations")
    }

    fn by_candle(&self) -> Result<Results> {
        let [q, k, v, d_out, sinks, bias, table] = self.inputs().map(|x| x.to_dtype(DType::F64));
        let d_out = d_out?;
        let vars = [q?, k?, v?, sinks?, bias?, table?].map(|x| Var::from_tensor(&x));
        let [q, k, v, sinks, bias, table] = vars;
        let (q, k, v, sinks, bias, table) = (q?, k?, v?, sinks?, bias?, table?);
        let (batch, queries, keys) = (self.queries.0.len(), self.queries.1, self.keys.1);
        let shape = (batch, HEADS, queries, keys);
        let pairs = self.pairs();

        let heads_first = |x: &Tensor| -> Result<Tensor> {
            let (b, s, g, d) = x.dims4()?;
            let x = x.unsqueeze(3)?.broadcast_as((b, s, g, HEADS / g, d))?.reshape((b, s, HEADS, d))?;
            x.transpose(1, 2)?.contiguous()
        };
        let mut scores = heads_first(&q)?.matmul(&heads_first(&k)?.transpose(2, 3)?.contiguous()?)?;
        scores = (scores * f64::from(self.terms.scale))?;
        if let Some(cap) = self.terms.softcap.map(f64::from) {
            scores = ((scores / cap)?.tanh()? * cap)?;
        }
        if self.terms.alibi {
            let term = |h: usize, pair: &Pair| -f64::from(slopes()[h]) * pair.distance.unsigned_abs() as f64;
            let terms = of_heads(&pairs, queries * keys, term);
            scores = (scores + Tensor::from_vec(terms, shape, &Device::Cpu)?)?;
        }
        if let Some(bidirectional) = self.terms.buckets {
            let indices: Vec<u32> = pairs.iter().map(|pair| bucket(pair.distance, bidirectional) as u32).collect();
            let indices = Tensor::from_vec(indices, pairs.len(), &Device::Cpu)?;
            let terms = table.index_select(&indices, 1)?.reshape((HEADS, batch, queries, keys))?.transpose(0, 1)?;
            scores = (scores + terms)?;
        }
        if self.terms.bias_heads.is_some() {
            scores = scores.broadcast_add(&bias.transpose(1, 2)?)?;
        }
        let hidden = of_heads(&pairs, queries * keys, |_, pair| if pair.visible { 0.0 } else { -1e30 });
        scores = (scores + Tensor::from_vec(hidden, shape, &Device::Cpu)?)?;
        if self.terms.sinks {
            let sinks = sinks.reshape((1, HEADS, 1, 1))?.broadcast_as((batch, HEADS, queries, 1))?;
            scores = Tensor::cat(&[&scores, &sinks.contiguous()?], 3)?;
        }
        let weights = softmax(&scores, D::Minus1)?.narrow(3, 0, keys)?;
        // A query that sees nothing has the output zero; dropout scales what it leaves.
        let dropout = self.score().dropout;
        let factor = |h: usize, pair: &Pair| match dropout {
            _ if !pair.visible => 0.0,
            Some(dropout) if !dropout.keeps(h, pair.query, pair.key) => 0.0,
            Some(Dropout { rate, .. }) => 1.0 / (1.0 - f64::from(rate)),
            None => 1.0,
        };
        let factors = Tensor::from_vec(of_heads(&pairs, queries * keys, factor), shape, &Device::Cpu)?;
        let out = (weights * factors)?.matmul(&heads_first(&v)?)?.transpose(1, 2)?.contiguous()?;

        // Padding has no gradient: nothing on ranks holds it.
        let is_token = tokens(&self.queries).iter().map(|token| f64::from(u8::from(token.is_some()))).collect();
        let is_token = Tensor::from_vec::<_, f64>(is_token, (batch, queries, 1, 1), &Device::Cpu)?;
        let gradients = out.broadcast_mul(&is_token)?.mul(&d_out)?.sum_all()?.backward()?;
        let gradient = |var: &Var| gradients.get(var.as_tensor()).cloned().map_or_else(|| var.zeros_like(), Ok);
        let mut results = vec![
            ("out", out.broadcast_mul(&is_token)?.detach()),
            ("dq", gradient(&q)?),
            ("dk", gradient(&k)?),
            ("dv", gradient(&v)?),
        ];
        let learned = [("d_sinks", &sinks), ("d_bias", &bias), ("d_table", &table)];
        for (name, var) in self.used(learned) {
            results.push((name, gradient(var)?));
        }
        Ok(results)
    }

    /// The gradients of sinks, bias and bucket table, as far as this case has them.
    fn used<'a, T>(&self, terms: [(&'static str, &'a T); 3]) -> Vec<(&'static str, &'a T)> {
        let used = [self.terms.sinks, self.terms.bias_heads.is_some(), self.terms.buckets.is_some()];
        terms.into_iter().zip(used).filter(|(_, used)| *used).map(|(term, _)| term).collect()
    }

    /// Every query of the batch with every key of its row.
    fn pairs(&self) -> Vec<Pair> {
        let (queries, keys) = (tokens(&self.queries), tokens(&self.keys));
        let mut pairs = Vec::new();
        for (query, token) in queries.iter().enumerate() {
            let row = query / self.queries.1;
            for key in 0..self.keys.1 {
                let pair = match (token, keys[row * self.keys.1 + key]) {
                    (Some((document, i)), Some((of_key, j))) if *document == of_key => {
                        Pair { query, key, visible: (self.sees)(*i, j), distance: *i as i64 - j as i64 }
                    }
                    _ => Pair { query, key, visible: false, distance: 0 },
                };
                pairs.push(pair);
            }
        }
        pairs
    }

    /// The same results by a context on ranks, each of which has its tokens only.
    pub(crate) fn on_ranks(
        &self,
        ranks: usize,
        build: impl Fn(ContextBuilder) -> ContextBuilder + Sync,
    ) -> std::result::Result<Results, Failure> {
        let mut results = World::threads(ranks)?.run(|rank| {
            let builder = Context::builder(rank).documents(Documents::from_rows(&self.queries.0, self.queries.1)?);
            let builder = match self.keys == self.queries {
                true => builder,
                false => builder.key_documents(Documents::from_rows(&self.keys.0, self.keys.1)?),
            };
            self.by_context(&build(builder.mask(self.mask.clone())).build()?)
        })?;
        Ok(results.swap_remove(0))
    }

    fn by_context(&self, context: &Context) -> std::result::Result<Results, Failure> {
        let is_bhsd = context.qkv_format() == QkvFormat::Bhsd;
        // The transposed tensors stay views: attention must read tensors that are not contiguous.
        let turned = |x: Tensor| if is_bhsd { x.transpose(1, 2) } else { Ok(x) };
        let [q, k, v, d_out, sinks, bias, table] = self.inputs().map(|x| x.to_dtype(self.dtype));
        let [q, k, v] = [context.shard(&q?)?, context.shard_keys(&k?)?, context.shard_keys(&v?)?];
        let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x));
        let (q, k, v) = (q?, k?, v?);
        let d_out = turned(context.shard(&d_out?)?)?;
        let bias = Var::from_tensor(&context.shard(&bias?.to_dtype(DType::F32)?)?)?;
        let sinks = Var::from_tensor(&sinks?.to_dtype(DType::F32)?)?;
        let table = Var::from_tensor(&table?.to_dtype(DType::F32)?)?;

        let [q_in, k_in, v_in] = [&q, &k, &v].map(|x| turned(x.as_tensor().clone()));
        let (q_in, k_in, v_in, bias_in) = (q_in?, k_in?, v_in?, turned(bias.as_tensor().clone())?);
        let inputs = AttentionInputs {
            sinks: self.terms.sinks.then_some(&sinks),
            bias: self.terms.bias_heads.map(|_| &bias_in),
            bucket_table: self.terms.buckets.map(|_| table.as_tensor()),
            ..AttentionInputs::new(&q_in, &k_in, &v_in)
        };
        let out = context.attention_with(&inputs, &self.mask, self.score())?;
        let mut gradients = (&out * d_out)?.to_dtype(DType::F32)?.sum_all()?.backward()?;

        let parameters = [("sinks".to_owned(), sinks.clone()), ("table".to_owned(), table.clone())];
        context.all_reduce_gradients(&mut gradients, &parameters)?;
        let gradient = |var: &Var| gradients.get(var.as_tensor()).cloned().map_or_else(|| var.zeros_like(), Ok);
        let mut results = vec![
            ("out", context.unshard(&turned(out.detach())?)?),
            ("dq", context.unshard(&gradient(&q)?)?),
            ("dk", context.unshard_keys(&gradient(&k)?)?),
            ("dv", context.unshard_keys(&gradient(&v)?)?),
        ];
        let whole = [gradient(&sinks)?, context.unshard(&gradient(&bias)?)?, gradient(&table)?];
        let learned = [("d_sinks", &whole[0]), ("d_bias", &whole[1]), ("d_table", &whole[2])];
        for (name, gradient) in self.used(learned) {
            results.push((name, gradient.clone()));
        }
        Ok(results)
    }
}

/// A query, counted in the batch, and a key, counted in its row.
struct Pair {
    query: usize,
    key: usize,
    visible: bool,
    /// The query's position minus the key's, in their document.
    distance: i64,
}

/// For each token of the batch its document and its position there; `None` for padding.
fn tokens((rows, len): &(Vec<Vec<usize>>, usize)) -> Vec<Option<(usize, usize)>> {
    let mut document = 0;
    let mut all = Vec::new();
    for row in rows {
        let mut tokens = Vec::new();
        for &length in row {
            tokens.extend((0..length).map(|position| Some((document, position))));
            document += 1;
        }
        tokens.resize(*len, None);
        all.extend(tokens);
    }
    all
}

/// A number for each row, head and pair, `[B, H, S, Sk]`.
fn of_heads(pairs: &[Pair], pairs_of_row: usize, number: impl Fn(usize, &Pair) -> f64) -> Vec<f64> {
    let rows = pairs.chunks(pairs_of_row.max(1));
    let mut numbers = Vec::with_capacity(pairs.len() * HEADS);
    for row in rows {
        for head in 0..HEADS {
            numbers.extend(row.iter().map(|pair| number(head, pair)));
        }
    }
    numbers
}

/// ALiBi's slopes for four heads: 1/4, 1/16, 1/64, 1/256.
fn slopes() -> [f32; HEADS] {
    [1, 2, 3, 4].map(|head| 0.25_f32.powi(head))
}

/// T5's bucket of a distance, as its paper's code computes it from the key's position minus the query's.
fn bucket(distance: i64, bidirectional: bool) -> usize {
    let relative = -distance;
    let (mut count, mut first) = (BUCKETS, 0);
    let magnitude = if bidirectional {
        count /= 2;
        first = if relative > 0 { count } else { 0 };
        relative.unsigned_abs() as usize
    } else {
        (-relative.min(0)) as usize
    };
    let exact = count / 2;
    if magnitude < exact {
        return first + magnitude;
    }
    let share = (magnitude as f64 / exact as f64).ln() / (MAX_DISTANCE as f64 / exact as f64).ln();
    first + (exact + (share * (count - exact) as f64) as usize).min(count - 1)
}

/// Checks each result by its relative error (L2).
#[track_caller]
pub(crate) fn assert_close(actual: &Results, expected: &Results, most: f64, case: &str) {
    assert_eq!(actual.len(), expected.len(), "{case}");
    for ((name, actual), (_, expected)) in actual.iter().zip(expected) {
        assert_eq!(actual.dims(), expected.dims(), "{case}: {name}");
        let distance = distance(actual, expected);
        assert!(distance <= most, "{case}: {name} is {distance:e} away");
    }
}

/// The L2 distance as a share of the norm of `expected`; the distance itself if that norm is zero.
pub(crate) fn distance(actual: &Tensor, expected: &Tensor) -> f64 {
    let norm =
        |x: &Tensor| x.sqr().and_then(|x| x.sum_all()).and_then(|x| x.to_scalar::<f64>()).expect("a norm").sqrt();
    let actual = actual.to_dtype(DType::F64).expect("f64");
    let (off, all) = (norm(&(&actual - expected).expect("equal shapes")), norm(expected));
    if all > 0.0 { off / all } else { off }
}
