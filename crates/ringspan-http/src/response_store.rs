//! The responses of `/v1/responses` that can be read and continued later: in memory, the oldest dropped for new ones.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Bytes that are reserved for each background response, so that an error message fits if it fails.
const FAILURE_RESERVE: usize = 512;

/// A response that can be read and continued. Both parts are JSON texts, whose memory is known, and which readers share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredResponse {
    /// The list of all items that the model has read, with those of the responses before.
    pub(crate) input: Arc<str>,
    /// The response.
    pub(crate) response: Arc<str>,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        self.input.len() + self.response.len()
    }
}

/// Why a response is not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoRoom {
    /// It would not fit into an empty store.
    #[error("the response needs {needed} bytes, but the server stores {capacity} bytes of them (--response-store)")]
    TooLarge {
        /// Bytes of the response and its input.
        needed: usize,
        /// Bytes of the store.
        capacity: usize,
    },
    /// Responses in the background, which are not dropped, have taken the room.
    #[error(
        "the response needs {needed} bytes, but those in the background hold {running} of the {capacity} bytes for stored \
         responses (--response-store); wait until one ends, or cancel one"
    )]
    Taken {
        /// Bytes of the response and its input.
        needed: usize,
        /// Bytes of the responses in the background.
        running: usize,
        /// Bytes of the store.
        capacity: usize,
    },
    /// As many responses are computed in the background as may be.
    #[error(
        "{most} responses are computed in the background already, and no more are at a time (half of --max-waiting); wait until \
         one ends, or cancel one"
    )]
    TooMany {
        /// Most responses in the background at a time.
        most: usize,
    },
}

/// Responses by their ids.
#[derive(Debug)]
pub(crate) struct ResponseStore {
    /// Most bytes of stored responses.
    capacity: usize,
    /// Most responses in the background at a time.
    most_running: usize,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    by_id: HashMap<String, Entry>,
    /// The ids of the responses that have ended, by the order of their ends.
    ended: BTreeMap<u64, String>,
    /// How many responses have ended so far.
    ends: u64,
    /// Bytes of the responses that have ended.
    ended_bytes: usize,
    /// Number of the responses in the background.
    running: usize,
    /// Bytes of the responses in the background, with those that they need at their ends.
    running_bytes: usize,
}

#[derive(Debug)]
struct Entry {
    stored: StoredResponse,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// The response is computed in the background, which ends when this is dropped.
    Running(oneshot::Sender<()>),
    /// The response has ended, as the key of [`Entries::ended`] says.
    Ended(u64),
}

impl ResponseStore {
    /// A store of at most `capacity` bytes, and `most_running` responses in the background; with 0 bytes, nothing is stored.
    pub(crate) fn new(capacity: usize, most_running: usize) -> Self {
        Self { capacity, most_running, entries: Mutex::default() }
    }

    /// Whether anything can be stored.
    pub(crate) fn is_enabled(&self) -> bool {
        self.capacity > 0
    }

    /// Bytes that all responses may have together.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        // No code panics while it holds the lock with half a change.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a response that is computed in the background; the oldest that have ended make room. The returned receiver is told
    /// when the response is deleted. Such responses are not dropped for others until they end.
    ///
    /// # Errors
    /// The other responses in the background leave no room.
    pub(crate) fn begin(&self, id: &str, stored: StoredResponse) -> Result<oneshot::Receiver<()>, NoRoom> {
        let mut entries = self.lock();
        if entries.running >= self.most_running {
            return Err(NoRoom::TooMany { most: self.most_running });
        }
        entries.make_room(stored.bytes() + FAILURE_RESERVE, self.capacity)?;
        let (running, unwanted) = oneshot::channel();
        entries.add_running(id, stored, running);
        Ok(unwanted)
    }

