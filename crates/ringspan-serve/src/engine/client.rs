//! `Client`: submits requests and commands to an engine in the same process.

use super::request::{EngineClient, Events, Limits, Metrics, Refusal, Request, SamplingParams};
use super::session::SessionSize;
use super::shared::{Command, Shared};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use tokio::sync::mpsc::unbounded_channel;

/// Longest wait for a session to be saved or restored.
const SESSION_DEADLINE: Duration = Duration::from_secs(3600);

/// A client of an engine in this process; clones are cheap.
#[derive(Debug, Clone)]
pub struct Client(pub(super) Arc<Shared>);

impl Client {
    /// Why the engine takes no more requests; `None` while it does.
    pub fn stopped(&self) -> Option<String> {
        self.0.stopped()
    }

    /// Saves the texts in the prefix cache, with their keys and values, to a file, which is replaced when all is written. `model`
    /// stands for the model, its weights and how it computes (see [`fingerprint`](super::fingerprint)).
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save_session(&self, file: &Path, model: &str) -> Result<SessionSize, Refusal> {
        let (reply, answer) = channel();
        self.0.command(Command::SaveSession { file: file.to_owned(), model: model.to_owned(), reply })?;
        self.within(SESSION_DEADLINE, &answer)?.map_err(Refusal::Invalid)
    }

    /// Restores what [`save_session`](Self::save_session) has saved, on any mesh and with pages of any size, as far as there is room;
    /// texts of adapters that are not loaded are left out. What is left out is counted.
    ///
    /// # Errors
    /// A damaged file, or one of another model. Pages that were restored before the damage was found stay in the cache; each has passed
    /// its checksum.
    pub fn restore_session(&self, file: &Path, model: &str) -> Result<SessionSize, Refusal> {
        let (reply, answer) = channel();
        self.0.command(Command::RestoreSession { file: file.to_owned(), model: model.to_owned(), reply })?;
        self.within(SESSION_DEADLINE, &answer)?.map_err(Refusal::Invalid)
    }

    /// Waits for the engine's answer.
    fn answer<T>(&self, reply: &Receiver<T>) -> Result<T, Refusal> {
        self.within(self.0.deadline, reply)
    }

    fn within<T>(&self, deadline: Duration, reply: &Receiver<T>) -> Result<T, Refusal> {
        reply.recv_timeout(deadline).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                let deadline = deadline.as_secs_f64();
                Refusal::Stopped(format!("the engine has not answered within {deadline:.1} s"))
            }
            RecvTimeoutError::Disconnected => {
                Refusal::Stopped(self.0.wait_for_stop_reason().unwrap_or_else(|| "the engine has ended".to_owned()))
            }
        })
    }
}

impl EngineClient for Client {
    fn submit(&self, request: Request) -> Result<Events, Refusal> {
        check(&request, &self.0.limits).map_err(Refusal::Invalid)?;
        let (sender, events) = unbounded_channel();
        self.0.submit(request, sender)?;
        Ok(events)
    }

    fn check_health(&self) -> Result<(), Refusal> {
        let (reply, answer) = channel();
        self.0.command(Command::CheckHealth { reply })?;
        self.answer(&answer)
    }

    fn metrics(&self) -> Metrics {
        self.0.metrics()
    }

    fn limits(&self) -> Limits {
        self.0.limits.clone()
    }

    fn load_adapter(&self, name: &str, folder: &Path) -> Result<(), Refusal> {
        if name.is_empty() {
            return Err(Refusal::Invalid("an adapter needs a name".to_owned()));
        }
        let (reply, answer) = channel();
        self.0.command(Command::Load { name: name.to_owned(), folder: folder.to_owned(), reply })?;
        self.answer(&answer)?.map_err(Refusal::Invalid)
    }

    fn unload_adapter(&self, name: &str) -> Result<(), Refusal> {
        self.0.remove_adapter(name)
    }

    fn adapters(&self) -> Vec<String> {
        self.0.adapters().into_keys().collect()
    }
}

