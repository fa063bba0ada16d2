//! Low-rank adapters (Hu et al., 2021, arXiv:2106.09685): the model stays as it is, and beside some of its linear layers
//! a product of two narrow matrices is trained, `y = x W^T + alpha / rank * (x A^T) B^T`.

pub(crate) mod names;

use crate::decoder::{Decoder, Weights};
use crate::error::{Error, Result};
use candle_core::{Device, Tensor};
use names::{ALL_LINEAR, Layers, Names, Pattern, ends_with};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use ringspan_candle::Adapter;
use std::sync::Arc;

/// The linear layers that adapters can stand beside; in sparse layers the last three are those of each expert.
pub const TARGETS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// The router of sparse layers, beside which there is an adapter only if it is named. PEFT's `all-linear` names it.
pub const ROUTER: &str = "gate";

const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";

/// Which layers have adapters, and of what size.
#[derive(Debug, Clone, PartialEq)]
pub struct Lora {
    /// Inner width r of an adapter, where no pattern says another.
    pub rank: usize,
    /// The adapter's part counts `alpha / rank` times, where no pattern says another alpha.
    pub alpha: f64,
    /// Share of an adapter's input that is dropped while it is trained, in 0..1.
    pub dropout: f64,
    /// Which layers have adapters.
    pub layers: Layers,
    /// Whether the adapter's part counts `alpha / sqrt(rank)` times instead (Kalajdzievski, 2023, arXiv:2312.03732).
    pub(crate) rank_stabilized: bool,
    /// Ranks of the layers that a pattern matches; the first counts.
    pub(crate) ranks: Vec<(Pattern, usize)>,
    /// Alphas of the layers that a pattern matches; the first counts.
    pub(crate) alphas: Vec<(Pattern, f64)>,
}

/// The size of one adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    /// Inner width r.
    pub rank: usize,
    /// What the product of its matrices is multiplied with.
    pub scale: f64,
}

impl Lora {
    /// Adapters of one rank beside the layers whose names end so, or beside all linear layers if `all-linear` alone is named.
    ///
    /// # Errors
    /// A rank of 0, an alpha that is no number above 0, no target, or a target that is unknown or given twice.
    pub fn new(rank: usize, alpha: f64, targets: Vec<String>) -> Result<Self> {
        if let [word] = &targets[..]
            && word == ALL_LINEAR
        {
            return Self::beside(rank, alpha, Layers::named(Names::AllLinear));
        }
        let refuse = |problem: String| Err(Error::Lora(problem));
        let possible = TARGETS.join(", ");
        for target in &targets {
            if !TARGETS.contains(&target.as_str()) && target != ROUTER {
                let alone = if target == ALL_LINEAR { " beside other names" } else { "" };
                return refuse(format!(
                    "'{target}' is no layer it can stand beside{alone}: possible are {possible}, and {ROUTER}, the router of \
                     experts; or {ALL_LINEAR} alone, for all of them"
                ));
            }
        }
        if targets.is_empty() {
            return refuse(format!("it stands beside no layer: possible are {possible}"));
        }
        Self::beside(rank, alpha, Layers::named(Names::Ends(targets)))
    }

