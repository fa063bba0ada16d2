//! Tests of failing ranks: every request is answered or refused with the name of the rank, and nothing hangs.

use candle_core::{Device, Tensor};
use ringspan_serve::engine::request::{EngineClient, Event, Events, Refusal, Request, SamplingParams};
use ringspan_serve::engine::step::{Outputs, Step};
use ringspan_serve::engine::{Engine, EngineOptions, EngineSizes, Executor, KvCacheSize};
use ringspan_serve::{Error, Groups, Mesh, Result};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const VOCABULARY: usize = 11;

/// A failure that a test plants in one rank at one step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Accident {
    Nothing,
    Error,
    Panic,
    /// The rank computes for longer than the others wait.
    Hang,
}

/// Computes nothing: every text is the same token again and again.
struct Scripted<'a> {
    groups: &'a Groups,
    accident: Accident,
    /// The rank and step of the accident.
    at: (usize, usize),
    steps: usize,
}

impl Executor for Scripted<'_> {
    fn execute(&mut self, step: &Step) -> Result<Option<Tensor>> {
        self.steps += 1;
        if (self.groups.rank(), self.steps) == self.at {
            match self.accident {
                Accident::Nothing => {}
                Accident::Error => return Err(Error::Tokenizer("broken on purpose".into())),
                Accident::Panic => panic!("on purpose"),
                Accident::Hang => std::thread::sleep(Duration::from_millis(2500)),
            }
        }
        self.groups.world().barrier()?;
        let rows = step.sequences.iter().map(|sequence| match sequence.outputs {
            Outputs::None => 0,
            Outputs::Last => 1,
            Outputs::All => sequence.tokens.len(),
        });
        let rows: usize = rows.sum();
        let hidden =
            (self.groups.rank() == 0 && rows > 0).then(|| Tensor::from_vec(vec![1f32; rows], (rows, 1), &Device::Cpu));
        Ok(hidden.transpose()?)
    }

    fn logits(&mut self, rows: usize, _: Option<&Tensor>) -> Result<Option<Vec<f32>>> {
        let row = || (0..VOCABULARY).map(|token| token as f32);
        Ok((self.groups.rank() == 0).then(|| (0..rows).flat_map(|_| row()).collect()))
    }

    fn most_likely(&mut self, rows: usize, _: Option<&Tensor>) -> Result<Option<Vec<Result<u32>>>> {
        Ok((self.groups.rank() == 0).then(|| (0..rows).map(|_| Ok(VOCABULARY as u32 - 1)).collect()))
    }

    fn load_adapter(&mut self, _: u64, folder: &Path) -> Result<()> {
        match self.groups.rank() {
            1 => Err(Error::Tokenizer(format!("{} is not readable here", folder.display()))),
            _ => Ok(()),
        }
    }

    fn unload_adapter(&mut self, _: u64) {}
}

fn start(accident: Accident, at: (usize, usize)) -> Engine {
    let mesh = Mesh { ring: 3, deadline: Duration::from_secs(1), ..Mesh::single() };
    let options = EngineOptions {
        page_size: 4,
        kv_cache: KvCacheSize::Pages(200),
        max_model_len: Some(300),
        deadline: Duration::from_secs(10),
        ..EngineOptions::default()
    };
    let sizes = EngineSizes {
        vocabulary: VOCABULARY,
        hidden_size: 1,
        ranks: 3,
        attn_dp: 1,
        cp: 3,
        pp: 1,
        local_ranks: 3,
        page_bytes: 1,
        window: None,
        trained_length: None,
    };
    let made = Engine::start_with(mesh, &options, &sizes, move |groups, _| {
        Ok(Box::new(Scripted { groups, accident, at, steps: 0 }))
    });
    made.expect("an engine")
}

fn request(prompt: usize, max_tokens: usize) -> Request {
    Request { sampling: SamplingParams::greedy(), ..Request::new(vec![1; prompt], max_tokens) }
}

/// The last event.
fn end(mut events: Events) -> Event {
    let mut last = None;
    while let Some(event) = events.blocking_recv() {
        last = Some(event);
    }
    last.expect("an event")
}

#[test]
fn a_rank_that_fails_is_named_in_every_request_and_in_all_later_ones() {
    for (accident, rank, words) in [
        (Accident::Error, 2, "broken on purpose"),
        (Accident::Error, 0, "broken on purpose"),
        (Accident::Panic, 1, "on purpose"),
        (Accident::Panic, 0, "on purpose"),
        (Accident::Hang, 2, ""),
    ] {
        let began = Instant::now();
        let engine = start(accident, (rank, 20));
        let client = engine.client();
        let taken: Vec<Events> = (0..5).map(|i| client.submit(request(3 + i, 200)).expect("taken")).collect();
        for events in taken {
            let Event::Failed(problem) = end(events) else { panic!("{accident:?} must fail the request") };
            assert!(problem.contains(&format!("rank {rank}")) && problem.contains(words), "{accident:?}: {problem}");
        }
        let Err(Refusal::Stopped(problem)) = client.submit(request(3, 1)) else { panic!("it has stopped") };
        assert!(problem.contains(&format!("rank {rank}")), "{problem}");
        assert!(client.check_health().is_err() && client.stopped().is_some());
        assert!(engine.wait().expect_err("the failure").to_string().contains(words));
        assert!(began.elapsed() < Duration::from_secs(8), "{accident:?} took {:?}", began.elapsed());
    }
}

