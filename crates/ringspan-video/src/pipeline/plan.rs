//! The plan of a video, computed from shapes alone: the mesh, tokens, bytes, operations, and the memory of each stage.

use super::{Images, VideoPipeline, VideoRequest, VideoStage};
use crate::bytes_text::bytes_text;
use crate::denoise::{DenoiseInputs, DenoisePlan};
use crate::error::{Error, Result};
use crate::ranks::VideoMesh;
use crate::text_encoder::{PROMPT_ROWS, PromptTokens};
use crate::vae;
use candle_core::{DType, Device, Tensor};
use std::fmt;

/// The plan of a video.
#[derive(Debug)]
pub struct VideoPlan {
    pub(super) prompt: PromptTokens,
    pub(super) negative: Option<PromptTokens>,
    /// `[1, C, F, H, W]`, with a frame before the others for each reference of a control.
    pub(super) latents: [usize; 5],
    pub(super) encode: Option<vae::Plan>,
    /// The plan of a reference's encoding.
    pub(super) reference: Option<vae::Plan>,
    pub(super) denoise: DenoisePlan,
    pub(super) preview: Option<Preview>,
    pub(super) decode: vae::Plan,
    /// `[1, 3, F, H, W]`.
    frames: [usize; 5],
    stages: Vec<StageMemory>,
    /// Ranks of this machine.
    local: usize,
}

/// What is decoded while the transformer computes.
#[derive(Debug)]
pub(super) struct Preview {
    /// The step after which it is decoded.
    pub(super) step: usize,
    pub(super) decode: PreviewDecoding,
}

/// How a preview is decoded.
#[derive(Debug)]
pub(super) enum PreviewDecoding {
    /// The first frame, by the autoencoder.
    FirstFrame(vae::Plan),
    /// All frames, by the tiny decoder, which takes so many bytes with its weights and the frames.
    Video { bytes: u64 },
}

impl PreviewDecoding {
    fn bytes(&self) -> u64 {
        match self {
            Self::FirstFrame(plan) => plan.weights() + plan.bytes_with_frames(),
            Self::Video { bytes } => *bytes,
        }
    }
}

/// The memory of a stage, in bytes.
#[derive(Debug, Clone, Copy)]
struct StageMemory {
    stage: VideoStage,
    /// Weights that the ranks of a process share, and tensors of the whole video.
    shared: u64,
    /// What each rank has of its own.
    of_rank: u64,
    /// What rank 0 has in addition.
    of_lead: u64,
}

impl StageMemory {
    /// Bytes on a machine with so many ranks in so many processes.
    fn bytes(self, ranks: usize, processes: usize) -> u64 {
        self.shared * processes as u64 + self.of_rank * ranks as u64 + self.of_lead
    }
}

