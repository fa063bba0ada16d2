//! Checks that all ranks were started with the same settings, and agreement on a number where they differ.

use super::{Buffer, Communicator};
use crate::error::{Error, Result};

/// A setting that must be the same on every rank: its name and its value as text.
pub type Setting = (String, String);

/// Compares settings over all ranks, which must all call this before they work together.
///
/// # Errors
/// [`Error::Disagreement`], the same on every rank: the first rank that differs from rank 0, and the setting that differs.
pub fn agree(comm: &dyn Communicator, settings: &[Setting]) -> Result<()> {
    let text: Vec<&str> = settings.iter().flat_map(|(name, value)| [name.as_str(), value]).collect();
    let all = comm.all_gather(Buffer::U8(text.join("\0").into_bytes()))?;
    let read = |buffer: &Buffer| match buffer {
        Buffer::U8(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        _ => String::new(),
    };
    let texts: Vec<String> = all.iter().map(|buffer| read(buffer)).collect();
    let Some((first, others)) = texts.split_first() else { return Ok(()) };
    let Some((rank, other)) = (1..).zip(others).find(|(_, other)| *other != first) else { return Ok(()) };
    let (first, other) = (pairs(first), pairs(other));
    let names = first.iter().chain(&other).map(|(name, _)| *name);
    let value = |all: &[(&str, &str)], name: &str| all.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
    let differs = |name: &&str| value(&first, name) != value(&other, name);
    let name = names.clone().find(differs).unwrap_or("the order of the settings");
    let shown = |all: &[(&str, &str)]| value(all, name).unwrap_or_else(|| "nothing".into());
    Err(Error::Disagreement { rank, what: name.to_owned(), value: shown(&other), first: shown(&first) })
}

/// The smallest number that a rank gives; all ranks must call this.
///
/// # Errors
/// Failures of other ranks.
pub fn smallest(comm: &dyn Communicator, number: u64) -> Result<u64> {
    let of_rank = |buffer: &Buffer| match buffer {
        Buffer::U64(numbers) => numbers.first().copied(),
        _ => None,
    };
    let all = comm.all_gather(Buffer::U64(vec![number]))?;
    Ok(all.iter().filter_map(|buffer| of_rank(buffer)).min().unwrap_or(number))
}

fn pairs(text: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = text.split('\0').collect();
    parts.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
}
