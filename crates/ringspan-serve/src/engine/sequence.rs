//! A running or waiting request: its tokens, its pages of the cache, and the channel of its events.

use super::outbox::Outbox;
use super::prefix_tree::{AdapterSlot, Namespace, NodeId};
use super::request::{Event, FinishReason, Pooling, Request, TokenLogprobs};
use super::request_times::RequestTimes;
use super::step::{CachePage, WindowPages};
use super::token_sampler::TokenSampler;
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;

/// A running or waiting request.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Number of requests that came before; the greatest is the youngest.
    pub(super) arrival: u64,
    /// The prompt, and after it the generated tokens.
    pub(super) tokens: Vec<u32>,
    /// Number of tokens of the prompt.
    pub(super) prompt_len: usize,
    /// Largest number of tokens, those of the prompt included.
    pub(super) max_len: usize,
    pub(super) stop_token_ids: Vec<u32>,
    /// The texts with which it may share pages.
    pub(super) namespace: Namespace,
    pub(super) sampler: TokenSampler,
    pub(super) prompt_results: PromptResults,
    /// The attention replica that has its pages, while it runs.
    pub(super) replica: usize,
    pub(super) page_table: PageTable,
    /// Guesses of the tokens after `tokens`, which the step under way computes; those that are drawn need not be computed again.
    pub(super) drafts: Vec<u32>,
    /// Number of the prompt's tokens that were in the cache when the request was first admitted; `None` before that.
    pub(super) cached_tokens: Option<usize>,
    pub(super) times: RequestTimes,
    events: UnboundedSender<Event>,
}

/// The results about a prompt that its client asked for (log-probabilities, an embedding), as far as they are computed.
#[derive(Debug)]
pub(super) struct PromptResults {
    /// Number of most likely tokens that are reported for each token of the prompt.
    logprobs: Option<usize>,
    of_prompt: Vec<Option<TokenLogprobs>>,
    pooling: Option<Pooling>,
    /// Sum of the prompt's hidden states.
    sum: Vec<f64>,
    last: Vec<f32>,
    /// Whether these results have been reported.
    done: bool,
}

/// The pages of the cache that a sequence holds.
#[derive(Debug, Default)]
pub(super) struct PageTable {
    /// Number of tokens whose keys and values are in the cache.
    pub(super) computed: usize,
    /// The pages of the sequence; page i is on rank i mod P.
    pub(super) pages: Vec<u32>,
    /// The pages of the sequence in sliding-window layers, which are numbered separately; only those that are still needed.
    pub(super) window: WindowPages,
    /// Number of first pages that are in the prefix cache, and the node of the last of them.
    pub(super) inserted: usize,
    pub(super) node: Option<NodeId>,
    /// Page `index` of another text, of which the next step copies rows: it is held until then.
    pub(super) copied_from: Option<CopiedFrom>,
}

/// Rows of a cached page that a sequence copies, since it continues from the middle of the page.
#[derive(Debug, Clone, Copy)]
pub(super) struct CopiedFrom {
    pub(super) index: usize,
    pub(super) page: u32,
    pub(super) window: Option<u32>,
    pub(super) rows: usize,
}

impl PageTable {
    /// Page `index` of the sequence.
    pub(super) fn page(&self, index: usize) -> CachePage {
        CachePage { full: self.pages[index], window: self.window.get(index) }
    }

    /// Replaces page `index`.
    pub(super) fn set_page(&mut self, index: usize, page: CachePage) {
        self.pages[index] = page.full;
        let in_window = index.checked_sub(self.window.first).and_then(|at| self.window.pages.get_mut(at));
        if let (Some(to), Some(page)) = (in_window, page.window) {
            *to = page;
        }
    }
}

