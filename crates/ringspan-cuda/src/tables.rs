//! Lists for the kernels: the tiles that each thread block of a call computes.

use crate::cuda::{Cuda, count};
use crate::kernel_params::{self, AttentionParams, TilePart};
use cudarc::driver::CudaSlice;
use ringspan::Band;
use ringspan::Result;
use ringspan::kernel::{HeadMap, Inputs, RelativeBias, Score, Tile};

/// Tiles, and for each block of rows the parts of tiles that it computes.
pub(crate) struct Tables {
    /// Number of blocks of rows, including those without parts.
    pub(crate) blocks: usize,
    tiles: CudaSlice<kernel_params::Tile>,
    parts: CudaSlice<TilePart>,
    parts_of: CudaSlice<i32>,
    kv_of: CudaSlice<i32>,
    heads_of: CudaSlice<i32>,
}

/// Score terms that depend on the distance.
pub(crate) struct ScoreTerms {
    terms: CudaSlice<f32>,
    first: CudaSlice<i64>,
}

/// Whether blocks consist of queries or of keys.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockSide {
    Queries,
    Keys,
}

impl Tables {
    /// Makes the lists; `None` if nothing is visible in the tiles.
    pub(crate) fn new(
        cuda: &Cuda,
        inputs: &Inputs,
        tiles: &[Tile],
        rows: BlockSide,
        block: usize,
    ) -> Result<Option<Self>> {
        // A band limited to its tile can be transposed without overflow.
        let cut = |tile: &Tile| Some(Tile { band: tile.band.clamp(tile.q.len(), tile.k.len())?, ..tile.clone() });
        let tiles: Vec<Tile> = tiles.iter().filter_map(cut).collect();
        let (own_tiles, own) = match rows {
            BlockSide::Queries => (tiles.clone(), inputs.q.tokens),
            BlockSide::Keys => (tiles.iter().map(transposed).collect(), inputs.k.tokens),
        };
        let blocks = parts_of_blocks(&own_tiles, block, own)?;
        let (mut parts, mut parts_of) = (Vec::new(), vec![0]);
        for of_block in &blocks {
            parts.extend_from_slice(of_block);
            parts_of.push(count(parts.len(), "parts of tiles")?);
        }
        if parts.is_empty() {
            return Ok(None);
        }
        let HeadLists { kv_of, heads_of } = HeadLists::new(inputs.heads);
        Ok(Some(Self {
            blocks: blocks.len(),
            tiles: cuda.upload_all(&tiles.iter().map(for_kernel).collect::<Vec<_>>())?,
            parts: cuda.upload_all(&parts)?,
            parts_of: cuda.upload_all(&parts_of)?,
            kv_of: cuda.upload_all(&kv_of)?,
            heads_of: cuda.upload_all(&heads_of)?,
        }))
    }

    /// A params that uses these lists.
    pub(crate) fn over(&self, cuda: &Cuda, params: AttentionParams) -> AttentionParams {
        AttentionParams {
            tiles: cuda.at(&self.tiles),
            parts: cuda.at(&self.parts),
            parts_of: cuda.at(&self.parts_of),
            kv_of: cuda.at(&self.kv_of),
            heads_of: cuda.at(&self.heads_of),
            ..params
        }
    }
}

impl ScoreTerms {
    pub(crate) fn new(cuda: &Cuda, score: &Score) -> Result<Self> {
        let (terms, first) = match &score.relative {
            None => (&[][..], Vec::new()),
            Some(RelativeBias::Alibi { slopes }) => (&slopes[..], Vec::new()),
            Some(RelativeBias::Buckets(buckets)) => {
                (&buckets.table[..], buckets.smallest_distances().into_iter().map(|smallest| smallest as i64).collect())
            }
        };
        Ok(Self { terms: cuda.upload_all(terms)?, first: cuda.upload_all(&first)? })
    }

