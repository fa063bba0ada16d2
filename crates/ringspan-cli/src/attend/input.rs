//! The tensors that `attend` reads, checked against each other before anything is computed.

use crate::files::{FileTensor, Tensors};
use anyhow::{Context, Result, bail, ensure};
use ringspan::Documents;
use safetensors::Dtype;

pub const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];
const KNOWN: [&str; 13] = [
    "q",
    "k",
    "v",
    "d_out",
    "cu_seqlens",
    "document_ids",
    "kv_lengths",
    "prefix_lengths",
    "block_pairs",
    "sinks",
    "alibi_slopes",
    "relative_bias",
    "bias",
];

/// Upper limit on the product of the other dims of a tensor with a dim of 0. Such a tensor has no bytes in the file, but rows
/// and heads without elements still cost memory and time.
const MOST_EMPTY: usize = 1 << 16;

/// Sizes of the tensors: B batch, Sq queries, Sk keys, H query heads, G key-value heads, D and Dv head widths.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct InputSizes {
    #[serde(rename = "B")]
    pub batch: usize,
    #[serde(rename = "Sq")]
    pub queries: usize,
    #[serde(rename = "Sk")]
    pub keys: usize,
    #[serde(rename = "H")]
    pub heads: usize,
    #[serde(rename = "G")]
    pub kv_heads: usize,
    #[serde(rename = "D")]
    pub dim: usize,
    #[serde(rename = "Dv")]
    pub v_dim: usize,
}

/// The input tensors, still in the bytes of their file.
pub struct Input<'a> {
    pub sizes: InputSizes,
    pub q: FileTensor<'a, 4>,
    pub k: FileTensor<'a, 4>,
    pub v: FileTensor<'a, 4>,
    pub d_out: Option<FileTensor<'a, 4>>,
    /// Documents of the queries; each corresponds to one of the `key_documents`, in the same order.
    pub query_documents: Documents,
    pub key_documents: Documents,
}

impl<'a> Input<'a> {
    pub fn new(file: &Tensors<'a>, backward: bool) -> Result<Self> {
        let path = file.path().display();
        let q = file.get::<4>("q", &FLOATS, "[B, Sq, H, D]")?;
        let k = file.get::<4>("k", &FLOATS, "[B, Sk, G, D]")?;
        let v = file.get::<4>("v", &FLOATS, "[B, Sk, G, Dv]")?;
        let equal = |a: (&str, &FileTensor<'_, 4>), b: (&str, &FileTensor<'_, 4>), dim: usize, letter: &str| {
            let (one, other) = (a.1.shape[dim], b.1.shape[dim]);
            ensure!(
                one == other,
                "{path}: `{}` {:?} and `{}` {:?} differ in {letter} (dim {dim}): {one} and {other}",
                a.0,
                a.1.shape,
                b.0,
                b.1.shape
            );
            Ok(())
        };
        equal(("q", &q), ("k", &k), 0, "B")?;
        equal(("q", &q), ("v", &v), 0, "B")?;
        equal(("k", &k), ("v", &v), 1, "Sk")?;
        equal(("q", &q), ("k", &k), 3, "D")?;
        equal(("k", &k), ("v", &v), 2, "G")?;
        let [batch, queries, heads, dim] = q.shape;
        let [_, keys, kv_heads, v_dim] = v.shape;
        let sizes = InputSizes { batch, queries, keys, heads, kv_heads, dim, v_dim };
        for (size, letter, name) in [(heads, "H", "q"), (dim, "D", "q"), (kv_heads, "G", "k"), (v_dim, "Dv", "v")] {
            ensure!(size > 0, "{path}: `{name}` has {letter} = 0, but it must be at least 1");
        }
        ensure!(
            heads.is_multiple_of(kv_heads),
            "{path}: the {heads} heads H of `q` {:?} are not a multiple of the {kv_heads} heads G of `k` {:?}",
            q.shape,
            k.shape
        );
        sizes.check().with_context(|| format!("{path}: {sizes:?}"))?;

        let d_out = match file.has("d_out") {
            true => {
                let d_out = file.get::<4>("d_out", &FLOATS, "[B, Sq, H, Dv]")?;
                let expected = [batch, queries, heads, v_dim];
                ensure!(
                    d_out.shape == expected,
                    "{path}: `d_out` has shape {:?}, expected {expected:?} [B, Sq, H, Dv], the shape of out",
                    d_out.shape
                );
                Some(d_out)
            }
            false => None,
        };
        if backward && d_out.is_none() {
            bail!(
                "{path}: --backward needs the tensor `d_out` [B, Sq, H, Dv]; the file has: {}",
                file.names().join(", ")
            );
        }
        let (query_documents, key_documents) = documents(file, &sizes)?;
        Ok(Self { sizes, q, k, v, d_out: d_out.filter(|_| backward), query_documents, key_documents })
    }
}

