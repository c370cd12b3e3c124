//! Rank of this process, from the launcher's environment variables.
//!
//! | launcher | variables |
//! |---|---|
//! | Open MPI's mpirun | `OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}` |
//! | torchrun, or by hand | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
//! | srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |
//! | MPICH's mpiexec, PMI | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
//! | a Kubernetes indexed job | `JOB_COMPLETION_INDEX` with `WORLD_SIZE` |
//!
//! Slurm often starts one of the others, whose variables then count. An sbatch script by itself is
//! one process, whatever number of tasks it requests: only the variables that `srun` sets count.

use std::num::ParseIntError;

/// Position of a process among all processes of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// Launcher that started it, for messages.
    pub launcher: &'static str,
    /// Rank of the process.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of ranks on this machine, if known.
    pub n_local: Option<usize>,
    /// Index of the process among the ranks of this machine, from 0.
    pub local_rank: usize,
    /// Whether MPI started the ranks. Under srun this requires `--mpi=pmix`.
    pub is_started_by_mpi: bool,
    /// Host and port of rank 0, as torchrun and similar launchers set them, or the reason why there
    /// are none.
    pub address: Result<(String, u16), String>,
}

/// Environment variables that contradict one another, or lack one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The rank is not below the number of ranks.
    #[error("{launcher} says rank {rank} of {world_size}: ranks are counted from 0")]
    Rank {
        /// The launcher.
        launcher: &'static str,
        /// The rank.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// A machine has no ranks, or more than there are.
    #[error("{launcher} says {n_local} ranks on this machine, of {world_size} in all")]
    LocalSize {
        /// The launcher.
        launcher: &'static str,
        /// Number of ranks on this machine.
        n_local: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// The local rank is not below the number of local ranks.
    #[error("{launcher} says local rank {local_rank} of {n_local}: they are counted from 0")]
    LocalRank {
        /// The launcher.
        launcher: &'static str,
        /// The local rank.
        local_rank: usize,
        /// Number of ranks on this machine.
        n_local: usize,
    },
    /// A launcher states the rank without the number of ranks.
    #[error("{rank} is set but {size} is not")]
    NoSize {
        /// Variable of the rank.
        rank: &'static str,
        /// Variable of the number of ranks.
        size: &'static str,
    },
    /// A variable is not a number.
    #[error("{name} is {text:?}, which is not a number: {source}")]
    NotANumber {
        /// The variable.
        name: &'static str,
        /// Its value.
        text: String,
        /// The cause.
        source: ParseIntError,
    },
    /// A pod of an indexed job states another rank than the launcher in it.
    #[error("RANK is {rank} but JOB_COMPLETION_INDEX is {index}: unset one of them")]
    IndexDiffers {
        /// The rank.
        rank: usize,
        /// Index of the pod.
        index: usize,
    },
    /// A pod of an indexed job does not know how many there are.
    #[error(
        "JOB_COMPLETION_INDEX is set but WORLD_SIZE is not: set WORLD_SIZE to the job's completions, or to \
         1 if every pod is a run of its own"
    )]
    NoCompletions,
    /// Two launchers state different ranks.
    #[error(
        "{} says rank {} of {}, {} says rank {} of {}: start with one of them only",
        one.launcher, one.rank, one.world_size, other.launcher, other.rank, other.world_size
    )]
    TwoLaunchers {
        /// A launcher's statement.
        one: Box<Launch>,
        /// The other's.
        other: Box<Launch>,
    },
    /// The outer launcher starts several processes, each of which would be alone.
    #[error(
        "{outer} says {n_processes} ranks, {inner} says one: {n_processes} processes would each do the \
         whole run; unset what {inner} has set"
    )]
    EachAlone {
        /// The outer launcher.
        outer: &'static str,
        /// The inner launcher.
        inner: &'static str,
        /// Number of processes.
        n_processes: usize,
    },
    /// A launcher of MPI does not say how many ranks there are.
    #[error("{name} is set, but nothing says how many ranks there are: set RANK and WORLD_SIZE")]
    NoWorldSize {
        /// The variable that is set.
        name: &'static str,
    },
}

