//! A small GPT of candle-nn's layers.

use candle_core::{Result, Tensor, Var};
use candle_nn::{
    Activation, Embedding, LayerNorm, Linear, Module, VarBuilder, embedding, layer_norm, linear, linear_no_bias,
};
use ringspan_candle::Context;

const LAYERS: usize = 2;
const HIDDEN: usize = 64;
const HEADS: usize = 4;

/// A byte-level GPT with learned positions.
pub(crate) struct Model {
    tokens: Embedding,
    positions: Embedding,
    layers: Vec<Layer>,
    norm: LayerNorm,
    head: Linear,
}

struct Layer {
    norms: [LayerNorm; 2],
    qkv: Linear,
    out: Linear,
    mlp: [Linear; 2],
}

impl Model {
    /// A model for sequences of up to `tokens` bytes.
    pub(crate) fn new(tokens: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            tokens: embedding(256, HIDDEN, vb.pp("tokens"))?,
            positions: embedding(tokens, HIDDEN, vb.pp("positions"))?,
            layers: (0..LAYERS).map(|index| Layer::new(vb.pp(format!("layers.{index}")))).collect::<Result<_>>()?,
            norm: layer_norm(HIDDEN, 1e-5, vb.pp("norm"))?,
            head: linear_no_bias(HIDDEN, 256, vb.pp("head"))?,
        })
    }

    /// Logits `[B, T, 256]` of this rank's bytes `[B, T]`.
    pub(crate) fn forward(&self, ids: &Tensor, context: &Context) -> Result<Tensor> {
        let positions = self.positions.forward(&context.position_ids(ids.device())?)?;
        let mut x = (self.tokens.forward(ids)? + positions)?;
        for layer in &self.layers {
            x = layer.forward(&x, context)?;
        }
        self.head.forward(&self.norm.forward(&x)?)
    }
}

impl Layer {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            norms: [layer_norm(HIDDEN, 1e-5, vb.pp("norm1"))?, layer_norm(HIDDEN, 1e-5, vb.pp("norm2"))?],
            qkv: linear(HIDDEN, 3 * HIDDEN, vb.pp("qkv"))?,
            out: linear(HIDDEN, HIDDEN, vb.pp("out"))?,
            mlp: [linear(HIDDEN, 4 * HIDDEN, vb.pp("up"))?, linear(4 * HIDDEN, HIDDEN, vb.pp("down"))?],
        })
    }

    fn forward(&self, x: &Tensor, context: &Context) -> Result<Tensor> {
        let (b, t, _) = x.dims3()?;
        let qkv = self.qkv.forward(&self.norms[0].forward(x)?)?.reshape((b, t, 3, HEADS, HIDDEN / HEADS))?;
        let [q, k, v] = [0, 1, 2].map(|index| qkv.narrow(2, index, 1).and_then(|x| x.squeeze(2)));
        // The one line that differs from a model for one device: attention over the tokens of all ranks.
        let attended = context.attention(&q?, &k?, &v?)?;
        let x = (x + self.out.forward(&attended.flatten_from(2)?)?)?;
        let inner = self.mlp[0].forward(&self.norms[1].forward(&x)?)?;
        &x + self.mlp[1].forward(&Activation::Gelu.forward(&inner)?)?
    }
}

/// Sets matrices to numbers that are the same in each run, so that runs can be compared, and biases to zero.
pub(crate) fn initialize(parameters: &[(String, Var)]) -> Result<()> {
    for (name, var) in parameters {
        if name.ends_with("bias") {
            var.set(&var.zeros_like()?)?;
        }
        if var.rank() != 2 {
            continue;
        }
        let seed = name.bytes().fold(7_u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let number = |index: u64| {
            let mixed = (index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed.wrapping_mul(0xD1B5_4A32_D192_ED03);
            0.04 * (((mixed ^ (mixed >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40) as f32 / (1 << 23) as f32 - 1.0)
        };
        let values: Vec<f32> = (0..var.elem_count() as u64).map(number).collect();
        var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?;
    }
    Ok(())
}
