//! `ringspan text-embed`: the embeddings of a prompt, by UMT5's encoder.

use crate::files::{self, OutputTensor};
use crate::mesh::MeshArgs;
use crate::output;
use crate::video_io;
use anyhow::{Context, Result};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_video::ranks::VideoRanks;
use ringspan_video::text_encoder::{PROMPT_ROWS, PromptTokenizer, TextEncoder};
use safetensors::Dtype;
use std::path::PathBuf;
use std::time::Instant;

/// Make the embeddings of a prompt for WAN's transformer with UMT5's encoder, over a mesh of ranks that share the tokens
///
/// OUT receives `prompt_embeds` [1,512,d] f32, and with --negative also `negative_prompt_embeds`: the states of the prompt's
/// tokens with the end token, and zeros after them. Weights are read layer by layer. Only the number of ranks, R x U, counts
/// here: the tokens are shared by a ring of all ranks.
#[derive(Debug, clap::Args)]
pub(crate) struct TextEmbedArgs {
    /// The folder of a pipeline, with text_encoder and tokenizer, or of an encoder with tokenizer.json or spiece.model in it
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// The prompt
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Negative prompt, which says what the video should not show
    #[arg(long, value_name = "TEXT")]
    negative: Option<String>,
    /// The safetensors file for the embeddings
    #[arg(long, value_name = "OUT")]
    out: PathBuf,
    #[command(flatten)]
    mesh: MeshArgs,
}

pub(crate) fn run(args: &TextEmbedArgs, processes: &ProcessGroup) -> Result<()> {
    files::check_output("--out", &args.out)?;
    let mut ranks = VideoRanks::start(&video_io::mesh(&args.mesh, false, processes)?)?;
    let of_model = || format!("--model {}", args.model.display());
    let tokenizer = PromptTokenizer::open(&args.model).with_context(of_model)?;
    let encoder = TextEncoder::open(&args.model).with_context(of_model)?;
    let width = encoder.config().d_model;
    let began = Instant::now();
    let mut out = Vec::new();
    let mut count = 0;
    let prompts = [("prompt_embeds", Some(&args.prompt)), ("negative_prompt_embeds", args.negative.as_ref())];
    for (name, prompt) in prompts.into_iter().filter_map(|(name, prompt)| Some((name, prompt?))) {
        let tokens = tokenizer.encode(prompt, PROMPT_ROWS)?;
        if tokens.cut > 0 {
            output::note(format_args!(
                "note: {name}: the last {} tokens are cut off, since {PROMPT_ROWS} are kept",
                tokens.cut
            ));
        }
        count += tokens.ids.len();
        let Some(mut states) = encoder.encode(&tokens.ids, &mut ranks)? else { continue };
        states.resize(PROMPT_ROWS * width, 0.0);
        out.push(OutputTensor::new(name, Dtype::F32, vec![1, PROMPT_ROWS, width], states));
    }
    if out.is_empty() {
        return Ok(());
    }
    files::write_tensors(&args.out, &out)?;
    let seconds = began.elapsed().as_secs_f64();
    output::line(format_args!("embeddings of {count} tokens in {seconds:.2} s: {}", args.out.display()))?;
    Ok(())
}
