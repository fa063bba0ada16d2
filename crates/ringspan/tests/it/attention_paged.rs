//! The last tokens of documents whose keys are in pages of a cache, spread over the ranks: every strategy gives the f64 reference's
//! answer.

use ringspan::attention::{DecodeTiles, Group, Inputs, Merge, Tokens, decode, forward, on_device};
use ringspan::comm::threads;
use ringspan::kernel::View;
use ringspan::{Documents, Error, Layout, LayoutKind, Mask, Run, Schedule, StrategyKind};
use ringspan_testing::mesh::{Problem, relative_l2};

/// Documents: tokens before, and tokens of the batch.
const DOCUMENTS: [(usize, usize); 5] = [(70, 33), (0, 20), (45, 2), (19, 1), (3, 64)];

/// The rows of a rank's cache in which its tokens are: pages of `page` rows in descending order, with an unused one between two.
fn cache_rows(tokens: usize, page: usize) -> Vec<u32> {
    let pages = tokens.div_ceil(page) * 2;
    (0..tokens).map(|token| ((pages - 1 - 2 * (token / page)) * page + token % page) as u32).collect()
}

/// A cache that holds `values` in these rows, and NaN in the others.
fn cache(values: &[f32], width: usize, rows: &[u32], page: usize) -> Vec<f32> {
    let mut all = vec![f32::NAN; (rows.len().div_ceil(page) * 2) * page * width];
    for (row, values) in rows.iter().zip(values.chunks_exact(width)) {
        all[*row as usize * width..][..width].copy_from_slice(values);
    }
    all
}

#[test]
fn every_strategy_reads_pages_in_place() {
    let lengths = DOCUMENTS.map(|(before, tokens)| before + tokens);
    let queries = Documents::continued(&DOCUMENTS).expect("few");
    let window = Mask::causal().window(Some(17), None);
    for mask in [Mask::causal(), window, Mask::causal().chunked(24).expect("chunks"), Mask::causal_bottom_right()] {
        let problem = Problem::with_documents(Documents::packed(&lengths), 1, 4, 2, 16, mask.clone());
        let problem = problem.with_softcap().with_sinks();
        let (inputs, wanted) = (problem.inputs(5), problem.reference(&problem.inputs(5)).out);
        for (ranks, page) in [(1, 16), (2, 16), (3, 1), (4, 4), (2, 64)] {
            let query = Layout::new(LayoutKind::PerDocumentZigzag, &queries, ranks).expect("ranks");
            let key = Layout::paged(&Documents::packed(&lengths), page, ranks).expect("pages");
            for strategy in StrategyKind::ALL {
                let schedule = Schedule::new(strategy, &query, &key, &mask, (ranks, 1)).expect("fits");
                let outs = threads::run(ranks, threads::Options::default(), |comm| {
                    let group = Group::new(comm, (ranks, 1), ringspan::Kernel::new(1))?;
                    let (rank, tokens) = (group.rank(), key.tokens(group.rank()));
                    let q = query.shard(rank, &inputs.q, 4 * 16)?;
                    let rows = cache_rows(tokens, page);
                    let of = |values| Ok::<_, Error>(cache(&key.shard(rank, values, 2 * 16)?, 2 * 16, &rows, page));
                    let (k, v) = (of(&inputs.k)?, of(&inputs.v)?);
                    let view = |data, tokens, heads| View::new(data, tokens, heads, 16).expect("its size");
                    let paged = |data| view(data, tokens.div_ceil(page) * 2 * page, 2).with_rows(&rows);
                    let local = Inputs::new(view(&q, query.tokens(rank), 4), paged(&k), paged(&v), &problem.score);
                    Ok::<_, Error>(forward(&group, &schedule, &local)?.out)
                })
                .expect("attends");
                for (rank, out) in outs.iter().enumerate() {
                    let wanted = query.shard(rank, &wanted, 4 * 16).expect("its size");
                    let apart = relative_l2(out, &wanted);
                    assert!(apart <= 1e-5, "{mask}, {strategy}, rank {rank} of {ranks}, pages of {page}: {apart:.1e}");
                }
            }
        }
    }
}