    /// Adapters of one rank beside some layers.
    ///
    /// # Errors
    /// A rank of 0, an alpha that is no number above 0, a target that is given twice.
    pub(crate) fn beside(rank: usize, alpha: f64, layers: Layers) -> Result<Self> {
        check_size(rank, alpha)?;
        if let Names::Ends(targets) = &layers.targets {
            let twice = |(at, target): (usize, &String)| targets[..at].contains(target).then(|| target.clone());
            if let Some(target) = targets.iter().enumerate().find_map(twice) {
                return Err(Error::Lora(format!("'{target}' is given twice")));
            }
        }
        let (ranks, alphas) = (Vec::new(), Vec::new());
        Ok(Self { rank, alpha, dropout: 0.0, layers, rank_stabilized: false, ranks, alphas })
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

    /// The same, with sizes of their own for some layers.
    ///
    /// # Errors
    /// A rank of 0, an alpha that is no number above 0.
    pub(crate) fn with_patterns(self, ranks: Vec<(Pattern, usize)>, alphas: Vec<(Pattern, f64)>) -> Result<Self> {
        ranks.iter().try_for_each(|(_, rank)| check_size(*rank, self.alpha))?;
        alphas.iter().try_for_each(|(_, alpha)| check_size(self.rank, *alpha))?;
        Ok(Self { ranks, alphas, ..self })
    }

    /// The layers that are named, as they were asked for.
    pub fn targets(&self) -> &Names {
        &self.layers.targets
    }

    /// The size that an adapter beside the layer with this whole name has.
    ///
    /// # Errors
    /// A pattern that is too hard to compare with.
    pub(crate) fn size(&self, layer: &str) -> Result<Size> {
        let rank = first_match(&self.ranks, layer)?.unwrap_or(self.rank);
        let alpha = first_match(&self.alphas, layer)?.unwrap_or(self.alpha);
        let divisor = if self.rank_stabilized { (rank as f64).sqrt() } else { rank as f64 };
        Ok(Size { rank, scale: alpha / divisor })
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

    /// The adapter beside the layer `name` with these matrices, or a rank's parts of them; `first` is the first column of the
    /// layer's input that is here. Each layer drops by itself, as in PEFT.
    pub(crate) fn adapter(&self, name: &str, size: Size, a: &Tensor, b: &Tensor, first: usize) -> Adapter {
        Adapter {
            a: a.clone(),
            b: b.clone(),
            scale: size.scale,
            dropout: self.dropout,
            // Half of the words: the generator counts on from this.
            layer: (stream(name) >> 1) as usize,
            first,
        }
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
            let merged = (&weight + (b.matmul(&a)? * self.size(&layer)?.scale)?)?;
            weights.insert(format!("{layer}.weight"), merged);
        }
        Ok(weights)
    }
}

fn check_size(rank: usize, alpha: f64) -> Result<()> {
    if rank == 0 {
        return Err(Error::Lora("its rank is 0; the least is 1".into()));
    }
    match alpha > 0.0 && alpha.is_finite() {
        true => Ok(()),
        false => Err(Error::Lora(format!("its alpha is {alpha}, but must be above 0 and finite"))),
    }
}

fn first_match<T: Copy>(patterns: &[(Pattern, T)], layer: &str) -> Result<Option<T>> {
    for (pattern, value) in patterns {
        if pattern.matches(layer)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

/// A number of its own for each name, whatever others there are: FNV-1a.
pub(crate) fn stream(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Whether a parameter belongs to an adapter.
pub(crate) fn is_adapter(name: &str) -> bool {
    name.ends_with(A) || name.ends_with(B)
}

/// The names of the two matrices beside the layer `name`.
pub(crate) fn matrices(name: &str) -> [String; 2] {
    [format!("{name}.{A}"), format!("{name}.{B}")]
}

impl Decoder {
    /// The same model with adapters, which alone are trained. In sparse layers each expert has its own.
    ///
    /// # Errors
    /// A name that is none of a linear layer here, as the router's of a model without experts; adapters beside no layer.
    pub fn with_lora(mut self, mut lora: Lora) -> Result<Self> {
        let linear = self.linear_layers();
        let is_there = |end: &str| linear.iter().any(|layer| ends_with(layer, end));
        let possible: Vec<&str> = TARGETS.into_iter().chain([ROUTER]).filter(|end| is_there(end)).collect();
        if lora.layers.targets == Names::AllLinear {
            // As PEFT writes them down, for readers that know the names alone.
            lora.layers.targets = Names::Ends(possible.iter().map(|end| (*end).to_owned()).collect());
        }
        let refuse = |problem: String| Err(Error::Lora(format!("{problem}: possible are {}", possible.join(", "))));
        if let Names::Ends(ends) = &lora.layers.targets
            && let Some(end) = ends.iter().find(|end| !is_there(end))
        {
            let what = if end == ROUTER { ", the router of experts," } else { "" };
            return refuse(format!("'{end}'{what} is no linear layer of this model's layers"));
        }
        let mut sizes = Vec::new();
        for layer in &linear {
            if lora.layers.has(layer)? {
                sizes.push((layer.clone(), lora.size(layer)?));
            }
        }
        if sizes.is_empty() {
            return refuse(format!("it stands beside no layer of this model ({})", lora.layers.targets));
        }
        self.adapters = Arc::new(sizes.into_iter().collect());
        self.lora = Some(lora);
        Ok(self)
    }

    /// The adapters as they were asked for.
    pub fn lora(&self) -> Option<&Lora> {
        self.lora.as_ref()
    }

    /// The layers that have adapters, by their whole names, with the sizes of these.
    pub fn adapters(&self) -> impl Iterator<Item = (&str, Size)> {
        self.adapters.iter().map(|(layer, size)| (layer.as_str(), *size))
    }

    /// The size of the adapter beside the layer with this whole name, if it has one.
    pub fn adapter(&self, layer: &str) -> Option<Size> {
        self.adapters.get(layer).copied()
    }

    /// Whether any layer whose whole name begins so has an adapter.
    pub(crate) fn adapts_any(&self, prefix: &str) -> bool {
        self.adapters.range(prefix.to_owned()..).next().is_some_and(|(layer, _)| layer.starts_with(prefix))
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