/// Checks that a request can be served; says in a sentence why not.
fn check(request: &Request, limits: &Limits) -> Result<(), String> {
    let Limits { vocabulary, max_model_len, .. } = *limits;
    let Request { prompt, max_tokens, sampling, logprobs, prompt_logprobs, .. } = request;
    let tokens = prompt.len();
    if tokens == 0 {
        return Err("the prompt has no tokens; give at least one".to_owned());
    }
    let known = |token: u32| (token as usize) < vocabulary;
    let last = vocabulary.saturating_sub(1);
    if let Some(position) = prompt.iter().position(|token| !known(*token)) {
        let token = prompt[position];
        return Err(format!("token {token} at position {position} of the prompt: the model knows tokens 0 to {last}"));
    }
    if tokens > max_model_len {
        return Err(format!("the prompt has {tokens} tokens, but the longest sequence has {max_model_len}"));
    }
    if *max_tokens > 0 && tokens == max_model_len {
        return Err(format!("the prompt has {tokens} tokens, as many as the longest sequence: none can follow"));
    }
    if request.min_tokens > *max_tokens {
        return Err(format!("min_tokens {} is above max_tokens {max_tokens}", request.min_tokens));
    }
    for (name, top) in [("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)] {
        if let Some(top) = top.filter(|top| *top > vocabulary) {
            return Err(format!("{name} {top}: the vocabulary has {vocabulary} tokens"));
        }
    }
    if let Some(token) = sampling.logit_bias.keys().find(|token| !known(**token)) {
        return Err(format!("logit_bias of token {token}: the model knows tokens 0 to {last}"));
    }
    sampling.check()
}

impl SamplingParams {
    /// Checks that all numbers are in their ranges.
    ///
    /// # Errors
    /// A sentence with the first number that is not, and its range.
    pub fn check(&self) -> Result<(), String> {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, .. } =
            *self;
        let check = |right: bool, name: &str, given: &dyn std::fmt::Display, possible: &str| match right {
            true => Ok(()),
            false => Err(format!("{name} {given}: possible is {possible}")),
        };
        let is_finite = |from: f32, x: f32| x.is_finite() && x >= from;
        check(is_finite(0.0, temperature), "temperature", &temperature, "a finite number of at least 0")?;
        check(top_k != Some(0), "top_k", &0, "a number of at least 1; leave it out to keep all tokens")?;
        for (name, p) in [("top_p", top_p), ("min_p", min_p)] {
            let p = p.unwrap_or(0.0);
            check((0.0..=1.0).contains(&p), name, &p, "a probability from 0 to 1")?;
        }
        let right = repetition_penalty.is_finite() && repetition_penalty > 0.0;
        check(right, "repetition_penalty", &repetition_penalty, "a finite number above 0")?;
        for (name, x) in [("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)] {
            check((-2.0..=2.0).contains(&x), name, &x, "a number from -2 to 2")?;
        }
        for (token, bias) in &self.logit_bias {
            let name = format!("logit_bias of token {token}:");
            check(bias.is_finite(), &name, bias, "a finite number")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            max_model_len: 8,
            vocabulary: 10,
            hidden_size: 4,
            max_running: 1,
            max_waiting: 1,
            ranks: 1,
            attn_dp: 1,
            cp: 1,
            pp: 1,
            page_size: 4,
            pages_per_rank: 2,
            window_pages_per_rank: 0,
            window_lookback: None,
            has_full_layers: true,
            cache_bytes: 0,
            kv_dtype: None,
            prefix_cache: true,
        }
    }

    fn request(prompt: &[u32]) -> Request {
        Request::new(prompt.to_vec(), 3)
    }

    #[test]
    fn requests_that_cannot_be_served_are_refused_with_the_numbers() {
        let refusal = |request: &Request| check(request, &limits()).expect_err("must be refused");
        assert!(check(&request(&[1; 7]), &limits()).is_ok());
        assert!(check(&Request { max_tokens: 0, ..request(&[1; 8]) }, &limits()).is_ok());
        assert!(refusal(&request(&[])).contains("no tokens"));
        let unknown = refusal(&request(&[1, 10]));
        assert!(unknown.contains("token 10 at position 1") && unknown.contains("0 to 9"), "{unknown}");
        assert!(refusal(&request(&[1; 9])).contains("9 tokens, but the longest sequence has 8"));
        assert!(refusal(&request(&[1; 8])).contains("none can follow"));
        assert!(refusal(&Request { min_tokens: 4, ..request(&[1]) }).contains("min_tokens 4 is above max_tokens 3"));
        assert!(refusal(&Request { logprobs: Some(11), ..request(&[1]) }).contains("logprobs 11"));
        let sampling = |change: fn(&mut SamplingParams)| {
            let mut wrong = request(&[1]);
            change(&mut wrong.sampling);
            refusal(&wrong)
        };
        assert!(sampling(|params| params.temperature = -0.5).contains("temperature -0.5"));
        assert!(sampling(|params| params.temperature = f32::NAN).contains("temperature NaN"));
        assert!(sampling(|params| params.top_k = Some(0)).contains("top_k 0"));
        assert!(sampling(|params| params.top_p = Some(1.5)).contains("top_p 1.5"));
        assert!(sampling(|params| params.min_p = Some(-0.1)).contains("min_p -0.1"));
        assert!(sampling(|params| params.repetition_penalty = 0.0).contains("repetition_penalty 0"));
        assert!(sampling(|params| params.presence_penalty = 2.5).contains("presence_penalty 2.5"));
        assert!(sampling(|params| params.frequency_penalty = -3.0).contains("from -2 to 2"));
        assert!(sampling(|params| params.logit_bias = [(10, 1.0)].into()).contains("logit_bias of token 10"));
        assert!(sampling(|params| params.logit_bias = [(1, f32::INFINITY)].into()).contains("inf"));
    }
}
