//! NCCL: moves blocks from GPU to GPU, also between processes and machines. `comm/direct/README.md` describes how ranks
//! agree on the order of flights; this module puts flights on a stream.

mod library;

use crate::cuda::Cuda;
use crate::gpu::Gpu;
use crate::memory::Memory;
use crate::source::GpuSource;
use cudarc::driver::CudaEvent;
use library::{Comm, NAMES, Nccl, NcclTransfer, UniqueId};
use ringspan::comm::direct::{self, Channel, Transfer};
use ringspan::comm::{Buffer, Communicator, OnDevice, Pending};
use ringspan::kernel::{DType, DeviceArray};
use ringspan::{Error, Result};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How long ranks wait until all are connected, and until all have ended.
const CONNECT: Duration = Duration::from_secs(180);
const END: Duration = Duration::from_secs(10);

/// Options for connecting GPUs.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Longest wait for another rank, even for one that computes.
    pub deadline: Duration,
    /// Whether ranks may share a GPU. NCCL refuses that unless all have `NCCL_MULTI_RANK_GPU_ENABLE=1` in their
    /// environment.
    pub shared_gpus: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(3600), shared_gpus: false }
    }
}

/// Returns why NCCL cannot connect the ranks of `comm`, of which this one computes on `gpu`, or `None` if it can. All ranks
/// must call this and get the same result.
///
/// # Errors
/// Failures of other ranks.
pub fn obstacle(comm: &dyn Communicator, gpu: &Gpu, options: &Options) -> Result<Option<String>> {
    let here = Nccl::load(NAMES).err().or_else(|| gpu.id().err().map(|error| error.to_string()));
    let mut view = gpu.id().unwrap_or_default().to_vec();
    view.extend(here.unwrap_or_default().bytes());
    let views = comm.all_gather(Buffer::U8(view))?;
    let read = |view: &Arc<Buffer>| match &**view {
        Buffer::U8(bytes) => {
            bytes.split_first_chunk::<16>().map(|(id, text)| (*id, String::from_utf8_lossy(text).into()))
        }
        _ => None,
    };
    let views: Vec<([u8; 16], String)> = views.iter().filter_map(read).collect();
    if let Some((rank, (_, text))) = views.iter().enumerate().find(|(_, (_, text))| !text.is_empty()) {
        return Ok(Some(format!("rank {rank}: {text}")));
    }
    for (rank, (id, _)) in views.iter().enumerate().filter(|_| !options.shared_gpus) {
        if let Some(first) = views[..rank].iter().position(|(other, _)| other == id) {
            return Ok(Some(format!("ranks {first} and {rank} share a GPU, and NCCL wants one for each rank")));
        }
    }
    Ok(None)
}

/// Makes a communicator of the same ranks that moves blocks on GPUs by NCCL, and everything else by `comm`. All ranks must
/// call this, each with the GPU of its kernel.
///
/// # Errors
/// [`Error::Device`] with the [obstacle](obstacle()) if there is one, or for failures of NCCL; failures of other ranks;
/// [`Error::Deadline`] if ranks do not connect within three minutes, or within the deadline if that is shorter.
pub fn over(comm: &dyn Communicator, gpu: &Gpu, options: Options) -> Result<Arc<dyn Communicator>> {
    let failed = |message: String| Error::Device { device: format!("{gpu:?}"), operation: "connect by NCCL", message };
    if let Some(obstacle) = obstacle(comm, gpu, &options)? {
        return Err(failed(obstacle));
    }
    let channel = NcclChannel::connect(comm, gpu, options.deadline.min(CONNECT), &failed)?;
    direct::over(comm, Box::new(channel), options.deadline)
}

/// The version of NCCL on this machine.
///
/// # Errors
/// [`Error::Device`] if there is none, or if it is too old.
pub fn version() -> Result<String> {
    let failed = |message| Error::Device { device: "CUDA".into(), operation: "load NCCL", message };
    Nccl::load(NAMES).map(|nccl| nccl.version).map_err(failed)
}

/// A flight that NCCL has put on the stream.
struct Flight {
    end: CudaEvent,
    /// The transfers, whose elements are kept until the flight has ended.
    transfers: Vec<Transfer>,
}

/// The channel of a rank: an NCCL communicator, and the stream of its flights.
struct NcclChannel {
    cuda: Cuda,
    /// The communicator; `None` once it was aborted.
    comm: Option<Comm>,
    /// Flights that NCCL has not been given yet, because it takes one at a time.
    waiting: VecDeque<Vec<Transfer>>,
    /// The flight that NCCL is putting on the stream.
    starting: Option<Vec<Transfer>>,
    started: VecDeque<Flight>,
}

