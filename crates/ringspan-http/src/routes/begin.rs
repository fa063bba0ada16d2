//! The common part of all conversation routes: parses a body to a conversation, and starts its answers.

use crate::app::{App, Target};
use crate::conversation::Conversation;
use crate::error::Result;
use crate::reply::Reply;
use crate::sampling::Sampling;
use serde_json::{Map, Value};
use std::sync::Arc;

/// A request for the next message of a conversation, in the form of one of the interfaces.
pub(crate) trait ConversationRequest: Sized + Send + 'static {
    /// Reads the fields of a body.
    ///
    /// # Errors
    /// Fields that are missing, wrong, or not supported.
    fn read(app: &App, body: Map<String, Value>) -> Result<Self>;

    /// The model, the conversation that it reads, and how its tokens are drawn.
    fn prompt(&self) -> (&Target, &Conversation, &Sampling);
}

/// Reads a request and begins its answers. It does so beside the threads that serve others, since templates and tokenizers take
/// long for long conversations.
///
/// # Errors
/// A body that cannot be read ([`ConversationRequest::read`]), and a conversation that cannot be started ([`Conversation::start`]).
pub(crate) async fn begin<R: ConversationRequest>(app: &Arc<App>, body: Map<String, Value>) -> Result<(R, Reply)> {
    let begin = move |app: &Arc<App>| {
        let request = R::read(app, body)?;
        let (target, conversation, sampling) = request.prompt();
        let reply = conversation.start(app, target, sampling)?;
        Ok((request, reply))
    };
    app.compute(begin).await
}