impl InputSizes {
    /// Refuses sizes for which there cannot be enough memory: where one dim is 0, a file without bytes may claim any other
    /// dims.
    fn check(&self) -> Result<()> {
        let Self { batch, queries, keys, heads, kv_heads, dim, v_dim } = *self;
        for dims in [[batch, queries, heads, dim.max(v_dim)], [batch, keys, kv_heads, dim.max(v_dim)]] {
            let elements = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim.max(1)));
            let room = elements.filter(|elements| Vec::<f32>::new().try_reserve_exact(*elements).is_ok());
            let nothing = dims.contains(&0);
            ensure!(
                !nothing || elements.is_some_and(|elements| elements <= MOST_EMPTY),
                "a tensor of {dims:?} holds nothing; with a dim of 0, the others may multiply to {MOST_EMPTY}"
            );
            ensure!(room.is_some(), "a tensor of {dims:?} f32 elements has more bytes than this machine can give");
        }
        Ok(())
    }
}

/// Names of the tensors in the file that `attend` does not use.
pub fn unknown(file: &Tensors<'_>) -> Vec<String> {
    file.names().into_iter().filter(|name| !KNOWN.contains(&name.as_str())).collect()
}

fn documents(file: &Tensors<'_>, sizes: &InputSizes) -> Result<(Documents, Documents)> {
    let path = file.path().display();
    let InputSizes { batch, queries, keys, .. } = *sizes;
    let given: Vec<&str> =
        ["cu_seqlens", "document_ids", "kv_lengths"].into_iter().filter(|name| file.has(name)).collect();
    if let [one, other, ..] = given[..] {
        bail!(
            "{path}: `{one}` and `{other}` contradict each other: each says alone which tokens are padding; keep one \
             (padding is what lies after the last entry of cu_seqlens, has document id 0, or lies after kv_lengths)"
        );
    }
    let Some(name) = given.first().copied() else {
        return Ok((Documents::batch(batch, queries), Documents::batch(batch, keys)));
    };
    if name != "kv_lengths" {
        ensure!(
            queries == keys,
            "{path}: `{name}` describes one row of tokens, but `q` has Sq = {queries} and `k` has Sk = {keys}"
        );
    }
    match name {
        "cu_seqlens" => {
            let given = file.get::<1>(name, &[Dtype::I32], "[n + 1]")?;
            ensure!(batch == 1, "{path}: `cu_seqlens` packs documents into one row (B = 1), but `q` has B = {batch}");
            let entries = given.integers();
            let Some(first) = entries.first() else {
                bail!("{path}: `cu_seqlens` is empty; for n documents it has n + 1 entries, the first of them 0");
            };
            ensure!(*first == 0, "{path}: `cu_seqlens`[0] is {first}, but the first document begins at 0");
            for (n, pair) in entries.windows(2).enumerate() {
                ensure!(
                    pair[0] <= pair[1],
                    "{path}: `cu_seqlens` falls from {} (entry {n}) to {} (entry {})",
                    pair[0],
                    pair[1],
                    n + 1
                );
            }
            let last = entries[entries.len() - 1];
            ensure!(
                last as usize <= queries,
                "{path}: `cu_seqlens` ends at {last}, but there are S = {queries} tokens"
            );
            let boundaries: Vec<usize> = entries.into_iter().map(|entry| entry as usize).collect();
            let documents = Documents::from_boundaries(&boundaries, queries)?;
            Ok((documents.clone(), documents))
        }
        "document_ids" => {
            let given = file.get::<2>(name, &[Dtype::I32], "[B, S]")?;
            ensure!(
                given.shape == [batch, queries],
                "{path}: `document_ids` has shape {:?}, expected [{batch}, {queries}] [B, S]",
                given.shape
            );
            let ids: Vec<i32> = given.integers().into_iter().map(|id| id as i32).collect();
            let documents = Documents::from_ids(&ids, queries).with_context(|| format!("{path}: `document_ids`"))?;
            Ok((documents.clone(), documents))
        }
        _ => {
            let given = file.get::<1>(name, &[Dtype::I32], "[B]")?;
            ensure!(given.shape == [batch], "{path}: `kv_lengths` has shape {:?}, expected [{batch}] [B]", given.shape);
            let lengths = given.integers().into_iter().enumerate().map(|(row, length)| {
                let fits = usize::try_from(length).ok().filter(|length| *length <= keys);
                fits.with_context(|| {
                    format!("{path}: `kv_lengths`[{row}] is {length}, but a row has 0 to Sk = {keys} keys")
                })
            });
            let keys = Documents::padded(&lengths.collect::<Result<Vec<_>>>()?, keys)?;
            Ok((Documents::batch(batch, queries), keys))
        }
    }
}
