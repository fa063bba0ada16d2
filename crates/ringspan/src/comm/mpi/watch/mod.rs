//! The watch over all ranks, next to MPI: which ranks live, which have failed, and when all may end. See `../README.md`.
//!
//! Rank 0 has a connection to every other rank. The connection of a rank that dies closes; a rank that is stopped becomes
//! silent.

mod connect;
mod signal;

pub(super) use connect::RankAddress;

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

/// Time between two heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
/// If this process sends a heartbeat later than this after the previous one, it was stopped or starved of CPU time.
const LATE_HEARTBEAT: Duration = Duration::from_millis(1500);
/// Longest wait for an answer about another rank.
const ANSWER: Duration = Duration::from_secs(1);

/// How long a rank must have waited for the same others before it counts as stuck: far longer than a heartbeat, or a
/// message to the rank, takes to arrive.
const STUCK: Duration = Duration::from_secs(2);
/// How long ranks that have lost rank 0 wait for each other to report their errors.
const ALONE: Duration = Duration::from_secs(1);

/// The operation of a rank, and when it began.
#[derive(Debug, Clone)]
struct RankActivity {
    /// The operation that the rank waits in; empty if it computes.
    operation: String,
    /// The ranks that it waits for.
    waits_for: Vec<usize>,
    since: Instant,
    /// When the rank last reported this operation. A rank that is stopped may have gone on since.
    heard: Instant,
}

impl RankActivity {
    fn new(operation: String, waits_for: Vec<usize>) -> Self {
        let now = Instant::now();
        Self { operation, waits_for, since: now, heard: now }
    }

    /// Whether the rank's last report is recent and says that it has waited for [`STUCK`]. Two ranks for which this is
    /// true have waited at the same time, since each wait is longer than the age of its report.
    fn stuck(&self) -> bool {
        let waited = self.heard.saturating_duration_since(self.since);
        !self.waits_for.is_empty() && waited > STUCK && self.heard.elapsed() < LATE_HEARTBEAT
    }
}

/// The state that this rank knows of the others.
#[derive(Debug)]
struct PeerStates {
    /// By rank; ranks other than 0 only know their own state and those they have asked for.
    doing: BTreeMap<usize, RankActivity>,
    /// For each rank, whether it is ready to end or has died.
    left: Vec<bool>,
    over: bool,
    /// The time at which this rank learnt of the failure.
    failed: Option<Instant>,
    /// The time of this process's last heartbeat, and of the last one that was late because the process was stopped.
    last_heartbeat: Instant,
    late: Option<Instant>,
}

/// The watch of one process.
pub(super) struct Watch {
    rank: usize,
    silence: Duration,
    failure: OnceLock<Failure>,
    known: Mutex<PeerStates>,
    changed: Condvar,
    /// Connections by rank: rank 0 has one to each other rank, the others only one to rank 0.
    writers: BTreeMap<usize, Mutex<TcpStream>>,
}

