//! `ringspan serve`: an OpenAI-compatible server over a mesh of ranks.

use crate::mesh::MeshArgs;
use crate::model::{ModelArgs, ModelAxes};
use crate::session::{self, Session};
use crate::{interrupt, model, output};
use anyhow::{Context, Result, anyhow, ensure};
use clap::builder::NonEmptyStringValueParser;
use ringspan::comm::process_group::ProcessGroup;
use ringspan_candle::DeviceName;
use ringspan_http::{ServedModel, Server, Settings};
use ringspan_models::{ModelSource, chat_template::ChatTemplate};
use ringspan_serve::engine::request::{EngineClient, Limits};
use ringspan_serve::engine::{Engine, EngineOptions, KvCacheSize};
use ringspan_serve::paged::KvDtype;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Upper limit on draft tokens in a step: each is computed, whether it is accepted or not.
const MOST_SPECULATIVE_TOKENS: usize = 64;

/// Serve a model over HTTP, in the interfaces of OpenAI and Anthropic.
///
/// The ranks of --ring and --ulysses prefill prompts together, and each caches the keys and values of its pages; those
/// of --tp share the width of layers, and those of --pp have some of the layers each; replicas of --attn-dp have requests
/// of their own. Requests are computed together, step by step. The first line on standard output is
/// `listening on http://HOST:PORT`. Ctrl-C or SIGTERM ends the server after the requests that run; a second one ends it
/// at once.
#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The name by which clients ask for the model [default: the name of the folder or file]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    model_name: Option<String>,
    /// Address to listen on; 0.0.0.0 for all of this machine
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS", help_heading = "Server")]
    host: String,
    /// Port to listen on; 0 for any that is free
    #[arg(long, default_value_t = 8000, value_name = "PORT", help_heading = "Server")]
    port: u16,
    /// A file with API keys, one a line; without it, everybody who reaches the port is served
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    api_key_file: Option<PathBuf>,
    /// An origin whose web pages may call the server, or * for all; may be given more than once
    #[arg(long, value_name = "ORIGIN", help_heading = "Server")]
    allow_origin: Vec<String>,
    /// Largest body of a request, such as 64MiB
    #[arg(long, default_value = "64MiB", value_name = "BYTES", value_parser = bytes, help_heading = "Server")]
    max_body: u64,
    /// Memory for stored responses of /v1/responses, such as 64MiB: the oldest make room for new ones; 0 stores none
    #[arg(long, default_value = "64MiB", value_name = "BYTES", value_parser = bytes_or_none, help_heading = "Server")]
    response_store: u64,
    /// Seconds that the server waits for the requests that run when it is asked to end
    #[arg(long, default_value_t = 60, value_name = "SECONDS", help_heading = "Server")]
    drain: u64,
    /// Memory for keys and values: bytes on each rank, such as 4GiB, or a share of the free memory for all ranks, such as 50%
    #[arg(long, default_value = "50%", value_name = "BYTES|SHARE%", value_parser = kv_cache, help_heading = "Engine")]
    kv_cache: KvCacheSize,
    /// Type of the cached keys and values: f32, bf16, or q8_0, 8-bit integers in blocks of 32 (heads must be as wide as whole
    /// blocks); each token's are rounded once [default: the type in which the model computes]
    #[arg(long, value_name = "TYPE", help_heading = "Engine")]
    kv_dtype: Option<KvDtype>,
    /// Tokens of a page of the cache
    #[arg(long, default_value_t = 16, value_name = "TOKENS", help_heading = "Engine")]
    page: usize,
    /// Longest sequence, prompt and text [default: what the model is made for and the cache holds]
    #[arg(long, value_name = "N", help_heading = "Engine")]
    max_model_len: Option<usize>,
    /// Most requests that are computed together, in each attention replica
    #[arg(long, default_value_t = 64, value_name = "N", help_heading = "Engine")]
    max_running: usize,
    /// Most requests that wait; further ones are told to come later
    #[arg(long, default_value_t = 1024, value_name = "N", help_heading = "Engine")]
    max_waiting: usize,
    /// Most prompt tokens in one step, in each attention replica: fewer shorten the time between other requests' tokens, more prefill
    /// prompts faster
    #[arg(long, default_value_t = 512, value_name = "N", help_heading = "Engine")]
    prefill_chunk: usize,
    /// Forget keys and values once their request has ended
    #[arg(long, help_heading = "Engine")]
    no_prefix_cache: bool,
    /// Speculative decoding by prompt lookup: propose up to N further tokens of each text, found by its last tokens in
    /// the text before, and check them in the same step; texts stay the same, and those that repeat themselves come
    /// faster
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = speculative_tokens, help_heading = "Engine")]
    num_speculative_tokens: usize,
    /// Save the cached keys and values to this folder when the server ends, and restore them when it starts, on any mesh; each
    /// model has a file of its own
    #[arg(long, value_name = "DIR", conflicts_with = "no_prefix_cache", help_heading = "Engine")]
    session_dir: Option<PathBuf>,
    /// A LoRA adapter (a PEFT folder) and the name by which clients ask for it; may be given more than once
    #[arg(long, value_name = "NAME=DIR", value_parser = adapter, help_heading = "Engine")]
    lora: Vec<(String, PathBuf)>,
    #[command(flatten)]
    mesh: MeshArgs,
    /// Tensor-parallel size T: neighbouring ranks that share heads, feed-forward layers and vocabulary; each reads and holds 1/T of the
    /// weights, and of keys and values those of its heads
    #[arg(long, default_value_t = 1, value_name = "T")]
    tp: usize,
    /// Expert-parallel size E: ranks, among those of a stage, over which whole experts are distributed
    #[arg(long, default_value_t = 1, value_name = "E")]
    ep: usize,
    /// Pipeline stages P, each of which holds some of the layers, with the keys and values of these
    #[arg(long, default_value_t = 1, value_name = "P")]
    pp: usize,
    /// Attention replicas D: each has the ranks of --ring, --ulysses and --tp, and computes requests of its own; --ep may share experts
    /// over several of them
    #[arg(long, default_value_t = 1, value_name = "D")]
    attn_dp: usize,
}

