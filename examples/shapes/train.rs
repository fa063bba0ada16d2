//! Training of a small video transformer by flow matching: it learns the velocity from data to noise.

use crate::shapes::PROMPTS;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use ringspan_candle::StoredWeights;
use ringspan_video::noise::noise;
use ringspan_video::ranks::RankGroups;
use ringspan_video::transformer::{TokenGrid, VideoContext, WanConfig, WanTransformer};
use ringspan_video::{Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

/// The training data of the transformer.
pub(crate) struct Examples {
    /// Latents `[1, C, F, H, W]` of videos, with the numbers of their prompts.
    pub(crate) videos: Vec<(usize, Tensor)>,
    /// Embeddings `[1, N, C]` of each prompt, and of the empty one at the end.
    pub(crate) prompts: Vec<Tensor>,
}

/// The settings of the training.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Training {
    pub(crate) steps: usize,
    /// Videos of a step.
    pub(crate) batch: usize,
    pub(crate) seed: u64,
}

const LEARNING_RATE: f64 = 3e-3;
/// Steps in which the learning rate rises.
const WARM_UP: f64 = 20.0;
/// A prompt is left out once in so many videos, so that guidance has something to compare with.
const WITHOUT_PROMPT: u64 = 10;
/// More noise levels are high, as in the schedules that make a video.
pub(crate) const SHIFT: f64 = 3.0;
/// Steps between two lines of progress.
const REPORT: usize = 25;

/// Parameters of a transformer that is not trained, or those of `before`.
fn initial(transformer: &WanTransformer, before: &HashMap<String, Tensor>, seed: u64) -> Result<BTreeMap<String, Var>> {
    let variable = |(index, (name, shape)): (usize, (String, Vec<usize>))| -> Result<(String, Var)> {
        if let Some(tensor) = before.get(&name).filter(|tensor| tensor.dims() == shape) {
            return Ok((name, Var::from_tensor(tensor)?));
        }
        let inputs: usize = shape[1..].iter().product::<usize>().max(1);
        let random = |scale: f64| -> Result<Tensor> { Ok((noise(seed + index as u64, &shape)? * scale)?) };
        let constant = |value: f64| Tensor::full(value as f32, shape.as_slice(), &Device::Cpu);
        let values = match name.as_str() {
            // Only few of the 512 embeddings of a prompt are words, so scores must begin wide apart for these to be seen.
            name if name.contains("attn2.norm_") => constant(2.0)?,
            name if name.ends_with("bias") => constant(0.0)?,
            name if shape.len() == 1 && name.ends_with("weight") => constant(1.0)?,
            name if name.ends_with("scale_shift_table") && shape[1] == 6 => {
                // Gates of both branches begin at 1, shifts and scales at 0.
                let row = |row: usize| if row % 3 == 2 { 1.0f32 } else { 0.0 };
                let rows = (0..shape[1]).flat_map(|index| vec![row(index); shape[2]]).collect::<Vec<_>>();
                Tensor::from_vec(rows, shape.as_slice(), &Device::Cpu)?
            }
            name if name.contains("time_proj") || name.contains("proj_out") => random(0.02)?,
            _ => random(1.0 / (inputs as f64).sqrt())?,
        };
        Ok((name, Var::from_tensor(&values)?))
    };
    transformer.shapes().into_iter().enumerate().map(variable).collect()
}

