//! Makes the mask and the terms of the scores from flags and tensors.

use super::args::AttendArgs;
use super::input::{FLOATS, InputSizes};
use crate::files::{FileTensor, Tensors};
use anyhow::{Context, Result, ensure};
use ringspan::kernel::{Buckets, Dropout, RelativeBias};
use ringspan::mask::BlockPairs;
use ringspan::{Mask, Score};
use safetensors::Dtype;

/// The mask that flags and tensors define together; `documents` is the number of documents.
pub fn mask(args: &AttendArgs, file: &Tensors<'_>, documents: usize) -> Result<Mask> {
    let path = file.path().display();
    let mut mask = args.visibility()?;
    if let Some(size) = args.chunk {
        mask = mask.chunked(size).context("--chunk")?;
    }
    ensure!(
        mask.limits_ahead() || (args.prefix.is_none() && !file.has("prefix_lengths")),
        "{path}: a prefix opens keys ahead of a query, and this mask ({mask}) hides none of them; give --mask causal, or \
         a --window with a limit ahead"
    );
    if let Some(length) = args.prefix {
        ensure!(!file.has("prefix_lengths"), "{path}: `prefix_lengths` and --prefix say the same; give one of them");
        mask = mask.prefix_lm([length]);
    } else if file.has("prefix_lengths") {
        let given = file.get::<1>("prefix_lengths", &[Dtype::I32], "[B] (one a document)")?;
        let lengths = given.integers().into_iter().enumerate().map(|(n, length)| {
            usize::try_from(length).with_context(|| format!("{path}: `prefix_lengths`[{n}] is {length}, below 0"))
        });
        mask = mask.prefix_lm(lengths.collect::<Result<Vec<_>>>()?);
    }
    mask.check(documents).with_context(|| format!("{path}: `prefix_lengths`"))?;
    match (args.block_size, file.has("block_pairs")) {
        (None, false) => Ok(mask),
        (Some(_), false) => anyhow::bail!("{path}: --block-size needs the tensor `block_pairs` [n, 2]"),
        (None, true) => anyhow::bail!("{path}: `block_pairs` needs --block-size QUERIES,KEYS, the size of a block"),
        (Some(size), true) => {
            let given = file.get::<2>("block_pairs", &[Dtype::I32], "[n, 2] (query block, key block)")?;
            ensure!(given.shape[1] == 2, "{path}: `block_pairs` has shape {:?}, expected [n, 2]", given.shape);
            let pairs = given.integers();
            let index =
                |n: i64| usize::try_from(n).with_context(|| format!("{path}: `block_pairs` holds {n}, below 0"));
            let pairs = pairs.chunks_exact(2).map(|pair| Ok((index(pair[0])?, index(pair[1])?)));
            let pairs = BlockPairs::new(size.queries, size.keys, pairs.collect::<Result<Vec<_>>>()?)?;
            Ok(mask.block_sparse(pairs))
        }
    }
}

/// The terms that turn products of queries and keys into attention weights.
pub struct ScoreTerms<'a> {
    pub score: Score,
    /// `[B or 1, H or 1, Sq, Sk]`
    pub bias: Option<FileTensor<'a, 4>>,
    /// Whether sinks are an input, and therefore have a gradient; the sinks of an off-by-one softmax are not.
    pub gives_sinks: bool,
}

/// The terms that flags and tensors define together.
pub fn terms<'a>(args: &AttendArgs, file: &Tensors<'a>, sizes: &InputSizes) -> Result<ScoreTerms<'a>> {
    Ok(ScoreTerms { score: score(args, file, sizes)?, bias: bias(file, sizes)?, gives_sinks: file.has("sinks") })
}

