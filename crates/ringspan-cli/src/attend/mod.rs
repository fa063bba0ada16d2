//! `ringspan attend`: attention on tensors of a file, so that anyone can check the results from any language.

pub mod args;
mod compute;
pub mod input;
mod memory_check;
pub mod parameters;
mod plan;
mod report;
mod results;

pub use args::AttendArgs;

use crate::device::Devices;
use crate::files::{self, TensorBytes};
use crate::{allocator, output};
use anyhow::{Context, Result, ensure};
use compute::RankWork;
use input::Input;
use report::Report;
use ringspan::comm::process_group::ProcessGroup;

pub(crate) fn run(args: &AttendArgs, processes: &ProcessGroup) -> Result<()> {
    if args.support {
        output::line(ringspan::support::table().trim_end())?;
        return Ok(());
    }
    // The argument parser requires both unless --support is given.
    let (input, out) = args.input.as_ref().zip(args.out.as_ref()).context("IN and --out are needed")?;
    let (_, threads) = args.mesh.start(processes)?;
    files::check_output("--out", out)?;
    if let Some(report) = &args.report {
        files::check_output("--report", report)?;
        ensure!(report != out, "--report and --out name the same file, {}", report.display());
    }
    let file = TensorBytes::read(input)?;
    let tensors = file.parse()?;
    let data = Input::new(&tensors, args.backward)?;
    let unknown = input::unknown(&tensors);
    if !unknown.is_empty() {
        output::note(format_args!(
            "note: {} also holds {}, which attend does not use",
            input.display(),
            unknown.join(", ")
        ));
    }
    let mask = parameters::mask(args, &tensors, data.query_documents.len())?;
    let terms = parameters::terms(args, &tensors, &data.sizes)?;
    let devices = Devices::open(args.device, processes, threads, args.mesh.gives_threads(), args.isa.fixed())?;
    let plan = plan::Plan::new(args, tensors.path(), &data, &mask, &terms, devices.threads())?;
    memory_check::check(&plan, &data.sizes, args.backward, processes)?;
    if processes.local().is_none() {
        allocator::avoid_large_pages(plan.schedule.query().ranks());
    }
    let (connected, blocks) = devices.connect(processes)?;
    blocks.iter().for_each(output::note);
    let work = RankWork {
        input: &data,
        schedule: &plan.schedule,
        terms: &terms,
        wire: plan.wire,
        devices: &devices,
        repeat: args.repeat as usize,
        blocks,
    };
    let Some(parts) = work.run(&connected)? else { return Ok(()) };
    let report = Report::new(&work, &plan, &parts);
    files::write_tensors(out, &results::join(&work, &parts)?)?;
    if let Some(path) = &args.report {
        files::write(path, serde_json::to_string_pretty(&report)?.as_bytes()).context("the report")?;
    }
    output::line(&report)?;
    Ok(())
}