impl VideoPipeline {
    /// The plan of a request on a mesh. Nothing is computed and no weight is read.
    ///
    /// # Errors
    /// Everything in which the request, the pipeline and the mesh do not fit each other, with the numbers.
    pub fn plan(&self, request: &VideoRequest, mesh: &VideoMesh) -> Result<VideoPlan> {
        self.check_images(request)?;
        self.check_control(request)?;
        let channels = self.denoiser.transformer(0).config().out_channels();
        let [frames, height, width] = self.denoiser.latents_of(request.size)?;
        let of_video = [1, channels, frames, height, width];
        let latents = [1, channels, request.control.references.len() + frames, height, width];
        let guided = request.settings.guidance[..self.denoiser.stages()].iter().any(|guidance| *guidance != 1.0);
        if request.negative.is_some() && !guided {
            return Err(Error::Input("a negative prompt has no effect with guidance 1".into()));
        }
        let prompt = self.tokenizer.encode(&request.prompt, PROMPT_ROWS)?;
        let empty = String::new();
        let negative = guided.then(|| request.negative.as_ref().unwrap_or(&empty));
        let negative = negative.map(|negative| self.tokenizer.encode(negative, PROMPT_ROWS)).transpose()?;

        let shaped = |shape: &[usize]| -> Result<Tensor> {
            Ok(Tensor::zeros((), DType::F32, &Device::Cpu)?.broadcast_as(shape)?)
        };
        let embeds = [1, PROMPT_ROWS, self.text_encoder.config().d_model];
        let condition = self.condition_shape(request, latents);
        let inputs = DenoiseInputs {
            prompt_embeds: shaped(&embeds)?,
            negative_prompt_embeds: negative.as_ref().map(|_| shaped(&embeds)).transpose()?,
            latents: shaped(&latents)?,
            image_embeds: self.image_embeds_shape(request).map(|shape| shaped(&shape)).transpose()?,
            condition: condition.map(|shape| shaped(&shape)).transpose()?,
            control: match self.images {
                Images::Control => Some(shaped(&[1, self.control_channels(), latents[2], height, width])?),
                _ => None,
            },
            control_scale: self.control_scale(request),
        };
        let denoise = DenoisePlan::new(&self.denoiser, mesh, &inputs, &request.settings)?;
        denoise.check_memory(request.memory)?;
        let (ranks, memory) = (mesh.size(), request.memory);
        let encode =
            self.encoded_shape(request).map(|shape| self.vae.plan_encoding(shape, ranks, memory)).transpose()?;
        let decode = self.vae.plan_decoding(of_video, ranks, memory)?;
        let [count, rows, columns] = request.size;
        let reference = match request.control.references.len() {
            0 => None,
            _ => Some(self.vae.plan_encoding([1, 3, 1, rows, columns], ranks, memory)?),
        };
        let preview = match request.preview {
            true => {
                let step = request.settings.steps.div_ceil(4);
                Some(Preview { step, decode: self.plan_preview(of_video, memory)? })
            }
            false => None,
        };
        let mut plan = VideoPlan {
            prompt,
            negative,
            latents,
            encode,
            reference,
            denoise,
            preview,
            decode,
            frames: [1, 3, count, rows, columns],
            stages: Vec::new(),
            local: mesh.processes.local().unwrap_or(ranks),
        };
        plan.stages = self.stages(request, &plan, ranks)?;
        Ok(plan)
    }

    /// How a preview of latents `[1, C, F, H, W]` is decoded, by one rank.
    fn plan_preview(&self, latents: [usize; 5], memory: Option<u64>) -> Result<PreviewDecoding> {
        let Some(tiny) = &self.tiny_decoder else {
            let [batch, channels, _, height, width] = latents;
            return Ok(PreviewDecoding::FirstFrame(self.vae.plan_decoding(
                [batch, channels, 1, height, width],
                1,
                memory,
            )?));
        };
        let (bytes, frames) = (tiny.bytes(latents), tiny.frames(latents)?);
        match memory.filter(|memory| bytes > *memory) {
            Some(memory) => Err(Error::Input(format!(
                "the tiny decoder takes {} for frames of this size, more than the memory of {} that is given; without it, a preview \
                 takes less",
                bytes_text(bytes),
                bytes_text(memory)
            ))),
            None => Ok(PreviewDecoding::Video {
                bytes: tiny.weights() + bytes + 4 * frames.iter().product::<usize>() as u64,
            }),
        }
    }

