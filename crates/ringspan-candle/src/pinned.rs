//! Pinned CPU memory, which a GPU can copy from and to while it computes.

use candle_core::cuda::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaView, DeviceRepr, DeviceSlice, DriverError, HostSlice, PinnedHostSlice,
    SyncOnDrop,
};
use candle_core::{Result, bail};
use std::ops::Range;
use std::sync::Arc;

/// Pinned memory is allocated in whole pages of this many bytes.
const PAGE: usize = 4096;

/// A block of pinned memory. Its owner must wait for its copies before dropping it.
pub(crate) struct Pinned(PinnedHostSlice<u8>);

impl Pinned {
    /// Allocates a little more than this many bytes, so that the block also suits a slightly larger request the next time.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: usize) -> std::result::Result<Self, DriverError> {
        let room = bytes.max(1).next_multiple_of((bytes.next_power_of_two() / 16).max(PAGE));
        // SAFETY: only bytes that the CPU or a copy has written are read.
        unsafe { context.alloc_pinned_with_flags::<u8>(room, 0) }.map(Self)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether this many bytes fit into the block without wasting much of it.
    pub(crate) fn suits(&self, bytes: usize) -> bool {
        (bytes..=bytes + bytes / 4 + PAGE).contains(&self.len())
    }

    /// Starts to copy numbers from a GPU to the bytes from `at` on, after all work that was started on their stream.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn copy_from<T: DeviceRepr>(
        &mut self,
        at: usize,
        from: &CudaView<T>,
        on: &Arc<CudaStream>,
    ) -> Result<()> {
        let bytes = from.len() * size_of::<T>();
        // SAFETY: any number may be read as bytes.
        let Some(view) = (unsafe { from.transmute::<u8>(bytes) }) else { bail!("{bytes} bytes of fewer") };
        on.join(from.stream()).map_err(failed("order streams"))?;
        on.memcpy_dtoh(&view, &mut self.part(at..at + bytes)).map_err(failed("copy to the CPU"))
    }

    /// Starts to copy the bytes from `at` on to GPU memory. The stream `on` must already be ordered after the allocation of
    /// that memory.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn copy_to<T: DeviceRepr>(
        &mut self,
        at: usize,
        to: &mut CudaSlice<T>,
        on: &Arc<CudaStream>,
    ) -> Result<()> {
        let bytes = to.len() * size_of::<T>();
        // SAFETY: any bytes are valid numbers.
        let Some(mut view) = (unsafe { to.transmute_mut::<u8>(bytes) }) else { bail!("{bytes} bytes of fewer") };
        on.memcpy_htod(&self.part(at..at + bytes), &mut view).map_err(failed("copy to the GPU"))
    }

    /// All bytes, for the CPU. Their copies must have ended.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn bytes(&mut self) -> Result<&mut [u8]> {
        self.0.as_mut_slice().map_err(failed("read pinned memory"))
    }

    fn part(&mut self, range: Range<usize>) -> PinnedPart<'_> {
        PinnedPart { of: &mut self.0, range }
    }
}

/// A range of the block: cudarc copies whole host slices only.
struct PinnedPart<'a> {
    of: &'a mut PinnedHostSlice<u8>,
    range: Range<usize>,
}

impl HostSlice<u8> for PinnedPart<'_> {
    fn len(&self) -> usize {
        self.range.len()
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [u8], SyncOnDrop<'a>) {
        // SAFETY: the caller keeps the contract of this function, which is that of the whole slice.
        let (all, order) = unsafe { self.of.stream_synced_slice(stream) };
        (&all[self.range.clone()], order)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [u8], SyncOnDrop<'a>) {
        // SAFETY: the caller keeps the contract of this function, which is that of the whole slice.
        let (all, order) = unsafe { self.of.stream_synced_mut_slice(stream) };
        (&mut all[self.range.clone()], order)
    }
}

/// Turns a driver's error in a copy into candle's error.
pub(crate) fn failed(operation: &'static str) -> impl Fn(DriverError) -> candle_core::Error {
    move |error| candle_core::Error::Msg(format!("copies between GPU and CPU: {operation}: {error}"))
}

/// Helpers of tests that check which stream waits for which.
#[cfg(test)]
pub(crate) mod test {
    use candle_core::Device;
    use ringspan_cuda::Gpu;

    /// A GPU whose memory cudarc does not track: streams are ordered by explicit events, or not at all.
    pub(crate) fn unwatched() -> Option<Device> {
        if Gpu::count() == Ok(0) {
            println!("skipped: no GPU on this machine");
            return None;
        }
        let device = Device::new_cuda_with_stream(0).expect("a GPU that works");
        // SAFETY: the ordering by explicit events is what is tested.
        unsafe { device.as_cuda_device().expect("a GPU").cuda_stream().context().disable_event_tracking() };
        Some(device)
    }

    /// Whether the device is a GPU emulated on a CPU, where work that nothing waits for has not run. On another GPU, nothing
    /// can be said.
    pub(crate) fn is_late(device: &Device) -> bool {
        let stream = device.as_cuda_device().expect("a GPU").cuda_stream();
        let late = stream.context().name().expect("a name") == "a CPU";
        if !late {
            println!("skipped: a GPU that copies when it likes");
        }
        late
    }
}
