//! A scripted engine for tests: its prompt contains the text that it generates. It has real log-probabilities, and fails on request.
//!
//! Tokens 0 to 255 are bytes. After `say:` in the last line of a prompt that has it, the rest of the line is the text, up to a special
//! token of the tokenizer without more; a prompt without it is repeated without an end.

use ringspan_serve::engine::EngineHistograms;
use ringspan_serve::engine::request::{
    EngineClient, Event, Events, FinishReason, Limits, Metrics, Pooling, RankMetrics, Refusal, Request, TokenLogprobs,
};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The token that ends a text.
pub(crate) const END: u32 = 256;
/// Number of tokens; the last ones have no text in the tokenizer.
pub(crate) const VOCABULARY: usize = 264;
/// Width of vectors.
pub(crate) const WIDTH: usize = 4;
/// Longest sequence.
pub(crate) const LONGEST: usize = 4096;

/// A prompt that was computed, after the salt of its request.
type CachedPrompt = (Option<Arc<str>>, Vec<u32>);

#[derive(Debug)]
pub(crate) struct TestEngine {
    /// Requests that are computed now.
    pub(crate) live: Arc<AtomicUsize>,
    /// Whether a rank is dead.
    pub(crate) dead: AtomicBool,
    /// Requests that may be computed at a time.
    pub(crate) most: AtomicUsize,
    prompts: Mutex<Vec<CachedPrompt>>,
    adapters: Mutex<Vec<String>>,
}

impl Default for TestEngine {
    fn default() -> Self {
        Self {
            live: Arc::default(),
            dead: AtomicBool::new(false),
            most: AtomicUsize::new(usize::MAX),
            prompts: Mutex::default(),
            adapters: Mutex::default(),
        }
    }
}

impl TestEngine {
    /// Tokens that the prompt shares with an earlier one of the same salt.
    fn cached(&self, request: &Request) -> usize {
        let (mut prompts, prompt) = (self.prompts.lock().unwrap(), &request.prompt);
        let same = |other: &Vec<u32>| prompt.iter().zip(other).take_while(|(a, b)| a == b).count();
        let of_salt = prompts.iter().filter(|(salt, _)| *salt == request.cache_salt);
        let cached = of_salt.map(|(_, other)| same(other)).max().unwrap_or(0).min(prompt.len() - 1);
        prompts.push((request.cache_salt.clone(), prompt.clone()));
        cached
    }
}

/// The text that a prompt asks for.
fn script(prompt: &[u32]) -> Option<Vec<u32>> {
    let bytes: Vec<u8> = prompt.iter().map(|token| u8::try_from(*token).unwrap_or(b'\n')).collect();
    let at = (0..bytes.len()).rev().find(|at| bytes[*at..].starts_with(b"say:"))?;
    let of_text = |token: &&u32| **token != u32::from(b'\n') && !(END..=END + 2).contains(*token);
    Some(prompt[at + 4..].iter().take_while(of_text).copied().collect())
}

fn logprobs(logits: &[f32], token: u32, alternatives: usize) -> TokenLogprobs {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum = logits.iter().map(|logit| (logit - most).exp()).sum::<f32>().ln() + most;
    let mut top: Vec<(u32, f32)> = logits.iter().enumerate().map(|(id, logit)| (id as u32, logit - sum)).collect();
    top.sort_by(|a, b| b.1.total_cmp(&a.1));
    top.truncate(alternatives);
    TokenLogprobs { token, logprob: logits[token as usize] - sum, top }
}

/// Logits that prefer `wanted`, and lower ids after it.
fn logits(wanted: u32) -> Vec<f32> {
    (0..VOCABULARY as u32).map(|id| if id == wanted { 9.0 } else { -0.01 * id as f32 }).collect()
}