#[test]
fn none_of_a_thousand_requests_is_silent_when_a_rank_dies() {
    let engine = start(Accident::Panic, (1, 60));
    let (answered, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for thread in 0..20 {
            let (client, answered, refused) = (engine.client(), &answered, &refused);
            scope.spawn(move || {
                for number in 0..50 {
                    match client.submit(request(1 + (thread * 7 + number) % 40, 1 + number % 9)) {
                        Ok(events) => {
                            assert!(matches!(end(events), Event::Finished { .. } | Event::Failed(_)));
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(refusal) => {
                            assert!(refusal.to_string().contains("rank 1"), "{refusal}");
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    assert_eq!(answered.into_inner() + refused.into_inner(), 1000);
    assert!(engine.wait().is_err());
}

/// Where the rank fails in a check of its health, which is a step as well, that check and the requests after it hear of the rank.
#[test]
fn checks_of_health_and_requests_after_them_hear_which_rank_failed() {
    for _ in 0..20 {
        let engine = start(Accident::Error, (1, 60));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let client = engine.client();
                scope.spawn(move || {
                    let refusal = loop {
                        if let Err(refusal) = client.check_health() {
                            break refusal;
                        }
                    };
                    assert!(refusal.to_string().contains("rank 1"), "{refusal}");
                });
                let client = engine.client();
                scope.spawn(move || {
                    let problem = loop {
                        match client.submit(request(3, 1)).map(end) {
                            Ok(Event::Finished { .. }) => {}
                            Ok(Event::Failed(problem)) => break problem,
                            Ok(event) => panic!("{event:?} ends no request"),
                            Err(refusal) => break refusal.to_string(),
                        }
                    };
                    assert!(problem.contains("rank 1"), "{problem}");
                });
            }
        });
        assert!(engine.wait().is_err());
    }
}

#[test]
fn an_idle_engine_outlives_the_deadline_of_its_ranks() {
    let engine = start(Accident::Nothing, (0, 0));
    std::thread::sleep(Duration::from_millis(2500));
    assert!(!engine.is_finished());
    engine.client().check_health().expect("healthy");
    assert!(matches!(end(engine.client().submit(request(9, 3)).expect("taken")), Event::Finished { .. }));
    engine.shutdown(true).expect("ended");
}

/// An adapter that one rank cannot read is refused, and the engine goes on.
#[test]
fn an_adapter_that_a_rank_cannot_read_is_refused() {
    let engine = start(Accident::Nothing, (0, 0));
    let client = engine.client();
    let refused = client.load_adapter("tales", Path::new("/nowhere")).expect_err("unreadable").to_string();
    assert!(refused.contains("rank 1") && refused.contains("/nowhere"), "{refused}");
    assert!(client.adapters().is_empty());
    let refused = client.submit(Request { adapter: Some("tales".into()), ..request(3, 1) }).expect_err("unknown");
    assert!(refused.to_string().contains("'tales'") && refused.to_string().contains("none is loaded"), "{refused}");
    assert!(client.unload_adapter("tales").is_err());
    assert!(matches!(end(client.submit(request(9, 3)).expect("taken")), Event::Finished { .. }));
}

#[test]
fn a_factory_that_fails_on_a_rank_is_an_error_of_the_start() {
    let mesh = Mesh { ring: 2, deadline: Duration::from_secs(5), ..Mesh::single() };
    let options = EngineOptions { kv_cache: KvCacheSize::Pages(4), max_model_len: Some(8), ..EngineOptions::default() };
    let sizes = EngineSizes {
        vocabulary: 2,
        hidden_size: 1,
        ranks: 2,
        attn_dp: 1,
        cp: 2,
        pp: 1,
        local_ranks: 2,
        page_bytes: 1,
        window: None,
        trained_length: None,
    };
    let made = Engine::start_with(mesh, &options, &sizes, |groups, _| match groups.rank() {
        1 => Err(Error::Tokenizer("no memory".into())),
        _ => Ok(Box::new(Scripted { groups, accident: Accident::Nothing, at: (0, 0), steps: 0 })),
    });
    let problem = made.expect_err("it cannot start").to_string();
    assert!(problem.contains("rank 1") && problem.contains("no memory"), "{problem}");
}