/// Function that returns the value of an environment variable.
type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Launch {
    /// Launch of a single process.
    pub const ALONE: Self = Self {
        launcher: "nobody",
        rank: 0,
        world_size: 1,
        n_local: Some(1),
        local_rank: 0,
        is_started_by_mpi: false,
        address: Err(String::new()),
    };

    /// Checks the rank against the index of the pod in which the launcher has started the process.
    fn check_pod(&self, index: usize) -> Result<(), LaunchError> {
        // mpirun inside a pod numbers its own ranks.
        if self.launcher != "torchrun" {
            return Ok(());
        }
        // torchrun starts several processes in a pod and numbers them itself.
        if self.n_local.is_some_and(|n_local| n_local > 1) {
            return Ok(());
        }
        if self.rank != index {
            return Err(LaunchError::IndexDiffers { rank: self.rank, index });
        }
        Ok(())
    }

    /// Reads the position of this process from environment variables, whose values `get` returns.
    ///
    /// # Errors
    /// [`LaunchError`].
    pub fn from_variables(get: Variables<'_>) -> Result<Self, LaunchError> {
        let mut found = Vec::new();
        for family in &FAMILIES {
            if let Some(launch) = family.read(get)? {
                found.push(FoundLaunch { launch, is_outer: family.is_outer });
            }
        }
        if let Some(index) = get("JOB_COMPLETION_INDEX") {
            let index = number("JOB_COMPLETION_INDEX", &index)?;
            match found.first() {
                Some(first) => first.launch.check_pod(index)?,
                None => found.push(FoundLaunch { launch: Self::from_pod(index, get)?, is_outer: false }),
            }
        }
        let innermost = innermost_launch(&found, get)?;
        let chosen = innermost.or(found.first().map(|first| &first.launch));
        let mut launch = chosen.cloned().unwrap_or(Self::ALONE);
        launch.is_started_by_mpi = match launch.launcher {
            "mpirun" | "mpiexec" => true,
            "srun" => get("PMIX_RANK").is_some(),
            _ => false,
        };
        launch.address = launch.read_address(get);
        Ok(launch)
    }

    /// Returns the position of pod `index` of an indexed job.
    fn from_pod(index: usize, get: Variables<'_>) -> Result<Self, LaunchError> {
        let size = get("WORLD_SIZE").ok_or(LaunchError::NoCompletions)?;
        let rank = if size == "1" { 0 } else { index };
        // Every pod numbers its own devices.
        let local = LocalRanks { number: None, rank: Some(0) };
        Self::new("kubernetes", rank, number("WORLD_SIZE", &size)?, local)
    }

    fn new(
        launcher: &'static str,
        rank: usize,
        world_size: usize,
        local: LocalRanks,
    ) -> Result<Self, LaunchError> {
        if rank >= world_size {
            return Err(LaunchError::Rank { launcher, rank, world_size });
        }
        let n_local = local.number;
        if let Some(n_local) = n_local
            && (n_local == 0 || n_local > world_size)
        {
            return Err(LaunchError::LocalSize { launcher, n_local, world_size });
        }
        // Launchers without a local rank fill one machine after another.
        let local_rank = local.rank.unwrap_or_else(|| rank % n_local.unwrap_or(world_size));
        if let Some(n_local) = n_local
            && local_rank >= n_local
        {
            return Err(LaunchError::LocalRank { launcher, local_rank, n_local });
        }
        Ok(Self { launcher, rank, world_size, n_local, local_rank, ..Self::ALONE })
    }

    /// Returns host and port of rank 0, or the reason why there are none.
    fn read_address(&self, get: Variables<'_>) -> Result<(String, u16), String> {
        let host = self.required("MASTER_ADDR", get)?;
        let port = self.required("MASTER_PORT", get)?;
        let port: u16 =
            port.trim().parse().map_err(|_| format!("MASTER_PORT is {port:?}, which is not a port"))?;
        // torchrun's own store listens on the port in MASTER_PORT.
        let is_taken = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        Ok((host, if is_taken { port.wrapping_add(1) } else { port }))
    }

    /// Returns the value of `name`, or the reason why ranks cannot meet without it.
    fn required(&self, name: &str, get: Variables<'_>) -> Result<String, String> {
        get(name).ok_or_else(|| {
            format!(
                "{} says rank {} of {}, but {name} is not set: set MASTER_ADDR to the machine of rank 0 and \
                 MASTER_PORT to a free port there, on all ranks",
                self.launcher, self.rank, self.world_size
            )
        })
    }
}

/// Statement of a launcher about the ranks of a machine.
struct LocalRanks {
    /// Number of ranks on the machine.
    number: Option<usize>,
    /// Rank among them.
    rank: Option<usize>,
}

/// Position that a launcher states.
struct FoundLaunch {
    launch: Launch,
    /// Whether another launcher may run inside this one.
    is_outer: bool,
}