impl NcclChannel {
    /// Connects all ranks of `comm`.
    fn connect(
        comm: &dyn Communicator,
        gpu: &Gpu,
        patience: Duration,
        failed: &dyn Fn(String) -> Error,
    ) -> Result<Self> {
        let (rank, size) = (comm.rank(), comm.size());
        let nccl = Nccl::load(NAMES).map_err(failed)?;
        let id = match rank {
            0 => Some(Buffer::U8(nccl.unique_id().map_err(failed)?.bytes().to_vec())),
            _ => None,
        };
        let id = match &*comm.broadcast(0, id)? {
            Buffer::U8(bytes) => UniqueId::from_bytes(bytes),
            _ => None,
        };
        let id = id.ok_or_else(|| failed("rank 0 sent something else than an id".into()))?;
        // A separate group, whose tags are used by nobody else. Its messages tell who is connected, and its errors who
        // failed.
        let words = comm.split(0, rank)?;
        let others: Vec<usize> = (0..size).filter(|other| *other != rank).collect();
        let connected =
            others.iter().map(|other| Ok((*other, words.receive(*other, 0)?))).collect::<Result<Vec<_>>>()?;
        let cuda = Cuda::new(gpu)?;
        cuda.bind()?;
        let mut channel = Self {
            comm: Some(Comm::begin(nccl, id, rank, size).map_err(failed)?),
            cuda,
            waiting: VecDeque::new(),
            starting: None,
            started: VecDeque::new(),
        };
        match channel.meet(&*words, connected, patience) {
            Ok(()) => Ok(channel),
            Err(error) => {
                channel.abort();
                Err(error)
            }
        }
    }

    /// Waits until NCCL has connected all ranks, and all have said so.
    fn meet(
        &self,
        words: &dyn Communicator,
        mut missing: Vec<(usize, Box<dyn Pending>)>,
        patience: Duration,
    ) -> Result<()> {
        let (start, mut told) = (Instant::now(), false);
        loop {
            if !told && self.comm()?.is_idle().map_err(|message| self.failed(message))? {
                for (other, _) in &missing {
                    words.send(*other, 0, Arc::new(Buffer::U8(Vec::new()))).map(drop)?;
                }
                told = true;
            }
            // Until this rank is connected, messages of others are only polled, not removed.
            if told {
                let mut silent = Vec::new();
                for (other, mut word) in missing {
                    if !word.test()? {
                        silent.push((other, word));
                    }
                }
                missing = silent;
            } else {
                missing.iter_mut().try_for_each(|(_, word)| word.test().map(drop))?;
            }
            match missing.first() {
                None if told => return Ok(()),
                _ if start.elapsed() < patience => thread::sleep(Duration::from_micros(200)),
                first => {
                    let rank = words.rank();
                    let peer = first.map_or(rank, |(other, _)| *other);
                    let (operation, peer_state) = ("connecting by NCCL".into(), "has not connected".into());
                    return Err(Error::Deadline { rank, operation, peer, peer_state, waited: patience });
                }
            }
        }
    }

    fn comm(&self) -> Result<&Comm> {
        self.comm.as_ref().ok_or_else(|| self.failed("it was aborted".into()))
    }

    fn failed(&self, message: String) -> Error {
        Error::Device { device: format!("{:?}", self.cuda.gpu()), operation: "NCCL", message }
    }

    /// Gives a flight to NCCL.
    fn begin(&self, transfers: &[Transfer]) -> Result<()> {
        let stream = &self.cuda.stream;
        let way = |transfer: &Transfer| {
            // The stream is made to wait for elements that are sent; received elements were allocated on it.
            let (elements, sends, at) = match transfer {
                Transfer::Send { elements, .. } => (elements, true, self.source(&**elements)?.read_in_flight(stream)?),
                Transfer::Receive { elements, .. } => {
                    (elements, false, self.cuda.write(&mut self.array(&**elements)?.clone().all_mut())?)
                }
            };
            let bytes = elements.elements() * usize::try_from(elements.width()).unwrap_or(0);
            Ok(NcclTransfer { peer: transfer.peer(), sends, at, bytes })
        };
        let ways = transfers.iter().map(way).collect::<Result<Vec<_>>>()?;
        self.cuda.bind()?;
        // SAFETY: the elements are kept until the flight has ended or the communicator was aborted; elements that are sent
        // are not written to any more (`Kernel::outgoing`, `SharedSlice::new`), and received elements are not handed out before.
        let started = unsafe { self.comm()?.start(&ways, stream.cu_stream().cast()) };
        started.map_err(|message| self.failed(message))
    }

