//! Transfers for a rank that computes on a GPU.
//!
//! GPU memory is allocated and freed on candle's stream; copies use two further streams, one for each direction. Memory for a
//! unit is reserved before the work on the unit before it is started, and an event is recorded at that moment: copies wait
//! for this event, and not for that work. So two units are on the GPU at a time. The CPU fills one block of pinned memory
//! while the GPU copies from another.

use super::Parameter;
use crate::gpu::operand;
use crate::pinned::{Pinned, failed};
use crate::precision::Precision;
use crate::rounding;
use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::{CudaEvent, CudaSlice, CudaStream};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Result, Storage, Tensor, bail};
use half::bf16;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Values in pinned memory begin at multiples of this many bytes.
const ALIGNED: usize = 256;

/// Number of blocks of pinned memory of a size: the CPU fills or reads one while another is copied.
const PIECES: usize = 2;

pub(super) struct CopyStreams {
    device: CudaDevice,
    /// The streams of parameters to the GPU and of gradients to the CPU: gradients wait for work that parameters must not
    /// wait for.
    up: Arc<CudaStream>,
    down: Arc<CudaStream>,
    /// Free blocks of pinned memory, the oldest first, each with the event at the end of its last copy if that may still be
    /// running.
    free: Mutex<Vec<(Pinned, Option<CudaEvent>)>>,
}

pub(super) struct ReservedMemory {
    slices: Vec<Slice>,
    /// The event at which candle's stream has allocated the memory.
    mark: CudaEvent,
}

enum Slice {
    F32(CudaSlice<f32>),
    Bf16(CudaSlice<bf16>),
    /// A parameter without elements: a GPU allocates no memory of size zero.
    Empty,
}

/// Gradients that are being copied to the CPU.
pub(super) struct PendingDownload {
    lane: Arc<CopyStreams>,
    /// Each gradient with its offset in pinned memory; the tensors stay on the GPU until all are copied.
    gradients: BTreeMap<String, (Tensor, usize)>,
    pinned: Option<Pinned>,
    end: Option<CudaEvent>,
}

impl CopyStreams {
    pub(super) fn new(device: &CudaDevice) -> Result<Self> {
        let stream = || device.cuda_stream().context().new_stream().map_err(failed("make a stream"));
        Ok(Self { device: device.clone(), up: stream()?, down: stream()?, free: Mutex::default() })
    }

    pub(super) fn reserve(&self, sizes: &[usize], precision: Precision) -> Result<ReservedMemory> {
        // SAFETY: `upload` writes all of it before anything reads it.
        let slice = |size: &usize| unsafe {
            Ok::<_, candle_core::Error>(match precision {
                _ if *size == 0 => Slice::Empty,
                Precision::F32 => Slice::F32(self.device.alloc(*size)?),
                Precision::Bf16 => Slice::Bf16(self.device.alloc(*size)?),
            })
        };
        let slices = sizes.iter().map(slice).collect::<Result<_>>()?;
        let mark = self.device.cuda_stream().record_event(None).map_err(failed("mark a unit"))?;
        Ok(ReservedMemory { slices, mark })
    }

