//! Server-sent events: a response that is written while it is computed, and ends when its reader leaves.

use crate::error::{ApiError, Result};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use std::convert::Infallible;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Events that wait for a client that reads slowly.
const WAITING_EVENTS: usize = 16;

/// The data of the last event of OpenAI's streams.
pub(crate) const DONE: &str = "[DONE]";

/// Writes events.
#[derive(Debug, Clone)]
pub(crate) struct Writer(mpsc::Sender<std::result::Result<Event, Infallible>>);

impl Writer {
    /// Writes an event without a name.
    pub(crate) async fn data(&self, data: &Value) {
        self.event(Event::default().data(data.to_string())).await;
    }

    /// Writes a text as an event.
    pub(crate) async fn text(&self, text: &str) {
        self.event(Event::default().data(text)).await;
    }

    /// Writes an event with a name.
    pub(crate) async fn named(&self, name: &str, data: &Value) {
        self.event(Event::default().event(name).data(data.to_string())).await;
    }

    async fn event(&self, event: Event) {
        // If the client has disconnected, the writing task is about to be dropped.
        let _ = self.0.send(Ok(event)).await;
    }
}

/// The last events of a response that has failed: names, where events have any, and data.
pub(crate) type Failure = fn(&ApiError) -> Vec<(Option<&'static str>, String)>;

/// A response that `write` writes; an error ends it by the events of `failure`. Once the client leaves, `write` is dropped, and with
/// it the requests of the engine.
pub(crate) fn stream<F>(failure: Failure, write: impl FnOnce(Writer) -> F) -> Response
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(WAITING_EVENTS);
    let writing = write(Writer(sender.clone()));
    tokio::spawn(async move {
        let result = tokio::select! {
            () = sender.closed() => return,
            result = writing => result,
        };
        for (name, data) in result.err().iter().flat_map(failure) {
            let event = Event::default().data(data);
            let event = name.map_or(event.clone(), |name| event.event(name));
            let _ = sender.send(Ok(event)).await;
        }
    });
    Sse::new(ReceiverStream::new(receiver)).keep_alive(KeepAlive::default()).into_response()
}

/// The failure of a stream in OpenAI's shape.
pub(crate) fn openai_failure(error: &ApiError) -> Vec<(Option<&'static str>, String)> {
    vec![(None, error.to_json().to_string()), (None, DONE.to_owned())]
}