impl Sequence {
    /// A request that waits, since `queued`. `max_model_len` limits its tokens, prompt and text.
    pub(super) fn new(
        arrival: u64,
        request: Request,
        adapter: AdapterSlot,
        max_model_len: usize,
        queued: Instant,
        events: UnboundedSender<Event>,
    ) -> Self {
        let sampler = TokenSampler::new(&request);
        let Request { prompt, max_tokens, stop_token_ids, prompt_logprobs, embedding, constraint, cache_salt, .. } =
            request;
        Self {
            arrival,
            prompt_len: prompt.len(),
            max_len: prompt.len().saturating_add(max_tokens).min(max_model_len),
            tokens: prompt,
            stop_token_ids,
            namespace: Namespace { adapter, salt: cache_salt },
            sampler: sampler.with_constraint(constraint),
            prompt_results: PromptResults {
                logprobs: prompt_logprobs,
                of_prompt: Vec::new(),
                pooling: embedding,
                sum: Vec::new(),
                last: Vec::new(),
                done: prompt_logprobs.is_none() && embedding.is_none(),
            },
            replica: 0,
            page_table: PageTable::default(),
            drafts: Vec::new(),
            cached_tokens: None,
            times: RequestTimes::new(queued),
            events,
        }
    }

    /// Whether the client has left.
    pub(super) fn is_abandoned(&self) -> bool {
        self.events.is_closed()
    }

    /// Tells the client something, once the events of `outbox` are sent.
    pub(super) fn tell(&self, outbox: &mut Outbox, event: Event) {
        outbox.add(&self.events, event);
    }

    /// Tells the client that the request succeeded.
    pub(super) fn finish(&self, outbox: &mut Outbox, reason: FinishReason) {
        self.tell(outbox, Event::Finished { reason });
    }

    /// Number of tokens that are not computed yet.
    pub(super) fn remaining(&self) -> usize {
        self.tokens.len() - self.page_table.computed
    }

    /// Number of generated tokens.
    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Whether hidden states of all of the prompt's tokens are still to be computed, so that none may be found in the cache.
    pub(super) fn needs_whole_prompt(&self) -> bool {
        !self.prompt_results.done
            && (self.prompt_results.logprobs.is_some() || self.prompt_results.pooling == Some(Pooling::Mean))
    }
}

impl PromptResults {
    /// Forgets what was computed: the prompt is read again from its beginning.
    pub(super) fn restart(&mut self) {
        self.of_prompt.clear();
        self.sum.clear();
    }

    /// How many top log-probabilities to report for each token of the prompt; `None` if none are wanted, or they have been reported.
    pub(super) fn wants_logprobs(&self) -> Option<usize> {
        self.logprobs.filter(|_| !self.done)
    }

    /// How to pool the prompt's hidden states; `None` if no embedding is wanted, or it has been reported.
    pub(super) fn wants_hidden(&self) -> Option<Pooling> {
        self.pooling.filter(|_| !self.done)
    }

    /// Adds the log-probabilities of the prompt's next token.
    pub(super) fn add_logprobs(&mut self, of_token: TokenLogprobs) {
        if self.of_prompt.is_empty() {
            // Nothing precedes the first token.
            self.of_prompt.push(None);
        }
        self.of_prompt.push(Some(of_token));
    }

    /// Adds the final-normed hidden state of the prompt's next token.
    pub(super) fn add_hidden(&mut self, state: &[f32]) {
        self.sum.resize(state.len(), 0.0);
        self.sum.iter_mut().zip(state).for_each(|(sum, x)| *sum += f64::from(*x));
        self.last.clear();
        self.last.extend_from_slice(state);
    }

    /// The events to report once the prompt of `tokens` tokens has been read; none the second time.
    pub(super) fn report(&mut self, tokens: usize) -> Vec<Event> {
        if std::mem::replace(&mut self.done, true) {
            return Vec::new();
        }
        let mut events = Vec::new();
        if self.logprobs.is_some() {
            let mut of_prompt = std::mem::take(&mut self.of_prompt);
            if of_prompt.is_empty() {
                of_prompt.push(None);
            }
            events.push(Event::Prompt(of_prompt));
        }
        let sum = std::mem::take(&mut self.sum);
        match self.pooling {
            Some(Pooling::Mean) => {
                events.push(Event::Embedding(sum.iter().map(|sum| (sum / tokens.max(1) as f64) as f32).collect()));
            }
            Some(Pooling::Last) => events.push(Event::Embedding(std::mem::take(&mut self.last))),
            None => {}
        }
        events
    }
}
