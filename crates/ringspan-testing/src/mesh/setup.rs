//! Computes the answer of a problem on a mesh of ranks that are threads.

use super::{Answer, Inputs, Problem};
use crate::Kernels;
use ringspan::attention::{self, Forward, Gradients, Group, Wire};
use ringspan::comm::{Communicator, threads};
use ringspan::kernel::{Data, Kernel, View};
use ringspan::mesh::Grid;
use ringspan::{Error, Layout, LayoutKind, Schedule, StrategyKind};
use std::sync::Arc;

/// The calls of a rank: returns its results, and the bytes it sent in each pass.
pub type RankProgram<'c> =
    dyn Fn(&Group, &Schedule, &attention::Inputs, View) -> Result<(Forward, Gradients, [u64; 2]), Error> + Sync + 'c;

/// Makes the communicator and the kernel of a rank, given its communicator of threads.
pub type MakeRank<'c> = dyn Fn(Arc<dyn Communicator>) -> Result<(Arc<dyn Communicator>, Kernel), Error> + Sync + 'c;

/// The mesh, layout, strategy and types with which a problem is computed.
#[derive(Debug, Clone, Copy)]
pub struct MeshSetup {
    pub kind: LayoutKind,
    pub strategy: StrategyKind,
    pub grid: Grid,
    pub head_chunks: usize,
    /// Storage type of q, k, v and d_out on the ranks; the inputs must be exact in it.
    pub stored: Wire,
    /// Wire type, which is given to the group if it differs from the storage type.
    pub wire: Wire,
}

impl MeshSetup {
    pub fn new(kind: LayoutKind, strategy: StrategyKind, grid: impl Into<Grid>) -> Self {
        Self { kind, strategy, grid: grid.into(), head_chunks: 1, stored: Wire::F32, wire: Wire::F32 }
    }
}

/// Numbers in their storage type.
enum StoredElements {
    F32(Vec<f32>),
    Bf16(Vec<half::bf16>),
    F16(Vec<half::f16>),
}

impl StoredElements {
    fn new(values: Vec<f32>, of: Wire) -> Self {
        match of {
            Wire::F32 => Self::F32(values),
            Wire::Bf16 => Self::Bf16(values.into_iter().map(half::bf16::from_f32).collect()),
            Wire::F16 => Self::F16(values.into_iter().map(half::f16::from_f32).collect()),
        }
    }

    fn data(&self) -> Data<'_> {
        match self {
            Self::F32(values) => Data::F32(values),
            Self::Bf16(values) => Data::Bf16(values),
            Self::F16(values) => Data::F16(values),
        }
    }
}

impl Problem {
    /// Computes the answer on a mesh of ranks, each with one thread of the CPU.
    pub fn on_mesh(&self, inputs: &Inputs, on: MeshSetup) -> Result<Answer, Error> {
        self.on_mesh_by(inputs, on, &|| Ok(Kernel::new(1)), &both_passes)
    }

    /// Like [`on_mesh`](Self::on_mesh), with these kernels, which this machine has.
    pub fn on_mesh_of(&self, kernels: &dyn Kernels, inputs: &Inputs, on: MeshSetup) -> Result<Answer, Error> {
        self.on_mesh_by(inputs, on, &|| Ok(kernels.one().expect("the device of a moment ago")), &both_passes)
    }

    /// Like [`on_mesh`](Self::on_mesh), with these kernels and calls.
    pub fn on_mesh_by(
        &self,
        inputs: &Inputs,
        on: MeshSetup,
        kernel: &(dyn Fn() -> Result<Kernel, Error> + Sync),
        call: &RankProgram<'_>,
    ) -> Result<Answer, Error> {
        self.on_mesh_with(inputs, on, &|comm| Ok((comm, kernel()?)), call)
    }

