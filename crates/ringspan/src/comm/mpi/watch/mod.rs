//! The watch over all ranks, beside MPI: who lives, who has failed, and when all may end. See `../README.md`.
//!
//! Rank 0 has a connection to every other rank. A rank that dies closes its connection; one that is stopped falls silent.

mod connect;
mod signal;

pub(super) use connect::Place;

use super::Options;
use crate::comm::group::failure::Failure;
use signal::Signal;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{self, Write};
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Between two signs of life.
const BEAT: Duration = Duration::from_millis(500);
/// A sign of life later than this after the one before was given by a process that had been stopped, or starved.
const LATE: Duration = Duration::from_millis(1500);
/// How long an answer about another rank may take.
const ANSWER: Duration = Duration::from_secs(1);

/// How long a rank must have waited for the same others before it counts as stuck: far longer than what is told of it,
/// or a message it was sent, can be under way.
const STUCK: Duration = Duration::from_secs(2);
/// How long ranks that have lost rank 0 leave each other for their last words.
const ALONE: Duration = Duration::from_secs(1);

/// What a rank does, since when.
#[derive(Debug, Clone)]
struct Doing {
    /// Empty: it computes.
    does: String,
    /// Ranks without which it cannot go on.
    misses: Vec<usize>,
    since: Instant,
}

/// What this rank knows of the others.
#[derive(Debug)]
struct Known {
    /// By rank; on other ranks than 0 only the own one and those asked for.
    doing: BTreeMap<usize, Doing>,
    /// Ranks that are ready to end, or gone.
    left: Vec<bool>,
    over: bool,
    /// When this rank learnt of the failure.
    failed: Option<Instant>,
    /// When this process last gave a sign of life, and when it last did so late: it was stopped itself.
    beat: Instant,
    late: Option<Instant>,
}

/// One process's part of the watch.
pub(super) struct Watch {
    rank: usize,
    silence: Duration,
    failure: OnceLock<Failure>,
    known: Mutex<Known>,
    changed: Condvar,
    /// By rank: on rank 0 to all others, on the others to rank 0.
    writers: BTreeMap<usize, Mutex<TcpStream>>,
}

