//! Measures the processor's time, which other processes of the machine lengthen little.

use super::Result;

/// Seconds of processor time that all threads of this process have taken so far, with a resolution of a hundredth.
///
/// # Errors
/// The operating system does not tell.
pub(crate) fn processor_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The process's name, in brackets, may hold blanks; user and system time are the 12th and 13th field after it.
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    let ticks = after.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
    Ok(ticks.sum::<std::result::Result<f64, _>>()? / 100.0)
}
