//! Steps over the paged cache give the hidden states of the whole sequences, whatever the pages, chunks, batch mates and ranks.

use crate::support::*;
use candle_core::{DType, Tensor};
use ringspan::{Documents, Group, Layout, LayoutKind, StrategyKind};
use ringspan_candle::Context;
use ringspan_serve::engine::step::{Outputs, Step, StepSequence};
use ringspan_serve::paged::{PagedCache, execute};
use ringspan_serve::{Model, Result};
use std::sync::Arc;

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
struct Pages {
    page: usize,
    free: Vec<Vec<u32>>,
}

impl Pages {
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
    fn next(&mut self, count: usize, outputs: Outputs, pages: &mut Pages) -> StepSequence {
        let (start, end) = (self.done, self.done + count);
        self.done = end;
        pages.extend(&mut self.pages, end);
        StepSequence { start, tokens: self.tokens[start..end].to_vec(), pages: self.pages.clone(), outputs }
    }
}

/// The steps of a test, and for each output the sequence and position that it is of.
type Script = (Vec<Step>, Vec<Vec<(usize, usize)>>);

/// Random steps until all texts are read: in each, some of the sequences take a token or a chunk.
fn script(texts: &mut [Text], ranks: usize, page: usize, random: &mut Random) -> Script {
    let mut pages = Pages::new(ranks, texts.len() * (LENGTH / page / ranks + 2), page, random);
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
fn executed(model: &Model, place: (usize, usize), pages: (usize, usize), steps: &[Step]) -> Vec<(Vec<f32>, Vec<u64>)> {
    let work = |group: Arc<Group>| -> Result<Vec<(Option<Vec<f32>>, u64)>> {
        let mut cache = PagedCache::new(model, pages.0, pages.1)?.with_max_length(LENGTH);
        let each = |step| {
            let before = group.cp().bytes_sent();
            let hidden = execute(&group, model, &mut cache, step)?;
            assert!(group.rank() == 0 || hidden.is_none(), "outputs are for rank 0");
            Ok((hidden.map(numbers), group.cp().bytes_sent() - before))
        };
        steps.iter().map(each).collect()
    };
    let ranks = mesh(place.0, place.1).run(work).expect("steps");
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
    for (case, (place, page)) in
        [((1, 1), 16), ((2, 1), 4), ((3, 1), 1), ((4, 1), 16), ((2, 1), 16), ((2, 2), 4)].into_iter().enumerate()
    {
        let (mut texts, ranks) = (texts.clone(), place.0 * place.1);
        let (steps, outputs) = script(&mut texts, ranks, page, &mut Random(seed + case as u64));
        let pages = texts.len() * (LENGTH / page / ranks + 2);
        for (number, ((got, _), of)) in executed(model, place, (pages, page), &steps).iter().zip(&outputs).enumerate() {
            let wanted: Vec<f32> = of.iter().flat_map(|&(text, position)| wanted[text][position].clone()).collect();
            let apart = apart(got, &wanted);
            assert!(apart <= bound, "{name}, {place:?}, pages of {page}, step {number}: {apart:.1e} apart");
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
