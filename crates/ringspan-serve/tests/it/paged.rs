//! Steps over the paged cache give the hidden states of the whole sequences, whatever the pages, chunks, batch mates and ranks.

mod decoding;
mod prefilling;

use crate::support::*;
use candle_core::{DType, Tensor};
use proptest::prelude::*;
use ringspan::{Documents, Group, Layout, LayoutKind, StrategyKind};
use ringspan_candle::{Context, Weight};
use ringspan_serve::engine::step::{Outputs, PageCopy, Step, StepSequence, WindowPages};
use ringspan_serve::paged::{PagedCache, execute};
use ringspan_serve::{Error, Groups, Model, Result};
use std::sync::{Arc, Mutex};

/// The longest sequence of the tests; embeddings that depend on the length are made for it.
const LENGTH: usize = 160;

/// A stream of pseudo-random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit.max(1)
    }
}

/// Hands out the pages of each rank in random order.
struct PagePool {
    page: usize,
    free: Vec<Vec<u32>>,
}

impl PagePool {
    fn new(ranks: usize, pages: usize, page: usize, random: &mut Random) -> Self {
        let shuffled = |_| {
            let mut all: Vec<u32> = (0..pages as u32).collect();
            (1..all.len()).rev().for_each(|i| all.swap(i, random.below(i + 1)));
            all
        };
        Self { page, free: (0..ranks).map(shuffled).collect() }
    }

    /// Extends the pages of a sequence for `tokens` tokens.
    fn extend(&mut self, pages: &mut Vec<u32>, tokens: usize) {
        while pages.len() * self.page < tokens {
            let rank = pages.len() % self.free.len();
            pages.push(self.free[rank].pop().expect("a free page"));
        }
    }
}

/// One sequence of a test: its text, and how far it is.
#[derive(Clone)]
struct Text {
    tokens: Vec<u32>,
    done: usize,
    pages: Vec<u32>,
}

impl Text {
    fn new(len: usize, seed: u64) -> Self {
        Self { tokens: tokens(len, seed).into_iter().map(|token| token % 96).collect(), done: 0, pages: Vec::new() }
    }

    /// The next `count` tokens as a part of a step.
    fn next(&mut self, count: usize, outputs: Outputs, pages: &mut PagePool) -> StepSequence {
        let (start, end) = (self.done, self.done + count);
        self.done = end;
        pages.extend(&mut self.pages, end);
        let window = WindowPages { first: 0, pages: self.pages.clone() };
        StepSequence {
            start,
            tokens: self.tokens[start..end].to_vec(),
            pages: self.pages.clone(),
            window,
            outputs,
            adapter: None,
            replica: 0,
        }
    }
}

/// The steps of a test, and for each output the sequence and position that it is of.
type Script = (Vec<Step>, Vec<Vec<(usize, usize)>>);

/// Random steps until all texts are read: in each, some of the sequences take a token or a chunk.
fn script(texts: &mut [Text], ranks: usize, page: usize, random: &mut Random) -> Script {
    let mut pages = PagePool::new(ranks, texts.len() * (LENGTH / page / ranks + 2), page, random);
    let (mut steps, mut outputs) = (Vec::new(), Vec::new());
    while texts.iter().any(|text| text.done < text.tokens.len()) {
        let (mut step, mut of_step) = (Step::default(), Vec::new());
        for (number, text) in texts.iter_mut().enumerate() {
            let left = text.tokens.len() - text.done;
            if left == 0 || random.below(4) == 0 {
                continue;
            }
            let count = if random.below(2) == 0 { 1 } else { 1 + random.below(left.min(40)) };
            let wanted = [Outputs::None, Outputs::Last, Outputs::All][random.below(3)];
            let positions = match wanted {
                Outputs::None => 0..0,
                Outputs::Last => text.done + count - 1..text.done + count,
                Outputs::All => text.done..text.done + count,
            };
            of_step.extend(positions.map(|position| (number, position)));
            step.sequences.push(text.next(count, wanted, &mut pages));
        }
        steps.push(step);
        outputs.push(of_step);
    }
    (steps, outputs)
}