    pub(super) fn upload(
        &self,
        reserved: Option<ReservedMemory>,
        parameters: &[Parameter<'_>],
        precision: Precision,
    ) -> Result<Vec<Tensor>> {
        let sizes: Vec<usize> = parameters.iter().map(Parameter::len).collect();
        let fits = |reserved: &ReservedMemory| reserved.slices.iter().map(Slice::len).eq(sizes.iter().copied());
        let ReservedMemory { mut slices, mark } = match reserved.filter(fits) {
            Some(reserved) => reserved,
            None => self.reserve(&sizes, precision)?,
        };
        let width = precision.dtype().size_in_bytes();
        let (places, bytes) = places(sizes.iter().map(|size| size * width));
        let mut pinned = self.pinned(bytes)?;
        let all = pinned.bytes()?;
        for (parameter, at) in parameters.iter().zip(&places) {
            let mut at = *at;
            for part in &parameter.parts {
                let to = &mut all[at..at + part.len() * width];
                match precision {
                    Precision::F32 => rounding::copy(part, numbers_mut(to)?),
                    Precision::Bf16 => rounding::round(part, numbers_mut(to)?),
                }
                at += to.len();
            }
        }
        self.up.wait(&mark).map_err(failed("order streams"))?;
        let copied = slices.iter_mut().zip(&places).try_for_each(|(slice, at)| match slice {
            Slice::F32(slice) => pinned.copy_to(*at, slice, &self.up),
            Slice::Bf16(slice) => pinned.copy_to(*at, slice, &self.up),
            Slice::Empty => Ok(()),
        });
        let [end, of_piece] = [0, 1].map(|_| self.up.record_event(None).map_err(failed("mark the end of a copy")));
        self.give_back(pinned, Some(of_piece?));
        let end = end?;
        // The wait is also needed after a failure, so that memory is freed after the copies that were started from it.
        self.device.cuda_stream().wait(&end).map_err(failed("order streams"))?;
        copied?;
        let tensor = |(slice, parameter): (Slice, &Parameter<'_>)| {
            let storage = match slice {
                Slice::F32(slice) => CudaStorage::wrap_cuda_slice(slice, self.device.clone()),
                Slice::Bf16(slice) => CudaStorage::wrap_cuda_slice(slice, self.device.clone()),
                Slice::Empty => operand::unwritten(&self.device, &parameter.shape, precision.dtype())?,
            };
            Ok(Tensor::from_storage(Storage::Cuda(storage), parameter.shape.clone(), BackpropOp::none(), true))
        };
        slices.into_iter().zip(parameters).map(tensor).collect()
    }

    pub(super) fn download(self: &Arc<Self>, gradients: BTreeMap<String, Tensor>) -> Result<PendingDownload> {
        let contiguous = |(name, gradient): (String, Tensor)| Ok((name, gradient.contiguous()?.detach()));
        let gradients: BTreeMap<_, _> = gradients.into_iter().map(contiguous).collect::<Result<_>>()?;
        let (places, bytes) = places(gradients.values().map(|x| x.elem_count() * x.dtype().size_in_bytes()));
        let pinned = self.pinned(bytes)?;
        let gradients = gradients.into_iter().zip(places).map(|((name, x), at)| (name, (x, at))).collect();
        let mut coming = PendingDownload { lane: self.clone(), gradients, pinned: Some(pinned), end: None };
        let started = coming.start();
        coming.end = Some(self.down.record_event(None).map_err(failed("mark the end of a copy"))?);
        started.map(|()| coming)
    }

    /// A block of pinned memory that no copy reads or writes.
    fn pinned(&self, bytes: usize) -> Result<Pinned> {
        let known = {
            let mut free = self.free();
            let suiting = || free.iter().enumerate().filter(|(_, (pinned, _))| pinned.suits(bytes));
            let idle = suiting().find(|(_, (_, end))| end.as_ref().is_none_or(CudaEvent::is_complete));
            // As long as there are fewer than [`PIECES`] blocks, another one is allocated instead of waiting.
            let oldest = || suiting().next().filter(|_| suiting().count() >= PIECES);
            let taken = idle.or_else(oldest).map(|(index, _)| index);
            taken.map(|index| free.remove(index))
        };
        match known {
            Some((pinned, Some(end))) => end.synchronize().map_err(failed("copy")).map(|()| pinned),
            Some((pinned, None)) => Ok(pinned),
            None => match Pinned::new(self.device.cuda_stream().context(), bytes) {
                Ok(pinned) => Ok(pinned),
                Err(error) => bail!(
                    "a unit's parameters and gradients travel through memory of the CPU: {bytes} bytes cannot be pinned: {error}"
                ),
            },
        }
    }

    fn give_back(&self, pinned: Pinned, end: Option<CudaEvent>) {
        self.free().push((pinned, end));
    }

    fn free(&self) -> MutexGuard<'_, Vec<(Pinned, Option<CudaEvent>)>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CopyStreams {
    fn drop(&mut self) {
        let context = self.up.context();
        [&self.up, &self.down].into_iter().for_each(|stream| context.record_err(stream.synchronize()));
    }
}

impl Slice {
    fn len(&self) -> usize {
        use candle_core::cuda::cudarc::driver::DeviceSlice;
        match self {
            Self::F32(slice) => DeviceSlice::len(slice),
            Self::Bf16(slice) => DeviceSlice::len(slice),
            Self::Empty => 0,
        }
    }
}

impl PendingDownload {
    fn start(&mut self) -> Result<()> {
        let Some(pinned) = &mut self.pinned else { return Ok(()) };
        for (gradient, at) in self.gradients.values().filter(|(gradient, _)| gradient.elem_count() > 0) {
            let (storage, layout) = gradient.storage_and_layout();
            let storage = operand::on_gpu(&storage)?;
            let Some((start, end)) = layout.contiguous_offsets() else {
                bail!("gradients are contiguous, given strides {:?}", layout.stride());
            };
            let copies = &self.lane.down;
            match storage.dtype() {
                DType::F32 => pinned.copy_from(*at, &storage.as_cuda_slice::<f32>()?.slice(start..end), copies),
                DType::BF16 => pinned.copy_from(*at, &storage.as_cuda_slice::<bf16>()?.slice(start..end), copies),
                other => bail!("gradients are F32 or BF16 on GPUs, given {other:?}"),
            }?;
        }
        Ok(())
    }