    /// The fields of a params that depend on the inputs, except for the tensors.
    pub(crate) fn params(&self, cuda: &Cuda, inputs: &Inputs) -> Result<AttentionParams> {
        let Inputs { q, k, score, bias, .. } = inputs;
        let (buckets, buckets_of_one) = match &score.relative {
            Some(RelativeBias::Buckets(buckets)) => (buckets.count, buckets.smallest_distances().len()),
            _ => (0, 0),
        };
        let mut params = AttentionParams {
            terms: cuda.at(&self.terms),
            first: cuda.at(&self.first),
            queries: count(q.tokens, "queries")?,
            keys: count(k.tokens, "keys")?,
            heads: count(q.heads, "heads")?,
            kv_heads: count(k.heads, "key-value heads")?,
            bias_heads: count(bias.map_or(0, |bias| bias.heads), "heads of the bias")?,
            bias_keys: count(bias.map_or(0, |bias| bias.dim), "keys of the bias")?,
            buckets: count(buckets, "buckets")?,
            buckets_of_one: count(buckets_of_one, "buckets")?,
            scale: score.scale,
            softcap: score.softcap.unwrap_or(0.0),
            ..AttentionParams::default()
        };
        if let Some(dropout) = score.dropout {
            (params.seed, params.first_query) = (dropout.seed, dropout.first_query as u64);
            params.first_head = count(dropout.first_head, "heads")?;
            (params.threshold, params.dropout_scale) = (dropout.threshold(), dropout.scale());
        }
        Ok(params)
    }
}

/// The parts of tiles that each block of `block` query rows computes: a part holds the keys that any of its queries sees. The bands
/// are limited to their tiles.
fn parts_of_blocks(tiles: &[Tile], block: usize, queries: usize) -> Result<Vec<Vec<TilePart>>> {
    let mut blocks = vec![Vec::new(); queries.div_ceil(block)];
    for (index, Tile { q, k, band, .. }) in tiles.iter().enumerate() {
        // The queries from `lo` on see keys, until the last key has left the band.
        let first = q.start + usize::try_from(band.lo).unwrap_or(0);
        let end = q.end.min(q.start + usize::try_from(band.hi + k.len() as i64).unwrap_or(0));
        if first >= end {
            continue;
        }
        for (at, parts) in blocks.iter_mut().enumerate().take(end.div_ceil(block)).skip(first / block) {
            let rows = first.max(at * block) - q.start..end.min((at + 1) * block) - q.start;
            // The visible keys advance with the query, so the first and the last query bound them.
            let keys = band.keys(rows.start, k.len()).start..band.keys(rows.end - 1, k.len()).end;
            if !keys.is_empty() {
                let [from, to] = [k.start + keys.start, k.start + keys.end].map(kernel_params::checked);
                parts.push(TilePart { tile: count(index, "tiles")?, from, to });
            }
        }
    }
    Ok(blocks)
}

/// The tile with queries and keys exchanged.
fn transposed(tile: &Tile) -> Tile {
    let Band { lo, hi } = tile.band;
    Tile { q: tile.k.clone(), k: tile.q.clone(), band: Band { lo: -hi, hi: -lo }, position: tile.position }
}

fn for_kernel(tile: &Tile) -> kernel_params::Tile {
    let place = tile.position;
    kernel_params::Tile {
        q: kernel_params::checked(tile.q.start),
        queries: kernel_params::checked(tile.q.len()),
        k: kernel_params::checked(tile.k.start),
        keys: kernel_params::checked(tile.k.len()),
        // The band was limited to the tile's size before, so its ends fit.
        lo: tile.band.lo as i32,
        hi: tile.band.hi as i32,
        query: place.query as i64,
        key: place.key as i64,
        distance: place.distance,
        step: place.step as i64,
    }
}

/// Lists of the key-value head of each query head, and of the first query head of each key-value head.
struct HeadLists {
    kv_of: Vec<i32>,
    heads_of: Vec<i32>,
}

impl HeadLists {
    fn new(heads: &HeadMap) -> Self {
        let kv_of = (0..heads.heads()).map(|head| kernel_params::checked(heads.kv_of(head))).collect();
        let starts = (0..heads.kv_heads()).map(|kv| heads.queries_of(kv).start).chain([heads.heads()]);
        Self { kv_of, heads_of: starts.map(kernel_params::checked).collect() }
    }
}