    /// Like [`on_mesh`](Self::on_mesh), with these communicators (which wrap those of threads), kernels and calls.
    pub fn on_mesh_with(
        &self,
        inputs: &Inputs,
        on: MeshSetup,
        make_rank: &MakeRank<'_>,
        call: &RankProgram<'_>,
    ) -> Result<Answer, Error> {
        let ranks = on.grid.size().expect("a small grid");
        let (query, key) = Layout::pair(on.kind, &self.q_documents, &self.k_documents, &self.mask, ranks)?;
        let schedule = Schedule::new(on.strategy, &query, &key, &self.mask, on.grid)?.with_head_chunks(on.head_chunks);
        let Self { heads, kv_heads, dim, v_dim, bias_heads, .. } = *self;
        let bias_width = bias_heads * self.keys;
        let locals = threads::run(ranks, threads::Options::default(), |comm| {
            let rank = comm.rank();
            let (comm, kernel) = make_rank(comm)?;
            let mut group = Group::new(comm, on.grid, kernel)?;
            if on.wire != on.stored {
                group = group.with_wire(on.wire);
            }
            let q = query.shard(rank, &inputs.q, heads * dim)?;
            let k = key.shard(rank, &inputs.k, kv_heads * dim)?;
            let v = key.shard(rank, &inputs.v, kv_heads * v_dim)?;
            let d_out = query.shard(rank, &inputs.d_out, heads * v_dim)?;
            let bias = query.shard(rank, &inputs.bias, bias_width)?;
            let view = |data, layout: &Layout, heads, dim| {
                View::new(data, layout.tokens(rank), heads, dim).expect("a shard has its layout's size")
            };
            // Adds 3 numbers after each head and 7 after each token, which must not be read.
            let apart = |data: Vec<f32>, heads: usize, dim: usize| -> Vec<f32> {
                let head = |row: &[f32]| [row, &[f32::NAN; 3]].concat();
                let token = |row: &[f32]| {
                    let mut row: Vec<f32> = row.chunks_exact(dim).flat_map(head).collect();
                    row.extend([f32::NAN; 7]);
                    row
                };
                if self.strided { data.chunks_exact(heads * dim).flat_map(token).collect() } else { data }
            };
            let stored = |data, heads, dim| StoredElements::new(apart(data, heads, dim), on.stored);
            let (q, k) = (stored(q, heads, dim), stored(k, kv_heads, dim));
            let (v, d_out) = (stored(v, kv_heads, v_dim), stored(d_out, heads, v_dim));
            let (gap, end) = if self.strided { (3, 7) } else { (0, 0) };
            let strided = |data, layout: &Layout, heads, dim| {
                let (tokens, head_stride) = (layout.tokens(rank), dim + gap);
                View {
                    data,
                    tokens,
                    heads,
                    dim,
                    token_stride: heads * head_stride + end,
                    head_stride,
                    rows: None,
                    computes_in_f32: false,
                }
            };
            let (q, k) = (strided(q.data(), &query, heads, dim), strided(k.data(), &key, kv_heads, dim));
            let (v, d_out) = (strided(v.data(), &key, kv_heads, v_dim), strided(d_out.data(), &query, heads, v_dim));
            let mut local = attention::Inputs::new(q, k, v, &self.score);
            if bias_heads > 0 {
                local = local.with_bias(view(&bias, &query, bias_heads, self.keys));
            }
            call(&group, &schedule, &local, d_out)
        })?;
        let (queries, keys) = (self.batch * self.queries, self.batch * self.keys);
        let mut answer = Answer {
            out: vec![0.0; queries * heads * v_dim],
            lse: vec![f32::NEG_INFINITY; queries * heads],
            dq: vec![0.0; queries * heads * dim],
            dk: vec![0.0; keys * kv_heads * dim],
            dv: vec![0.0; keys * kv_heads * v_dim],
            d_sinks: vec![0.0; self.score.sinks.as_ref().map_or(0, Vec::len)],
            d_table: vec![0.0; self.score.table_len()],
            d_bias: vec![0.0; queries * bias_width],
            ..Answer::default()
        };
        for (rank, (forward, gradients, [bytes_forward, bytes_backward])) in locals.into_iter().enumerate() {
            query.unshard(rank, &forward.out, heads * v_dim, &mut answer.out)?;
            query.unshard(rank, &gradients.dq, heads * dim, &mut answer.dq)?;
            key.unshard(rank, &gradients.dk, kv_heads * dim, &mut answer.dk)?;
            key.unshard(rank, &gradients.dv, kv_heads * v_dim, &mut answer.dv)?;
            query.unshard(rank, &gradients.d_bias, bias_width, &mut answer.d_bias)?;
            for (sums, part) in [(&mut answer.d_sinks, &gradients.d_sinks), (&mut answer.d_table, &gradients.d_table)] {
                assert_eq!(sums.len(), part.len(), "a gradient of a parameter");
                sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            }
            // The log-sum-exp is [H, T] on a rank, and [B, H, S] in the answer.
            let (tokens, lse) = (query.tokens(rank), forward.lse());
            for (token, row) in query.rows(rank).into_iter().enumerate() {
                let (b, s) = (row / self.queries, row % self.queries);
                for head in 0..heads {
                    answer.lse[(b * heads + head) * self.queries + s] = lse[head * tokens + token];
                }
            }
            answer.bytes_forward.push(bytes_forward);
            answer.bytes_backward.push(bytes_backward);
        }
        Ok(answer)
    }
}

/// The forward and the backward pass of a rank, and the bytes that it sent in each.
fn both_passes(
    group: &Group,
    schedule: &Schedule,
    local: &attention::Inputs,
    d_out: View,
) -> Result<(Forward, Gradients, [u64; 2]), Error> {
    let comm = group.cp();
    let before = comm.bytes_sent();
    let forward = attention::forward(group, schedule, local)?;
    let between = comm.bytes_sent();
    let gradients = attention::backward(group, schedule, local, &forward, d_out)?;
    Ok((forward, gradients, [between - before, comm.bytes_sent() - between]))
}
