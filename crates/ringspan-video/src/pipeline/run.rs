//! Runs the stages of a pipeline, one after the other.

use super::plan::PreviewDecoding;
use super::{Images, VideoPipeline, VideoPlan, VideoRequest, VideoStage};
use crate::denoise::{DenoiseInputs, DenoiseStep, denoise_in_each_process};
use crate::error::{Error, Result};
use crate::noise::noise;
use crate::ranks::{VideoMesh, VideoRanks};
use crate::vae::{Plan, VideoTensor};
use candle_core::{DType, Device, Tensor};

/// An event of a run, reported in the process of rank 0.
#[derive(Debug)]
pub enum VideoEvent {
    /// A stage begins.
    Began(VideoStage),
    /// The blocks of the transformer were skipped in this step, which is counted from 1.
    Skipped(usize),
    /// So many steps have been taken.
    Stepped(usize),
    /// The first frame `[1, 3, 1, H, W]` of the video that the transformer predicts so far; with a tiny decoder all frames.
    Preview(VideoTensor),
}

impl VideoPipeline {
    /// Makes a video, on all ranks; `plan` is that of the same request and their mesh. Returns the frames `[1, 3,
    /// F, H, W]` in [-1, 1], or `None` in a process without rank 0. `told` is called with each event, and an error of
    /// it ends the run.
    ///
    /// # Errors
    /// Failures of the file system and of any rank, latents that are not finite, an error of `told`.
    pub fn run(
        &self,
        request: &VideoRequest,
        ranks: &mut VideoRanks,
        plan: &VideoPlan,
        told: impl Fn(VideoEvent) -> Result<()> + Sync,
    ) -> Result<Option<VideoTensor>> {
        let (lead, threads) = (ranks.processes().lead(), ranks.mesh().threads);
        let tell = |event: VideoEvent| if lead { told(event) } else { Ok(()) };
        tell(VideoEvent::Began(VideoStage::Text))?;
        let prompt_embeds = self.embeds(&plan.prompt.ids, ranks)?;
        let negative_prompt_embeds =
            plan.negative.as_ref().map(|negative| self.embeds(&negative.ids, ranks)).transpose()?;
        let image_embeds = match (&self.image_encoder, self.embedded_images(request), self.image_embeds_shape(request))
        {
            (Some(encoder), Some(images), Some(shape)) => {
                tell(VideoEvent::Began(VideoStage::Image))?;
                let embeds = encoder.encode(&images, ranks)?;
                Some(Tensor::from_vec(ranks.broadcast(embeds)?, &shape, &Device::Cpu)?)
            }
            _ => None,
        };
        let (mut condition, mut control) = (None, None);
        if let Some(encode) = &plan.encode {
            tell(VideoEvent::Began(VideoStage::Encode))?;
            let encoder = self.vae.encoder()?;
            let mut encoded = |frames: &VideoTensor, plan: &Plan| {
                let encoded = encoder.encode(frames, ranks, plan)?.map(VideoTensor::into_values);
                VideoTensor::new(encoder.latents(frames.shape())?, ranks.broadcast(encoded)?)
            };
            if self.images == Images::Control {
                control = Some(self.control(request, |frames| {
                    // References are single frames, and have a plan of their own unless the video is one, too.
                    let plan = plan.reference.as_ref().filter(|_| frames.shape()[2] == 1).unwrap_or(encode);
                    let encoded = encoded(frames, plan)?;
                    Ok(Tensor::from_slice(encoded.values(), encoded.shape().as_slice(), &Device::Cpu)?)
                })?);
            } else if let Some(frames) = self.frames_to_encode(request)? {
                condition = Some(self.condition(request, &encoded(&frames, encode)?)?);
            }
        }
        tell(VideoEvent::Began(VideoStage::Denoise))?;
        // What is given of the first frame stays as it is; predictions of it have no meaning.
        let given = if self.images == Images::FirstFrame { condition.clone() } else { None };
        let inputs = DenoiseInputs {
            prompt_embeds,
            negative_prompt_embeds,
            latents: noise(request.seed, &plan.latents)?,
            image_embeds,
            condition,
            control,
            control_scale: self.control_scale(request),
        };
        let stepped = |step: &DenoiseStep| {
            if step.skipped {
                told(VideoEvent::Skipped(step.number))?;
            }
            told(VideoEvent::Stepped(step.number))?;
            match &plan.preview {
                Some(preview) if preview.step == step.number => {
                    let (predicted, references) = (step.predicted()?, request.control.references.len());
                    let mut predicted = predicted.narrow(2, references, predicted.dim(2)? - references)?;
                    if let Some(first) = &given {
                        let rest = predicted.narrow(2, 1, predicted.dim(2)? - 1)?;
                        predicted = Tensor::cat(&[&first.to_dtype(rest.dtype())?, &rest], 2)?;
                    }
                    told(VideoEvent::Preview(self.preview(&predicted, threads, &preview.decode)?))
                }
                _ => Ok(()),
            }
        };
        let latents = denoise_in_each_process(&self.denoiser, ranks, &inputs, &request.settings, stepped)?;
        self.denoiser.release();
        drop(inputs);
        let references = request.control.references.len();
        let latents = video_tensor(&latents.narrow(2, references, latents.dim(2)? - references)?)?;
        tell(VideoEvent::Began(VideoStage::Decode))?;
        self.vae.decoder()?.decode(&latents, ranks, &plan.decode)
    }

    /// The embeddings `[1, 512, text_dim]` of a prompt's tokens, with zeros after them, in every process.
    fn embeds(&self, tokens: &[u32], ranks: &mut VideoRanks) -> Result<Tensor> {
        let states = self.text_encoder.encode(tokens, ranks)?;
        let mut states = ranks.broadcast(states)?;
        let (rows, width) = (crate::text_encoder::PROMPT_ROWS, self.text_encoder.config().d_model);
        states.resize(rows * width, 0.0);
        Ok(Tensor::from_vec(states, (1, rows, width), &Device::Cpu)?)
    }

    /// Decodes the predicted latents `[1, C, F, H, W]`, or the first of them, by this rank alone.
    fn preview(&self, latents: &Tensor, threads: usize, decode: &PreviewDecoding) -> Result<VideoTensor> {
        match (decode, &self.tiny_decoder) {
            (PreviewDecoding::Video { .. }, Some(tiny)) => tiny.decode(&video_tensor(latents)?, threads),
            (PreviewDecoding::Video { .. }, None) => {
                Err(Error::Config("this pipeline has no tiny decoder, but its plan has".into()))
            }
            (PreviewDecoding::FirstFrame(plan), _) => {
                let mut alone = VideoRanks::start(&VideoMesh { threads, ..VideoMesh::single() })?;
                let frame = self.vae.decoder()?.decode(&video_tensor(&latents.narrow(2, 0, 1)?)?, &mut alone, plan)?;
                frame.ok_or_else(|| Error::Mesh("a rank alone has no rank 0".into()))
            }
        }
    }
}

/// Latents as the autoencoder takes them.
fn video_tensor(latents: &Tensor) -> Result<VideoTensor> {
    let (batch, channels, frames, height, width) = latents.dims5()?;
    let values = latents.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let bad = values.iter().filter(|x| !x.is_finite()).count();
    if bad > 0 {
        return Err(Error::Input(format!("{bad} of {} latents are not finite", values.len())));
    }
    VideoTensor::new([batch, channels, frames, height, width], values)
}
