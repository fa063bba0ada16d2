//! From a prompt to the frames of a video: text encoder, transformers and decoder of a pipeline's folder, one after the
//! other on the same ranks. Each stage's weights are freed before the next stage reads its own.

mod condition;
mod control;
mod plan;
mod run;
mod stage;

pub use control::VideoControl;
pub use plan::VideoPlan;
pub use run::VideoEvent;
pub use stage::VideoStage;

use crate::denoise::{DenoiseFolder, DenoiseSettings};
use crate::error::{Error, Result};
use crate::frames::RgbFrame;
use crate::image_encoder::ImageEncoder;
use crate::lora::LoraSource;
use crate::tensor_folder::read_json;
use crate::text_encoder::{PromptTokenizer, TextEncoder};
use crate::transformer::WeightType;
use crate::vae::{TinyDecoderFile, VaeFolder};
use serde_json::{Map, Value};
use std::path::Path;

/// A pipeline's folder as diffusers saves it. Configurations and headers have been read, weights have not.
#[derive(Debug)]
pub struct VideoPipeline {
    tokenizer: PromptTokenizer,
    text_encoder: TextEncoder,
    /// The encoder of images, whose embeddings the transformers of 2.1 take.
    image_encoder: Option<ImageEncoder>,
    denoiser: DenoiseFolder,
    vae: VaeFolder,
    /// A decoder for previews.
    tiny_decoder: Option<TinyDecoderFile>,
    images: Images,
}

/// How the pipeline uses images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Images {
    /// It takes none.
    None,
    /// Their latents are appended to the channels, with a mask of so many channels; it needs the first image.
    Appended { mask: usize },
    /// The first frame may be given (TI2V).
    FirstFrame,
    /// They are part of a control (VACE).
    Control,
}

/// A video to make.
#[derive(Debug, Clone)]
pub struct VideoRequest {
    /// What the video should show.
    pub prompt: String,
    /// What it should not show; the empty text if there is guidance and none is given.
    pub negative: Option<String>,
    /// The first frame, of any size.
    pub image: Option<RgbFrame>,
    /// The last frame, of any size.
    pub last_image: Option<RgbFrame>,
    /// What VACE takes.
    pub control: VideoControl,
    /// Frames, height and width in pixels.
    pub size: [usize; 3],
    /// The seed of the noise.
    pub seed: u64,
    /// Steps, scheduler and guidance.
    pub settings: DenoiseSettings,
    /// The most bytes of activations and buffers on each rank.
    pub memory: Option<u64>,
    /// Whether the first frame, or with a tiny decoder the whole video, is decoded a quarter of the steps in.
    pub preview: bool,
}

/// The files by which a pipeline's folder is recognized, each with another one that may be in its place.
const FILES: [(&str, Option<&str>); 4] = [
    ("tokenizer/tokenizer.json", Some("tokenizer/spiece.model")),
    ("text_encoder/config.json", None),
    ("transformer/config.json", None),
    ("vae/config.json", None),
];

