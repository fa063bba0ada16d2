//! Finds out the rank of this process and the number of processes: from explicit flags, else from the environment variables
//! that launchers set.

use crate::error::{Error, Result};
use std::fmt;

/// The rank of a process among several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// The rank of this process, `0..size`.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// The source of these numbers.
    pub source: Source,
}

/// The source of rank and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Explicit flags.
    Flags,
    /// `torchrun`.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH, Intel MPI and others that speak PMI.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
}

impl Source {
    /// Launchers in the order in which their variables are looked up.
    const ENVIRONMENT: [Self; 4] = [Self::Torchrun, Self::OpenMpi, Self::Pmi, Self::Slurm];

    /// The variables of rank and size, and a third that must be set too.
    ///
    /// Some platforms set torchrun's names for each machine instead of each process, but only torchrun sets the local rank.
    /// A shell under Slurm has the variables of its job, but not those of a job step.
    fn variables(self) -> [&'static str; 3] {
        match self {
            Self::Flags => ["--rank", "--world-size", "--world-size"],
            Self::Torchrun => ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
            Self::OpenMpi => ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"],
            Self::Pmi => ["PMI_RANK", "PMI_SIZE", "PMI_SIZE"],
            Self::Slurm => ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS"],
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Flags => "flags",
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
            Self::Slurm => "Slurm",
        };
        let [rank, size, _] = self.variables();
        write!(f, "{name} ({rank}, {size})")
    }
}

impl Launch {
    /// Takes rank and size from `flags`, else from the first launcher whose variables are set; `None` if the process was
    /// not launched as one of several. `variable` reads an environment variable.
    ///
    /// # Errors
    /// [`Error::Launch`] for a variable that is not a number, or a rank that is not below the size.
    pub fn find(flags: Option<(usize, usize)>, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let found = match flags {
            Some((rank, size)) => Some((Source::Flags, rank, size)),
            None => Self::environment(&variable)?,
        };
        let Some((source, rank, size)) = found else { return Ok(None) };
        if rank >= size {
            return Err(Error::Launch {
                problem: format!("{source} say rank {rank} of {size} processes: it must be below {size}"),
            });
        }
        Ok(Some(Self { rank, size, source }))
    }

    fn environment(variable: &impl Fn(&str) -> Option<String>) -> Result<Option<(Source, usize, usize)>> {
        for source in Source::ENVIRONMENT {
            let names = source.variables();
            let [Some(rank), Some(size), Some(_)] = names.map(variable) else { continue };
            let number = |name: &str, text: &str| {
                text.trim().parse().map_err(|_| Error::Launch { problem: format!("{name} is '{text}', no number") })
            };
            return Ok(Some((source, number(names[0], &rank)?, number(names[1], &size)?)));
        }
        Ok(None)
    }
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} processes, by {}", self.rank, self.size, self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(flags: Option<(usize, usize)>, variables: &[(&str, &str)]) -> Result<Option<Launch>> {
        let value = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        Launch::find(flags, value)
    }

    const TORCHRUN: [(&str, &str); 3] = [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")];
    const OPEN_MPI: [(&str, &str); 2] = [("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "5")];
    const PMI: [(&str, &str); 2] = [("PMI_RANK", "3"), ("PMI_SIZE", "6")];
    const SLURM: [(&str, &str); 2] = [("SLURM_PROCID", "4"), ("SLURM_STEP_NUM_TASKS", "7")];

    #[test]
    fn flags_come_before_torchrun_open_mpi_pmi_and_slurm() {
        let all = [&TORCHRUN[..], &OPEN_MPI, &PMI, &SLURM].concat();
        let found = |flags, variables: &[_]| {
            find(flags, variables).expect("good").map(|launch| (launch.source, launch.rank, launch.size))
        };
        assert_eq!(found(Some((0, 3)), &all), Some((Source::Flags, 0, 3)));
        assert_eq!(found(None, &all), Some((Source::Torchrun, 1, 4)));
        assert_eq!(found(None, &all[3..]), Some((Source::OpenMpi, 2, 5)));
        assert_eq!(found(None, &all[5..]), Some((Source::Pmi, 3, 6)));
        assert_eq!(found(None, &all[7..]), Some((Source::Slurm, 4, 7)));
        assert_eq!(found(None, &[]), None);
    }

    #[test]
    fn variables_of_a_machine_or_of_a_job_are_not_those_of_a_process() {
        assert_eq!(find(None, &TORCHRUN[..2]), Ok(None));
        assert_eq!(find(None, &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), Ok(None));
    }

    #[test]
    fn nonsense_is_refused_with_its_name() {
        let text = |flags, variables: &[_]| find(flags, variables).expect_err("nonsense").to_string();
        assert!(text(None, &[("PMI_RANK", "x"), ("PMI_SIZE", "2")]).contains("PMI_RANK is 'x'"));
        assert!(text(Some((3, 3)), &[]).contains("rank 3 of 3"));
        let launch = find(None, &PMI).expect("good").expect("found");
        assert_eq!(launch.to_string(), "rank 3 of 6 processes, by PMI (PMI_RANK, PMI_SIZE)");
    }
}
