//! A backend from outside the library: a device with memory of its own, which the library cannot read.
//!
//! `cargo run --release -p ringspan --example own_backend` computes attention of four ranks, each on such a device, forward and backward,
//! and compares results with those of the CPU. The device here is made of the CPU: its memory is behind a lock, and it computes by the
//! library's CPU kernel. A backend for real hardware starts its own kernels in the same places.

use half::{bf16, f16};
use ringspan::attention::{self, Group, Inputs};
use ringspan::kernel::{
    Backend, DType, Data, DeviceArray, DeviceMemory, DeviceSlice, DeviceSliceMut, FloatsMut, Inputs as KernelInputs,
    Kernel, OnlineSoftmax, Progress, RowTarget, Saved, StateShape, Statistics, Sums, TensorSlice, Tile, View,
};
use ringspan::{Documents, Error, Layout, LayoutKind, Mask, Result, Schedule, Score, StrategyKind, World};
use std::any::Any;
use std::sync::{Arc, PoisonError, RwLock};

/// Shapes of the example: tokens, query heads, key-value heads, and width of a head.
const TOKENS: usize = 601;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;

/// Memory of the device of this number. It holds elements of every type as f32, rounded to their type.
struct Memory {
    device: usize,
    dtype: DType,
    values: RwLock<Vec<f32>>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "device {}", self.device)
    }
}

impl Memory {
    fn copy(&self, start: usize, len: usize) -> Vec<f32> {
        self.values.read().unwrap_or_else(PoisonError::into_inner)[start..start + len].to_vec()
    }
}

impl DeviceMemory for Memory {
    fn download(&self, start: usize, to: &mut [u8]) -> Result<()> {
        let width = self.dtype.width();
        let values = self.copy(start / width, to.len() / width);
        for (to, x) in to.chunks_exact_mut(width).zip(values) {
            match self.dtype {
                DType::F32 => to.copy_from_slice(&x.to_ne_bytes()),
                DType::Bf16 => to.copy_from_slice(&bf16::from_f32(x).to_ne_bytes()),
                DType::F16 => to.copy_from_slice(&f16::from_f32(x).to_ne_bytes()),
            }
        }
        Ok(())
    }
}

fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::Bf16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
    }
}

/// A rank's backend: the device of this number, and the kernel by which it computes.
struct Device {
    number: usize,
    cpu: Kernel,
    progress: Option<Progress>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "device {}", self.number)
    }
}

impl Device {
    fn new(number: usize) -> Self {
        Self { number, cpu: Kernel::new(1), progress: None }
    }

    fn array(&self, dtype: DType, values: Vec<f32>) -> DeviceArray {
        let len = values.len();
        DeviceArray::new(Arc::new(Memory { device: self.number, dtype, values: RwLock::new(values) }), dtype, len)
    }