pub(crate) fn run(args: &ServeArgs, processes: &ProcessGroup) -> Result<()> {
    let device = args.model.device;
    ensure!(
        device == DeviceName::Cpu,
        "--device {device}: `serve` computes on CPUs; `generate` and `score` compute on GPUs, too"
    );
    let settings = Settings {
        host: args.host.clone(),
        port: args.port,
        max_body: usize::try_from(args.max_body).context("--max-body")?,
        api_keys: args.api_key_file.as_deref().map(read_keys).transpose()?.unwrap_or_default(),
        allow_origin: args.allow_origin.clone(),
        response_store: usize::try_from(args.response_store).context("--response-store")?,
        drain: Duration::from_secs(args.drain),
        ..Settings::default()
    };
    // These are found before the model is loaded, which may take minutes.
    if processes.lead() {
        Server::check_address(&settings)?;
        args.session_dir.as_deref().map(session::create_folder).transpose()?;
    }
    for (adapter, folder) in &args.lora {
        ensure!(folder.is_dir(), "--lora {adapter}={}: there is no such folder", folder.display());
    }
    let path = &args.model.path;
    let axes = ModelAxes { tp: args.tp, ep: args.ep, pp: args.pp, attn_dp: args.attn_dp };
    let mesh = model::mesh_sharing_model(&args.mesh, axes, &args.model, processes)?;
    let tokenizer = model::tokenizer(path)?;
    let template = ModelSource::at(path).and_then(|source| ChatTemplate::of(&source)).context("--model")?;
    let (end_tokens, generation_config) = (model::end_tokens(path)?, model::generation_config(path)?);
    let loaded = args.model.load(&mesh)?;
    loaded.weight_formats(&mesh.devices).iter().for_each(output::note);
    args.max_model_len.iter().for_each(|length| model::warn_context_overflow(&loaded, *length));
    let mesh = model::connected(mesh)?;
    let axes = mesh.to_string();
    let engine = Engine::start(loaded, mesh, &args.options())?;
    // A launcher passes signals to all processes: the others end when rank 0 does.
    let stop = interrupt::watch();
    if !processes.lead() {
        return Ok(engine.wait()?);
    }
    let client = Arc::new(engine.client());
    let limits = client.limits();
    output::note(format!("mesh {axes} = {}", summary(&limits)));
    let name = args.model_name.clone().unwrap_or_else(|| name_of(path));
    for (adapter, folder) in &args.lora {
        ensure!(*adapter != name, "--lora {adapter}: the model itself has this name");
        client.load_adapter(adapter, folder).with_context(|| format!("--lora {adapter}={}", folder.display()))?;
    }
    let new_session = |folder: &PathBuf| Session::new(folder, &args.model, limits.max_model_len, args.kv_dtype);
    let mut session = args.session_dir.as_ref().map(new_session).transpose()?;
    session.iter_mut().for_each(|session| session.restore(&client));
    if template.is_none() {
        output::note("the model has no chat template: texts can be continued, but there is no chat");
    }
    let model = ServedModel { engine: client.clone(), name, tokenizer, template, end_tokens, generation_config };
    let server = Server::bind(model, &settings)?;
    output::line(format!("listening on http://{}", server.address()?))?;
    let drained = server.run(|| stop.load(Ordering::SeqCst) || engine.is_finished())?;
    if !drained {
        output::note(format!("ended before all requests did, since --drain {} is over", args.drain));
    }
    if !engine.is_finished() {
        session.iter().for_each(|session| session.save(&client));
    }
    Ok(engine.shutdown(drained)?)
}

