//! The few calls of MPI that move bytes, over a private communicator.

use crate::comm::Buffer;
use ::mpi::ffi;
use bytemuck::{cast_slice, cast_slice_mut};
use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

/// Maximum bytes of a piece of a payload: MPI counts in 32 bits. Several pieces are in transfer at the same time.
const PIECE: usize = 64 << 20;

/// Headers and payloads have separate tags, so that each keeps its own order.
const HEADER: c_int = 1;
const PAYLOAD: c_int = 2;

/// The text of an error that cannot occur, because groups refuse such messages earlier.
const ELSEWHERE: &str = "a message in the memory of a device";

/// The result of an MPI call, with the text of its error.
pub(super) type Result<T> = std::result::Result<T, String>;

/// A communicator over all processes, separate from MPI's world communicator.
pub(super) struct Wire {
    comm: ffi::MPI_Comm,
    pub(super) rank: usize,
    pub(super) size: usize,
}

// SAFETY: MPI is started as `Serialized`: any thread may call it, one at a time. A `Wire` lies behind one lock, and
// nothing else in the process calls MPI between its start and its end.
unsafe impl Send for Wire {}

/// A piece in transfer. Its memory must stay valid until the request has finished.
pub(super) struct Request(ffi::MPI_Request);

// SAFETY: as for `Wire`: a request is only used by the wire's calls, under its lock.
unsafe impl Send for Request {}

impl Wire {
    /// Duplicates MPI's world communicator; all processes must call this.
    pub(super) fn new() -> Result<Self> {
        let (mut comm, mut rank, mut size) = (MaybeUninit::uninit(), 0, 0);
        // SAFETY: MPI is initialised; all pointers are to places of this frame; the communicator is read only once the
        // call that writes it has succeeded.
        unsafe {
            check(ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, comm.as_mut_ptr()))?;
            let comm = comm.assume_init();
            // A lost connection must be an error that names a rank, not the end of the process.
            check(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
            check(ffi::MPI_Comm_rank(comm, &mut rank))?;
            check(ffi::MPI_Comm_size(comm, &mut size))?;
            Ok(Self { comm, rank: index(rank)?, size: index(size)? })
        }
    }

    /// Fills `bytes` on every rank with the bytes of `root`.
    pub(super) fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()> {
        let (count, root) = (c_count(bytes.len())?, c_count(root)?);
        // SAFETY: the pointer and the count are those of one slice.
        check(unsafe { ffi::MPI_Bcast(bytes.as_mut_ptr().cast(), count, ffi::RSMPI_UINT8_T, root, self.comm) })
    }

    /// Gathers the `bytes` of all ranks, in rank order; all ranks must give the same number.
    pub(super) fn gather(&self, bytes: &[u8]) -> Result<Vec<u8>> {
        let mut all = vec![0u8; bytes.len() * self.size];
        let count = c_count(bytes.len())?;
        let (from, to, byte) = (bytes.as_ptr().cast(), all.as_mut_ptr().cast(), u8_type());
        // SAFETY: every rank sends `count` bytes, and there is room for as many from each.
        check(unsafe { ffi::MPI_Allgather(from, count, byte, to, count, byte, self.comm) })?;
        Ok(all)
    }

    /// Starts sending a header.
    ///
    /// # Safety
    /// `bytes` must stay at the same address, unchanged, until the request has finished.
    pub(super) unsafe fn send_header(&self, to: usize, bytes: &[u8]) -> Result<Request> {
        // SAFETY: the caller's promise is this call's.
        unsafe { self.send_piece(to, HEADER, bytes) }
    }

    /// Starts sending a range of a buffer, in pieces.
    ///
    /// # Safety
    /// The buffer must stay valid and unchanged until all requests have finished.
    pub(super) unsafe fn send(&self, to: usize, data: &Buffer, range: Range<usize>) -> Result<Vec<Request>> {
        let bytes = match data {
            Buffer::F32(values) => cast_slice(&values[range]),
            Buffer::U16(values) => cast_slice(&values[range]),
            Buffer::U64(values) => cast_slice(&values[range]),
            Buffer::U8(values) => &values[range],
            Buffer::Device(_) => return Err(ELSEWHERE.into()),
        };
        // SAFETY: the caller's promise is this call's.
        bytes.chunks(PIECE).map(|piece| unsafe { self.send_piece(to, PAYLOAD, piece) }).collect()
    }