    /// The memory behind an array and the position of its first element there; an error for memory that others made.
    fn memory<'a>(&self, of: DeviceSlice<'a>) -> Result<(&'a Memory, usize)> {
        let memory: &dyn Any = of.memory();
        let memory = memory.downcast_ref().ok_or_else(|| self.failed(format!("{of:?} is of another backend")))?;
        Ok((memory, of.start() / of.dtype().width()))
    }

    fn read(&self, from: DeviceSlice) -> Result<Vec<f32>> {
        let (memory, start) = self.memory(from)?;
        if memory.device != self.number {
            return Err(self.failed(format!("it cannot read {from:?}")));
        }
        Ok(memory.copy(start, from.len()))
    }

    fn read_data(&self, from: Data) -> Result<Vec<f32>> {
        match from {
            Data::Device(from) => self.read(from),
            other => Ok(other.to_f32().into_owned()),
        }
    }

    /// Lets `change` write to the elements.
    fn write(&self, to: DeviceSliceMut, change: impl FnOnce(&mut [f32])) -> Result<()> {
        let (memory, start) = self.memory(to.data())?;
        let mut values = memory.values.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut values[start..start + to.len()]);
        Ok(())
    }

    /// Calls `compute` with the inputs as the CPU's kernel reads them.
    fn with_inputs<T>(&self, inputs: &KernelInputs, compute: impl FnOnce(&KernelInputs) -> Result<T>) -> Result<T> {
        let [q, k, v] =
            [self.read_data(inputs.q.data)?, self.read_data(inputs.k.data)?, self.read_data(inputs.v.data)?];
        let bias = inputs.bias.map(|bias| self.read_data(bias.data)).transpose()?;
        compute(&KernelInputs {
            q: View { data: Data::F32(&q), ..inputs.q },
            k: View { data: Data::F32(&k), ..inputs.k },
            v: View { data: Data::F32(&v), ..inputs.v },
            bias: inputs.bias.zip(bias.as_deref()).map(|(view, values)| View { data: Data::F32(values), ..view }),
            ..*inputs
        })
    }

    fn partial(&self, state: DeviceSlice, shape: StateShape) -> Result<OnlineSoftmax> {
        let mut out = self.read(state)?;
        let mut max = out.split_off(shape.rows() * shape.v_dim);
        let sum = max.split_off(shape.rows());
        Ok(OnlineSoftmax { out, max, sum })
    }

    fn set(&self, state: &mut DeviceArray, partial: OnlineSoftmax) -> Result<()> {
        self.write(state.all_mut(), |values| values.copy_from_slice(&partial.into_message()))
    }

    fn failed(&self, message: String) -> Error {
        Error::Device { device: format!("device {}", self.number), operation: "use a tensor", message }
    }
}

impl Backend for Device {
    fn set_progress(&mut self, progress: Progress) {
        self.progress = Some(progress);
    }

    fn progress(&self) -> Option<Progress> {
        self.progress.clone()
    }

    fn multiplies_bf16(&self) -> bool {
        false
    }