impl ServeArgs {
    fn options(&self) -> EngineOptions {
        EngineOptions {
            page_size: self.page,
            kv_cache: self.kv_cache,
            kv_dtype: self.kv_dtype,
            max_model_len: self.max_model_len,
            max_running: self.max_running,
            max_waiting: self.max_waiting,
            prefill_chunk: self.prefill_chunk,
            prefix_cache: !self.no_prefix_cache,
            num_speculative_tokens: self.num_speculative_tokens,
            ..EngineOptions::default()
        }
    }
}

/// Describes how many tokens and requests the engine has room for. Where all layers have a window, the pages that only say which tokens are
/// cached take no memory, and are not counted.
fn summary(limits: &Limits) -> String {
    let Limits { ranks, page_size, pages_per_rank, window_pages_per_rank, .. } = limits;
    let ranks = match (*ranks, limits.attn_dp) {
        (1, _) => "1 rank".to_owned(),
        (_, 1) => format!("{ranks} ranks"),
        (_, replicas) => format!("{ranks} ranks in {replicas} attention replicas"),
    };
    let window = limits.window_lookback.map_or(0, |lookback| lookback.saturating_add(1));
    let pages = match (limits.has_full_layers, window) {
        (true, 0) => format!("{pages_per_rank} pages of {page_size} tokens each"),
        (true, _) => format!(
            "{pages_per_rank} pages of {page_size} tokens each, and {window_pages_per_rank} for layers with a window of {window} \
             tokens"
        ),
        (false, _) => format!(
            "{window_pages_per_rank} pages of {page_size} tokens each, all for layers with a window of {window} tokens"
        ),
    };
    let holds =
        if limits.has_full_layers { format!(", which hold {} tokens", limits.cache_tokens()) } else { String::new() };
    format!(
        "{ranks} with {pages} ({:.1} MB of keys and values a rank){holds}; sequences of up to {} tokens, {} at a time; {} requests \
         may wait",
        limits.cache_bytes as f64 / 1e6,
        limits.max_model_len,
        limits.max_running,
        limits.max_waiting
    )
}

/// Reads API keys, one a line; empty lines and lines that begin with # are none.
pub(crate) fn read_keys(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("--api-key-file {}", path.display()))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    ensure!(!keys.is_empty(), "--api-key-file {}: the file has no key, so nobody could be served", path.display());
    Ok(keys)
}