    /// The elements of a send; an error unless they are on this GPU.
    fn source<'a>(&self, elements: &'a dyn OnDevice) -> Result<GpuSource<'a>> {
        let source = GpuSource::of(elements).filter(|source| source.is_in(&self.cuda.gpu().0.context));
        source.ok_or_else(|| self.elsewhere(elements))
    }

    /// The array of a receive; an error unless it is on this GPU.
    fn array<'a>(&self, elements: &'a dyn OnDevice) -> Result<&'a DeviceArray> {
        let array = (elements as &dyn Any).downcast_ref::<DeviceArray>();
        let array =
            array.filter(|array| Memory::of(array.memory()).is_some_and(|memory| memory.gpu.is(self.cuda.gpu())));
        array.ok_or_else(|| self.elsewhere(elements))
    }

    fn elsewhere(&self, elements: &dyn OnDevice) -> Error {
        self.failed(format!("{elements:?} is not on the GPU that was connected"))
    }

    /// Advances all flights.
    fn advance(&mut self) -> Result<()> {
        while self.comm()?.is_idle().map_err(|message| self.failed(message))? {
            if let Some(transfers) = self.starting.take() {
                // The flight is on the stream only now, so an event recorded here marks its end.
                for transfer in &transfers {
                    if let Transfer::Receive { elements, .. } = transfer {
                        self.cuda.share(self.array(&**elements)?)?;
                    }
                }
                let end = self.cuda.stream.record_event(None).map_err(self.cuda.gpu().failed("mark a flight's end"))?;
                self.started.push_back(Flight { end, transfers });
            }
            let Some(transfers) = self.waiting.pop_front() else { break };
            self.begin(&transfers)?;
            self.starting = Some(transfers);
        }
        Ok(())
    }
}

impl Channel for NcclChannel {
    fn type_code(&self, elements: &dyn OnDevice) -> Result<u64> {
        Ok(match self.source(elements)?.dtype {
            DType::F32 => 0,
            DType::Bf16 => 1,
            DType::F16 => 2,
        })
    }

    fn allocate(&mut self, type_code: u64, len: usize) -> Result<Arc<dyn OnDevice>> {
        let stored = match type_code {
            0 => DType::F32,
            1 => DType::Bf16,
            2 => DType::F16,
            _ => {
                return Err(self.failed(format!(
                    "another rank sent elements with the type code {type_code}, which does not exist"
                )));
            }
        };
        self.cuda.bind()?;
        Ok(Arc::new(self.cuda.array(stored, len)?))
    }

    fn start(&mut self, transfers: Vec<Transfer>) -> Result<()> {
        self.waiting.push_back(transfers);
        self.advance()
    }

    fn take_ended(&mut self) -> Result<usize> {
        self.advance()?;
        let mut ended = 0;
        while let Some(flight) = self.started.front() {
            if !flight.end.try_is_complete().map_err(self.cuda.gpu().failed("move blocks"))? {
                break;
            }
            self.started.pop_front();
            ended += 1;
        }
        Ok(ended)
    }

    fn abort(&mut self) {
        if let Some(comm) = self.comm.take() {
            // If the GPU cannot be made current, its driver has failed, and with it all flights.
            let _ = self.cuda.bind();
            comm.abort();
            let left = self.started.iter().map(|flight| &flight.transfers).chain(&self.starting).flatten();
            for transfer in left {
                if let Transfer::Send { elements, .. } = transfer
                    && let Ok(source) = self.source(&**elements)
                {
                    source.was_aborted(&self.cuda.stream);
                }
            }
        }
    }
}

impl Drop for NcclChannel {
    fn drop(&mut self) {
        let Some(comm) = self.comm.take() else { return };
        let (_, start) = (self.cuda.bind(), Instant::now());
        let mut ended = comm.finalize().is_ok();
        while ended && start.elapsed() < END {
            match comm.is_idle() {
                // At this point an error could not be reported to anybody.
                Ok(true) => return drop(comm.destroy()),
                Ok(false) => thread::sleep(Duration::from_micros(200)),
                Err(_) => ended = false,
            }
        }
        comm.abort();
    }
}
