//! `ringspan attend`: attention on tensors of a file, so that anyone can check us from any language.

mod args;
mod compute;
mod input;
mod report;

pub(crate) use args::AttendArgs;

use crate::files::{self, Out, TensorFile};
use crate::say;
use anyhow::{Context, Result, ensure};
use compute::Work;
use input::Input;
use report::Report;
use ringspan::schedule::HeadShare;
use ringspan::{Layout, Schedule};
use safetensors::Dtype;

pub(crate) fn run(args: &AttendArgs) -> Result<()> {
    let (ranks, threads) = args.mesh.start()?;
    files::check_output("--out", &args.out)?;
    if let Some(report) = &args.report {
        files::check_output("--report", report)?;
        ensure!(*report != args.out, "--report and --out name the same file, {}", report.display());
    }
    let file = TensorFile::read(&args.input)?;
    let tensors = file.parse()?;
    let input = Input::new(&tensors, args.backward)?;
    let unknown = input::unknown(&tensors);
    if !unknown.is_empty() {
        eprintln!("note: {} also holds {}, which attend does not use", args.input.display(), unknown.join(", "));
    }
    let sizes = input.sizes;
    let scale = args.scale.unwrap_or(1.0 / (sizes.dim as f32).sqrt());
    ensure!(scale.is_finite(), "--scale {scale} is not a finite number");
    HeadShare::all(sizes.heads, sizes.kv_heads, args.mesh.ring, args.mesh.ulysses)?;

    let kind = args.layout();
    let query = Layout::new(kind, &input.query_documents, ranks)?;
    let key = Layout::new(kind, &input.key_documents, ranks)?;
    let schedule = Schedule::new(args.strategy, &query, &key, &args.visibility(), args.mesh.ring, args.mesh.ulysses)?;
    let work = Work { input: &input, schedule: &schedule, scale, threads, repeat: args.repeat as usize };
    let parts = work.run()?;
    let report = Report::new(args, &work, &parts, kind);
    let results = work.join(parts)?;

    let mut out = vec![
        Out::new("out", input.q.dtype, vec![sizes.batch, sizes.queries, sizes.heads, sizes.v_dim], results.out),
        Out::new("lse", Dtype::F32, vec![sizes.batch, sizes.heads, sizes.queries], results.lse),
    ];
    if let Some([dq, dk, dv]) = results.gradients {
        out.push(Out::new("dq", input.q.dtype, input.q.shape.to_vec(), dq));
        out.push(Out::new("dk", input.k.dtype, input.k.shape.to_vec(), dk));
        out.push(Out::new("dv", input.v.dtype, input.v.shape.to_vec(), dv));
    }
    files::write_tensors(&args.out, &out)?;
    if let Some(path) = &args.report {
        files::write(path, serde_json::to_string_pretty(&report)?.as_bytes()).context("the report")?;
    }
    say::line(&report)?;
    Ok(())
}