/// Environment variables of one launcher.
struct Family {
    launcher: &'static str,
    rank: &'static str,
    size: &'static str,
    n_local: &'static str,
    local_rank: &'static str,
    /// True if another launcher may run inside this one.
    is_outer: bool,
}

const FAMILIES: [Family; 4] = [
    Family {
        launcher: "mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        n_local: "OMPI_COMM_WORLD_LOCAL_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        is_outer: false,
    },
    Family {
        launcher: "torchrun",
        rank: "RANK",
        size: "WORLD_SIZE",
        n_local: "LOCAL_WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        is_outer: false,
    },
    Family {
        launcher: "mpiexec",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        n_local: "MPI_LOCALNRANKS",
        local_rank: "MPI_LOCALRANKID",
        is_outer: false,
    },
    Family {
        launcher: "srun",
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        n_local: "SLURM_STEP_TASKS_PER_NODE",
        local_rank: "SLURM_LOCALID",
        is_outer: true,
    },
];

impl Family {
    fn read(&self, get: Variables<'_>) -> Result<Option<Launch>, LaunchError> {
        let Some(rank) = get(self.rank) else { return Ok(None) };
        let Some(size) = get(self.size) else {
            // An sbatch script has the size without the rank; a pod of an indexed job has
            // WORLD_SIZE only.
            if self.is_outer {
                return Ok(None);
            }
            return Err(LaunchError::NoSize { rank: self.rank, size: self.size });
        };
        let rank = number(self.rank, &rank)?;
        let size = number(self.size, &size)?;
        let mut local = LocalRanks { number: None, rank: None };
        if let Some(text) = get(self.n_local)
            && !text.contains(',')
        {
            // `2(x3),1` means two tasks on each of three nodes and one on the last. Only equal
            // counts are used.
            local.number = text.split('(').next().and_then(|text| text.parse().ok());
        }
        if let Some(text) = get(self.local_rank) {
            local.rank = Some(number(self.local_rank, &text)?);
        }
        Launch::new(self.launcher, rank, size, local).map(Some)
    }
}

fn number(name: &'static str, text: &str) -> Result<usize, LaunchError> {
    text.trim().parse().map_err(|source| LaunchError::NotANumber { name, text: text.to_string(), source })
}

