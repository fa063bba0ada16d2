//! `ringspan bench`: measures the latency and throughput of a server as its users see them.

use crate::output;
use anyhow::{Result, ensure};
use ringspan_http::bench::{BenchResult, Load};
use std::path::PathBuf;
use std::time::Duration;

/// Measure speed from outside.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Debug, clap::Subcommand)]
enum Benchmark {
    Serve(ServeArgs),
}

/// Stream completions from a server with several clients at a time.
///
/// Works with every server that has OpenAI's /v1/completions with token ids, and /tokenize. Prompts are random, so that no cache
/// has them. Times are medians and 99th percentiles.
#[derive(Debug, clap::Args)]
struct ServeArgs {
    /// Address of the server
    #[arg(long, default_value = "http://127.0.0.1:8000", value_name = "URL")]
    url: String,
    /// Numbers of clients that ask at the same time, one measurement for each
    #[arg(long, default_value = "1,4,16,64", value_delimiter = ',', value_name = "N,N", value_parser = clap::value_parser!(u32).range(1..))]
    clients: Vec<u32>,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Tokens of each text
    #[arg(long, default_value_t = 128, value_name = "M", value_parser = clap::value_parser!(u32).range(1..))]
    output_tokens: u32,
    /// Requests of each measurement, at least one per client [default: 4 per client]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,
    /// Models or adapters that requests ask for in turn [default: the server's first model]
    #[arg(long, value_delimiter = ',', value_name = "NAME,NAME")]
    model: Vec<String>,
    /// A file whose first line is the server's API key
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let Benchmark::Serve(args) = &args.benchmark;
    let keys = args.api_key_file.as_deref().map(crate::serve::read_keys).transpose()?.unwrap_or_default();
    let load = Load {
        url: args.url.clone(),
        api_key: keys.into_iter().next(),
        models: args.model.clone(),
        prompt_tokens: args.prompt_tokens as usize,
        output_tokens: args.output_tokens as usize,
        requests: args.requests.map(|requests| requests as usize),
    };
    ensure!(!args.clients.is_empty(), "--clients: give at least one number");
    let clients: Vec<usize> = args.clients.iter().map(|clients| *clients as usize).collect();
    output::line(format!(
        "{} prompt tokens and {} generated tokens a request",
        args.prompt_tokens, args.output_tokens
    ))?;
    output::line("clients  requests  first token (p99)      between tokens (p99)   generated   prompt")?;
    let mut written = Ok(());
    load.run(&clients, |measured| written = output::line(row(measured)))?;
    Ok(written?)
}

fn row(measured: &BenchResult) -> String {
    let BenchResult { clients, requests, first_token, between_tokens, .. } = measured;
    let time = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
    let spread = |median: Duration, p99: Duration| format!("{} ({})", time(median), time(p99));
    let between = between_tokens.map_or("-".to_owned(), |between| spread(between.median, between.p99));
    format!(
        "{clients:>7}  {requests:>8}  {:<21}  {between:<21}  {:>6.1}/s  {:>6.0}/s",
        spread(first_token.median, first_token.p99),
        measured.output_tokens_per_second,
        measured.prompt_tokens_per_second
    )
}