impl EngineClient for TestEngine {
    fn submit(&self, mut request: Request) -> Result<Events, Refusal> {
        if self.dead.load(Ordering::SeqCst) {
            return Err(Refusal::Stopped("rank 1 has died".into()));
        }
        let live = self.live.load(Ordering::SeqCst);
        if live >= self.most.load(Ordering::SeqCst) {
            return Err(Refusal::Busy { waiting: live });
        }
        self.live.fetch_add(1, Ordering::SeqCst);
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        let (live, cached_tokens) = (self.live.clone(), self.cached(&request));
        std::thread::spawn(move || {
            let prompt = request.prompt.clone();
            let text = String::from_utf8_lossy(&prompt.iter().map(|t| *t as u8).collect::<Vec<_>>()).into_owned();
            let wanted = script(&prompt);
            let send = |event| sender.send(event).is_ok();
            send(Event::Started { cached_tokens });
            if let Some(alternatives) = request.prompt_logprobs {
                let each = |pair: &[u32]| Some(logprobs(&logits(pair[0]), pair[1], alternatives));
                send(Event::Prompt(std::iter::once(None).chain(prompt.windows(2).map(each)).collect()));
            }
            if let Some(pooling) = request.embedding {
                let all = prompt.iter().fold([0.0; WIDTH], |mut sum, token| {
                    sum[*token as usize % WIDTH] += 1.0;
                    sum
                });
                let mut last = [0.0; WIDTH];
                last[prompt[prompt.len() - 1] as usize % WIDTH] = 2.0;
                send(Event::Embedding(if pooling == Pooling::Mean { all } else { last }.to_vec()));
            }
            let mut reason = FinishReason::Length;
            for count in 0..request.max_tokens {
                if text.contains("SLOW") {
                    std::thread::sleep(Duration::from_millis(20));
                }
                if text.contains("FAIL") && count == 2 {
                    send(Event::Failed("rank 1 has died".into()));
                    live.fetch_sub(1, Ordering::SeqCst);
                    return;
                }
                let next = match &wanted {
                    Some(script) => script.get(count).copied().unwrap_or(END),
                    None => prompt[count % prompt.len()],
                };
                let plain = logits(next);
                let mut logits = plain.clone();
                request.sampling.logit_bias.iter().for_each(|(token, bias)| logits[*token as usize] += bias);
                if count < request.min_tokens {
                    request.stop_token_ids.iter().for_each(|token| logits[*token as usize] = f32::NEG_INFINITY);
                }
                if let Some(constraint) = &mut request.constraint
                    && let Err(problem) = constraint.mask(&mut logits)
                {
                    send(Event::Failed(problem));
                    break;
                }
                let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32;
                if request.stop_token_ids.contains(&best) {
                    reason = FinishReason::Stop { token: Some(best) };
                    break;
                }
                let logprob = request.logprobs.map(|alternatives| logprobs(&plain, best, alternatives));
                if !send(Event::Token(best, logprob)) {
                    break;
                }
                if request.constraint.as_mut().is_some_and(|constraint| constraint.advance(best) == Ok(true)) {
                    reason = FinishReason::Stop { token: None };
                    break;
                }
            }
            live.fetch_sub(1, Ordering::SeqCst);
            send(Event::Finished { reason });
        });
        Ok(receiver)
    }

    fn check_health(&self) -> Result<(), Refusal> {
        match self.dead.load(Ordering::SeqCst) {
            true => Err(Refusal::Stopped("rank 1 has died".into())),
            false => Ok(()),
        }
    }

    fn metrics(&self) -> Metrics {
        let live = self.live.load(Ordering::SeqCst);
        let ranks = vec![
            RankMetrics {
                pages_used: 3 * live,
                pages_cached: 7,
                transfer_bytes: 11,
                wait_seconds: 0.5,
                ..Default::default()
            };
            2
        ];
        let mut histograms = EngineHistograms::default();
        histograms.queue_time.observe(0.25);
        histograms.prefill_time.observe(0.5);
        histograms.decode_time.observe(2.0);
        histograms.inference_time.observe(2.5);
        [1.0, 8.0, 700.0].into_iter().for_each(|tokens| histograms.step_tokens.observe(tokens));
        let running_adapters = self.adapters.lock().unwrap().iter().cloned().collect();
        Metrics { running: live, prompt_tokens: 5, ranks, running_adapters, histograms, ..Metrics::default() }
    }

    fn limits(&self) -> Limits {
        Limits {
            max_model_len: LONGEST,
            vocabulary: VOCABULARY,
            hidden_size: WIDTH,
            max_running: 8,
            max_waiting: 8,
            ranks: 2,
            attn_dp: 1,
            cp: 2,
            pp: 1,
            page_size: 16,
            pages_per_rank: 100,
            window_pages_per_rank: 0,
            window_lookback: None,
            has_full_layers: true,
            cache_bytes: 0,
            kv_dtype: None,
            prefix_cache: true,
        }
    }

    fn load_adapter(&self, name: &str, folder: &Path) -> Result<(), Refusal> {
        let mut adapters = self.adapters.lock().unwrap();
        if !folder.is_dir() {
            return Err(Refusal::Invalid(format!("{}: there is no such folder", folder.display())));
        }
        if adapters.iter().any(|adapter| adapter == name) {
            return Err(Refusal::Invalid(format!("there is an adapter `{name}` already")));
        }
        adapters.push(name.to_owned());
        Ok(())
    }

    fn unload_adapter(&self, name: &str) -> Result<(), Refusal> {
        self.adapters.lock().unwrap().retain(|adapter| adapter != name);
        Ok(())
    }

    fn adapters(&self) -> Vec<String> {
        self.adapters.lock().unwrap().clone()
    }
}

/// A tokenizer whose tokens 0 to 255 are bytes, with three special tokens after them.
pub(crate) fn tokenizer() -> tokenizers::Tokenizer {
    tokenizer_of(&[], serde_json::Value::Null)
}

/// The same tokenizer with more special tokens and a post-processor.
pub(crate) fn tokenizer_of(more: &[(u32, &str)], post_processor: serde_json::Value) -> tokenizers::Tokenizer {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    let mut vocabulary = serde_json::Map::new();
    for byte in 0..256u32 {
        let c = if printable(byte) {
            byte
        } else {
            next += 1;
            next - 1
        };
        vocabulary.insert(char::from_u32(c).unwrap().to_string(), byte.into());
    }
    let special = |(id, content): (u32, &str)| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let own = [(END, "<|end|>"), (257, "<|user|>"), (258, "<|assistant|>")];
    let added: Vec<_> = own.iter().chain(more).copied().map(special).collect();
    let json = serde_json::json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "post_processor": post_processor,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": []}});
    tokenizers::Tokenizer::from_bytes(json.to_string()).expect("a tokenizer")
}
