//! Runs the stages of a pipeline, one after the other.

use super::plan::PreviewDecoding;
use super::{Images, VideoPipeline, VideoPlan, VideoRequest, VideoStage};
use crate::denoise::{DenoiseInputs, DenoiseStep, VideoMesh, denoise_in_each_process};
use crate::encoder_mesh::EncoderMesh;
use crate::error::{Error, Result};
use crate::noise::noise;
use crate::vae::{Mesh, Plan, VideoTensor};
use candle_core::{DType, Device, Tensor};
use ringspan::comm::Buffer;
use ringspan::comm::process_group::ProcessGroup;

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
    /// Makes a video, on all ranks of a mesh; `plan` is that of the same request and mesh. Returns the frames `[1, 3,
    /// F, H, W]` in [-1, 1], or `None` in a process without rank 0. `told` is called with each event, and an error of
    /// it ends the run.
    ///
    /// # Errors
    /// Failures of the file system and of any rank, latents that are not finite, an error of `told`.
    pub fn run(
        &self,
        request: &VideoRequest,
        mesh: &VideoMesh,
        plan: &VideoPlan,
        told: impl Fn(VideoEvent) -> Result<()> + Sync,
    ) -> Result<Option<VideoTensor>> {
        let tell = |event: VideoEvent| if mesh.processes.lead() { told(event) } else { Ok(()) };
        tell(VideoEvent::Began(VideoStage::Text))?;
        let prompt_embeds = self.embeds(&plan.prompt.ids, mesh)?;
        let negative_prompt_embeds =
            plan.negative.as_ref().map(|negative| self.embeds(&negative.ids, mesh)).transpose()?;
        let image_embeds = match (&self.image_encoder, self.embedded_images(request), self.image_embeds_shape(request))
        {
            (Some(encoder), Some(images), Some(shape)) => {
                tell(VideoEvent::Began(VideoStage::Image))?;
                let embeds = encoder.encode(&images, &encoder_mesh(mesh))?;
                Some(Tensor::from_vec(from_lead(&mesh.processes, embeds)?, &shape, &Device::Cpu)?)
            }
            _ => None,
        };
        let ranks = Mesh {
            processes: mesh.processes.clone(),
            size: mesh.size(),
            threads: mesh.threads,
            deadline: mesh.deadline,
        };
        let (mut condition, mut control) = (None, None);
        if let Some(encode) = &plan.encode {
            tell(VideoEvent::Began(VideoStage::Encode))?;
            let encoder = self.vae.encoder()?;
            let encoded = |frames: &VideoTensor, plan: &Plan| {
                let encoded = encoder.encode(frames, &ranks, plan)?.map(VideoTensor::into_values);
                VideoTensor::new(encoder.latents(frames.shape())?, from_lead(&mesh.processes, encoded)?)
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
                    told(VideoEvent::Preview(self.preview(&predicted, mesh, &preview.decode)?))
                }
                _ => Ok(()),
            }
        };
        let latents = denoise_in_each_process(&self.denoiser, mesh, &inputs, &request.settings, stepped)?;
        self.denoiser.release();
        drop(inputs);
        let references = request.control.references.len();
        let latents = video_tensor(&latents.narrow(2, references, latents.dim(2)? - references)?)?;
        tell(VideoEvent::Began(VideoStage::Decode))?;
        self.vae.decoder()?.decode(&latents, &ranks, &plan.decode)
    }

    /// The embeddings `[1, 512, text_dim]` of a prompt's tokens, with zeros after them, in every process.
    fn embeds(&self, tokens: &[u32], mesh: &VideoMesh) -> Result<Tensor> {
        let mut states = from_lead(&mesh.processes, self.text_encoder.encode(tokens, &encoder_mesh(mesh))?)?;
        let (rows, width) = (crate::text_encoder::PROMPT_ROWS, self.text_encoder.config().d_model);
        states.resize(rows * width, 0.0);
        Ok(Tensor::from_vec(states, (1, rows, width), &Device::Cpu)?)
    }

    /// Decodes the predicted latents `[1, C, F, H, W]`, or the first of them, by this rank alone.
    fn preview(&self, latents: &Tensor, mesh: &VideoMesh, decode: &PreviewDecoding) -> Result<VideoTensor> {
        match (decode, &self.tiny_decoder) {
            (PreviewDecoding::Video { .. }, Some(tiny)) => tiny.decode(&video_tensor(latents)?, mesh.threads),
            (PreviewDecoding::Video { .. }, None) => {
                Err(Error::Config("this pipeline has no tiny decoder, but its plan has".into()))
            }
            (PreviewDecoding::FirstFrame(plan), _) => {
                let processes = ProcessGroup::single();
                let alone = Mesh { processes, size: 1, threads: mesh.threads, deadline: mesh.deadline };
                let frame = self.vae.decoder()?.decode(&video_tensor(&latents.narrow(2, 0, 1)?)?, &alone, plan)?;
                frame.ok_or_else(|| Error::Mesh("a rank alone has no rank 0".into()))
            }
        }
    }
}

/// The ranks of an encoder: its tokens are few, so all ranks share them as a ring, of any size.
fn encoder_mesh(mesh: &VideoMesh) -> EncoderMesh {
    let (ring, threads, deadline) = (mesh.size(), mesh.threads, mesh.deadline);
    EncoderMesh { processes: mesh.processes.clone(), ring, ulysses: 1, threads, deadline }
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

/// Broadcasts the values of rank 0's process to every process.
fn from_lead(processes: &ProcessGroup, own: Option<Vec<f32>>) -> Result<Vec<f32>> {
    let Some(comm) = processes.comm() else { return Ok(own.unwrap_or_default()) };
    Ok(comm.broadcast(0, own.map(Buffer::F32))?.f32()?.to_vec())
}