/// Returns the innermost launcher, if the launchers whose variables are set agree with one another.
fn innermost_launch<'f>(
    found: &'f [FoundLaunch],
    get: Variables<'_>,
) -> Result<Option<&'f Launch>, LaunchError> {
    let mut inner_launches = found.iter().filter(|found| !found.is_outer).map(|found| &found.launch);
    let first = inner_launches.next();
    if let (Some(one), Some(other)) = (first, inner_launches.next())
        && (one.rank, one.world_size) != (other.rank, other.world_size)
    {
        return Err(LaunchError::TwoLaunchers { one: Box::new(one.clone()), other: Box::new(other.clone()) });
    }
    let outer = found.iter().find(|found| found.is_outer).map(|found| &found.launch);
    if let (Some(inner), Some(outer)) = (first, outer)
        && inner.world_size == 1
        && outer.world_size > 1
    {
        return Err(LaunchError::EachAlone {
            outer: outer.launcher,
            inner: inner.launcher,
            n_processes: outer.world_size,
        });
    }
    if found.is_empty() {
        for name in ["PMIX_RANK", "MV2_COMM_WORLD_RANK"] {
            if get(name).is_some() {
                return Err(LaunchError::NoWorldSize { name });
            }
        }
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn launch(variables: &[(&str, &str)]) -> Result<Launch, LaunchError> {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        Launch::from_variables(&|name| variables.get(name).map(ToString::to_string))
    }

    fn error(variables: &[(&str, &str)]) -> LaunchError {
        launch(variables).unwrap_err()
    }

    fn ranks(variables: &[(&str, &str)]) -> (usize, usize) {
        let launch = launch(variables).unwrap();
        (launch.rank, launch.world_size)
    }

    #[test]
    fn variables_of_every_launcher_are_read() {
        let alone = launch(&[]).unwrap();
        assert_eq!((alone.launcher, alone.rank, alone.world_size), ("nobody", 0, 1));
        assert_eq!(ranks(&[("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "4")]), (2, 4));
        assert_eq!(ranks(&[("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")]), (1, 2));
        assert_eq!(ranks(&[("PMI_RANK", "0"), ("PMI_SIZE", "3")]), (0, 3));
        assert_eq!(ranks(&[("JOB_COMPLETION_INDEX", "3"), ("WORLD_SIZE", "8")]), (3, 8));
        assert_eq!(ranks(&[("JOB_COMPLETION_INDEX", "3"), ("WORLD_SIZE", "1")]), (0, 1), "each for itself");
        let slurm =
            [("SLURM_PROCID", "5"), ("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_STEP_TASKS_PER_NODE", "4(x2)")];
        assert_eq!(launch(&slurm).unwrap().n_local, Some(4));
        assert_eq!(ranks(&slurm), (5, 8));
        let in_pod =
            [("JOB_COMPLETION_INDEX", "1"), ("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")];
        assert_eq!(ranks(&in_pod), (5, 8), "the second of the second pod");
        assert_eq!(launch(&slurm).unwrap().local_rank, 1, "the second node's second");
        let torchrun = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "3")];
        assert_eq!(launch(&torchrun).unwrap().local_rank, 3);
        assert_eq!(launch(&[("JOB_COMPLETION_INDEX", "3"), ("WORLD_SIZE", "8")]).unwrap().local_rank, 0);
    }

    /// The script of `#SBATCH --ntasks=8` is one process, although its environment says eight
    /// tasks.
    #[test]
    fn an_sbatch_script_is_one_process_and_launchers_inside_slurm_count() {
        assert_eq!(ranks(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), (0, 1));
        let inside = [
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("OMPI_COMM_WORLD_RANK", "5"),
            ("OMPI_COMM_WORLD_SIZE", "16"),
        ];
        assert_eq!(ranks(&inside), (5, 16));
    }

    #[test]
    fn the_address_is_read_from_the_launcher() {
        let mut variables = vec![("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "head")];
        assert!(launch(&variables).unwrap().address.unwrap_err().contains("MASTER_PORT is not set"));
        variables.push(("MASTER_PORT", "29500"));
        assert_eq!(launch(&variables).unwrap().address, Ok(("head".to_string(), 29500)));
        // torchrun's store has the port itself.
        variables.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
        assert_eq!(launch(&variables).unwrap().address, Ok(("head".to_string(), 29501)));
        variables[3] = ("MASTER_PORT", "x");
        assert!(launch(&variables).unwrap().address.unwrap_err().contains("MASTER_PORT is \"x\""));
    }

    #[test]
    fn mpi_is_recognized_by_its_launcher() {
        let slurm = [("SLURM_PROCID", "5"), ("SLURM_STEP_NUM_TASKS", "8")];
        assert!(!launch(&slurm).unwrap().is_started_by_mpi);
        assert!(launch(&[&slurm[..], &[("PMIX_RANK", "5")]].concat()).unwrap().is_started_by_mpi);
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "4")];
        assert!(launch(&open_mpi).unwrap().is_started_by_mpi);
    }

    #[test]
    fn contradictions_are_errors() {
        let launch_error = error(&[("RANK", "4"), ("WORLD_SIZE", "4")]);
        assert_eq!(launch_error, LaunchError::Rank { launcher: "torchrun", rank: 4, world_size: 4 });
        let launch_error = error(&[("RANK", "1")]);
        assert_eq!(launch_error, LaunchError::NoSize { rank: "RANK", size: "WORLD_SIZE" });
        assert_eq!(error(&[("PMIX_RANK", "0")]), LaunchError::NoWorldSize { name: "PMIX_RANK" });
        let slurm =
            [("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "8"), ("RANK", "0"), ("WORLD_SIZE", "1")];
        assert_eq!(
            error(&slurm),
            LaunchError::EachAlone { outer: "srun", inner: "torchrun", n_processes: 8 }
        );
        let launch_error = error(&[("RANK", "x"), ("WORLD_SIZE", "4")]);
        assert!(matches!(launch_error, LaunchError::NotANumber { name: "RANK", .. }), "{launch_error}");
        let local = [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "2")];
        assert_eq!(error(&local), LaunchError::LocalRank { launcher: "torchrun", local_rank: 2, n_local: 2 });
        assert_eq!(error(&[("JOB_COMPLETION_INDEX", "1")]), LaunchError::NoCompletions);
        let launch_error = error(&[("JOB_COMPLETION_INDEX", "1"), ("RANK", "0"), ("WORLD_SIZE", "2")]);
        assert_eq!(launch_error, LaunchError::IndexDiffers { rank: 0, index: 1 });
        let launch_error = error(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "3")]);
        assert_eq!(launch_error, LaunchError::LocalSize { launcher: "torchrun", n_local: 3, world_size: 2 });
        let two = [
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
        ];
        let launch_error = error(&two);
        assert!(matches!(launch_error, LaunchError::TwoLaunchers { .. }), "{launch_error}");
    }
}
