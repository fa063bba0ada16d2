//! The state that the engine and its clients share: the queue of requests and commands, and the metrics.

use super::prefix_tree::AdapterSlot;
use super::request::{Event, Limits, Metrics, Refusal, Request};
use super::session::SessionSize;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// Shared by an engine and its clients.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) limits: Limits,
    /// Longest wait of a client for an answer of the engine.
    pub(super) deadline: Duration,
    state: Mutex<SharedState>,
    wake: Condvar,
    /// Tells clients that `stopped` is known.
    stopping: Condvar,
}

#[derive(Debug, Default)]
struct SharedState {
    queue: VecDeque<Command>,
    metrics: Metrics,
    /// The loaded adapters by name.
    adapters: BTreeMap<String, u64>,
    /// How the engine ends, once it should.
    ending: Option<Ending>,
    /// Why the engine takes no more requests.
    stopped: Option<String>,
}

/// How an engine ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// Requests in flight are finished first.
    Drain,
    /// At once.
    Stop,
}

/// A command of a client to the engine.
#[derive(Debug)]
pub(super) enum Command {
    Submit { request: Box<Request>, adapter: AdapterSlot, queued: Instant, events: UnboundedSender<Event> },
    CheckHealth { reply: Sender<()> },
    Load { name: String, folder: PathBuf, reply: Sender<Result<(), String>> },
    Unload { slot: u64 },
    SaveSession { file: PathBuf, model: String, reply: Sender<Result<SessionSize, String>> },
    RestoreSession { file: PathBuf, model: String, reply: Sender<Result<SessionSize, String>> },
}

impl Shared {
    pub(super) fn new(limits: Limits, deadline: Duration) -> Self {
        let metrics = Metrics { ranks: vec![Default::default(); limits.ranks], ..Metrics::default() };
        let state = Mutex::new(SharedState { metrics, ..SharedState::default() });
        Self { limits, deadline, state, wake: Condvar::new(), stopping: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, SharedState> {
        // No code panics while it holds the lock with half a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a request with the adapter of this name.
    pub(super) fn submit(&self, request: Request, events: UnboundedSender<Event>) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.refuse_if_stopped()?;
        let adapter = match &request.adapter {
            None => None,
            Some(name) => Some(*state.adapters.get(name).ok_or_else(|| unknown_adapter(name, &state.adapters))?),
        };
        let waiting = state.waiting();
        if waiting >= self.limits.max_waiting {
            return Err(Refusal::Busy { waiting });
        }
        state.queue.push_back(Command::Submit { request: Box::new(request), adapter, queued: Instant::now(), events });
        self.wake.notify_one();
        Ok(())
    }

    /// Queues another command.
    pub(super) fn command(&self, command: Command) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.refuse_if_stopped()?;
        state.queue.push_back(command);
        self.wake.notify_one();
        Ok(())
    }

    /// The number of commands in the queue; waits for one for at most `wait`. Also returns how the engine should end.
    pub(super) fn commands(&self, wait: Option<Duration>) -> (usize, Option<Ending>) {
        let mut state = self.lock();
        if let Some(wait) = wait {
            let until = Instant::now() + wait;
            while state.queue.is_empty() && state.ending.is_none() {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                state = self.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        (state.queue.len(), state.ending)
    }

    /// Takes the next command from the queue.
    pub(super) fn next_command(&self) -> Option<Command> {
        let mut state = self.lock();
        let command = state.queue.pop_front()?;
        if matches!(command, Command::Submit { .. }) {
            // Until the engine publishes its own count, this request waits.
            state.metrics.waiting += 1;
        }
        Some(command)
    }

    /// Makes the engine end; requests are refused from now on.
    pub(super) fn end(&self, ending: Ending) {
        let mut state = self.lock();
        // A drain can be cut short, but an end cannot become a drain.
        if state.ending != Some(Ending::Stop) {
            state.ending = Some(ending);
        }
        state.stopped.get_or_insert_with(|| "the engine is shutting down and takes no new requests".to_owned());
        self.wake.notify_one();
        self.stopping.notify_all();
    }

    /// Refuses everything from now on, and fails what is in the queue.
    pub(super) fn stop(&self, problem: &str) {
        let mut state = self.lock();
        state.stopped = Some(problem.to_owned());
        for command in state.queue.drain(..) {
            if let Command::Submit { events, .. } = command {
                let _ = events.send(Event::Failed(problem.to_owned()));
            }
        }
        state.metrics.running = 0;
        state.metrics.waiting = 0;
        self.stopping.notify_all();
    }

    /// Why the engine takes no more requests, once it does not.
    pub(super) fn stopped(&self) -> Option<String> {
        self.lock().stopped.clone()
    }

    /// Like [`stopped`](Self::stopped), but waits up to the deadline until the reason is known. A client needs this because the engine
    /// drops its command before all ranks have ended.
    pub(super) fn wait_for_stop_reason(&self) -> Option<String> {
        let waiting = self.stopping.wait_timeout_while(self.lock(), self.deadline, |state| state.stopped.is_none());
        waiting.unwrap_or_else(PoisonError::into_inner).0.stopped.clone()
    }

    pub(super) fn publish(&self, metrics: Metrics) {
        self.lock().metrics = metrics;
    }

    pub(super) fn metrics(&self) -> Metrics {
        let state = self.lock();
        let mut metrics = Metrics { waiting: state.waiting(), ..state.metrics.clone() };
        metrics.waiting_adapters.extend(state.queued().filter_map(|request| request.adapter.clone()));
        metrics
    }

    pub(super) fn adapters(&self) -> BTreeMap<String, u64> {
        self.lock().adapters.clone()
    }

    pub(super) fn add_adapter(&self, name: String, slot: u64) {
        self.lock().adapters.insert(name, slot);
    }

    /// Forgets the name of an adapter; requests that were queued before keep it until they end.
    pub(super) fn remove_adapter(&self, name: &str) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.refuse_if_stopped()?;
        let slot = state.adapters.remove(name).ok_or_else(|| unknown_adapter(name, &state.adapters))?;
        state.queue.push_back(Command::Unload { slot });
        self.wake.notify_one();
        Ok(())
    }
}

impl SharedState {
    fn refuse_if_stopped(&self) -> Result<(), Refusal> {
        self.stopped.clone().map_or(Ok(()), |problem| Err(Refusal::Stopped(problem)))
    }

    /// Number of requests that have not been admitted.
    fn waiting(&self) -> usize {
        self.metrics.waiting + self.queued().count()
    }

    /// The requests in the queue.
    fn queued(&self) -> impl Iterator<Item = &Request> {
        self.queue.iter().filter_map(|command| match command {
            Command::Submit { request, .. } => Some(&**request),
            _ => None,
        })
    }
}

fn unknown_adapter(name: &str, adapters: &BTreeMap<String, u64>) -> Refusal {
    let loaded = match adapters.is_empty() {
        true => "none is loaded".to_owned(),
        false => format!("loaded are {}", adapters.keys().cloned().collect::<Vec<_>>().join(", ")),
    };
    Refusal::Invalid(format!("there is no adapter '{name}': {loaded}"))
}