impl VideoPipeline {
    /// Opens a pipeline's folder; weights are read when they are needed.
    ///
    /// # Errors
    /// A folder of something else, files and tensors that are missing, components that do not fit each other, and pipelines that
    /// need more than a prompt and images.
    pub fn open(path: &Path, weights: WeightType) -> Result<Self> {
        let refuse = |problem: String| Err(Error::Format { path: path.to_owned(), problem });
        let exists = |file: &str| path.join(file).is_file();
        if let Some((missing, _)) = FILES.into_iter().find(|(file, other)| !exists(file) && !other.is_some_and(exists))
        {
            let named =
                FILES.map(|(file, other)| other.map_or(file.to_owned(), |other| format!("{file} (or {other})")));
            return refuse(format!(
                "{missing} is missing; a pipeline's folder, as diffusers saves it, has {}",
                named.join(", ")
            ));
        }
        let index = match path.join("model_index.json") {
            file if file.is_file() => read_json::<Map<String, Value>>(&file)?,
            _ => Map::new(),
        };
        let denoiser = DenoiseFolder::open(path, weights)?;
        let (text_encoder, vae) = (TextEncoder::open(path)?, VaeFolder::open(path)?);
        let config = denoiser.transformer(0).config();
        let (inputs, channels) = (config.in_channels, config.out_channels());
        let (of_control, is_vace) = (config.vace_in_channels, config.vace_layers.is_some());
        let image_encoder = match config.image_dim {
            Some(dim) => Some(Self::open_image_encoder(path, dim, config.pos_embed_seq_len)?),
            None => None,
        };
        let (text, wanted) = (text_encoder.config().d_model, config.text_dim);
        if text != wanted {
            return refuse(format!(
                "text_encoder gives {text} numbers a token (d_model), transformer takes {wanted} (text_dim)"
            ));
        }
        let z = vae.config().z_dim;
        if z != channels {
            return refuse(format!("transformer has {channels} channels of latents (out_channels), vae {z} (z_dim)"));
        }
        let images = match inputs.checked_sub(channels) {
            Some(0) if is_vace => Images::Control,
            Some(0) if index.get("expand_timesteps").and_then(Value::as_bool) == Some(true) => Images::FirstFrame,
            Some(0) => Images::None,
            Some(more) if more == z + vae.config().time() => Images::Appended { mask: more - z },
            _ => {
                return refuse(format!(
                    "transformer takes {inputs} channels; with latents of {channels}, possible are {channels}, and with the mask \
                     and the latents of an image {}",
                    channels + z + vae.config().time()
                ));
            }
        };
        if image_encoder.is_some() && !matches!(images, Images::Appended { .. }) {
            return refuse(
                "transformer takes embeddings of images (image_dim), but no channels of their latents".into(),
            );
        }
        let tokenizer = PromptTokenizer::open(path)?;
        let pipeline = Self { tokenizer, text_encoder, image_encoder, denoiser, vae, tiny_decoder: None, images };
        match of_control.filter(|given| is_vace && *given != pipeline.control_channels()) {
            Some(given) => refuse(format!(
                "transformer takes a control of {given} channels (vace_in_channels); with this vae it has {}: twice the latents and a \
                 mask of each of their pixels",
                pipeline.control_channels()
            )),
            None => Ok(pipeline),
        }
    }

    /// The encoder of images for a transformer that takes embeddings of width `dim`, and if it has positions, so many of them.
    fn open_image_encoder(path: &Path, dim: usize, positions: Option<usize>) -> Result<ImageEncoder> {
        let refuse = |problem: String| Err(Error::Format { path: path.to_owned(), problem });
        let files = ["image_encoder/config.json", "image_processor/preprocessor_config.json"];
        if let Some(missing) = files.into_iter().find(|file| !path.join(file).is_file()) {
            return refuse(format!(
                "{missing} is missing: the transformer takes the embeddings of an image encoder (image_dim {dim}); `ringspan \
                 denoise` takes them from the file of --embeds"
            ));
        }
        let encoder = ImageEncoder::open(path)?;
        let (width, embeddings) = (encoder.config().hidden_size, encoder.config().embeddings());
        if width != dim {
            return refuse(format!(
                "image_encoder gives {width} numbers an embedding (hidden_size), transformer takes {dim} (image_dim)"
            ));
        }
        match positions.filter(|positions| *positions != 2 * embeddings) {
            Some(positions) => refuse(format!(
                "image_encoder gives {embeddings} embeddings an image, and transformer has {positions} positions for two images \
                 (pos_embed_seq_len)"
            )),
            None => Ok(encoder),
        }
    }

    /// The pipeline with adapters of the transformer of a stage, instead of those that it had; without sources those stay.
    ///
    /// # Errors
    /// As for [`DenoiseFolder::with_loras`].
    pub fn with_loras(self, stage: usize, sources: &[LoraSource]) -> Result<Self> {
        Ok(Self { denoiser: self.denoiser.with_loras(stage, sources)?, ..self })
    }

    /// The pipeline with a tiny decoder, so that previews show the whole video.
    ///
    /// # Errors
    /// A decoder of other latents than those of the pipeline.
    pub fn with_tiny_decoder(self, decoder: TinyDecoderFile) -> Result<Self> {
        let vae = self.vae.config();
        let (found, wanted) = (decoder.sizes(), [vae.z_dim, vae.time(), vae.space()]);
        if found != wanted {
            return Err(Error::Config(format!(
                "the tiny decoder takes latents of {} channels, {} frames and {} x {} pixels, but those of the pipeline have {}, {} and \
                 {} x {}",
                found[0], found[1], found[2], found[2], wanted[0], wanted[1], wanted[2], wanted[2]
            )));
        }
        Ok(Self { tiny_decoder: Some(decoder), ..self })
    }

    /// The transformers and the scheduler.
    #[must_use]
    pub fn denoiser(&self) -> &DenoiseFolder {
        &self.denoiser
    }
}
