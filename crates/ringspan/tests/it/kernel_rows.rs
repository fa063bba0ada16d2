//! Keys and values that are read through a table of rows, as from the pages of a cache.

use ringspan::Band;
use ringspan::kernel::{
    BlockQ8_0, Data, HeadMap, Inputs, Isa, Kernel, OnlineSoftmax, QuantizedSlice, Saved, Sums, Tile, TilePosition, View,
};
use ringspan_testing::kernel::{FULL, Problem, Storage, random, tile};

/// Numbers below `limit` in random order, `count` of them.
fn some_of(limit: usize, count: usize, seed: u64) -> Vec<u32> {
    let mut keyed: Vec<(u32, u32)> =
        random(limit, seed).iter().zip(0..).map(|(x, row)| (x.to_bits().wrapping_mul(0x9e37_79b9), row)).collect();
    keyed.sort_unstable();
    keyed.into_iter().take(count).map(|(_, row)| row).collect()
}

/// Rows of `count` tokens in pages of `page` tokens, which are in random order among `pages` pages.
fn in_pages(count: usize, page: usize, pages: usize, seed: u64) -> Vec<u32> {
    let pages = some_of(pages, count.div_ceil(page), seed);
    (0..count).map(|token| pages[token / page] * page as u32 + (token % page) as u32).collect()
}

/// A tensor of `room` rows, of which `rows` hold those of `values`, and the others NaN.
fn scattered(values: &[f32], width: usize, rows: &[u32], room: usize) -> Vec<f32> {
    let mut all = vec![f32::NAN; room * width];
    for (row, values) in rows.iter().zip(values.chunks_exact(width)) {
        all[*row as usize * width..][..width].copy_from_slice(values);
    }
    all
}

