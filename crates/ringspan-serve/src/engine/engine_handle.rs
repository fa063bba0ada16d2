//! The owner of an engine: it starts and ends the ranks.

use super::client::Client;
use super::engine_core::EngineCore;
use super::executor::Executor;
use super::model_executor::ModelExecutor;
use super::model_shards::{AdaptedModels, ModelShards};
use super::options::{EngineOptions, EngineSizes, WindowSizes};
use super::page_pool::PagePool;
use super::prefix_cache::PrefixCache;
use super::rank::EngineRank;
use super::request::Limits;
use super::scheduler::{Bounds, Scheduler};
use super::shared::{Ending, Shared};
use crate::error::{Error, Result};
use crate::groups::Groups;
use crate::mesh::Mesh;
use crate::model::Model;
use crate::paged::{PagedCache, PerKind, window_lookback};
use ringspan::comm::timed::TimedCommunicator;
use ringspan_candle::tensor_parallel::part;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest time between two messages of rank 0 to idle ranks.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// A running engine. Dropping it ends it at once; requests in flight fail.
///
/// Where ranks are processes, each of them starts the engine; only the one with rank 0 has clients, and the others
/// [`wait`](Self::wait) until it ends.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Engine {
    /// Starts an engine for a model on a mesh of ranks.
    ///
    /// # Errors
    /// Options that do not fit, a mesh that the model's heads do not allow, a model on a GPU, and failures of ranks while they
    /// start.
    pub fn start(model: impl Into<Arc<Model>>, mesh: Mesh, options: &EngineOptions) -> Result<Self> {
        let model: Arc<Model> = model.into();
        mesh.check(model.decoder())?;
        let config = model.decoder().config();
        let page_bytes = page_bytes(&model, &mesh, options)?;
        let window = window_lookback(&model).map(|lookback| WindowSizes { lookback, page_bytes: page_bytes.window });
        let sizes = EngineSizes {
            vocabulary: model.vocabulary(),
            hidden_size: config.hidden_size,
            ranks: mesh.size(),
            attn_dp: mesh.attn_dp,
            cp: mesh.cp(),
            pp: mesh.pp,
            local_ranks: mesh.processes.local().unwrap_or(mesh.size()),
            page_bytes: page_bytes.full,
            window,
            trained_length: config.max_position_embeddings,
        };
        let (adapted, devices, kv_dtype) = (Arc::new(AdaptedModels::default()), mesh.devices.clone(), options.kv_dtype);
        let shards = Arc::new(ModelShards::new(model, &mesh)?);
        Self::start_with(mesh, options, &sizes, move |groups, limits| {
            let model = shards.get(groups.model_rank())?;
            Ok(Box::new(ModelExecutor::new(groups, model, adapted.clone(), devices.clone(), limits, kv_dtype)?))
        })
    }

    /// Starts an engine whose ranks compute with the executors that `make` makes, one on each rank.
    ///
    /// # Errors
    /// Options that do not fit, and failures of ranks while they start.
    pub fn start_with<M>(mesh: Mesh, options: &EngineOptions, sizes: &EngineSizes, make: M) -> Result<Self>
    where
        M: for<'a> Fn(&'a Groups, &Limits) -> Result<Box<dyn Executor + 'a>> + Send + Sync + 'static,
    {
        // Each process may see another amount of free memory.
        let limits = options.limits_with(sizes, |pages| Ok(mesh.processes.smallest(pages)?))?;
        let of_replica = |_| {
            let pages = PagePool::new(limits.cp, limits.pages_per_rank as u32);
            let cache = PrefixCache::new(pages, limits.page_size, options.prefix_cache);
            match limits.window_lookback {
                Some(lookback) => {
                    cache.with_window(PagePool::new(limits.cp, limits.window_pages_per_rank as u32), lookback)
                }
                None => cache,
            }
        };
        let caches = (0..limits.attn_dp).map(of_replica).collect();
        let EngineOptions { page_size, max_running, prefill_chunk, mixed_chunk, num_speculative_tokens, .. } = *options;
        let bounds = Bounds { page_size, max_running, prefill_chunk, mixed_chunk, num_speculative_tokens };
        let scheduler = Scheduler::new(caches, bounds);
        let shared = Arc::new(Shared::new(limits, options.deadline));
        if !mesh.processes.lead() {
            shared.stop("requests are taken by the process with rank 0, not by this one");
        }
        let (ready, is_ready) = channel();
        let thread = {
            let shared = shared.clone();
            let run = move || run(&mesh, &shared, scheduler, &make, ready);
            let spawned = std::thread::Builder::new().name("engine".to_owned()).spawn(run);
            spawned.map_err(|error| Error::Rank { rank: 0, problem: format!("no thread for the engine: {error}") })?
        };
        let engine = Self { shared, thread: Some(thread) };
        match is_ready.recv() {
            Ok(()) => Ok(engine),
            // The ranks have ended before they were ready.
            Err(_) => match engine.wait() {
                Err(error) => Err(error),
                Ok(()) => Err(Error::Rank { rank: 0, problem: "the engine ended while it started".to_owned() }),
            },
        }
    }

    /// A client of the engine.
    pub fn client(&self) -> Client {
        Client(self.shared.clone())
    }

    /// Ends the engine and waits for its ranks: after the requests in flight if it should `drain`, else these fail.
    ///
    /// # Errors
    /// The failure of a rank, then or before.
    pub fn shutdown(self, drain: bool) -> Result<()> {
        self.shared.end(if drain { Ending::Drain } else { Ending::Stop });
        self.wait()
    }

    /// Whether the ranks have ended, for instance because one of them failed.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the engine ends.
    ///
    /// # Errors
    /// The failure of a rank.
    pub fn wait(mut self) -> Result<()> {
        self.join()
    }

    fn join(&mut self) -> Result<()> {
        let panicked = |_| Err(Error::Rank { rank: 0, problem: "the engine's thread panicked".to_owned() });
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap_or_else(panicked))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.shared.end(Ending::Stop);
            // `drop` cannot return a failure; `shutdown` and `wait` do.
            let _ = self.join();
        }
    }
}

