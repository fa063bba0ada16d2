//! `ringspan export`: a model folder from a checkpoint.

use crate::output;
use anyhow::Result;
use ringspan::comm::process_group::ProcessGroup;
use ringspan_models::folder::SavedType;
use std::path::PathBuf;

/// Write the model of a training's checkpoint as a model folder in the layout of Hugging Face.
///
/// Works on a run that was stopped, failed, or still goes on; a run that ends does it by itself.
#[derive(Debug, clap::Args)]
pub(crate) struct ExportArgs {
    /// The training's folder
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// The checkpoint of this step [default: the newest]
    #[arg(long, value_name = "N")]
    step: Option<u64>,
    /// Folder for the model [default: RUN itself]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Type in which it is saved: f32, bf16 [default: as the training says]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<SavedType>,
}

pub(crate) fn run(args: &ExportArgs, processes: &ProcessGroup) -> Result<()> {
    processes.check(1)?;
    let done = ringspan_train::export(&args.run, args.step, args.out.as_deref(), args.dtype)?;
    output::line(format_args!("model of step {}  {}", done.step, done.out.display()))?;
    Ok(())
}