    fn holds(&self, memory: &(dyn DeviceMemory + 'static)) -> bool {
        let memory: &dyn Any = memory;
        memory.downcast_ref().is_some_and(|memory: &Memory| memory.device == self.number)
    }

    fn allocate(&self, dtype: DType, len: usize) -> Result<DeviceArray> {
        // A read of elements that nobody wrote shows as NaN.
        Ok(self.array(dtype, vec![f32::NAN; len]))
    }

    fn zeros(&self, len: usize) -> Result<DeviceArray> {
        Ok(self.array(DType::F32, vec![0.0; len]))
    }

    fn upload(&self, from: Data) -> Result<DeviceArray> {
        Ok(self.array(from.dtype(), from.to_f32().into_owned()))
    }

    fn download(&self, from: DeviceSlice, to: &mut [u8]) -> Result<()> {
        from.memory().download(from.start(), to)
    }

    fn copy(&self, from: DeviceSlice) -> Result<DeviceArray> {
        let (memory, start) = self.memory(from)?;
        Ok(self.array(from.dtype(), memory.copy(start, from.len())))
    }

    fn share(&self, _: &DeviceArray) -> Result<()> {
        // Each call has done its work when it returns, so there is nothing that readers must wait for.
        Ok(())
    }

    fn pack(&self, dtype: DType, slices: &[TensorSlice]) -> Result<DeviceArray> {
        let mut packed = Vec::with_capacity(slices.iter().map(TensorSlice::len).sum());
        for TensorSlice { view, heads, rows } in slices {
            let values = self.read_data(view.data)?;
            let view = View { data: Data::F32(&values), ..*view };
            for row in rows.iter().flat_map(Clone::clone) {
                for head in heads.clone() {
                    packed.extend(view.at(row, head).to_f32().iter().map(|&x| rounded(dtype, x)));
                }
            }
        }
        Ok(self.array(dtype, packed))
    }

    fn append(&self, to: &mut DeviceArray, filled: usize, from: DeviceSlice) -> Result<()> {
        let values = self.read(from)?;
        let (_, rest) = to.split_at_mut(filled);
        self.write(rest, |rest| rest[..values.len()].copy_from_slice(&values))
    }

    fn add(&self, sum: DeviceSliceMut, target: &RowTarget, values: DeviceSlice) -> Result<()> {
        let values = self.read(values)?;
        self.write(sum, |sum| {
            let rows = target.rows.iter().flat_map(Clone::clone);
            for (row, values) in rows.zip(values.chunks_exact(target.width.max(1))) {
                let sum = &mut sum[target.offset + row * target.stride..][..target.width];
                sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
            }
        })
    }

    fn transpose(&self, values: DeviceSlice, rows: usize, columns: usize) -> Result<DeviceArray> {
        let values = self.read(values)?;
        let columns_of = |column| (0..rows).map(move |row| row * columns + column);
        Ok(self.array(DType::F32, (0..columns).flat_map(columns_of).map(|at| values[at]).collect()))
    }

    fn softmax_state(&self, StateShape { tokens, heads, v_dim }: StateShape) -> Result<DeviceArray> {
        Ok(self.array(DType::F32, OnlineSoftmax::new(tokens, heads, v_dim).into_message()))
    }

    fn merge(&self, state: &mut DeviceArray, shape: StateShape, other: DeviceSlice) -> Result<()> {
        let mut partial = self.partial(state.data(), shape)?;
        partial.merge(shape.tokens, shape.heads, shape.v_dim, &self.read(other)?);
        self.set(state, partial)
    }

    fn finish(
        &self,
        state: DeviceArray,
        shape: StateShape,
        sinks: Option<&[f32]>,
    ) -> Result<(DeviceArray, Statistics<DeviceArray>)> {
        let partial = self.partial(state.data(), shape)?;
        let (out, Statistics { max, sum }) = partial.finish(shape.tokens, shape.heads, shape.v_dim, sinks);
        let [out, max, sum] = [out, max, sum].map(|values| self.array(DType::F32, values));
        Ok((out, Statistics { max, sum }))
    }

    fn forward(&self, inputs: &KernelInputs, tiles: &[Tile], state: &mut DeviceArray) -> Result<()> {
        let shape = StateShape { tokens: inputs.q.tokens, heads: inputs.q.heads, v_dim: inputs.v.dim };
        let mut partial = self.partial(state.data(), shape)?;
        self.with_inputs(inputs, |inputs| self.cpu.forward(inputs, tiles, &mut partial))?;
        self.set(state, partial)
    }

    fn delta(&self, out: &View, d_out: &View) -> Result<DeviceArray> {
        let (of_out, of_d_out) = (self.read_data(out.data)?, self.read_data(d_out.data)?);
        let [out, d_out] =
            [(out, &of_out), (d_out, &of_d_out)].map(|(view, data)| View { data: Data::F32(data), ..*view });
        Ok(self.array(DType::F32, self.cpu.delta(out, d_out)?))
    }

    fn backward(&self, inputs: &KernelInputs, tiles: &[Tile], saved: &Saved, sums: &mut Sums) -> Result<()> {
        let statistics =
            Statistics { max: self.read_data(saved.statistics.max)?, sum: self.read_data(saved.statistics.sum)? };
        let (delta, d_out) = (self.read_data(saved.delta)?, self.read_data(saved.d_out.data)?);
        let saved = Saved {
            statistics: Statistics { max: Data::F32(&statistics.max), sum: Data::F32(&statistics.sum) },
            delta: Data::F32(&delta),
            d_out: View { data: Data::F32(&d_out), ..saved.d_out },
        };
        let Sums { dq, dk, dv, d_table, d_bias } = sums;
        let mut gradients = [const { Vec::new() }; 5];
        let mut targets = [dq, dk, dv, d_table, d_bias];
        for (copy, target) in gradients.iter_mut().zip(&targets) {
            *copy = self.read_data(target.data())?;
        }
        {
            let [dq, dk, dv, d_table, d_bias] = gradients.each_mut().map(FloatsMut::from);
            let mut sums = Sums { dq, dk, dv, d_table, d_bias };
            self.with_inputs(inputs, |inputs| self.cpu.backward(inputs, tiles, &saved, &mut sums))?;
        }
        for (copy, target) in gradients.iter().zip(&mut targets) {
            if let FloatsMut::Device(target) = target {
                self.write(target.reborrow(), |target| target.copy_from_slice(copy))?;
            }
        }
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }

    fn step(&self) -> Result<()> {
        Ok(())
    }
}

/// Numbers between -1 and 1, which depend on the seed.
fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Computes out, dq, dk, dv `[TOKENS, heads, DIM]` by ranks in a ring of `grid.0` and Ulysses groups of `grid.1`, with the kernel
/// that `kernel` makes for each.
fn compute(grid: (usize, usize), mask: &Mask, kernel: impl Fn(usize) -> Kernel + Send + Sync) -> Result<[Vec<f32>; 4]> {
    let ranks = grid.0 * grid.1;
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, TOKENS), ranks)?;
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, mask, grid)?;
    let heads = [HEADS, KV_HEADS, KV_HEADS, HEADS];
    let mut results = [HEADS, HEADS, KV_HEADS, KV_HEADS].map(|heads| vec![0.0; TOKENS * heads * DIM]);
    let score = Score::new(0.25);
    let of_ranks = World::threads(ranks)?.run(|rank| {
        let group = Group::new(rank.communicator().clone(), grid, kernel(rank.index()))?;
        let mut local = Vec::new();
        for (seed, heads) in (1..).zip(heads) {
            local.push(layout.shard(rank.index(), &random(TOKENS * heads * DIM, seed), heads * DIM)?);
        }
        let view = |at: usize| {
            let wrong = || Error::Layout("a tensor of another size".into());
            View::new(&local[at], layout.tokens(rank.index()), heads[at], DIM).ok_or_else(wrong)
        };
        let inputs = Inputs::new(view(0)?, view(1)?, view(2)?, &score);
        let saved = attention::forward(&group, &schedule, &inputs)?;
        let gradients = attention::backward(&group, &schedule, &inputs, &saved, view(3)?)?;
        Ok::<_, Error>([saved.out, gradients.dq, gradients.dk, gradients.dv])
    })?;
    for (rank, of_rank) in of_ranks.iter().enumerate() {
        for ((local, global), heads) in of_rank.iter().zip(&mut results).zip([HEADS, HEADS, KV_HEADS, KV_HEADS]) {
            layout.unshard(rank, local, heads * DIM, global)?;
        }
    }
    Ok(results)
}