    fn stages(&self, request: &VideoRequest, plan: &VideoPlan, ranks: usize) -> Result<Vec<StageMemory>> {
        let elements = |shape: [usize; 5]| shape.into_iter().product::<usize>() as u64;
        let of_vae = |stage, coding: &vae::Plan, tensors: u64| StageMemory {
            stage,
            shared: coding.weights() + tensors,
            of_rank: coding.bytes_with_frames(),
            of_lead: 0,
        };
        let tokens = plan.negative.iter().map(|negative| negative.ids.len()).fold(plan.prompt.ids.len(), usize::max);
        let text = self.text_encoder.bytes(tokens, ranks)?;
        let mut stages = vec![StageMemory { stage: VideoStage::Text, shared: 0, of_rank: text, of_lead: 0 }];
        if let (Some(encoder), Some(images)) = (&self.image_encoder, self.embedded_images(request)) {
            let of_rank = encoder.bytes(images.len(), ranks);
            stages.push(StageMemory { stage: VideoStage::Image, shared: 0, of_rank, of_lead: 0 });
        }
        if let (Some(encode), Some(shape)) = (&plan.encode, self.encoded_shape(request)) {
            // A control has its frames, the part of them that is being encoded, and a mask of one channel instead of three.
            let channels = if self.images == Images::Control { 3 + 3 + 1 } else { 3 };
            stages.push(of_vae(VideoStage::Encode, encode, 4 * elements(shape) / 3 * channels));
        }
        let preview = plan.preview.as_ref().map_or(0, |preview| preview.decode.bytes());
        stages.push(StageMemory {
            stage: VideoStage::Denoise,
            shared: plan.denoise.most_weights(),
            of_rank: plan.denoise.activations(),
            of_lead: preview,
        });
        // The ranks' parts, which their plan counts, are joined to the frames.
        stages.push(of_vae(VideoStage::Decode, &plan.decode, 4 * elements(plan.frames)));
        Ok(stages)
    }
}

impl VideoPlan {
    /// The stage that needs most memory on this machine, and its bytes.
    fn fullest(&self) -> Option<(VideoStage, u64)> {
        self.stages.iter().map(|stage| (stage.stage, self.bytes_of(stage))).max_by_key(|(_, bytes)| *bytes)
    }

    /// Bytes of a stage on this machine.
    fn bytes_of(&self, stage: &StageMemory) -> u64 {
        stage.bytes(self.local, self.denoise.local_processes())
    }

    /// Refuses a video that does not fit into `free` bytes of this machine's memory.
    ///
    /// # Errors
    /// The stage that does not fit, with the numbers.
    pub fn check_free(&self, free: u64) -> Result<()> {
        match self.fullest().filter(|(_, bytes)| *bytes > free) {
            Some((stage, bytes)) => Err(Error::Input(format!(
                "the stage {stage} needs about {} of memory on this machine ({} ranks), and {} are free",
                bytes_text(bytes),
                self.local,
                bytes_text(free)
            ))),
            None => Ok(()),
        }
    }

    /// The number of floating-point operations of all steps, over all ranks.
    #[must_use]
    pub fn operations(&self) -> f64 {
        self.denoise.operations()
    }

    /// The shape `[1, 3, F, H, W]` of the frames.
    #[must_use]
    pub fn frames(&self) -> [usize; 5] {
        self.frames
    }

    /// The numbers of tokens that are cut off the prompt and the negative prompt, which are too long.
    #[must_use]
    pub fn cut(&self) -> [usize; 2] {
        [self.prompt.cut, self.negative.as_ref().map_or(0, |negative| negative.cut)]
    }
}

impl fmt::Display for VideoPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [_, _, frames, height, width] = self.frames;
        writeln!(f, "video     {frames} frames of {width} x {height}")?;
        write!(f, "prompt    {} tokens", self.prompt.ids.len())?;
        if let Some(negative) = &self.negative {
            write!(f, ", negative prompt {}", negative.ids.len())?;
        }
        writeln!(f, "\n{}", self.denoise)?;
        if let Some(encode) = &self.encode {
            writeln!(f, "encode    {encode}")?;
        }
        if let Some(preview) = &self.preview {
            let shown = match preview.decode {
                PreviewDecoding::FirstFrame(_) => "the first frame",
                PreviewDecoding::Video { .. } => "all frames, by the tiny decoder",
            };
            writeln!(f, "preview   {shown} after step {}", preview.step)?;
        }
        writeln!(f, "decode    {}", self.decode)?;
        let stages = self.stages.iter().map(|memory| format!("{} {}", memory.stage, bytes_text(self.bytes_of(memory))));
        write!(f, "machine   {} ranks here: {}", self.local, stages.collect::<Vec<_>>().join(", "))
    }
}