fn view(data: Data<'_>, tokens: usize, heads: usize, dim: usize) -> View<'_> {
    View::stored(data, tokens, heads, dim).expect("its size")
}

/// Calls `each` with every instruction set, with one and with three threads.
fn on_every_kernel(mut each: impl FnMut(&Kernel)) {
    for isa in Isa::available() {
        for threads in [1, 3] {
            each(&Kernel::with_isa(threads, isa).expect("available"));
        }
    }
}

#[test]
fn scattered_keys_give_the_bits_of_keys_in_order() {
    for storage in [Storage::F32, Storage::Bf16, Storage::F16] {
        for (queries, keys, kv_heads) in [(1, 2500, 1), (70, 300, 2), (1, 37, 4)] {
            let mut problem = Problem::new(queries, keys, (4, kv_heads), (24, 40), Band { lo: -260, hi: i64::MAX });
            problem.storage = storage;
            let (values, tiles) = (problem.values(), &problem.blocks[0].1);
            let map = HeadMap::new(problem.kv_of.clone(), kv_heads).expect("heads in order");
            let rows = some_of(keys + 50, keys, 9);
            let spread = |values: &[f32], dim: usize| scattered(values, kv_heads * dim, &rows, keys + 50);
            let (k_spread, v_spread) = (spread(&values.k, 24), spread(&values.v, 40));
            let [q, k, v] = [&values.q, &values.k, &values.v].map(|x| storage.store(x));
            let (k_spread, v_spread) = (storage.store(&k_spread), storage.store(&v_spread));
            let (q, d_out) = (view(q.data(), queries, 4, 24), view(Data::F32(&values.d_out), queries, 4, 40));
            let (k, v) = (view(k.data(), keys, kv_heads, 24), view(v.data(), keys, kv_heads, 40));
            let in_order = Inputs { q, k, v, heads: &map, score: &problem.score, bias: None };
            let (k, v) =
                (view(k_spread.data(), keys + 50, kv_heads, 24), view(v_spread.data(), keys + 50, kv_heads, 40));
            let by_rows = Inputs { k: k.with_rows(&rows), v: v.with_rows(&rows), ..in_order };
            on_every_kernel(|kernel| {
                let computed = |inputs: &Inputs| {
                    let (mut forward, mut decoded) =
                        (OnlineSoftmax::new(queries, 4, 40), OnlineSoftmax::new(queries, 4, 40));
                    kernel.forward(inputs, tiles, &mut forward).expect("no failure");
                    kernel.decode(inputs, tiles, &mut decoded).expect("no failure");
                    let (out, statistics) = forward.clone().finish(queries, 4, 40, None);
                    let delta = kernel.delta(view(Data::F32(&out), queries, 4, 40), d_out).expect("no failure");
                    let mut sums = [values.q.len(), values.k.len(), values.v.len()].map(|len| vec![0.0; len]);
                    let [dq, dk, dv] = &mut sums;
                    let (d_table, d_bias) = ((&mut [][..]).into(), (&mut [][..]).into());
                    let mut targets = Sums { dq: dq.into(), dk: dk.into(), dv: dv.into(), d_table, d_bias };
                    let saved = Saved { statistics: statistics.data(), delta: Data::F32(&delta), d_out };
                    kernel.backward(inputs, tiles, &saved, &mut targets).expect("no failure");
                    (forward, decoded, sums)
                };
                let what = format!("{kernel:?}, {storage:?}, {queries} queries, {keys} keys");
                assert!(computed(&by_rows) == computed(&in_order), "{what}");
            });
        }
    }
}

/// Keys and values in blocks are read as the f32 numbers that the blocks stand for, by every kernel that reads rows.
#[test]
fn keys_in_blocks_give_the_bits_of_their_numbers() {
    for (queries, keys, kv_heads, (dim, v_dim)) in
        [(1, 2500, 1, (64, 32)), (70, 300, 2, (32, 96)), (3, 37, 4, (256, 32))]
    {
        let problem = Problem::new(queries, keys, (4, kv_heads), (dim, v_dim), Band { lo: -260, hi: i64::MAX });
        let (values, tiles) = (problem.values(), &problem.blocks[0].1);
        let map = HeadMap::new(problem.kv_of.clone(), kv_heads).expect("heads in order");
        let rows = some_of(keys, keys, 9);
        let blocks = [&values.k, &values.v].map(|numbers| {
            let (blocks, rest) = numbers.as_chunks();
            assert!(rest.is_empty());
            blocks.iter().map(BlockQ8_0::quantize).collect::<Vec<_>>()
        });
        let [k_blocks, v_blocks] = [&blocks[0], &blocks[1]].map(|blocks| Data::Q8_0(QuantizedSlice::new(blocks)));
        let (k_numbers, v_numbers) = (k_blocks.to_f32(), v_blocks.to_f32());
        assert_ne!(*k_numbers, *values.k, "blocks are rounded");
        let q = view(Data::F32(&values.q), queries, 4, dim);
        let of = |k, v| Inputs {
            q,
            k: view(k, keys, kv_heads, dim).with_rows(&rows),
            v: view(v, keys, kv_heads, v_dim).with_rows(&rows),
            heads: &map,
            score: &problem.score,
            bias: None,
        };
        on_every_kernel(|kernel| {
            let computed = |inputs: &Inputs| {
                let (mut forward, mut decoded) =
                    (OnlineSoftmax::new(queries, 4, v_dim), OnlineSoftmax::new(queries, 4, v_dim));
                kernel.forward(inputs, tiles, &mut forward).expect("no failure");
                kernel.decode(inputs, tiles, &mut decoded).expect("no failure");
                (forward, decoded)
            };
            let (in_blocks, in_f32) = (of(k_blocks, v_blocks), of(Data::F32(&k_numbers), Data::F32(&v_numbers)));
            assert!(computed(&in_blocks) == computed(&in_f32), "{kernel:?}, {queries} queries, {keys} keys");
        });
    }
}

/// Rows that are adjacent in memory are read in place if they are whole vectors of f32 or bf16, and copied otherwise: a head's bits
/// depend neither on this nor on the other heads, of which a task may read some or all.
#[test]
fn decoding_reads_pages_with_the_bits_of_scattered_rows() {
    for storage in [Storage::F32, Storage::Bf16, Storage::F16] {
        // The last visible key is 2000, and the first may be inside of a page.
        for (keys, kv_of, (dim, v_dim), first, softcap) in [
            (2500, vec![0, 0, 0, 0], (256, 256), 0, None),
            (1100, vec![0, 0, 1, 1, 2, 2], (64, 48), 5, Some(0.7)),
            (2048, [[0; 8], [1; 8]].concat(), (32, 80), 1037, None),
            (45, vec![0, 0, 0, 1, 1, 1], (16, 112), 3, None),
            (5000, vec![0, 1, 1, 1, 1, 1, 1, 1, 3], (48, 16), 16, Some(2.0)),
        ] {
            let (heads, kv_heads) = (kv_of.len(), kv_of[kv_of.len() - 1] + 1);
            let band = Band { lo: -2000, hi: -first };
            let mut problem = Problem::new(1, keys, (heads, 1), (dim, v_dim), band);
            (problem.kv_of, problem.kv_heads, problem.storage) = (kv_of, kv_heads, storage);
            problem.score.softcap = softcap;
            let (values, tiles) = (problem.values(), &problem.blocks[0].1);
            let map = HeadMap::new(problem.kv_of.clone(), kv_heads).expect("heads in order");
            let q = storage.store(&values.q);
            let decoded = |kernel: &Kernel, rows: &[u32]| {
                let room = rows.iter().max().map_or(0, |last| *last as usize + 1);
                let spread = |values: &[f32], dim: usize| scattered(values, kv_heads * dim, rows, room);
                let (k, v) = (spread(&values.k, dim), spread(&values.v, v_dim));
                let [k, v] = [&k, &v].map(|x| storage.store(x));
                let inputs = Inputs {
                    q: view(q.data(), 1, heads, dim),
                    k: view(k.data(), room, kv_heads, dim).with_rows(rows),
                    v: view(v.data(), room, kv_heads, v_dim).with_rows(rows),
                    heads: &map,
                    score: &problem.score,
                    bias: None,
                };
                let (mut forward, mut decoded) =
                    (OnlineSoftmax::new(1, heads, v_dim), OnlineSoftmax::new(1, heads, v_dim));
                kernel.forward(&inputs, tiles, &mut forward).expect("no failure");
                kernel.decode(&inputs, tiles, &mut decoded).expect("no failure");
                let [(wanted, _), (got, _)] = [forward, decoded.clone()].map(|x| x.finish(1, heads, v_dim, None));
                for (got, wanted) in got.iter().zip(&wanted) {
                    // Products of bf16 round probabilities.
                    let tolerance = if storage == Storage::Bf16 { 1e-2 } else { 1e-5 };
                    assert!((got - wanted).abs() < tolerance, "{kernel:?}, {storage:?}: {got} for {wanted}");
                }
                decoded
            };
            for isa in Isa::available() {
                let kernels = [1, 3].map(|threads| Kernel::with_isa(threads, isa).expect("available"));
                let wanted = decoded(&kernels[0], &some_of(keys + 50, keys, 9));
                for (kernel, page) in kernels.iter().flat_map(|kernel| [16, 48, 7].map(|page| (kernel, page))) {
                    let rows = in_pages(keys, page, keys / page + 5, 4);
                    let what = format!("{kernel:?}, {storage:?}, {keys} keys in pages of {page}, {heads} heads");
                    assert!(decoded(kernel, &rows) == wanted, "{what}");
                }
            }
        }
    }
}

#[test]
fn many_queries_with_keys_of_their_own_give_the_bits_of_each_alone() {
    // With the second, even the longest text is little of a worker's share, and is read by one task.
    check_many_queries(&[700, 1, 0, 2100, 64, 1025]);
    check_many_queries(&[
        1100, 130, 0, 900, 1025, 1, 640, 800, 990, 129, 1090, 300, 777, 1024, 512, 1000, 1050, 1099, 950, 860,
    ]);
}

fn check_many_queries(counts: &[usize]) {
    let keys: usize = counts.iter().sum();
    let mut problem = Problem::new(counts.len(), keys, (6, 2), (24, 40), FULL);
    (problem.score.softcap, problem.bias_heads) = (Some(0.7), 6);
    let values = problem.values();
    let map = HeadMap::new(problem.kv_of.clone(), 2).expect("heads in order");
    let view = |data, tokens, heads, dim| view(Data::F32(data), tokens, heads, dim);
    let all = Inputs {
        q: view(&values.q, counts.len(), 6, 24),
        k: view(&values.k, keys, 2, 24),
        v: view(&values.v, keys, 2, 40),
        heads: &map,
        score: &problem.score,
        bias: Some(view(&values.bias, counts.len(), 6, keys)),
    };
    let mut first = 0;
    let of_query = |(query, count): (usize, &usize)| {
        first += count;
        let position = TilePosition { key: first - count, ..TilePosition::START };
        Tile { position, ..tile(query..query + 1, first - count..first, FULL) }
    };
    let tiles: Vec<Tile> = counts.iter().enumerate().map(of_query).collect();
    on_every_kernel(|kernel| {
        let mut together = OnlineSoftmax::new(counts.len(), 6, 40);
        kernel.decode(&all, &tiles, &mut together).expect("no failure");
        for (query, tile) in tiles.iter().enumerate() {
            let alone = Inputs {
                q: view(&values.q[query * 6 * 24..][..6 * 24], 1, 6, 24),
                bias: Some(view(&values.bias[query * 6 * keys..][..6 * keys], 1, 6, keys)),
                ..all
            };
            let mut single = OnlineSoftmax::new(1, 6, 40);
            kernel.decode(&alone, &[Tile { q: 0..1, ..tile.clone() }], &mut single).expect("no failure");
            assert_eq!(together.out[query * 6 * 40..][..6 * 40], single.out, "{kernel:?}, query {query}");
            for head in 0..6 {
                let at = head * counts.len() + query;
                assert_eq!([together.max[at], together.sum[at]], [single.max[head], single.sum[head]]);
            }
        }
        let mut forward = OnlineSoftmax::new(counts.len(), 6, 40);
        kernel.forward(&all, &tiles, &mut forward).expect("no failure");
        let (out, _) = together.finish(counts.len(), 6, 40, None);
        let (wanted, _) = forward.finish(counts.len(), 6, 40, None);
        out.iter().zip(&wanted).for_each(|(got, wanted)| assert!((got - wanted).abs() < 1e-5, "{got} for {wanted}"));
    });
}