    pub(super) fn take<T>(&mut self, name: &str, f: impl FnOnce(&[usize], &[f32]) -> T) -> Result<Option<T>> {
        let Some((gradient, at)) = self.gradients.remove(name) else { return Ok(None) };
        if let Some(end) = self.end.take() {
            end.synchronize().map_err(failed("copy to the CPU"))?;
        }
        let Some(pinned) = &mut self.pinned else { bail!("gradients that nothing was copied of") };
        let bytes = gradient.elem_count() * gradient.dtype().size_in_bytes();
        let bytes = &mut pinned.bytes()?[at..at + bytes];
        Ok(Some(match gradient.dtype() {
            DType::BF16 => f(gradient.dims(), &rounding::widened(numbers_mut(bytes)?)),
            _ => f(gradient.dims(), numbers_mut(bytes)?),
        }))
    }

    pub(super) fn rest(&self) -> Option<&str> {
        self.gradients.keys().next().map(String::as_str)
    }
}

impl Drop for PendingDownload {
    fn drop(&mut self) {
        let end = self.end.take();
        // Gradients that were never taken are freed on candle's stream after their copy.
        if let Some(end) = &end {
            let _ = self.lane.device.cuda_stream().wait(end);
        }
        if let Some(pinned) = self.pinned.take() {
            self.lane.give_back(pinned, end);
        }
    }
}

/// Offsets for values of these numbers of bytes, and the number of bytes in all.
fn places(bytes: impl Iterator<Item = usize>) -> (Vec<usize>, usize) {
    let mut next = 0;
    let place = |bytes: usize| {
        let at = next;
        next += bytes.next_multiple_of(ALIGNED);
        at
    };
    (bytes.map(place).collect(), next)
}

/// Views bytes as numbers.
fn numbers_mut<T: bytemuck::Pod>(bytes: &mut [u8]) -> Result<&mut [T]> {
    bytemuck::try_cast_slice_mut(bytes).map_err(|error| candle_core::Error::Msg(format!("pinned memory: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pinned::test::{is_late, unwatched};
    use candle_core::{Device, Shape};

    fn lane(device: &Device) -> Arc<CopyStreams> {
        Arc::new(device.as_cuda_device().and_then(CopyStreams::new).expect("a stream"))
    }

    fn numbers(seed: usize, count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 31 + seed * 7) % 256) as f32 - 128.0).collect()
    }

    /// A unit of three parameters, of which the second is empty and the third has two parts.
    fn unit(values: &[f32]) -> Vec<Parameter<'_>> {
        let (first, second) = values.split_at(values.len() / 3);
        let (left, right) = second.split_at(second.len() / 2);
        let of = |parts: Vec<_>| {
            let shape = Shape::from(parts.iter().map(|part: &&[f32]| part.len()).sum::<usize>());
            Parameter { parts, shape }
        };
        vec![of(vec![first]), of(vec![]), of(vec![left, right])]
    }

