//! The two attentions of a block: of a video to itself, over all ranks, and to its prompt, on each rank alone.

use super::config::WanConfig;
use super::video_context::VideoContext;
use candle_core::{Result, Tensor};
use ringspan::{Mask, Score};
use ringspan_candle::layers::{Attention, ForwardPass, ReplicatedLinear, RmsNorm};
use ringspan_candle::model::Scope;
use ringspan_candle::rope::rope_interleaved;
use ringspan_candle::shard::HeadCounts;
use ringspan_candle::{Attend, AttentionInputs};

/// The projections that both attentions have. The norms of queries and keys are over all heads at once.
#[derive(Debug)]
struct Projections {
    q: ReplicatedLinear,
    k: ReplicatedLinear,
    v: ReplicatedLinear,
    out: ReplicatedLinear,
    norm_q: RmsNorm,
    norm_k: RmsNorm,
    heads: usize,
    head_dim: usize,
}

impl Projections {
    fn new(scope: &Scope, config: &WanConfig) -> Self {
        let width = config.width();
        let linear = |name| ReplicatedLinear::new(&scope.at(name), width, width, true);
        Self {
            q: linear("to_q"),
            k: linear("to_k"),
            v: linear("to_v"),
            out: linear("to_out.0"),
            norm_q: RmsNorm::new(&scope.at("norm_q"), width, config.eps),
            norm_k: RmsNorm::new(&scope.at("norm_k"), width, config.eps),
            heads: config.num_attention_heads,
            head_dim: config.attention_head_dim,
        }
    }

    /// x `[N, C]` as `[N, H, D]`.
    fn heads(&self, x: &Tensor) -> Result<Tensor> {
        x.reshape((x.dim(0)?, self.heads, self.head_dim))
    }

    fn queries(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        self.heads(&self.norm_q.forward(&self.q.forward(x, pass)?, pass)?)
    }

    fn keys(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        self.heads(&self.norm_k.forward(&self.k.forward(x, pass)?, pass)?)
    }
}

/// Attention of a video's tokens to each other (`attn1`).
#[derive(Debug)]
pub(super) struct SelfAttention {
    projections: Projections,
    attention: Attention,
}

impl SelfAttention {
    pub(super) fn new(scope: &Scope, config: &WanConfig, index: usize) -> Self {
        let heads = HeadCounts { queries: config.num_attention_heads, key_values: config.num_attention_heads };
        let attention = Attention::new(scope, index, heads, Mask::full(), score(config.attention_head_dim));
        Self { projections: Projections::new(scope, config), attention }
    }

    pub(super) fn attention(&self) -> &Attention {
        &self.attention
    }

    /// Queries, keys and values `[T, H, D]` of x `[T, C]`, rotated by the tokens' positions on the grid.
    pub(super) fn inputs(&self, x: &Tensor, video: &VideoContext, pass: &ForwardPass) -> Result<[Tensor; 3]> {
        let of = &self.projections;
        let q = rope_interleaved(&of.queries(x, pass)?, video.rotary())?;
        let k = rope_interleaved(&of.keys(x, pass)?, video.rotary())?;
        Ok([q, k, of.heads(&of.v.forward(x, pass)?)?])
    }

    /// The output projection of the attention output, `[T, C]` each.
    pub(super) fn output(&self, attended: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        self.projections.out.forward(attended, pass)
    }
}

/// Attention of a video's tokens to its prompt (`attn2`).
#[derive(Debug)]
pub(super) struct CrossAttention {
    projections: Projections,
    /// Keys and values of image embeddings, and the norm of these keys.
    image: Option<(ReplicatedLinear, ReplicatedLinear, RmsNorm)>,
    index: usize,
}

/// Keys and values of a prompt in one block, `[B * N, H, D]` each.
#[derive(Debug, Clone)]
pub struct BlockPrompt {
    text: [Tensor; 2],
    image: Option<[Tensor; 2]>,
}

impl CrossAttention {
    pub(super) fn new(scope: &Scope, config: &WanConfig, index: usize) -> Self {
        let width = config.width();
        let image = config.added_kv_proj_dim.map(|added| {
            let linear = |name| ReplicatedLinear::new(&scope.at(name), added, width, true);
            let norm = RmsNorm::new(&scope.at("norm_added_k"), width, config.eps);
            (linear("add_k_proj"), linear("add_v_proj"), norm)
        });
        Self { projections: Projections::new(scope, config), image, index }
    }

    /// Keys and values of embedded text and images, `[B * N, C]` each.
    pub(super) fn prompt(&self, text: &Tensor, image: Option<&Tensor>, pass: &ForwardPass) -> Result<BlockPrompt> {
        let of = &self.projections;
        let text = [of.keys(text, pass)?, of.heads(&of.v.forward(text, pass)?)?];
        let image = match (image, &self.image) {
            (Some(x), Some((k, v, norm))) => {
                let keys = norm.forward(&k.forward(x, pass)?, pass)?;
                Some([of.heads(&keys)?, of.heads(&v.forward(x, pass)?)?])
            }
            _ => None,
        };
        Ok(BlockPrompt { text, image })
    }

    /// The output of attention of x `[T, C]` to its prompt, `[T, C]`. The same queries attend to text and to images,
    /// apart.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        prompt: &BlockPrompt,
        video: &VideoContext,
        pass: &ForwardPass,
    ) -> Result<Tensor> {
        let of = &self.projections;
        let sum = self.attended(x, prompt, video, pass)?;
        of.out.forward(&sum.flatten_from(1)?, pass)
    }

    /// Outputs `[T, H, D]` before their projection.
    fn attended(&self, x: &Tensor, prompt: &BlockPrompt, video: &VideoContext, pass: &ForwardPass) -> Result<Tensor> {
        let of = &self.projections;
        let q = of.queries(x, pass)?;
        let attended = |[k, v]: &[Tensor; 2]| {
            let context = video.to_prompt(k.dim(0)? / video.batch()).map_err(candle_core::Error::wrap)?;
            let Some(context) = context else { return Ok(q.clone()) };
            context.layer_attention(self.index, &AttentionInputs::new(&q, k, v), &Mask::full(), &score(of.head_dim))
        };
        let of_text = attended(&prompt.text)?;
        match &prompt.image {
            Some(image) => of_text + attended(image)?,
            None => Ok(of_text),
        }
    }
}

fn score(head_dim: usize) -> Score {
    Score::new(1.0 / (head_dim as f32).sqrt())
}
