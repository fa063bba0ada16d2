//! Pinned memory of the CPU: a GPU copies to and from it by itself, while it computes.

use candle_core::cuda::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaView, DeviceRepr, DeviceSlice, DriverError, HostSlice, PinnedHostSlice,
    SyncOnDrop,
};
use candle_core::{Result, bail};
use std::ops::Range;
use std::sync::Arc;

/// Pinned memory is taken page by page.
const PAGE: usize = 4096;

/// Some bytes of it. Who drops it has waited for its copies.
pub(crate) struct Pinned(PinnedHostSlice<u8>);

impl Pinned {
    /// A little more than so many bytes, so that who needs a few more can have it the next time.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: usize) -> std::result::Result<Self, DriverError> {
        let room = bytes.max(1).next_multiple_of((bytes.next_power_of_two() / 16).max(PAGE));
        // SAFETY: what is read of it is what was written there before, by the CPU or by a copy.
        unsafe { context.alloc_pinned_with_flags::<u8>(room, 0) }.map(Self)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether so many bytes fit, and do not waste much of it.
    pub(crate) fn suits(&self, bytes: usize) -> bool {
        (bytes..=bytes + bytes / 4 + PAGE).contains(&self.len())
    }

    /// Starts to copy numbers of a GPU to the bytes from `at` on, behind all that was started on their stream.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn copy_from<T: DeviceRepr>(
        &mut self,
        at: usize,
        from: &CudaView<T>,
        on: &Arc<CudaStream>,
    ) -> Result<()> {
        let bytes = from.len() * size_of::<T>();
        // SAFETY: numbers are bytes.
        let Some(view) = (unsafe { from.transmute::<u8>(bytes) }) else { bail!("{bytes} bytes of fewer") };
        on.join(from.stream()).map_err(failed("order streams"))?;
        on.memcpy_dtoh(&view, &mut self.part(at..at + bytes)).map_err(failed("copy to the CPU"))
    }

    /// Starts to copy the bytes from `at` on to memory of a GPU, which its stream has come to by then.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn copy_to<T: DeviceRepr>(
        &mut self,
        at: usize,
        to: &mut CudaSlice<T>,
        on: &Arc<CudaStream>,
    ) -> Result<()> {
        let bytes = to.len() * size_of::<T>();
        // SAFETY: any bytes are numbers.
        let Some(mut view) = (unsafe { to.transmute_mut::<u8>(bytes) }) else { bail!("{bytes} bytes of fewer") };
        on.memcpy_htod(&self.part(at..at + bytes), &mut view).map_err(failed("copy to the GPU"))
    }

    /// All bytes, for the CPU: after the end of their copies.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn bytes(&mut self) -> Result<&mut [u8]> {
        self.0.as_mut_slice().map_err(failed("read pinned memory"))
    }

    fn part(&mut self, range: Range<usize>) -> Part<'_> {
        Part { of: &mut self.0, range }
    }
}

/// Copies are of whole host slices.
struct Part<'a> {
    of: &'a mut PinnedHostSlice<u8>,
    range: Range<usize>,
}

impl HostSlice<u8> for Part<'_> {
    fn len(&self) -> usize {
        self.range.len()
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [u8], SyncOnDrop<'a>) {
        // SAFETY: the caller's promise.
        let (all, order) = unsafe { self.of.stream_synced_slice(stream) };
        (&all[self.range.clone()], order)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [u8], SyncOnDrop<'a>) {
        // SAFETY: the caller's promise.
        let (all, order) = unsafe { self.of.stream_synced_mut_slice(stream) };
        (&mut all[self.range.clone()], order)
    }
}

/// What the driver says of a copy.
pub(crate) fn failed(operation: &'static str) -> impl Fn(DriverError) -> candle_core::Error {
    move |error| candle_core::Error::Msg(format!("copies between GPU and CPU: {operation}: {error}"))
}

/// GPUs on which it is seen who waits for whom.
#[cfg(test)]
pub(crate) mod test {
    use candle_core::Device;
    use ringspan::kernel::Gpu;

    /// A GPU whose memory cudarc does not watch: streams are ordered as they are told, or not at all.
    pub(crate) fn unwatched() -> Option<Device> {
        if Gpu::count() == Ok(0) {
            println!("skipped: no GPU on this machine");
            return None;
        }
        let device = Device::new_cuda_with_stream(0).expect("a GPU that works");
        // SAFETY: that is what is tested.
        unsafe { device.as_cuda_device().expect("a GPU").cuda_stream().context().disable_event_tracking() };
        Some(device)
    }

    /// Whether what nobody waits for has not happened, as on the GPU made of a CPU. Of another, nothing can be said.
    pub(crate) fn is_late(device: &Device) -> bool {
        let stream = device.as_cuda_device().expect("a GPU").cuda_stream();
        let late = stream.context().name().expect("a name") == "a CPU";
        if !late {
            println!("skipped: a GPU that copies when it likes");
        }
        late
    }
}
