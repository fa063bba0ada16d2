//! The command `ringspan`: trains and runs transformers over sequences cut across ranks.

use ringspan_cli::CountingAllocator;
use std::process::ExitCode;

/// candle allocates and frees large buffers all the time, and the system's allocator would return their pages each time.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    ringspan_cli::main()
}