/// Executes steps on a mesh; returns the outputs of rank 0 and the bytes that each rank sent, for each step.
fn executed(model: &Model, grid: (usize, usize), pages: (usize, usize), steps: &[Step]) -> Vec<(Vec<f32>, Vec<u64>)> {
    let work = |group: Arc<Group>| -> Result<Vec<(Option<Vec<f32>>, u64)>> {
        let mut cache = PagedCache::new(model, pages.0, pages.1)?.with_max_length(LENGTH);
        let groups = Groups::from(group.clone());
        let each = |step| {
            let before = group.cp().bytes_sent();
            let hidden = execute(&groups, model, &mut cache, step)?;
            assert!(group.rank() == 0 || hidden.is_none(), "outputs are for rank 0");
            Ok((hidden.map(numbers), group.cp().bytes_sent() - before))
        };
        steps.iter().map(each).collect()
    };
    let ranks = mesh(grid.0, grid.1).run(work).expect("steps");
    let each = |step: usize| {
        let sent = ranks.iter().map(|rank| rank[step].1).collect();
        (ranks[0][step].0.clone().unwrap_or_default(), sent)
    };
    (0..steps.len()).map(each).collect()
}

fn numbers(tensor: Tensor) -> Vec<f32> {
    let tensor = tensor.to_dtype(DType::F32).and_then(|tensor| tensor.flatten_all());
    tensor.and_then(|tensor| tensor.to_vec1()).expect("numbers")
}

/// The hidden states of a whole text, computed on one rank without a cache, row by row.
fn plain(model: &Model, tokens: &[u32]) -> Vec<Vec<f32>> {
    let work = |group: Arc<Group>| -> Result<Vec<Vec<f32>>> {
        let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, tokens.len()), 1)?;
        let context = Context::new(group, Arc::new(layout), StrategyKind::Ring)?.with_max_length(LENGTH);
        Ok(model.hidden(0, tokens, &context)?.to_dtype(DType::F32)?.to_vec2()?)
    };
    mesh(1, 1).run(work).expect("one rank").remove(0)
}

/// Executes random steps on several meshes and compares each output with the plain computation.
fn check(name: &str, model: &Model, bound: f64, seed: u64) {
    let lengths = [150, 1, 37, 64, 2];
    let texts: Vec<Text> = lengths.iter().zip(seed..).map(|(len, seed)| Text::new(*len, seed)).collect();
    let wanted: Vec<Vec<Vec<f32>>> = texts.iter().map(|text| plain(model, &text.tokens)).collect();
    for (case, (grid, page)) in
        [((1, 1), 16), ((2, 1), 4), ((3, 1), 1), ((4, 1), 16), ((2, 1), 16), ((2, 2), 4)].into_iter().enumerate()
    {
        let (mut texts, ranks) = (texts.clone(), grid.0 * grid.1);
        let (steps, outputs) = script(&mut texts, ranks, page, &mut Random(seed + case as u64));
        let pages = texts.len() * (LENGTH / page / ranks + 2);
        for (number, ((got, _), of)) in executed(model, grid, (pages, page), &steps).iter().zip(&outputs).enumerate() {
            let wanted: Vec<f32> = of.iter().flat_map(|&(text, position)| wanted[text][position].clone()).collect();
            let apart = relative_l2(got, &wanted);
            assert!(apart <= bound, "{name}, {grid:?}, pages of {page}, step {number}: {apart:.1e} apart");
        }
    }
}

#[test]
fn steps_give_the_hidden_states_of_whole_sequences_for_every_kind_of_layer() {
    let models = [("qwen3", qwen3()), ("gemma3", gemma3()), ("qwen3_moe", qwen3_moe()), ("window", mistral(7))];
    models.iter().zip(1..).for_each(|((name, model), seed)| check(name, model, 1e-5, 10 * seed));
    check("dynamic", &dynamic(26), 1e-5, 50);
}

#[test]
fn steps_give_the_hidden_states_of_whole_sequences_for_every_family() {
    for (name, seed) in ["gpt_oss", "deepseek_v3", "gemma2", "phi3_longrope", "smollm3", "glm4"].into_iter().zip(1..) {
        check(name, &of_fixture(name), 1e-5, 100 * seed);
    }
}

/// The same model, computing in bf16.
fn in_bf16(model: &Model) -> Model {
    let round = |(name, weight): (&String, &Weight)| {
        let weight = weight.to_tensor().and_then(|weight| weight.to_dtype(DType::BF16)).expect("dense");
        (name.clone(), weight)
    };
    Model::new(model.decoder().clone(), model.weights(0).iter().map(round).collect()).expect("a whole model")
}