/// Runs all ranks of this process until the engine ends; then no request is left without an answer.
fn run<M>(mesh: &Mesh, shared: &Shared, scheduler: Scheduler, make: &M, ready: Sender<()>) -> Result<()>
where
    M: for<'a> Fn(&'a Groups, &Limits) -> Result<Box<dyn Executor + 'a>> + Send + Sync,
{
    let heartbeat = HEARTBEAT.min(mesh.deadline / 4);
    let scheduler = Mutex::new(scheduler);
    let ended = mesh.run_timed(|groups, timed| {
        let on_rank = || run_rank(groups, timed, shared, &scheduler, heartbeat, make, &ready);
        on_rank().map_err(|error| named(error, groups.rank()))
    });
    let problem = match &ended {
        Ok(_) => "the engine was shut down".to_owned(),
        Err(error) => error.to_string(),
    };
    shared.stop(&problem);
    scheduler.into_inner().unwrap_or_else(PoisonError::into_inner).fail_all(&problem);
    ended.map(|_| ())
}

fn run_rank<M>(
    groups: &Groups,
    timed: &TimedCommunicator,
    shared: &Shared,
    scheduler: &Mutex<Scheduler>,
    heartbeat: Duration,
    make: &M,
    ready: &Sender<()>,
) -> Result<()>
where
    M: for<'a> Fn(&'a Groups, &Limits) -> Result<Box<dyn Executor + 'a>>,
{
    let executor = make(groups, &shared.limits)?;
    groups.world().barrier()?;
    let mut rank = EngineRank::new(groups, timed, executor);
    // The receiver waits for the first message only.
    let _ = ready.send(());
    if groups.rank() == 0 {
        let mut scheduler = scheduler.lock().unwrap_or_else(PoisonError::into_inner);
        EngineCore::new(&mut scheduler, shared, heartbeat).run(&mut rank)
    } else {
        rank.follow()
    }
}

/// Bytes of a page on the rank with the most key-value heads, in the stage with the most layers of each kind.
fn page_bytes(model: &Model, mesh: &Mesh, options: &EngineOptions) -> Result<PerKind<u64>> {
    let heads = model.decoder().head_counts();
    let mut most = 0;
    for rank in 0..mesh.tp {
        let own = heads.of_rank((rank, mesh.tp)).map_err(|error| Error::Mesh(error.to_string()))?;
        most = most.max(own.key_values.len());
    }
    let of_layer = PagedCache::bytes_per_page_and_layer(model, options.page_size, options.kv_dtype)?;
    let of_layer = (of_layer / model.key_value_heads() * most) as u64;
    let (mut full, mut window) = (0, 0);
    for stage in 0..mesh.pp {
        let layers = part(model.decoder().config().num_hidden_layers, stage, mesh.pp);
        let sees_window = |layer: &usize| model.decoder().mask(*layer).lookback().is_some();
        let of_stage = layers.clone().filter(sees_window).count();
        (full, window) = (full.max(layers.len() - of_stage), window.max(of_stage));
    }
    Ok(PerKind { full: of_layer * full as u64, window: of_layer * window as u64 })
}

/// Adds the number of the rank to an error that does not name one.
fn named(error: Error, rank: usize) -> Error {
    match error {
        Error::Ringspan(_) | Error::Rank { .. } => error,
        other => Error::Rank { rank, problem: other.to_string() },
    }
}
