//! Low-rank adapters (LoRA; Hu et al., 2021, arXiv:2106.09685): the model's weights are frozen, and for some of its linear
//! layers the product of two narrow matrices is trained, `y = x W^T + alpha / rank * (x A^T) B^T`.

pub(crate) mod names;

use crate::error::{Error, Result};

use names::{ALL_LINEAR, AdaptedLayers, LayerNames, Pattern};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use ringspan_candle::lora::{dropout_stream, layer_of};
use ringspan_candle::{AdapterSize, Weights};

/// The linear layers that most models have; in sparse layers each expert has the last three.
pub const TARGETS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// The router of sparse layers, which has an adapter only if a target names it. PEFT's `all-linear` includes it.
pub const ROUTER: &str = "gate";

const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";

/// Which layers have adapters, and of what size.
#[derive(Debug, Clone, PartialEq)]
pub struct Lora {
    /// Inner width r of an adapter, for layers that no pattern of ranks matches.
    pub rank: usize,
    /// The adapter's output is multiplied by `alpha / rank`; for layers that no pattern of alphas matches.
    pub alpha: f64,
    /// Probability with which an element of an adapter's input is dropped in training, in 0..1.
    pub dropout: f64,
    /// Which layers have adapters.
    pub layers: AdaptedLayers,
    /// Whether the factor is `alpha / sqrt(rank)` instead (rank-stabilized LoRA; Kalajdzievski, 2023, arXiv:2312.03732).
    pub(crate) rank_stabilized: bool,
    /// Ranks of the layers whose name matches a pattern; the first match counts.
    pub(crate) ranks: Vec<(Pattern, usize)>,
    /// Alphas of the layers whose name matches a pattern; the first match counts.
    pub(crate) alphas: Vec<(Pattern, f64)>,
}

impl Lora {
    /// Adapters of one rank for all linear layers of a model's layers except the routers of experts.
    ///
    /// # Errors
    /// A rank of 0, or an alpha that is not a number above 0.
    pub fn of_all_layers(rank: usize, alpha: f64) -> Result<Self> {
        Self::for_layers(rank, alpha, AdaptedLayers::named(LayerNames::AllButRouters))
    }

    /// Adapters of one rank for layers whose names end with a target, or for all linear layers if the one target is
    /// `all-linear`. Whether a model has such layers is checked when the adapters are [attached](crate::Decoder::with_lora).
    ///
    /// # Errors
    /// A rank of 0, an alpha that is not a number above 0, no target, or a target that is given twice.
    pub fn new(rank: usize, alpha: f64, targets: Vec<String>) -> Result<Self> {
        if let [word] = &targets[..]
            && word == ALL_LINEAR
        {
            return Self::for_layers(rank, alpha, AdaptedLayers::named(LayerNames::AllLinear));
        }
        let refuse = |problem: String| Err(Error::Lora(problem));
        if targets.iter().any(|target| target == ALL_LINEAR) {
            return refuse(format!("'{ALL_LINEAR}' is beside other names: it stands alone, for all of them"));
        }
        if targets.is_empty() {
            return refuse(format!("it is attached to no layer: name some, or {ALL_LINEAR}"));
        }
        Self::for_layers(rank, alpha, AdaptedLayers::named(LayerNames::Ends(targets)))
    }

    /// Adapters of one rank for the layers that `layers` selects.
    ///
    /// # Errors
    /// A rank of 0, an alpha that is not a number above 0, or a target that is given twice.
    pub(crate) fn for_layers(rank: usize, alpha: f64, layers: AdaptedLayers) -> Result<Self> {
        check_size(rank, alpha)?;
        if let LayerNames::Ends(targets) = &layers.targets {
            let twice = |(at, target): (usize, &String)| targets[..at].contains(target).then(|| target.clone());
            if let Some(target) = targets.iter().enumerate().find_map(twice) {
                return Err(Error::Lora(format!("'{target}' is given twice")));
            }
        }
        let (ranks, alphas) = (Vec::new(), Vec::new());
        Ok(Self { rank, alpha, dropout: 0.0, layers, rank_stabilized: false, ranks, alphas })
    }

    /// A copy with dropout of the adapters' inputs in training.
    ///
    /// # Errors
    /// A share that is outside 0..1 once it is rounded to f32, the type in which it is used: 1 would drop everything.
    pub fn with_dropout(self, dropout: f64) -> Result<Self> {
        match dropout >= 0.0 && (dropout as f32) < 1.0 {
            true => Ok(Self { dropout, ..self }),
            false => Err(Error::Lora(format!("its dropout is {dropout}, but must be at least 0 and, as f32, below 1"))),
        }
    }

    /// A copy with ranks and alphas of their own for the layers that a pattern matches.
    ///
    /// # Errors
    /// A rank of 0, or an alpha that is not a number above 0.
    pub(crate) fn with_patterns(self, ranks: Vec<(Pattern, usize)>, alphas: Vec<(Pattern, f64)>) -> Result<Self> {
        ranks.iter().try_for_each(|(_, rank)| check_size(*rank, self.alpha))?;
        alphas.iter().try_for_each(|(_, alpha)| check_size(self.rank, *alpha))?;
        Ok(Self { ranks, alphas, ..self })
    }

    /// The target layers, as they were requested.
    pub fn targets(&self) -> &LayerNames {
        &self.layers.targets
    }

    /// Whether the layer with this full name has an adapter.
    ///
    /// # Errors
    /// A pattern whose regular expression is too expensive to match.
    pub fn adapts(&self, layer: &str) -> Result<bool> {
        self.layers.has(layer)
    }

    /// The rank and scale of the adapter for the layer with this full name.
    ///
    /// # Errors
    /// A pattern whose regular expression is too expensive to match.
    pub fn size(&self, layer: &str) -> Result<AdapterSize> {
        let rank = first_match(&self.ranks, layer)?.unwrap_or(self.rank);
        let alpha = first_match(&self.alphas, layer)?.unwrap_or(self.alpha);
        let divisor = if self.rank_stabilized { (rank as f64).sqrt() } else { rank as f64 };
        Ok(AdapterSize { rank, scale: alpha / divisor })
    }

    /// Initial values of an adapter's matrix: A is uniform within `1 / sqrt(inputs)`, as in PEFT, and B is zero, so that
    /// training starts from the model as it is. The values depend on the seed and the name only.
    pub fn init(&self, name: &str, shape: &[usize], seed: u64) -> Vec<f32> {
        let count = shape.iter().product();
        if !name.ends_with(A) {
            return vec![0.0; count];
        }
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(dropout_stream(name));
        let bound = 1.0 / (shape.last().copied().unwrap_or(1).max(1) as f64).sqrt();
        let mut uniform = || (random.next_u64() >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
        (0..count).map(|_| (uniform() * bound) as f32).collect()
    }

    /// Merges the adapters: each is added to the weight of its layer, `W + alpha / rank * B A`.
    ///
    /// # Errors
    /// An adapter with only one of its matrices, or whose shape does not fit its layer.
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

/// Whether a parameter belongs to an adapter.
pub(crate) fn is_adapter(name: &str) -> bool {
    layer_of(name).is_some()
}