/// Trains on this rank alone, from the weights `before` where there are any; returns the weights by their names, and the mean loss of the
/// first and of the last steps.
pub(crate) fn train(
    groups: &RankGroups,
    config: &WanConfig,
    before: &HashMap<String, Tensor>,
    examples: &Examples,
    training: Training,
) -> Result<(HashMap<String, Tensor>, [f64; 2])> {
    let transformer = WanTransformer::new(config.clone());
    let variables = initial(&transformer, before, 1000 * training.seed)?;
    let weights: StoredWeights =
        variables.iter().map(|(name, variable)| (name.clone(), variable.as_tensor().clone().into())).collect();
    let settings = ParamsAdamW { lr: LEARNING_RATE, weight_decay: 0.0, beta2: 0.99, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(variables.values().cloned().collect(), settings)?;
    let (_, _, frames, height, width) = examples.videos[0].1.dims5()?;
    let grid = TokenGrid::new([frames, height, width], config.patch_size)?;
    let video = VideoContext::new(config, groups.video().clone(), groups.alone().clone(), training.batch, grid)?;
    let mut random = ChaCha8Rng::seed_from_u64(training.seed);
    let (began, mut losses) = (Instant::now(), Vec::new());
    for step in 0..training.steps {
        let warm_up = ((step + 1) as f64 / WARM_UP).min(1.0);
        let left = 1.0 - step as f64 / training.steps as f64;
        optimizer.set_learning_rate(LEARNING_RATE * warm_up * left.sqrt());
        let batch = Batch::draw(examples, training.batch, &mut random)?;
        let prompt = transformer.prompt(&weights, &batch.text, None, &video)?;
        let times = video.timesteps(&batch.times)?;
        let found = transformer.forward(&weights, &batch.noisy, &times, &prompt, None, &video)?;
        let wanted = patches(&grid, &batch.velocity, config)?;
        let loss = (found - wanted)?.sqr()?.mean_all()?;
        optimizer.backward_step(&loss)?;
        losses.push(f64::from(loss.to_scalar::<f32>()?));
        if (step + 1) % REPORT == 0 || step + 1 == training.steps {
            let last = &losses[losses.len().saturating_sub(REPORT)..];
            let mean = last.iter().sum::<f64>() / last.len() as f64;
            println!("step {:>4}/{}: loss {mean:.4}, {:.0} s", step + 1, training.steps, began.elapsed().as_secs_f64());
        }
    }
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len().max(1) as f64;
    let some = losses.len().div_ceil(4);
    let ends = [mean(&losses[..some]), mean(&losses[losses.len() - some..])];
    let tensors = variables.into_iter().map(|(name, variable)| (name, variable.as_detached_tensor())).collect();
    Ok((tensors, ends))
}

/// Videos at random noise levels.
struct Batch {
    noisy: Tensor,
    /// Noise without the video.
    velocity: Tensor,
    times: Vec<f32>,
    text: Tensor,
}

impl Batch {
    fn draw(examples: &Examples, size: usize, random: &mut ChaCha8Rng) -> Result<Self> {
        let (mut noisy, mut velocity, mut times, mut text) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..size {
            let (prompt, latents) = &examples.videos[(random.next_u64() % examples.videos.len() as u64) as usize];
            let prompt = if random.next_u64().is_multiple_of(WITHOUT_PROMPT) { PROMPTS } else { *prompt };
            let uniform = (random.next_u32() as f64 + 0.5) / 2f64.powi(32);
            let sigma = SHIFT * uniform / (1.0 + (SHIFT - 1.0) * uniform);
            let noise = noise(random.next_u64(), latents.dims())?;
            noisy.push(((latents * (1.0 - sigma))? + (&noise * sigma)?)?);
            velocity.push((noise - latents)?);
            times.push((1000.0 * sigma) as f32);
            text.push(examples.prompts.get(prompt).ok_or_else(|| Error::Input(format!("no prompt {prompt}")))?.clone());
        }
        Ok(Self {
            noisy: Tensor::cat(&noisy, 0)?,
            velocity: Tensor::cat(&velocity, 0)?,
            times,
            text: Tensor::cat(&text, 0)?,
        })
    }
}

/// The patches of latents in the order of the transformer's output: by frame, row and column, the channel last.
fn patches(grid: &TokenGrid, latents: &Tensor, config: &WanConfig) -> Result<Tensor> {
    let tokens = latents.dim(0)? * grid.tokens();
    let by_channel = grid.patches(latents, &(0..tokens).collect::<Vec<_>>())?;
    let by_channel = by_channel.reshape((tokens, config.out_channels(), config.patch()))?.to_dtype(DType::F32)?;
    Ok(by_channel.transpose(1, 2)?.contiguous()?.flatten_from(1)?)
}