fn score(args: &AttendArgs, file: &Tensors<'_>, sizes: &InputSizes) -> Result<Score> {
    let path = file.path().display();
    let heads = sizes.heads;
    let per_head = |name: &str| -> Result<Option<Vec<f32>>> {
        if !file.has(name) {
            return Ok(None);
        }
        let given = file.get::<1>(name, &FLOATS, "[H]")?;
        ensure!(given.shape == [heads], "{path}: `{name}` has shape {:?}, expected [{heads}] [H]", given.shape);
        Ok(Some(given.floats()))
    };
    let mut sinks = per_head("sinks")?;
    if args.off_by_one {
        ensure!(sinks.is_none(), "{path}: --off-by-one is a sink of 0 for each head, but the file has `sinks`");
        sinks = Some(vec![0.0; heads]);
    }
    let alibi = per_head("alibi_slopes")?.map(|slopes| RelativeBias::Alibi { slopes });
    let relative = match buckets(args, file, heads)? {
        None => alibi,
        Some(buckets) => {
            ensure!(
                alibi.is_none(),
                "{path}: `alibi_slopes` and `relative_bias` are both terms of the distance; keep one"
            );
            Some(RelativeBias::Buckets(buckets))
        }
    };
    ensure!(args.dropout.is_some() || args.seed.is_none(), "--seed is of use with --dropout only");
    let seed = args.seed.unwrap_or(0);
    if let Some(scale) = args.scale.filter(|scale| !scale.is_finite()) {
        anyhow::bail!("--scale {scale} is not a finite number");
    }
    let score = Score {
        scale: args.scale.unwrap_or(1.0 / (sizes.dim as f32).sqrt()),
        softcap: args.softcap,
        relative,
        sinks,
        dropout: args.dropout.map(|rate| Dropout { rate, seed, first_head: 0, first_query: 0 }),
    };
    score.check(heads)?;
    Ok(score)
}

fn buckets(args: &AttendArgs, file: &Tensors<'_>, heads: usize) -> Result<Option<Buckets>> {
    let path = file.path().display();
    if !file.has("relative_bias") {
        let unused = args.relative_max_distance.is_some() || args.relative_bidirectional;
        ensure!(
            !unused,
            "{path}: --relative-max-distance and --relative-bidirectional need the tensor `relative_bias`"
        );
        return Ok(None);
    }
    let given = file.get::<2>("relative_bias", &FLOATS, "[buckets, H]")?;
    let [count, given_heads] = given.shape;
    ensure!(
        given_heads == heads,
        "{path}: `relative_bias` has shape {:?}, expected [buckets, {heads}] [.., H]",
        given.shape
    );
    let by_bucket = given.floats();
    let table = (0..heads).flat_map(|head| by_bucket.iter().copied().skip(head).step_by(heads.max(1))).collect();
    let max_distance = args.relative_max_distance.unwrap_or(128);
    Ok(Some(Buckets { table, count, max_distance, bidirectional: args.relative_bidirectional }))
}

fn bias<'a>(file: &Tensors<'a>, sizes: &InputSizes) -> Result<Option<FileTensor<'a, 4>>> {
    if !file.has("bias") {
        return Ok(None);
    }
    let path = file.path().display();
    let given = file.get::<4>("bias", &FLOATS, "[B or 1, H or 1, Sq, Sk]")?;
    let InputSizes { batch, queries, keys, heads, .. } = *sizes;
    let [rows, given_heads, q, k] = given.shape;
    ensure!(
        (rows == batch || rows == 1) && (given_heads == heads || given_heads == 1) && (q, k) == (queries, keys),
        "{path}: `bias` has shape {:?}, expected [{batch} or 1, {heads} or 1, {queries}, {keys}] [B or 1, H or 1, Sq, Sk]",
        given.shape
    );
    let greatest = given.greatest(|x| x);
    ensure!(
        greatest <= Score::LARGEST_TERM,
        "{path}: `bias` holds {greatest:?}; a term may be up to {:?}, so that scores with it stay finite",
        Score::LARGEST_TERM
    );
    Ok(Some(given))
}