#[test]
fn a_cache_in_bf16_gives_what_its_model_gives_up_to_rounding() {
    check("bf16", &in_bf16(&gemma3()), 0.03, 7);
    let (narrow, wide) = (in_bf16(&qwen3()), qwen3());
    let bytes = |model: &Model| PagedCache::new(model, 3, 16).expect("a cache").bytes();
    // Keys and values of 2 layers with 2 heads of width 8.
    assert_eq!((bytes(&narrow), bytes(&wide)), (3 * 16 * 2 * 2 * 2 * 8 * 2, 3 * 16 * 2 * 2 * 2 * 8 * 4));
    assert_eq!(PagedCache::bytes_per_page(&wide, 16, None).expect("bytes") * 3, bytes(&wide));
}

/// A sequence's outputs alone in its steps, and with others that come and go.
#[test]
fn outputs_do_not_depend_on_batch_mates() {
    for (name, model) in [("gemma3", gemma3()), ("qwen3_moe", qwen3_moe())] {
        // Products of few rows and of many add the same terms in different orders.
        for (ranks, bound) in [(1, 3e-6), (3, 1e-5)] {
            let mut pages = PagePool::new(ranks, 200, 4, &mut Random(3));
            let steps = |mates: bool, pages: &mut PagePool| -> Vec<Step> {
                let mut random = Random(8);
                let (mut text, mut others) = (Text::new(70, 1), [Text::new(150, 2), Text::new(150, 3)]);
                let step = |number: usize| {
                    let count = if number < 2 { 25 } else { 1 };
                    let mut sequences = vec![text.next(count, Outputs::All, pages)];
                    for other in others.iter_mut().filter(|_| mates) {
                        let count = 1 + random.below(12);
                        sequences.insert(random.below(2), other.next(count, Outputs::None, pages));
                    }
                    Step { sequences, ..Step::default() }
                };
                (0..12).map(step).collect()
            };
            let alone = executed(&model, (ranks, 1), (200, 4), &steps(false, &mut pages));
            let mixed = executed(&model, (ranks, 1), (200, 4), &steps(true, &mut pages));
            for (step, (alone, mixed)) in alone.iter().zip(&mixed).enumerate() {
                let apart = relative_l2(&mixed.0, &alone.0);
                assert!(apart <= bound, "{name}, {ranks} ranks, step {step}: {apart:.1e} apart");
            }
        }
    }
}

/// Two sequences begin with the same 10 tokens: the second takes their full pages, and a copy of the page that both go on with.
#[test]
fn copied_and_shared_pages_continue_a_common_beginning() {
    let model = gemma3();
    for ranks in [1, 2, 3] {
        let mut pages = PagePool::new(ranks, 60, 4, &mut Random(5));
        let mut first = Text::new(30, 1);
        let mut second = Text::new(34, 2);
        second.tokens[..10].copy_from_slice(&first.tokens[..10]);
        let read = Step { sequences: vec![first.next(17, Outputs::None, &mut pages)], ..Step::default() };
        second.pages = first.pages[..2].to_vec();
        pages.extend(&mut second.pages, 10);
        second.done = 10;
        let copy = PageCopy {
            replica: 0,
            rank: 2 % ranks,
            from: first.pages[2],
            to: second.pages[2],
            window: Some([first.pages[2], second.pages[2]]),
            rows: 2,
        };
        let both = vec![second.next(24, Outputs::Last, &mut pages), first.next(13, Outputs::Last, &mut pages)];
        let got = executed(
            &model,
            (ranks, 1),
            (60, 4),
            &[read, Step { copies: vec![copy], sequences: both, ..Step::default() }],
        );
        let wanted: Vec<f32> =
            [&second, &first].iter().flat_map(|text| plain(&model, &text.tokens).pop().expect("tokens")).collect();
        let apart = relative_l2(&got[1].0, &wanted);
        assert!(apart <= 1e-5, "{ranks} ranks: {apart:.1e} apart");
    }
}

/// Makes a step wrong.
type Change<'a> = &'a dyn Fn(&mut Step);