    /// Starts receiving a whole buffer, in pieces.
    ///
    /// # Safety
    /// The buffer's elements must stay at the same address, untouched, until all requests have finished.
    pub(super) unsafe fn receive(&self, from: usize, data: &mut Buffer) -> Result<Vec<Request>> {
        let bytes = match data {
            Buffer::F32(values) => cast_slice_mut(values),
            Buffer::U16(values) => cast_slice_mut(values),
            Buffer::U64(values) => cast_slice_mut(values),
            Buffer::U8(values) => &mut values[..],
            Buffer::Device(_) => return Err(ELSEWHERE.into()),
        };
        let from = c_count(from)?;
        let receive = |piece: &mut [u8]| {
            let mut request = MaybeUninit::uninit();
            let (to, count) = (piece.as_mut_ptr().cast(), c_count(piece.len())?);
            // SAFETY: pointer and count are those of one slice, which the caller keeps; the request is read only once
            // the call has written it.
            unsafe {
                check(ffi::MPI_Irecv(to, count, u8_type(), from, PAYLOAD, self.comm, request.as_mut_ptr()))?;
                Ok(Request(request.assume_init()))
            }
        };
        bytes.chunks_mut(PIECE).map(receive).collect()
    }

    unsafe fn send_piece(&self, to: usize, tag: c_int, piece: &[u8]) -> Result<Request> {
        let mut request = MaybeUninit::uninit();
        let (from, count, to) = (piece.as_ptr().cast(), c_count(piece.len())?, c_count(to)?);
        // SAFETY: pointer and count are those of one slice, which the caller keeps; the request is read only once the
        // call has written it.
        unsafe {
            check(ffi::MPI_Isend(from, count, u8_type(), to, tag, self.comm, request.as_mut_ptr()))?;
            Ok(Request(request.assume_init()))
        }
    }

    /// Receives a header that has arrived, and returns it with its sender. Never blocks.
    pub(super) fn header(&self) -> Result<Option<(usize, Vec<u8>)>> {
        let (mut here, mut status, mut count) = (0, MaybeUninit::<ffi::MPI_Status>::uninit(), 0);
        // SAFETY: all pointers are to places of this frame; the status is read only if a message is here, and the buffer
        // has the length MPI tells. The message received is the one found: headers of a sender keep their order, and
        // nobody else receives.
        unsafe {
            check(ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, HEADER, self.comm, &mut here, status.as_mut_ptr()))?;
            if here == 0 {
                return Ok(None);
            }
            let status = status.assume_init();
            check(ffi::MPI_Get_count(&status, u8_type(), &mut count))?;
            let mut bytes = vec![0u8; index(count)?];
            let (to, from) = (bytes.as_mut_ptr().cast(), status.MPI_SOURCE);
            check(ffi::MPI_Recv(to, count, u8_type(), from, HEADER, self.comm, ffi::RSMPI_STATUS_IGNORE))?;
            Ok(Some((index(from)?, bytes)))
        }
    }

    /// Whether all requests have finished; finished ones are removed. Never blocks.
    pub(super) fn finished(&self, requests: &mut Vec<Request>) -> Result<bool> {
        let mut left = Vec::new();
        for mut request in requests.drain(..) {
            let mut done = 0;
            // SAFETY: the request is active: finished ones are not kept.
            check(unsafe { ffi::MPI_Test(ptr::from_mut(&mut request.0), &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
            if done == 0 {
                left.push(request);
            }
        }
        *requests = left;
        Ok(requests.is_empty())
    }

    /// Ends all processes, including this one.
    pub(super) fn abort(&self) {
        // SAFETY: MPI is initialised and not finalised, or there would be no wire.
        let _ = unsafe { ffi::MPI_Abort(self.comm, 1) };
    }
}

fn u8_type() -> ffi::MPI_Datatype {
    // SAFETY: a constant that MPI defines before it is started.
    unsafe { ffi::RSMPI_UINT8_T }
}

fn c_count(number: usize) -> Result<c_int> {
    c_int::try_from(number).map_err(|_| format!("{number} is more than MPI can count"))
}

fn index(number: c_int) -> Result<usize> {
    usize::try_from(number).map_err(|_| format!("MPI gave the number {number}"))
}

/// The result of a call: nothing, or MPI's text for the error code.
fn check(code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // The buffer is longer than MPI_MAX_ERROR_STRING of all implementations.
    let (mut text, mut len) = ([0; 4096], 0);
    // SAFETY: the buffer is longer than any text, and starts as zeros, so a terminator follows whatever is written.
    let text = unsafe {
        ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut len);
        CStr::from_ptr(text.as_ptr())
    };
    Err(format!("MPI: {}", text.to_string_lossy()))
}
