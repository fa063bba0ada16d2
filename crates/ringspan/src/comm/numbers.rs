//! Collectives over f64 numbers such as losses: no buffer type holds them, so their bits are sent as integers.

use super::{Buffer, Communicator};
use crate::error::{Error, Result};

/// Gathers the numbers of every rank, in rank order; all ranks must give the same count.
///
/// # Errors
/// A rank that gives another count or another type, or failures of ranks.
pub fn all_gather(comm: &dyn Communicator, own: &[f64]) -> Result<Vec<Vec<f64>>> {
    let bits = own.iter().map(|number| number.to_bits()).collect();
    let all = comm.all_gather(Buffer::U64(bits))?;
    let of_rank = |(rank, buffer): (usize, &std::sync::Arc<Buffer>)| match &**buffer {
        Buffer::U64(bits) if bits.len() == own.len() => Ok(bits.iter().map(|bits| f64::from_bits(*bits)).collect()),
        other => Err(Error::Shape {
            operation: "gathering numbers",
            what: "the buffer of a rank",
            expected: own.len(),
            actual: other.len(),
            shape: format!("64-bit numbers of rank {rank} of {}", comm.size()),
        }),
    };
    all.iter().enumerate().map(of_rank).collect()
}

/// Sums the ranks' numbers in rank order: the same bits on every rank.
///
/// # Errors
/// Like those of [`all_gather`].
pub fn all_reduce(comm: &dyn Communicator, own: &[f64]) -> Result<Vec<f64>> {
    let mut sums = vec![0.0; own.len()];
    for of_rank in all_gather(comm, own)? {
        sums.iter_mut().zip(of_rank).for_each(|(sum, number)| *sum += number);
    }
    Ok(sums)
}