impl Watch {
    /// Connects the ranks, and starts the threads of the watch.
    pub(super) fn start(address: &RankAddress, options: &Options) -> io::Result<Arc<Self>> {
        let streams = address.connect()?;
        let (rank, size) = (address.rank, address.size);
        let own = RankActivity::new(String::new(), Vec::new());
        let known = PeerStates {
            doing: (0..size).map(|rank| (rank, own.clone())).collect(),
            left: vec![false; size],
            over: false,
            failed: None,
            last_heartbeat: Instant::now(),
            late: None,
        };
        let mut writers = BTreeMap::new();
        for (peer, stream) in &streams {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(options.silence))?;
            stream.set_write_timeout(Some(HEARTBEAT_INTERVAL))?;
            writers.insert(*peer, Mutex::new(stream.try_clone()?));
        }
        let (failure, known, changed) = (OnceLock::new(), Mutex::new(known), Condvar::new());
        let watch = Arc::new(Self { rank, silence: options.silence, failure, known, changed, writers });
        for (peer, stream) in streams {
            let own = watch.clone();
            spawn(format!("watch-{peer}"), move || own.listen(peer, stream))?;
        }
        let own = watch.clone();
        spawn("watch-heartbeat".into(), move || own.send_heartbeats())?;
        Ok(watch)
    }

    /// The first failure this rank has heard of.
    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Records a failure and, if it is the first, tells the others.
    pub(super) fn fail(&self, failure: Failure) {
        self.adopt(failure, None);
    }

    /// Like [`fail`](Self::fail), for a failure reported by rank `from`.
    fn adopt(&self, failure: Failure, from: Option<usize>) {
        if self.failure.set(failure.clone()).is_err() {
            return;
        }
        self.known().failed = Some(Instant::now());
        self.changed.notify_all();
        let signal = Signal::Failed(failure);
        self.writers.keys().filter(|peer| Some(**peer) != from).for_each(|peer| self.tell(*peer, &signal));
    }

    /// Records what this rank waits for, and the ranks it waits for; an empty text means that it computes.
    pub(super) fn note(&self, operation: String, waits_for: Vec<usize>) {
        self.known().doing.insert(self.rank, RankActivity::new(operation, waits_for));
    }

    /// Describes what another rank does.
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
        let Some(RankActivity { operation, since, .. }) = known.doing.get(&rank) else {
            return "does not answer".into();
        };
        match operation.as_str() {
            "" => format!("has computed for {:.1?}", since.elapsed()),
            operation => operation.to_owned(),
        }
    }

    /// Says that this rank has reported its error, and waits until all have, so that no report is cut off by the end of
    /// another process. The wait is short, since a rank may be stopped or dead.
    pub(super) fn leave(&self) {
        let last_words = self.silence.mul_f64(0.8);
        let start = Instant::now();
        self.known().left[self.rank] = true;
        self.tell(0, &Signal::Left);
        let mut known = self.known();
        loop {
            let all = if self.rank == 0 { known.left.iter().all(|left| *left) } else { known.over };
            // If rank 0 is gone, nobody says when all have left.
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

    /// Handles the signals of one rank until it has said goodbye or is gone.
    fn listen(&self, peer: usize, mut stream: TcpStream) {
        loop {
            // Peeking first allows a timed-out read to be repeated, because no byte has been consumed.
            let signal = match stream.peek(&mut [0]).and_then(|_| Signal::read(&mut stream)) {
                Ok(signal) => signal,
                // The read was interrupted by a signal of the system, such as the one after a stop.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let silent = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
                    if silent && self.was_stopped() {
                        continue;
                    }
                    let message = match silent {
                        true => format!(
                            "it gave no heartbeat for {:?}: it is stopped, or its machine is lost",
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
                Signal::Heartbeat { operation, waits_for, for_ms } => {
                    let mut doing = RankActivity::new(operation, waits_for);
                    doing.since = doing.heard.checked_sub(Duration::from_millis(for_ms)).unwrap_or(doing.heard);
                    self.known().doing.insert(peer, doing);
                }
                Signal::Failed(failure) => self.adopt(failure, Some(peer)),
                Signal::Ask(rank) => self.tell(peer, &Signal::Answer(rank, self.describe(rank))),
                Signal::Answer(rank, operation) => {
                    self.known().doing.insert(rank, RankActivity::new(operation, Vec::new()));
                }
                Signal::Left => self.known().left[peer] = true,
                Signal::Over => self.known().over = true,
                Signal::Bye => return,
                Signal::Hello { .. } => {}
            }
            self.changed.notify_all();
        }
    }

    /// Whether this process itself did not run for a while, so that the silence of others proves nothing yet. Therefore
    /// a job that is suspended as a whole can go on.
    fn was_stopped(&self) -> bool {
        let known = self.known();
        known.last_heartbeat.elapsed() > LATE_HEARTBEAT || known.late.is_some_and(|late| late.elapsed() < self.silence)
    }

    /// Sends heartbeats, and ends the process if its rank makes no call for some time after a failure.
    fn send_heartbeats(&self) {
        let last_look = self.silence / 2;
        loop {
            let (signal, late) = {
                let mut known = self.known();
                if known.last_heartbeat.elapsed() > LATE_HEARTBEAT {
                    known.late = Some(Instant::now());
                }
                known.last_heartbeat = Instant::now();
                let late = !known.left[self.rank] && known.failed.is_some_and(|failed| failed.elapsed() > last_look);
                let Some(doing) = known.doing.get_mut(&self.rank) else { return };
                doing.heard = Instant::now();
                let for_ms = doing.since.elapsed().as_millis() as u64;
                (
                    Signal::Heartbeat {
                        operation: doing.operation.clone(),
                        waits_for: doing.waits_for.clone(),
                        for_ms,
                    },
                    late,
                )
            };
            self.writers.keys().for_each(|peer| self.tell(*peer, &signal));
            let problem = if self.rank == 0 { deadlock(&self.known().doing) } else { None };
            if let Some(problem) = problem {
                self.fail(Failure::Deadlock { problem });
            }
            if let (true, Some(failure)) = (late, self.failure()) {
                let error = failure.seen_by(self.rank, &"its own work");
                // The rank's thread may compute for hours before its next call, so the error is printed here.
                say(&error);
                std::process::exit(1);
            }
            thread::sleep(HEARTBEAT_INTERVAL);
        }
    }

    /// Sends a signal, ignoring errors: the thread that reads from the rank notices if it is gone.
    fn tell(&self, peer: usize, signal: &Signal) {
        if let Some(writer) = self.writers.get(&peer) {
            let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = signal.write(&mut *writer);
        }
    }

    fn known(&self) -> MutexGuard<'_, PeerStates> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, known: MutexGuard<'a, PeerStates>, time: Duration) -> MutexGuard<'a, PeerStates> {
        self.changed.wait_timeout(known, time).unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Describes the ranks that wait for each other and have not moved for [`STUCK`].
///
/// A rank needs all ranks it waits for, so one cycle is a deadlock. Ranks that wait for none of the remaining ranks are
/// removed until there are no such ranks; all that remain then wait for another that remains.
fn deadlock(doing: &BTreeMap<usize, RankActivity>) -> Option<String> {
    let mut left: BTreeMap<usize, &RankActivity> =
        doing.iter().filter(|(_, doing)| doing.stuck()).map(|(rank, doing)| (*rank, doing)).collect();
    loop {
        let free = |doing: &RankActivity| doing.waits_for.iter().all(|rank| !left.contains_key(rank));
        let out: Vec<usize> = left.iter().filter(|(_, doing)| free(doing)).map(|(rank, _)| *rank).collect();
        if out.is_empty() {
            break;
        }
        left.retain(|rank, _| !out.contains(rank));
    }
    let words: Vec<String> =
        left.iter().take(16).map(|(rank, doing)| format!("rank {rank} {}", doing.operation)).collect();
    (!words.is_empty()).then(|| format!("deadlock: {}", words.join("; ")))
}

/// Prints an error to standard error in one write, because the output of all processes may be merged.
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

    fn doing(ranks: &[(&[usize], u64)]) -> BTreeMap<usize, RankActivity> {
        let one = |(rank, (waits_for, seconds)): (usize, &(&[usize], u64))| {
            let mut doing = RankActivity::new(format!("waits for {waits_for:?}"), waits_for.to_vec());
            doing.since = before(doing.heard, *seconds);
            (rank, doing)
        };
        ranks.iter().enumerate().map(one).collect()
    }

    fn before(time: Instant, seconds: u64) -> Instant {
        time.checked_sub(Duration::from_secs(seconds)).expect("the clock is old enough")
    }

    #[test]
    fn a_rank_that_became_silent_while_it_waited_is_no_deadlock() {
        for waited in [0, 3] {
            let mut ranks = doing(&[(&[1], 9), (&[0], waited)]);
            let stopped = ranks.get_mut(&1).expect("two ranks");
            (stopped.since, stopped.heard) = (before(stopped.since, 9), before(stopped.heard, 9));
            assert_eq!(deadlock(&ranks), None, "rank 1 may have gone on since it was last heard");
        }
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