impl Watch {
    /// Connects the ranks, and starts to watch.
    pub(super) fn start(place: &Place, options: &Options) -> io::Result<Arc<Self>> {
        let streams = place.connect()?;
        let (rank, size) = (place.rank, place.size);
        let own = Doing { does: String::new(), misses: Vec::new(), since: Instant::now() };
        let known = Known {
            doing: (0..size).map(|rank| (rank, own.clone())).collect(),
            left: vec![false; size],
            over: false,
            failed: None,
            beat: Instant::now(),
            late: None,
        };
        let mut writers = BTreeMap::new();
        for (peer, stream) in &streams {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(options.silence))?;
            stream.set_write_timeout(Some(BEAT))?;
            writers.insert(*peer, Mutex::new(stream.try_clone()?));
        }
        let (failure, known, changed) = (OnceLock::new(), Mutex::new(known), Condvar::new());
        let watch = Arc::new(Self { rank, silence: options.silence, failure, known, changed, writers });
        for (peer, stream) in streams {
            let own = watch.clone();
            spawn(format!("watch-{peer}"), move || own.listen(peer, stream))?;
        }
        let own = watch.clone();
        spawn("watch-beat".into(), move || own.beat())?;
        Ok(watch)
    }

    /// The first failure this rank has heard of.
    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Records a failure and tells it, if it is the first.
    pub(super) fn fail(&self, failure: Failure) {
        self.adopt(failure, None);
    }

    /// As [`fail`](Self::fail), for one heard from rank `from`.
    fn adopt(&self, failure: Failure, from: Option<usize>) {
        if self.failure.set(failure.clone()).is_err() {
            return;
        }
        self.known().failed = Some(Instant::now());
        self.changed.notify_all();
        let signal = Signal::Failed(failure);
        self.writers.keys().filter(|peer| Some(**peer) != from).for_each(|peer| self.tell(*peer, &signal));
    }

    /// Notes what this rank waits for, and the ranks without which it cannot go on; an empty text: it computes.
    pub(super) fn note(&self, does: String, misses: Vec<usize>) {
        self.known().doing.insert(self.rank, Doing { does, misses, since: Instant::now() });
    }

    /// What another rank does, in words.
    pub(super) fn describe(&self, rank: usize) -> String {
        let mut known = self.known();
        if self.rank != 0 && rank != self.rank {
            known.doing.remove(&rank);
            drop(known);
            self.tell(0, &Signal::Ask(rank));
            known = self.known();
            let asked = Instant::now();
            while !known.doing.contains_key(&rank) && asked.elapsed() < ANSWER {
                known = self.wait(known, ANSWER.saturating_sub(asked.elapsed()));
            }
        }
        let Some(Doing { does, since, .. }) = known.doing.get(&rank) else { return "does not answer".into() };
        match does.as_str() {
            "" => format!("has computed for {:.1?}", since.elapsed()),
            does => does.to_owned(),
        }
    }

    /// Says that this rank has told its error, and waits until all have, so that nobody's words are cut off by the end
    /// of another; not for long, since one of them may be stopped or dead.
    pub(super) fn leave(&self) {
        let last_words = self.silence.mul_f64(0.8);
        let start = Instant::now();
        self.known().left[self.rank] = true;
        self.tell(0, &Signal::Left);
        let mut known = self.known();
        loop {
            let all = if self.rank == 0 { known.left.iter().all(|left| *left) } else { known.over };
            // Without rank 0 nobody says when all have left.
            let time = if self.rank != 0 && known.left[0] { last_words.min(ALONE) } else { last_words };
            if all || start.elapsed() >= time {
                break;
            }
            known = self.wait(known, time.saturating_sub(start.elapsed()));
        }
        drop(known);
        self.writers.keys().filter(|_| self.rank == 0).for_each(|peer| self.tell(*peer, &Signal::Over));
    }

    /// Says that this rank has finished well.
    pub(super) fn bye(&self) {
        self.writers.keys().for_each(|peer| self.tell(*peer, &Signal::Bye));
    }

    /// Hears what one rank says until it has said goodbye or is gone.
    fn listen(&self, peer: usize, mut stream: TcpStream) {
        loop {
            // Looks first: a wait that is over without a byte can begin again.
            let signal = match stream.peek(&mut [0]).and_then(|_| Signal::read(&mut stream)) {
                Ok(signal) => signal,
                // A signal of the system, such as the one after a stop.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let silent = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
                    if silent && self.was_stopped() {
                        continue;
                    }
                    let message = match silent {
                        true => format!(
                            "it gave no sign of life for {:?}: it is stopped, or its machine is lost",
                            self.silence
                        ),
                        false if error.kind() == io::ErrorKind::UnexpectedEof => {
                            "its process is gone, without a word of why".to_owned()
                        }
                        false => format!("its process is gone, without a word of why ({error})"),
                    };
                    self.adopt(Failure::Rank { peer, message }, Some(peer));
                    let mut known = self.known();
                    known.left[peer] = true;
                    drop(known);
                    self.changed.notify_all();
                    return;
                }
            };
            match signal {
                Signal::Beat { does, misses, for_ms } => {
                    let since = Instant::now().checked_sub(Duration::from_millis(for_ms));
                    let doing = Doing { does, misses, since: since.unwrap_or_else(Instant::now) };
                    self.known().doing.insert(peer, doing);
                }
                Signal::Failed(failure) => self.adopt(failure, Some(peer)),
                Signal::Ask(rank) => self.tell(peer, &Signal::Does(rank, self.describe(rank))),
                Signal::Does(rank, does) => {
                    self.known().doing.insert(rank, Doing { does, misses: Vec::new(), since: Instant::now() });
                }
                Signal::Left => self.known().left[peer] = true,
                Signal::Over => self.known().over = true,
                Signal::Bye => return,
                Signal::Hello { .. } => {}
            }
            self.changed.notify_all();
        }
    }

    /// Whether this process itself did not run for a while: then the others' silence means nothing yet. So a job that is
    /// suspended as a whole goes on.
    fn was_stopped(&self) -> bool {
        let known = self.known();
        known.beat.elapsed() > LATE || known.late.is_some_and(|late| late.elapsed() < self.silence)
    }

    /// Gives signs of life, and ends a process whose own rank does not look up from its work after a failure.
    fn beat(&self) {
        let last_look = self.silence / 2;
        loop {
            let (signal, late) = {
                let mut known = self.known();
                if known.beat.elapsed() > LATE {
                    known.late = Some(Instant::now());
                }
                known.beat = Instant::now();
                let Some(Doing { does, misses, since }) = known.doing.get(&self.rank) else { return };
                let for_ms = since.elapsed().as_millis() as u64;
                let late = !known.left[self.rank] && known.failed.is_some_and(|failed| failed.elapsed() > last_look);
                (Signal::Beat { does: does.clone(), misses: misses.clone(), for_ms }, late)
            };
            self.writers.keys().for_each(|peer| self.tell(*peer, &signal));
            let problem = if self.rank == 0 { deadlock(&self.known().doing) } else { None };
            if let Some(problem) = problem {
                self.fail(Failure::Deadlock { problem });
            }
            if let (true, Some(failure)) = (late, self.failure()) {
                let error = failure.seen_by(self.rank, &"its own work");
                // The rank's thread may compute for hours before it talks again: nobody else is left to say it.
                say(&error);
                std::process::exit(1);
            }
            thread::sleep(BEAT);
        }
    }

    /// Whether it arrives is not this rank's business: who is gone is noticed by the reader.
    fn tell(&self, peer: usize, signal: &Signal) {
        if let Some(writer) = self.writers.get(&peer) {
            let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = signal.write(&mut *writer);
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, known: MutexGuard<'a, Known>, time: Duration) -> MutexGuard<'a, Known> {
        self.changed.wait_timeout(known, time).unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Ranks that wait for each other and have not moved for [`STUCK`], in words.
///
/// A rank needs all it misses, so one circle is a deadlock. Ranks that miss nobody who is left are taken out until there
/// are none; who is left then waits for somebody who is left.
fn deadlock(doing: &BTreeMap<usize, Doing>) -> Option<String> {
    let stuck = |doing: &&Doing| doing.since.elapsed() > STUCK && !doing.misses.is_empty();
    let mut left: BTreeMap<usize, &Doing> =
        doing.iter().filter(|(_, doing)| stuck(doing)).map(|(rank, doing)| (*rank, doing)).collect();
    loop {
        let free = |doing: &Doing| doing.misses.iter().all(|rank| !left.contains_key(rank));
        let out: Vec<usize> = left.iter().filter(|(_, doing)| free(doing)).map(|(rank, _)| *rank).collect();
        if out.is_empty() {
            break;
        }
        left.retain(|rank, _| !out.contains(rank));
    }
    let words: Vec<String> = left.iter().take(16).map(|(rank, doing)| format!("rank {rank} {}", doing.does)).collect();
    (!words.is_empty()).then(|| format!("deadlock: {}", words.join("; ")))
}

/// An error on standard error, in one piece: the streams of all processes may flow together.
pub(super) fn say(error: &impl Display) {
    let _ = io::stderr().write_all(format!("error: {error}\n").as_bytes());
}

fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    const STACK: usize = 256 << 10;
    thread::Builder::new().name(name).stack_size(STACK).spawn(work).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doing(ranks: &[(&[usize], u64)]) -> BTreeMap<usize, Doing> {
        let one = |(rank, (misses, seconds)): (usize, &(&[usize], u64))| {
            let since = Instant::now().checked_sub(Duration::from_secs(*seconds)).expect("the clock is old enough");
            (rank, Doing { does: format!("waits for {misses:?}"), misses: misses.to_vec(), since })
        };
        ranks.iter().enumerate().map(one).collect()
    }

    #[test]
    fn a_circle_that_has_not_moved_is_a_deadlock_and_nothing_else_is() {
        let found = deadlock(&doing(&[(&[3], 9), (&[2], 9), (&[1], 9), (&[], 9)])).expect("ranks 1 and 2");
        assert_eq!(found, "deadlock: rank 1 waits for [2]; rank 2 waits for [1]");
        for free in
            [doing(&[(&[1], 9), (&[], 9)]), doing(&[(&[1], 9), (&[0], 1)]), doing(&[(&[1, 2], 9), (&[2], 9), (&[], 9)])]
        {
            assert_eq!(deadlock(&free), None, "{free:?}");
        }
    }
}