/// One query for each of several documents: joined tiles of a whole batch give what each document gives alone.
#[test]
fn a_batch_of_decoding_documents_equals_each_alone() {
    let lengths = [90, 1, 37, 64];
    for mask in [Mask::causal(), Mask::causal().window(Some(17), None), Mask::causal().chunked(24).expect("chunks")] {
        let problem = Problem::with_documents(Documents::packed(&lengths), 1, 4, 2, 16, mask.clone()).with_sinks();
        let inputs = problem.inputs(5);
        for (ranks, page) in [(1, 16), (2, 16), (3, 1), (4, 4)] {
            let key = Layout::paged(&Documents::packed(&lengths), page, ranks).expect("pages");
            let last = |(document, len): (usize, &usize)| Run { document, start: len - 1, len: 1, step: 1 };
            let queries: Vec<Run> = lengths.iter().enumerate().map(last).collect();
            let all = threads::run(ranks, threads::Options::default(), |comm| {
                let group = Group::new(comm, (ranks, 1), ringspan::Kernel::new(1))?;
                let rank = group.rank();
                let view = |data, tokens, heads| View::new(data, tokens, heads, 16).expect("its size");
                let (k, v) = (key.shard(rank, &inputs.k, 2 * 16)?, key.shard(rank, &inputs.v, 2 * 16)?);
                let (k, v) = (view(&k, key.tokens(rank), 2), view(&v, key.tokens(rank), 2));
                let rows = lengths.iter().scan(0, |end, len| Some(std::mem::replace(end, *end + len) + len - 1));
                let q: Vec<f32> = rows.flat_map(|row| inputs.q[row * 64..][..64].to_vec()).collect();
                let seq_lens = (90, 90);
                let tokens = Tokens { queries: &queries, keys: key.runs(rank), seq_lens };
                let tiles = DecodeTiles::joined(&tokens, &mask)?;
                let local = Inputs::new(view(&q, 4, 4), k, v, &problem.score);
                let (out, _) = on_device::decode_tiles(&group, &tiles, &local, Merge::AllGather)?;
                // Tiles of a single query are as few as there are stretches of rows.
                assert!(ranks > 1 || tiles.len() == lengths.len(), "{} tiles", tiles.len());
                let mut alone = Vec::new();
                for (number, query) in queries.iter().enumerate() {
                    let tokens = Tokens { queries: &[*query], ..tokens };
                    let local = Inputs::new(view(&q[number * 64..][..64], 1, 4), k, v, &problem.score);
                    alone.extend(decode(&group, &mask, &tokens, &local, Merge::AllGather)?.0);
                }
                Ok::<_, Error>((group.kernel().to_host(out)?, alone))
            });
            for (together, alone) in all.expect("decodes") {
                let apart = relative_l2(&together, &alone);
                assert!(apart <= 1e-6, "{mask}, {ranks} ranks, pages of {page}: {apart:.1e}");
            }
        }
    }
}

#[test]
fn joined_tiles_are_refused_for_scores_that_depend_on_positions() {
    let problem = Problem::cross(1, 1, 30, 2, 2, 8, Mask::causal()).with_alibi();
    let inputs = problem.inputs(5);
    let error = threads::run(1, threads::Options::default(), |comm| {
        let group = Group::new(comm, (1, 1), ringspan::Kernel::new(1))?;
        let view = |data, tokens| View::new(data, tokens, 2, 8).expect("its size");
        let local = Inputs::new(view(&inputs.q, 1), view(&inputs.k, 30), view(&inputs.v, 30), &problem.score);
        let runs = [1, 30].map(|len| Run { document: 0, start: 30 - len, len, step: 1 });
        let tokens = Tokens { queries: &runs[..1], keys: &[Run { start: 0, ..runs[1] }], seq_lens: (30, 30) };
        let tiles = DecodeTiles::joined(&tokens, &Mask::causal())?;
        on_device::decode_tiles(&group, &tiles, &local, Merge::AllGather).map(drop)
    });
    assert!(error.expect_err("no positions").to_string().contains("positions"));
}

#[test]
fn layouts_of_pages_refuse_what_they_cannot_deal() {
    let documents = Documents::packed(&[10]);
    for (page, ranks) in [(0, 2), (4, 0)] {
        let message = Layout::paged(&documents, page, ranks).expect_err("nothing to distribute").to_string();
        assert!(message.contains(&format!("pages of {page} tokens on {ranks} ranks")), "{message}");
    }
    let gaps = Documents::from_ids(&[1, 2, 1], 3).expect("ids");
    assert!(Layout::paged(&gaps, 4, 2).expect_err("a gap").to_string().contains("gaps"));
    assert!(Documents::continued(&[(usize::MAX, 2)]).is_err() && Documents::continued(&[(1, usize::MAX / 4)]).is_err());
}