/// Relative L2 error of `got`.
fn error(got: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let distance: f64 = got.iter().zip(expected).map(|(a, b)| square(f64::from(a - b))).sum();
    (distance / expected.iter().map(|&x| square(f64::from(x))).sum::<f64>()).sqrt()
}

/// The largest error of out, dq, dk and dv, by name.
fn check(grid: (usize, usize), mask: &Mask) -> Result<[(&'static str, f64); 4]> {
    let expected = compute((1, 1), mask, |_| Kernel::new(1))?;
    let got = compute(grid, mask, |rank| Kernel::on(Device::new(rank)))?;
    Ok(std::array::from_fn(|at| (["out", "dq", "dk", "dv"][at], error(&got[at], &expected[at]))))
}

fn main() -> Result<()> {
    println!("four ranks, each on a device of its own, ring of 2 x Ulysses of 2:");
    for (name, error) in check((2, 2), &Mask::causal())? {
        println!("{name:>4} differs from the CPU's by {error:.1e}");
        assert!(error < 1e-5, "{name} is wrong");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringspan_testing::Kernels;

    /// Kernels on devices of the example, which run the checks of any backend.
    struct Devices;

    impl Kernels for Devices {
        fn one(&self) -> Option<Kernel> {
            Some(Kernel::on(Device::new(0)))
        }
    }

    ringspan_testing::check_kernels!(Devices);
    ringspan_testing::check_backend!(Devices);

    #[test]
    fn results_are_those_of_the_cpu() {
        for mask in [Mask::full(), Mask::causal(), Mask::causal().window(Some(70), None)] {
            for grid in [(1, 1), (3, 1), (1, 2), (2, 2)] {
                for (name, error) in check(grid, &mask).unwrap() {
                    assert!(error < 1e-5, "{name} differs by {error:e}, {grid:?}, {mask}");
                }
            }
        }
    }
}