    /// Replaces a response in the background by its end, unless it was deleted or has ended in the meantime.
    ///
    /// # Errors
    /// No room; the response stays as it was.
    pub(crate) fn end(&self, id: &str, response: impl Into<Arc<str>>) -> Result<(), NoRoom> {
        let response = response.into();
        let mut entries = self.lock();
        let is_running = |entry: &Entry| matches!(entry.phase, Phase::Running(_));
        if !entries.by_id.get(id).is_some_and(is_running) {
            return Ok(());
        }
        let Some(Entry { stored, phase: Phase::Running(running) }) = entries.remove(id) else { return Ok(()) };
        let input = stored.input.clone();
        match entries.make_room(input.len() + response.len(), self.capacity) {
            Ok(()) => entries.add_ended(id, StoredResponse { input, response }),
            Err(error) => {
                entries.add_running(id, stored, running);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Stores a response that has ended; the oldest of those make room.
    ///
    /// # Errors
    /// The responses in the background leave no room; all others stay.
    pub(crate) fn insert(&self, id: &str, stored: StoredResponse) -> Result<(), NoRoom> {
        let mut entries = self.lock();
        entries.make_room(stored.bytes(), self.capacity)?;
        entries.add_ended(id, stored);
        Ok(())
    }

    /// The response with this id.
    pub(crate) fn get(&self, id: &str) -> Option<StoredResponse> {
        self.lock().by_id.get(id).map(|entry| entry.stored.clone())
    }

    /// All responses: those in the background, and then those that have ended, the newest first.
    pub(crate) fn newest_first(&self) -> Vec<StoredResponse> {
        let entries = self.lock();
        let running = entries.by_id.values().filter(|entry| matches!(entry.phase, Phase::Running(_)));
        let ended = entries.ended.values().rev().filter_map(|id| entries.by_id.get(id));
        running.chain(ended).map(|entry| entry.stored.clone()).collect()
    }

    /// Deletes a response, and ends its computation; returns whether there was one.
    pub(crate) fn delete(&self, id: &str) -> bool {
        // The memory is freed after the lock.
        let removed = self.lock().remove(id);
        removed.is_some()
    }
}

impl Entries {
    /// Drops the oldest responses that have ended until there is room for `needed` bytes; none if that is not enough.
    fn make_room(&mut self, needed: usize, capacity: usize) -> Result<(), NoRoom> {
        if needed > capacity {
            return Err(NoRoom::TooLarge { needed, capacity });
        }
        if self.running_bytes + needed > capacity {
            return Err(NoRoom::Taken { needed, running: self.running_bytes, capacity });
        }
        while self.running_bytes + self.ended_bytes + needed > capacity {
            let Some(oldest) = self.ended.first_entry().map(|oldest| oldest.get().clone()) else { break };
            self.remove(&oldest);
        }
        Ok(())
    }

    fn add_running(&mut self, id: &str, stored: StoredResponse, running: oneshot::Sender<()>) {
        self.running += 1;
        self.running_bytes += stored.bytes() + FAILURE_RESERVE;
        self.by_id.insert(id.to_owned(), Entry { stored, phase: Phase::Running(running) });
    }

    fn add_ended(&mut self, id: &str, stored: StoredResponse) {
        self.ended_bytes += stored.bytes();
        self.ended.insert(self.ends, id.to_owned());
        self.by_id.insert(id.to_owned(), Entry { stored, phase: Phase::Ended(self.ends) });
        self.ends += 1;
    }

    fn remove(&mut self, id: &str) -> Option<Entry> {
        let entry = self.by_id.remove(id)?;
        match entry.phase {
            Phase::Running(_) => {
                self.running -= 1;
                self.running_bytes -= entry.stored.bytes() + FAILURE_RESERVE;
            }
            Phase::Ended(at) => {
                self.ended.remove(&at);
                self.ended_bytes -= entry.stored.bytes();
            }
        }
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot::error::TryRecvError;

    fn of(bytes: usize) -> StoredResponse {
        StoredResponse { input: "i".repeat(bytes / 2).into(), response: "r".repeat(bytes - bytes / 2).into() }
    }

    #[test]
    fn the_oldest_make_room_for_the_newest() {
        let store = ResponseStore::new(100, 1);
        for id in ["a", "b", "c"] {
            store.insert(id, of(40)).unwrap();
        }
        assert_eq!((store.get("a"), store.get("b"), store.get("c")), (None, Some(of(40)), Some(of(40))));
        assert!(store.delete("b") && !store.delete("b"));
        store.insert("d", of(60)).unwrap();
        assert_eq!((store.get("c"), store.get("d")), (Some(of(40)), Some(of(60))));
        assert_eq!(store.insert("e", of(101)), Err(NoRoom::TooLarge { needed: 101, capacity: 100 }));
        let left = ["c", "d", "e"].map(|id| store.get(id).map(|stored| stored.bytes()));
        assert_eq!(left, [Some(40), Some(60), None], "what is too large leaves the others");
        assert!(store.delete("c") && store.delete("d"));
        let entries = store.lock();
        assert_eq!((entries.ended_bytes, entries.ended.len(), entries.by_id.len()), (0, 0, 0));
    }

    #[test]
    fn what_was_deleted_leaves_its_room_and_the_order_of_the_others() {
        let store = ResponseStore::new(100, 1);
        for round in 0..1000 {
            store.insert(&format!("a{round}"), of(10)).unwrap();
            assert!(store.delete(&format!("a{round}")));
        }
        assert_eq!(store.lock().ended.len(), 0, "ids of deleted responses do not pile up");
        for id in ["a", "b", "c"] {
            store.insert(id, of(30)).unwrap();
        }
        assert!(store.delete("a"));
        store.insert("d", of(40)).unwrap();
        assert_eq!(["b", "c", "d"].map(|id| store.get(id).is_some()), [true, true, true], "there was room");
        store.insert("e", of(10)).unwrap();
        assert_eq!(["b", "c", "d"].map(|id| store.get(id).is_some()), [false, true, true], "the oldest goes first");
    }

    #[test]
    fn a_response_in_the_background_stays_until_it_ends() {
        let store = ResponseStore::new(5000, 2);
        let mut unwanted = store.begin("a", of(1000)).unwrap();
        store.insert("b", of(3000)).unwrap();
        store.insert("c", of(3000)).unwrap();
        assert_eq!(["a", "b", "c"].map(|id| store.get(id).is_some()), [true, false, true]);
        assert_eq!(unwanted.try_recv(), Err(TryRecvError::Empty));
        store.end("a", "r".repeat(2000)).unwrap();
        assert_eq!((store.get("a").map(|stored| stored.response.len()), store.get("c")), (Some(2000), None));
        let mut unwanted = store.begin("d", of(10)).unwrap();
        assert!(store.delete("d"));
        assert_eq!(unwanted.try_recv(), Err(TryRecvError::Closed), "the computation hears of it");
        store.end("d", "too late").unwrap();
        assert_eq!(store.get("d"), None);
    }

    #[test]
    fn responses_in_the_background_count() {
        let store = ResponseStore::new(5000, 2);
        store.insert("old", of(2000)).unwrap();
        store.insert("new", of(2000)).unwrap();
        let mut unwanted = store.begin("a", of(1000)).unwrap();
        assert_eq!(["old", "new"].map(|id| store.get(id).is_some()), [false, true], "the oldest has made room");
        let (running, capacity) = (1000 + FAILURE_RESERVE, 5000);
        let needed = 4000 + FAILURE_RESERVE;
        assert_eq!(store.begin("b", of(4000)).unwrap_err(), NoRoom::Taken { needed, running, capacity });
        assert_eq!(
            store.begin("b", of(5000)).unwrap_err(),
            NoRoom::TooLarge { needed: 5000 + FAILURE_RESERVE, capacity }
        );
        assert_eq!(store.insert("b", of(4000)), Err(NoRoom::Taken { needed: 4000, running, capacity }));
        assert!(store.get("new").is_some(), "what finds no room drops nothing");
        // An end without room changes nothing, so that a smaller one can say why.
        assert_eq!(store.end("a", "r".repeat(4501)), Err(NoRoom::TooLarge { needed: 5001, capacity }));
        assert_eq!((store.get("a"), unwanted.try_recv()), (Some(of(1000)), Err(TryRecvError::Empty)));
        store.end("a", "r".repeat(500 + FAILURE_RESERVE)).unwrap();
        assert!(store.get("new").is_some(), "room for the end was kept");
        // Ends and deletions give the room back, and the place of another in the background.
        for id in ["c", "d"] {
            store.begin(id, of(1000)).unwrap();
        }
        assert_eq!(store.begin("e", of(10)).unwrap_err(), NoRoom::TooMany { most: 2 });
        assert!(store.delete("c"));
        store.begin("e", of(2000)).unwrap();
        store.end("d", "d").unwrap();
        store.begin("f", of(1000)).unwrap();
        for id in ["a", "d", "e", "f", "new"] {
            // Some have made room for others.
            store.delete(id);
        }
        let entries = store.lock();
        let left = (entries.running, entries.running_bytes, entries.ended_bytes, entries.by_id.len());
        assert_eq!(left, (0, 0, 0, 0));
    }

    #[test]
    fn the_first_end_stays() {
        let store = ResponseStore::new(5000, 1);
        let mut unwanted = store.begin("a", of(10)).unwrap();
        store.end("a", "cancelled").unwrap();
        assert_eq!(unwanted.try_recv(), Err(TryRecvError::Closed));
        store.end("a", "too late").unwrap();
        assert_eq!(store.get("a").map(|stored| stored.response), Some("cancelled".into()));
        store.end("b", "b").unwrap();
        assert_eq!(store.get("b"), None);
    }
}