#[test]
fn steps_that_do_not_fit_are_refused_on_all_ranks() {
    let model = qwen3();
    let refused = |change: Change| {
        let (tokens, window) = (vec![1, 2], WindowPages::default());
        let sequence = StepSequence {
            start: 5,
            tokens,
            pages: vec![0, 0],
            window,
            outputs: Outputs::Last,
            adapter: None,
            replica: 0,
        };
        let mut step = Step { sequences: vec![sequence], ..Step::default() };
        change(&mut step);
        let result = mesh(2, 1).run(|group| {
            let mut cache = PagedCache::new(&model, 4, 4)?.with_max_length(20);
            execute(&group.clone().into(), &model, &mut cache, &step).map(drop)
        });
        result.map_or_else(|error| error.to_string(), |_| "executed".into())
    };
    assert_eq!(refused(&|_| {}), "executed");
    let cases: [(Change, &str); 8] = [
        (&|step| step.sequences[0].tokens.clear(), "sequence 0 of the step has no new tokens"),
        (&|step| step.sequences[0].tokens[1] = 97, "token 97 at position 1"),
        (&|step| step.sequences[0].pages = vec![0], "has 1 pages; 7 tokens need 2 of 4 tokens"),
        (&|step| step.sequences[0].pages[1] = 4, "has page 4; a rank has 4"),
        (&|step| step.sequences[0].start = 19, "grows to 21 tokens; possible are 20"),
        (&|step| step.sequences[0].start = usize::MAX, "possible are 20"),
        (&|step| step.sequences.push(step.sequences[0].clone()), "writes page 0 of rank 1, which is written already"),
        (
            &|step| step.copies.push(PageCopy { replica: 0, rank: 1, from: 0, to: 4, window: None, rows: 1 }),
            "2 ranks of 4 pages of 4 tokens",
        ),
    ];
    for (change, wanted) in cases {
        let message = refused(change);
        assert!(message.contains(wanted), "{message}");
    }
    for (pages, page) in [(0, 16), (4, 0), (usize::MAX, 2), (1 << 20, 1 << 20)] {
        let message = PagedCache::new(&model, pages, page).expect_err("no such cache").to_string();
        assert!(message.contains(&format!("{pages} pages of {page} tokens")), "{message}");
    }
}

/// The other ranks wait in an exchange for a rank that has failed: they return an error that names it.
#[test]
fn a_rank_that_fails_is_named() {
    let model = qwen3();
    let mut pages = PagePool::new(3, 60, 4, &mut Random(5));
    let mut text = Text::new(40, 1);
    let steps = [20, 1, 19]
        .map(|count| Step { sequences: vec![text.next(count, Outputs::Last, &mut pages)], ..Step::default() });
    for failing in 0..3 {
        for rank_fails_at in 1..3 {
            let errors = Mutex::new(Vec::new());
            let result = mesh(3, 1).run(|group| {
                let mut cache = PagedCache::new(&model, 60, 4)?;
                for (number, step) in steps.iter().enumerate() {
                    if (group.rank(), number) == (failing, rank_fails_at) {
                        return Err(Error::Tokenizer("gone".into()));
                    }
                    execute(&group.clone().into(), &model, &mut cache, step)
                        .inspect_err(|error| errors.lock().expect("no panic").push(error.to_string()))?;
                }
                Ok(())
            });
            assert!(result.expect_err("a rank failed").to_string().contains("gone"));
            let errors = errors.into_inner().expect("no panic");
            assert!(!errors.is_empty(), "others wait for rank {failing}");
            assert!(errors.iter().all(|error| error.contains(&format!("rank {failing}"))), "{errors:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Any lengths, pages, ranks and chunks.
    #[test]
    fn any_steps_give_the_hidden_states_of_whole_sequences(
        lengths in prop::collection::vec(1usize..60, 1..4),
        page in 1usize..20,
        ranks in 1usize..5,
        seed in any::<u64>(),
    ) {
        let model = mistral(9);
        let mut texts: Vec<Text> = lengths.iter().zip(seed % 1000..).map(|(len, seed)| Text::new(*len, seed)).collect();
        let wanted: Vec<Vec<Vec<f32>>> = texts.iter().map(|text| plain(&model, &text.tokens)).collect();
        let (steps, outputs) = script(&mut texts, ranks, page, &mut Random(seed));
        let pages = texts.len() * (LENGTH / page / ranks + 2);
        for ((got, _), of) in executed(&model, (ranks, 1), (pages, page), &steps).iter().zip(&outputs) {
            let wanted: Vec<f32> = of.iter().flat_map(|&(text, position)| wanted[text][position].clone()).collect();
            prop_assert!(relative_l2(got, &wanted) <= 1e-5);
        }
    }
}
