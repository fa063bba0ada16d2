//! A long random conversation of a world and of groups split from it, checked against direct computation.

use ringspan::Error;
use ringspan::comm::{Buffer, Communicator, Pending};
use std::sync::Arc;

/// A small random generator that gives the same numbers on every rank.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    /// A random number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// The elements that `from` sends to `to` in step `step`; their magnitudes differ, so that sums depend on the order.
fn values(step: usize, from: usize, to: usize, len: usize) -> Vec<f32> {
    let value = |i: usize| ((step * 131 + from * 31 + to * 17 + i) as f32).sin() * 10f32.powi(from as i32 % 5 - 2);
    (0..len).map(value).collect()
}

fn floats(data: &Buffer) -> &[f32] {
    match data {
        Buffer::F32(values) => values,
        other => panic!("expected f32, got {other:?}"),
    }
}

/// The sum of the ranks' elements, in the order of `ranks`.
fn sum(ranks: &[usize], part: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
    let add = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(b).map(|(a, b)| a + b).collect();
    ranks.iter().map(|rank| part(*rank)).reduce(add).unwrap_or_default()
}

/// One step among `ranks` of the world; all results are compared with numbers computed here. Returns the bytes sent.
fn one(comm: &dyn Communicator, ranks: &[usize], step: usize, random: &mut Random) -> Result<u64, Error> {
    let (me, size) = (comm.rank(), comm.size());
    let own = ranks[me];
    assert_eq!(size, ranks.len());
    // All ranks draw the same numbers, even in groups that do not need all of them.
    let mut lens = [[0usize; 8]; 8];
    lens.iter_mut().flatten().for_each(|len| *len = random.below(40));
    let (what, root) = (random.below(6), random.below(8) % size);
    let others = || (0..size).filter(|to| *to != me);
    let len = |from: usize, to: usize| lens[ranks[from]][ranks[to]];
    let elements = match what {
        0 => {
            let parts = (0..size).map(|to| Buffer::F32(values(step, own, ranks[to], len(me, to)))).collect();
            for (from, got) in comm.all_to_all(parts)?.iter().enumerate() {
                assert_eq!(floats(got), values(step, ranks[from], own, len(from, me)));
            }
            others().map(|to| len(me, to)).sum()
        }
        1 => {
            let got = comm.all_gather(Buffer::F32(values(step, own, 0, len(me, 0))))?;
            for (from, got) in got.iter().enumerate() {
                assert_eq!(floats(got), values(step, ranks[from], 0, len(from, 0)));
            }
            len(me, 0) * (size - 1)
        }
        2 => {
            let counts: Vec<usize> = (0..size).map(|to| len(0, to)).collect();
            let total = counts.iter().sum();
            let got = comm.reduce_scatter(values(step, own, 0, total), &counts)?;
            let start: usize = counts[..me].iter().sum();
            let wanted = sum(ranks, |rank| values(step, rank, 0, total));
            assert_eq!(got, wanted[start..start + counts[me]]);
            total - counts[me]
        }
        3 => {
            let total = len(0, size - 1);
            let mut got = values(step, own, 0, total);
            comm.all_reduce(&mut got)?;
            let wanted = sum(ranks, |rank| values(step, rank, 0, total));
            assert!(got.iter().zip(&wanted).all(|(a, b)| a.to_bits() == b.to_bits()));
            let share = total / size + usize::from(me < total % size);
            (total - share) + share * (size - 1)
        }
        4 => {
            let data = (me == root).then(|| Buffer::F32(values(step, own, 0, len(root, 0))));
            assert_eq!(floats(&*comm.broadcast(root, data)?), values(step, ranks[root], 0, len(root, 0)));
            if me == root { len(root, 0) * (size - 1) } else { 0 }
        }
        _ => {
            // Every rank sends three messages of one tag to every rank; they are waited for in another order than posted.
            let mut pending: Vec<(Vec<f32>, Box<dyn Pending>)> = Vec::new();
            for (from, &sender) in ranks.iter().enumerate() {
                for n in 0..3 {
                    pending.push((values(step + n, sender, own, len(from, me)), comm.receive(from, 1)?));
                }
            }
            for (to, &receiver) in ranks.iter().enumerate() {
                for n in 0..3 {
                    comm.send(to, 1, Arc::new(Buffer::F32(values(step + n, own, receiver, len(me, to)))))?;
                }
            }
            while !pending.is_empty() {
                let (wanted, pending) = pending.swap_remove(random.below(1000) % pending.len());
                assert_eq!(pending.wait()?.as_deref().map(floats), Some(&wanted[..]));
            }
            3 * others().map(|to| len(me, to)).sum::<usize>()
        }
    };
    Ok(4 * elements as u64)
}

/// A conversation in the world and in two groups split from it; `before` is called before every step.
pub fn converse(
    comm: &Arc<dyn Communicator>,
    seed: u64,
    steps: usize,
    before: impl Fn(usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let (rank, size) = (comm.rank(), comm.size());
    let all: Vec<usize> = (0..size).collect();
    let part: Vec<usize> = (0..size).rev().filter(|other| other % 2 == rank % 2).collect();
    let group = comm.split(rank % 2, size - rank)?;
    assert_eq!(part[group.rank()], rank);
    let mut random = Random(seed);
    for step in 0..steps {
        before(step)?;
        let start = comm.bytes_sent();
        let sent = match random.below(3) {
            0 => one(&*group, &part, step, &mut random.clone())?,
            _ => one(&**comm, &all, step, &mut random.clone())?,
        };
        assert_eq!(comm.bytes_sent() - start, sent, "bytes of step {step} on rank {rank}");
        random.below(2);
    }
    Ok(())
}
