//! The few NCCL functions that move blocks, looked up in the library on this machine.
//!
//! cudarc has these functions too, but it looks for `libnccl.so` and `libnccl.so.13`, while NCCL is installed as
//! `libnccl.so.2`; it panics if a function is missing; and a program that links CUDA's libraries would have to link NCCL as
//! well. Here they are looked up by name, and return codes are plain numbers, because newer versions may add to them.

use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;

/// File names of the library: the name of the runtime package, and the name of the development package.
pub(super) const NAMES: &[&str] = if cfg!(windows) { &["nccl.dll"] } else { &["libnccl.so.2", "libnccl.so"] };

/// Since version 2.18, non-blocking communicators support sends and receives reliably, and can be finalized.
const OLDEST: c_int = 21800;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// NCCL's type code of a byte.
const UINT8: c_int = 1;

/// A result with an error text.
pub(super) type Result<T> = std::result::Result<T, String>;

type Handle = *mut c_void;

/// The id with which ranks find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId([u8; 128]);

/// The struct `ncclConfig_t` of 2.18; newer versions read only as many bytes as `size` says.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

type CommFunction = unsafe extern "C" fn(Handle) -> c_int;
type Plain = unsafe extern "C" fn() -> c_int;

/// NCCL's functions.
struct Calls {
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int,
    async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int,
    group_start: Plain,
    group_end: Plain,
    finalize: CommFunction,
    destroy: CommFunction,
    abort: CommFunction,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Handle) -> *const c_char,
}

/// The library. It stays loaded until the process ends, because it has its own threads.
pub(super) struct Nccl {
    calls: Calls,
    /// The version as text, such as 2.22.3.
    pub(super) version: String,
    _library: ManuallyDrop<Library>,
}

impl UniqueId {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl Nccl {
    /// Loads the first library of `names` that exists.
    pub(super) fn load(names: &[&str]) -> Result<Self> {
        // SAFETY: loading runs the initialisers of NVIDIA's library, which have no preconditions.
        let Some(library) = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok()) else {
            return Err(format!(
                "NVIDIA's library NCCL was not found: looked for {} where libraries are loaded from (LD_LIBRARY_PATH and \
                 the system's folders); the packages libnccl2 of NVIDIA and nvidia-nccl-cu13 of Python have it",
                names.join(" and ")
            ));
        };
        let library = ManuallyDrop::new(library);
        /// Looks up a function by name; its type is that of the field.
        macro_rules! call {
            ($name:literal) => {{
                // SAFETY: the types of the fields are those in nccl.h since 2.18, which keeps them stable.
                let call = unsafe { library.get($name.as_bytes()) };
                *call.map_err(|_| format!("NCCL has no call {}: it must be 2.18 or newer", $name))?
            }};
        }
        let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = call!("ncclGetVersion");
        let mut version = 0;
        // SAFETY: the call writes to a valid number.
        if unsafe { get_version(&mut version) } != SUCCESS || version < OLDEST {
            return Err(format!("NCCL is version {}, but must be 2.18 or newer", written(version)));
        }
        let calls = Calls {
            get_unique_id: call!("ncclGetUniqueId"),
            init: call!("ncclCommInitRankConfig"),
            async_error: call!("ncclCommGetAsyncError"),
            send: call!("ncclSend"),
            receive: call!("ncclRecv"),
            group_start: call!("ncclGroupStart"),
            group_end: call!("ncclGroupEnd"),
            finalize: call!("ncclCommFinalize"),
            destroy: call!("ncclCommDestroy"),
            abort: call!("ncclCommAbort"),
            error_string: call!("ncclGetErrorString"),
            last_error: call!("ncclGetLastError"),
        };
        Ok(Self { calls, version: written(version), _library: library })
    }

    /// A new id for a communicator; the calling rank serves all others until they have found each other.
    pub(super) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the call writes to a valid id.
        let code = unsafe { (self.calls.get_unique_id)(&mut id) };
        self.check(code, "make an id", std::ptr::null_mut()).map(|()| id)
    }

    /// Returns an error, unless the code means success or in progress.
    fn check(&self, code: c_int, what: &str, comm: Handle) -> Result<()> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: both calls return texts that stay valid, or null.
        let texts = unsafe { [(self.calls.error_string)(code), (self.calls.last_error)(comm)] };
        let text = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: it is a C string, and not null.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned(),
        };
        let [error, last] = texts.map(text);
        let last = if last.is_empty() || last == error { String::new() } else { format!(": {last}") };
        Err(format!("could not {what}: {error} ({code}){last}"))
    }
}