/// The name of a model's folder, or of its file without the ending.
fn name_of(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = if path.is_file() { path.file_stem() } else { path.file_name() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn adapter(text: &str) -> Result<(String, PathBuf)> {
    match text.split_once('=') {
        Some((name, folder)) if !name.is_empty() && !folder.is_empty() => Ok((name.to_owned(), folder.into())),
        _ => Err(anyhow!("must be a name, =, and a folder")),
    }
}

fn kv_cache(text: &str) -> Result<KvCacheSize> {
    let Some(share) = text.strip_suffix('%') else { return bytes(text).map(KvCacheSize::Bytes) };
    let share: f64 = share.trim().parse().with_context(|| format!("`{share}` is no number"))?;
    ensure!(share > 0.0 && share <= 100.0, "a share must be more than 0% and at most 100%");
    Ok(KvCacheSize::Share(share / 100.0))
}

/// A number of draft tokens in a step.
pub(crate) fn speculative_tokens(text: &str) -> Result<usize> {
    let tokens: usize = text.parse().with_context(|| format!("`{text}` is no number"))?;
    ensure!(tokens <= MOST_SPECULATIVE_TOKENS, "possible are 0 (none) to {MOST_SPECULATIVE_TOKENS}");
    Ok(tokens)
}

/// A number of bytes, or 0.
fn bytes_or_none(text: &str) -> Result<u64> {
    if text == "0" { Ok(0) } else { bytes(text) }
}

/// A number of bytes, such as 1000, 64MiB or 1.5GB.
pub(crate) fn bytes(text: &str) -> Result<u64> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.trim().parse().with_context(|| format!("`{text}` is no number of bytes"))?;
    let scale = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" | "k" => 1e3,
        "mb" | "m" => 1e6,
        "gb" | "g" => 1e9,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        "tb" | "t" => 1e12,
        "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return Err(anyhow!("`{unit}` is no unit; there are B, kB, MB, GB, TB, KiB, MiB, GiB and TiB")),
    };
    ensure!(number >= 1.0 / scale && number * scale < 1e18, "`{text}` is less than a byte, or more than there can be");
    Ok((number * scale) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringspan_serve::engine::{EngineSizes, WindowSizes};

    #[test]
    fn memory_is_bytes_with_a_unit_or_a_share() {
        assert_eq!(bytes("64MiB").expect("bytes"), 64 << 20);
        assert_eq!(bytes("1.5 GB").expect("bytes"), 1_500_000_000);
        assert_eq!(bytes("12").expect("bytes"), 12);
        assert_eq!(bytes_or_none("0").expect("none"), 0);
        assert_eq!(bytes_or_none("1kB").expect("bytes"), 1000);
        for wrong in ["", "x", "0", "-1GB", "1TBx", "nan"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!(kv_cache("25%").expect("a share"), KvCacheSize::Share(0.25));
        assert_eq!(kv_cache("1KiB").expect("bytes"), KvCacheSize::Bytes(1024));
        for wrong in ["0%", "101%", "%", "nan%"] {
            assert!(kv_cache(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn pages_without_memory_are_not_counted() {
        let limits = |full: u64, window: u64| {
            let window = (window > 0).then_some(WindowSizes { lookback: 511, page_bytes: window * 1000 });
            let (page_bytes, trained_length) = (full * 1000, Some(8192));
            let sizes = EngineSizes {
                vocabulary: 10,
                hidden_size: 4,
                ranks: 1,
                attn_dp: 1,
                cp: 1,
                pp: 1,
                local_ranks: 1,
                page_bytes,
                window,
                trained_length,
            };
            let options = EngineOptions { kv_cache: KvCacheSize::Bytes(1_000_000), ..EngineOptions::default() };
            summary(&options.limits(&sizes).expect("room"))
        };
        assert!(limits(1, 0).starts_with("1 rank with 1000 pages of 64 tokens each (1.0 MB"), "{}", limits(1, 0));
        let both = limits(1, 1);
        assert!(both.contains(", and ") && both.contains(" for layers with a window of 512 tokens (1.0 MB"), "{both}");
        let windows = limits(0, 1);
        assert!(
            windows.starts_with("1 rank with 1000 pages of 64 tokens each, all for layers with a window"),
            "{windows}"
        );
        assert!(!windows.contains("which hold") && windows.contains("sequences of up to 8192 tokens"), "{windows}");
    }

    #[test]
    fn keys_are_lines() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "# of the team\nabc\r\n\n  def \n").expect("written");
        assert_eq!(read_keys(file.path()).expect("keys"), ["abc", "def"]);
        std::fs::write(file.path(), "\n#x\n").expect("written");
        assert!(read_keys(file.path()).expect_err("none").to_string().contains("no key"));
    }

    #[test]
    fn adapters_have_a_name_and_a_folder() {
        assert_eq!(adapter("a=b/c=d").expect("one"), ("a".to_owned(), PathBuf::from("b/c=d")));
        assert!(adapter("a").is_err() && adapter("=b").is_err() && adapter("a=").is_err());
    }
}
