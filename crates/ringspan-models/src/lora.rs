//! Low-rank adapters (Hu et al., 2021, arXiv:2106.09685): the model stays as it is, and beside some of its linear layers
//! a product of two narrow matrices is trained, `y = x W^T + alpha / rank * (x A^T) B^T`.

use crate::decoder::{Decoder, Weights};
use crate::error::{Error, Result};
use candle_core::{DType, Device, Tensor};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use ringspan_candle::Drops;
use ringspan_candle::cast::cast;
use ringspan_candle::linear::linear;

/// The linear layers that adapters can stand beside.
pub const TARGETS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Those of attention, which sparse layers have, too.
pub const ATTENTION_TARGETS: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];

const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";

/// Which layers have adapters, and of what size.
#[derive(Debug, Clone, PartialEq)]
pub struct Lora {
    /// Inner width r of an adapter.
    pub rank: usize,
    /// The adapter's part counts `alpha / rank` times.
    pub alpha: f64,
    /// Last parts of the names of the layers: some of [`TARGETS`].
    pub targets: Vec<String>,
    /// Share of an adapter's input that is dropped while it is trained, in 0..1.
    pub dropout: f64,
}

impl Lora {
    /// Adapters of one rank beside the layers whose names end so.
    ///
    /// # Errors
    /// A rank of 0, an alpha that is no number above 0, no target, or a target that is unknown or given twice.
    pub fn new(rank: usize, alpha: f64, targets: Vec<String>) -> Result<Self> {
        let refuse = |problem: String| Err(Error::Lora(problem));
        if rank == 0 {
            return refuse("its rank is 0; the least is 1".into());
        }
        if !(alpha > 0.0 && alpha.is_finite()) {
            return refuse(format!("its alpha is {alpha}, but must be above 0 and finite"));
        }
        let possible = TARGETS.join(", ");
        for (at, target) in targets.iter().enumerate() {
            if !TARGETS.contains(&target.as_str()) {
                return refuse(format!("'{target}' is no layer it can stand beside: possible are {possible}"));
            }
            if targets[..at].contains(target) {
                return refuse(format!("'{target}' is given twice"));
            }
        }
        match targets.is_empty() {
            true => refuse(format!("it stands beside no layer: possible are {possible}")),
            false => Ok(Self { rank, alpha, targets, dropout: 0.0 }),
        }
    }

    /// The same, with dropout in training.
    ///
    /// # Errors
    /// A share outside 0..1, as f32 in which it is used: just below 1 it would be 1 there, and leave nothing.
    pub fn with_dropout(self, dropout: f64) -> Result<Self> {
        match dropout >= 0.0 && (dropout as f32) < 1.0 {
            true => Ok(Self { dropout, ..self }),
            false => Err(Error::Lora(format!("its dropout is {dropout}, but must be at least 0 and, as f32, below 1"))),
        }
    }

    /// What the product of the adapter's matrices is multiplied with.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Whether the layer `name`, without `.weight`, has an adapter.
    pub(crate) fn is_beside(&self, name: &str) -> bool {
        let last = name.rsplit('.').next().unwrap_or(name);
        self.targets.iter().any(|target| target == last)
    }

    /// The adapter of a layer `[to, from]`: names and shapes.
    pub(crate) fn shapes(&self, name: &str, to: usize, from: usize) -> [(String, Vec<usize>); 2] {
        [(format!("{name}.{A}"), vec![self.rank, from]), (format!("{name}.{B}"), vec![to, self.rank])]
    }

    /// Values of a new adapter's matrix: A uniform within `1 / sqrt(from)`, as PEFT has it, B zero, so that the model
    /// begins as it was. They depend on the seed and the name only.
    pub fn init(&self, name: &str, shape: &[usize], seed: u64) -> Vec<f32> {
        let count = shape.iter().product();
        if !name.ends_with(A) {
            return vec![0.0; count];
        }
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream(name));
        let bound = 1.0 / (shape.last().copied().unwrap_or(1).max(1) as f64).sqrt();
        let mut uniform = || (random.next_u64() >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
        (0..count).map(|_| (uniform() * bound) as f32).collect()
    }

    /// The input `x` `[T, in]` of the adapter beside the layer `name`, of which `first` is the first column here: as it is, or
    /// in training, with some of it dropped. Each layer drops by itself, as in PEFT.
    pub(crate) fn input(&self, name: &str, x: &Tensor, first: usize, drops: Option<&Drops>) -> Result<Tensor> {
        match drops.filter(|_| self.dropout > 0.0) {
            // Half of the words: the generator counts on from this.
            Some(drops) => Ok(drops.apply(x, self.dropout, (stream(name) >> 1) as usize, first)?),
            None => Ok(x.clone()),
        }
    }

    /// The adapter's part of a layer: x `[T, in]` to `[T, out]`.
    pub(crate) fn apply(&self, x: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        // The scale goes to the narrow matrix, and is not rounded itself.
        let narrow = (cast(&linear(x, a, None)?, DType::F32)? * self.scale())?;
        Ok(linear(&cast(&narrow, x.dtype())?, b, None)?)
    }

    /// Weights without adapters: each is added to its layer, `W + alpha / rank * B A`.
    ///
    /// # Errors
    /// An adapter that has one matrix only, or does not fit its layer.
    pub fn merge(&self, mut weights: Weights) -> Result<Weights> {
        let adapted: Vec<String> =
            weights.keys().filter_map(|name| name.strip_suffix(A)?.strip_suffix('.')).map(str::to_owned).collect();
        for layer in adapted {
            let mut take = |part: &str| {
                let name = format!("{layer}.{part}");
                weights.remove(&name).ok_or(Error::Missing { name, shape: Vec::new() })
            };
            let (a, b, weight) = (take(A)?, take(B)?, take("weight")?);
            let merged = (&weight + (b.matmul(&a)? * self.scale())?)?;
            weights.insert(format!("{layer}.weight"), merged);
        }
        Ok(weights)
    }
}

/// A number of its own for each name, whatever others there are: FNV-1a.
fn stream(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Whether a parameter belongs to an adapter.
pub(crate) fn is_adapter(name: &str) -> bool {
    name.ends_with(A) || name.ends_with(B)
}

impl Decoder {
    /// The same model with adapters, which alone are trained.
    ///
    /// # Errors
    /// Sparse layers, whose experts have no adapters.
    pub fn with_lora(mut self, lora: Lora) -> Result<Self> {
        let experts = lora.targets.iter().find(|target| TARGETS[4..].contains(&target.as_str()));
        if let (Some(target), true) = (experts, self.experts() > 0) {
            let possible = ATTENTION_TARGETS.join(", ");
            return Err(Error::Lora(format!(
                "'{target}' belongs to experts here, which have no adapters: possible are {possible}"
            )));
        }
        self.lora = Some(lora);
        Ok(self)
    }

    /// The adapters.
    pub fn lora(&self) -> Option<&Lora> {
        self.lora.as_ref()
    }

    /// Whether a parameter is trained: all are, or where there are adapters those alone.
    pub fn trains(&self, name: &str) -> bool {
        self.lora.is_none() || is_adapter(name)
    }

    /// `weights` with new adapters.
    ///
    /// # Errors
    /// Sizes that do not fit in memory.
    pub fn adapted(&self, mut weights: Weights, seed: u64) -> Result<Weights> {
        let Some(lora) = &self.lora else { return Ok(weights) };
        for (name, shape) in self.shapes().into_iter().filter(|(name, _)| is_adapter(name)) {
            let values = lora.init(&name, &shape, seed);
            weights.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        Ok(weights)
    }
}