/// Formats a version number: 21805 is 2.18.5, 22203 is 2.22.3.
fn written(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// A send or a receive of a block, with its address.
pub(super) struct NcclTransfer {
    pub(super) peer: usize,
    pub(super) sends: bool,
    pub(super) at: u64,
    pub(super) bytes: usize,
}

/// A rank's handle of a communicator with non-blocking calls. It belongs to the GPU that was current when it was made.
pub(super) struct Comm {
    nccl: Nccl,
    handle: Handle,
}

// SAFETY: any thread may use a communicator, one at a time; it is behind one lock.
unsafe impl Send for Comm {}

impl Comm {
    /// Starts connecting to the other ranks, with the GPU that is current on this thread.
    pub(super) fn begin(nccl: Nccl, id: UniqueId, rank: usize, size: usize) -> Result<Self> {
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: OLDEST.unsigned_abs(),
            blocking: 0,
            // These fields have the value for NCCL's defaults.
            cga_cluster_size: c_int::MIN,
            min_ctas: c_int::MIN,
            max_ctas: c_int::MIN,
            net_name: std::ptr::null(),
            split_share: c_int::MIN,
        };
        let mut handle = std::ptr::null_mut();
        let (rank, size) = (c_count(rank)?, c_count(size)?);
        // SAFETY: the call writes to a valid handle and reads a valid config; the id is one of `unique_id`.
        let code = unsafe { (nccl.calls.init)(&mut handle, size, id, rank, &mut config) };
        nccl.check(code, "connect the ranks", std::ptr::null_mut())?;
        if handle.is_null() {
            return Err("it made no communicator".into());
        }
        Ok(Self { nccl, handle })
    }

    /// Whether all started operations have been set up.
    pub(super) fn is_idle(&self) -> Result<bool> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is neither destroyed nor aborted, and the call writes to a valid number.
        let code = unsafe { (self.nccl.calls.async_error)(self.handle, &mut state) };
        self.nccl.check(code, "ask for its state", self.handle)?;
        self.nccl.check(state, "move blocks", self.handle)?;
        Ok(state == SUCCESS)
    }

    /// Starts putting transfers that move together on a stream. The next call must wait until this one [is
    /// done](Self::is_idle).
    ///
    /// # Safety
    /// The memory must be on this GPU and stay valid until the stream has passed the transfers; sent memory must not be
    /// written to, received memory neither read nor written.
    pub(super) unsafe fn start(&self, transfers: &[NcclTransfer], stream: *mut c_void) -> Result<()> {
        let calls = &self.nccl.calls;
        // SAFETY: all calls between start and end of the group are on one thread.
        self.nccl.check(unsafe { (calls.group_start)() }, "begin a group", self.handle)?;
        let one = |way: &NcclTransfer| {
            let peer = c_count(way.peer)?;
            // SAFETY: the contract of the caller.
            let code = unsafe {
                match way.sends {
                    true => (calls.send)(way.at as *const c_void, way.bytes, UINT8, peer, self.handle, stream),
                    false => (calls.receive)(way.at as *mut c_void, way.bytes, UINT8, peer, self.handle, stream),
                }
            };
            self.nccl.check(code, if way.sends { "send" } else { "receive" }, self.handle)
        };
        let all = transfers.iter().try_for_each(one);
        // SAFETY: a group was started on this thread; it is ended even if calls in it failed.
        let end = self.nccl.check(unsafe { (calls.group_end)() }, "end a group", self.handle);
        all.and(end)
    }

    /// Starts ending the communicator without an abort; all ranks should do this.
    pub(super) fn finalize(&self) -> Result<()> {
        // SAFETY: no transfer is in progress.
        self.nccl.check(unsafe { (self.nccl.calls.finalize)(self.handle) }, "end", self.handle)
    }

    /// Frees the communicator after [`finalize`](Self::finalize).
    pub(super) fn destroy(self) -> Result<()> {
        // SAFETY: the handle is not used after this.
        self.nccl.check(unsafe { (self.nccl.calls.destroy)(self.handle) }, "end", std::ptr::null_mut())
    }

    /// Ends the communicator and all transfers; received memory may be partly written.
    pub(super) fn abort(self) {
        // SAFETY: the handle is not used after this. Its return code is of no use.
        let _ = unsafe { (self.nccl.calls.abort)(self.handle) };
    }
}

fn c_count(number: usize) -> Result<c_int> {
    c_int::try_from(number).map_err(|_| format!("{number} is more than NCCL can count"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_what_was_looked_for_and_who_has_it() {
        let Err(text) = Nccl::load(&["libno-nccl.so.2", "libno-nccl.so"]) else { panic!("found") };
        for words in
            ["NCCL was not found", "libno-nccl.so.2 and libno-nccl.so", "LD_LIBRARY_PATH", "libnccl2", "nvidia-nccl"]
        {
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn a_library_that_is_another_one_is_refused() {
        // The C library is in every program.
        if let Err(text) = Nccl::load(&["libc.so.6"]) {
            assert!(text.contains("no call ncclGetVersion") || text.contains("was not found"), "{text}");
        } else {
            panic!("taken");
        }
    }

    #[test]
    fn versions_are_written_as_people_do() {
        assert_eq!([21800, 22203, 23004].map(written), ["2.18.0", "2.22.3", "2.30.4"]);
    }
}
