//! The responses of `/v1/responses` that can be read and continued later: in memory, the oldest dropped for new ones.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// A response that can be read and continued. Both parts are JSON texts, whose memory is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredResponse {
    /// The list of all items that the model has read, with those of the responses before.
    pub(crate) input: String,
    /// The response.
    pub(crate) response: String,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        self.input.len() + self.response.len()
    }
}

/// Responses by their ids.
#[derive(Debug)]
pub(crate) struct ResponseStore {
    /// Most bytes of stored responses.
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<String, Entry>,
    /// The ids of responses that have ended, oldest first. It may have ids that were deleted.
    ended: VecDeque<String>,
    /// Bytes of the responses that have ended.
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    stored: StoredResponse,
    /// Ends the computation of a response in the background when it is dropped; `None` once that has ended, and for others.
    running: Option<oneshot::Sender<()>>,
}

impl ResponseStore {
    /// A store of at most `capacity` bytes; with 0, nothing is stored.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, state: Mutex::default() }
    }

    /// Whether anything can be stored.
    pub(crate) fn is_enabled(&self) -> bool {
        self.capacity > 0
    }

    /// Bytes that all responses may have together.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock with half a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a response that is computed in the background. The returned receiver hears when nobody wants it any more. Such
    /// responses are not dropped for others until they end: the engine's limits bound their number.
    pub(crate) fn begin(&self, id: &str, stored: StoredResponse) -> oneshot::Receiver<()> {
        let (running, unwanted) = oneshot::channel();
        self.lock().entries.insert(id.to_owned(), Entry { stored, running: Some(running) });
        unwanted
    }

    /// Replaces a response in the background by its end, unless it was deleted or cancelled in the meantime.
    pub(crate) fn end(&self, id: &str, response: String) {
        let mut state = self.lock();
        if let Some(entry) = state.entries.get_mut(id).filter(|entry| entry.running.is_some()) {
            entry.running = None;
            entry.stored.response = response;
            state.ended(id, self.capacity);
        }
    }

    /// Ends the computation of a response in the background, which becomes what `cancelled` makes of it. Returns the response as it
    /// is now; `None` where there is none.
    pub(crate) fn cancel(&self, id: &str, cancelled: impl FnOnce(&str) -> String) -> Option<String> {
        let mut state = self.lock();
        let entry = state.entries.get_mut(id)?;
        if entry.running.take().is_some() {
            entry.stored.response = cancelled(&entry.stored.response);
            let response = entry.stored.response.clone();
            state.ended(id, self.capacity);
            return Some(response);
        }
        Some(entry.stored.response.clone())
    }

    /// Stores a response that has ended.
    pub(crate) fn insert(&self, id: &str, stored: StoredResponse) {
        let mut state = self.lock();
        state.entries.insert(id.to_owned(), Entry { stored, running: None });
        state.ended(id, self.capacity);
    }

    /// The response with this id.
    pub(crate) fn get(&self, id: &str) -> Option<StoredResponse> {
        self.lock().entries.get(id).map(|entry| entry.stored.clone())
    }

    /// Deletes a response, and ends its computation; returns whether there was one.
    pub(crate) fn delete(&self, id: &str) -> bool {
        let mut state = self.lock();
        let Some(entry) = state.entries.remove(id) else { return false };
        if entry.running.is_none() {
            state.bytes -= entry.stored.bytes();
            state.ended.retain(|other| other != id);
        }
        true
    }
}

impl State {
    /// Counts a response that has ended, and drops the oldest ones that have no room beside it.
    fn ended(&mut self, id: &str, capacity: usize) {
        self.bytes += self.entries.get(id).map_or(0, |entry| entry.stored.bytes());
        self.ended.push_back(id.to_owned());
        while self.bytes > capacity {
            let Some(oldest) = self.ended.pop_front() else { return };
            if let Some(entry) = self.entries.remove(&oldest) {
                self.bytes -= entry.stored.bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: usize) -> StoredResponse {
        StoredResponse { input: "i".repeat(bytes / 2), response: "r".repeat(bytes - bytes / 2) }
    }

    #[test]
    fn the_oldest_make_room_for_the_newest() {
        let store = ResponseStore::new(100);
        for id in ["a", "b", "c"] {
            store.insert(id, of(40));
        }
        assert_eq!((store.get("a"), store.get("b"), store.get("c")), (None, Some(of(40)), Some(of(40))));
        assert!(store.delete("b") && !store.delete("b"));
        store.insert("d", of(60));
        assert_eq!((store.get("c"), store.get("d")), (Some(of(40)), Some(of(60))));
        store.insert("e", of(101));
        assert_eq!(["c", "d", "e"].map(|id| store.get(id)), [None, None, None], "what is too large leaves no room");
        let state = store.lock();
        assert_eq!((state.bytes, state.ended.len()), (0, 0));
    }

    #[test]
    fn a_response_in_the_background_stays_until_it_ends() {
        let store = ResponseStore::new(50);
        let mut unwanted = store.begin("a", of(10));
        store.insert("b", of(50));
        assert!(store.get("a").is_some() && unwanted.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        store.end("a", "r".repeat(20));
        assert_eq!((store.get("a").map(|stored| stored.response.len()), store.get("b")), (Some(20), None));
        let mut unwanted = store.begin("c", of(10));
        assert!(store.delete("c"));
        assert_eq!(unwanted.try_recv(), Err(oneshot::error::TryRecvError::Closed), "the computation hears of it");
        store.end("c", "too late".into());
        assert_eq!(store.get("c"), None);
    }

    #[test]
    fn what_was_cancelled_stays_so() {
        let store = ResponseStore::new(50);
        let mut unwanted = store.begin("a", of(10));
        assert_eq!(store.cancel("a", |_| "cancelled".into()), Some("cancelled".into()));
        assert_eq!(unwanted.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        store.end("a", "too late".into());
        assert_eq!(store.cancel("a", |_| "again".into()), Some("cancelled".into()));
        assert_eq!(store.cancel("b", |_| "b".into()), None);
    }
}