    fn sizes(unit: &[Parameter<'_>]) -> Vec<usize> {
        unit.iter().map(Parameter::len).collect()
    }

    #[test]
    fn units_come_and_go_in_the_order_that_is_said_here() -> Result<()> {
        let Some(device) = unwatched() else { return Ok(()) };
        let lane = lane(&device);
        let work = lane.device.cuda_stream();
        // Each stream may run ahead of all that it was not told to wait for.
        let ahead = [None, Some(&lane.up), Some(&lane.down), Some(&work)];
        for (precision, ahead) in
            [Precision::F32, Precision::Bf16].into_iter().flat_map(|it| ahead.map(|ahead| (it, ahead)))
        {
            let come = || ahead.map_or(Ok(()), |stream| stream.synchronize().map_err(failed("go ahead")));
            let mut gone: Vec<(usize, PendingDownload)> = Vec::new();
            let mut reserved = None;
            for (seed, count) in [700, 3000, 700, 720, 3000, 1].into_iter().enumerate() {
                let values = numbers(seed, count);
                let unit = unit(&values);
                let there = lane.upload(reserved.take(), &unit, precision)?;
                come()?;
                reserved = Some(lane.reserve(&sizes(&unit), precision)?);
                let doubled = |x: &Tensor| (x + x).map(|sum| sum.detach());
                let results = [("a".to_owned(), doubled(&there[0])?), ("b".to_owned(), doubled(&there[2])?)];
                come()?;
                drop(there);
                gone.push((seed, lane.download(results.into())?));
                come()?;
            }
            for (seed, mut coming) in gone {
                let values = numbers(seed, [700, 3000, 700, 720, 3000, 1][seed]);
                let unit = unit(&values);
                for (name, parameter) in [("b", &unit[2]), ("a", &unit[0])] {
                    let wanted: Vec<f32> = parameter.parts.concat().iter().map(|x| 2.0 * x).collect();
                    // Integers up to 256 are exact in bf16.
                    let got = coming.take(name, |dims, values| (dims.to_vec(), values.to_vec()))?;
                    assert_eq!(got, Some((vec![wanted.len()], wanted)), "{name} of unit {seed}");
                }
                assert_eq!((coming.take("a", |_, _| ())?, coming.rest()), (None, None));
            }
            // The following gradients are never taken.
            let left = Tensor::ones(50, DType::F32, &device)?;
            drop(lane.download([("c".to_owned(), (&left * 2.0)?)].into())?);
            come()?;
            drop(lane.reserve(&[5, 0], precision)?);
            let waited = lane.free().len();
            assert!(waited > 0, "pinned memory is used again");
        }
        Ok(())
    }

    /// A unit arrives before earlier work has ended, and its pinned memory is used again by the unit after the next.
    #[test]
    fn an_upload_waits_only_for_its_own_buffer() -> Result<()> {
        let Some(device) = unwatched().filter(is_late) else { return Ok(()) };
        let lane = lane(&device);
        let values = numbers(1, 3000);
        let reserved = lane.reserve(&sizes(&unit(&values)), Precision::F32)?;
        let work = (Tensor::ones(50, DType::F32, &device)? * 2.0)?;
        let end = lane.device.cuda_stream().record_event(None).map_err(failed("mark"))?;
        let there = lane.upload(Some(reserved), &unit(&values), Precision::F32)?;
        lane.up.synchronize().map_err(failed("copy"))?;
        assert!(!end.is_complete(), "a unit came after work on the one before it");
        assert_eq!(there[2].to_vec1::<f32>()?, unit(&values)[2].parts.concat());
        assert_eq!(work.to_vec1::<f32>()?, [2.0; 50]);

        let gradient = (Tensor::ones(3000, DType::F32, &device)? * 3.0)?;
        let mut coming = lane.download([("a".to_owned(), gradient)].into())?;
        let more = (Tensor::ones(50, DType::F32, &device)? * 4.0)?;
        let end = lane.device.cuda_stream().record_event(None).map_err(failed("mark"))?;
        assert_eq!(coming.take("a", |_, values| values.iter().sum::<f32>())?, Some(9000.0));
        assert!(!end.is_complete(), "gradients came after work on the next ones");
        assert_eq!(more.to_vec1::<f32>()?, [4.0; 50]);

        // In the backward pass, gradients of the unit before wait for its work, and the next unit does not wait for them.
        let reserved = lane.reserve(&sizes(&unit(&values)), Precision::F32)?;
        let work = (Tensor::ones(50, DType::F32, &device)? * 5.0)?;
        let end = lane.device.cuda_stream().record_event(None).map_err(failed("mark"))?;
        let mut coming = lane.download([("a".to_owned(), work)].into())?;
        let there = lane.upload(Some(reserved), &unit(&values), Precision::F32)?;
        lane.up.synchronize().map_err(failed("copy"))?;
        assert!(!end.is_complete(), "a unit came after gradients of the one before it");
        assert_eq!(there[0].to_vec1::<f32>()?, unit(&values)[0].parts.concat());
        assert_eq!(coming.take("a", |_, values| values.iter().sum::<f32>())?, Some(250.0));

        for _ in 0..5 {
            drop(lane.upload(None, &unit(&values), Precision::F32)?);
        }
        assert_eq!(lane.free().iter().filter(|(pinned, _)| pinned.suits(12_000)).count(), PIECES);
        Ok(())
    }
}
