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

use anyhow::{Context, bail};

/// Position of a process among all processes of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launch {
    /// Launcher that started it, for messages.
    pub(crate) launcher: &'static str,
    /// Rank of the process.
    pub(crate) rank: usize,
    /// Number of ranks.
    pub(crate) world_size: usize,
    /// Number of ranks on this machine, if known.
    pub(crate) n_local: Option<usize>,
    /// Index of the process among the ranks of this machine, from 0.
    pub(crate) local_rank: usize,
}

impl Launch {
    /// A process by itself.
    pub(crate) const ALONE: Self =
        Self { launcher: "nobody", rank: 0, world_size: 1, n_local: Some(1), local_rank: 0 };

    /// Reads the environment of this process.
    pub(crate) fn from_env() -> anyhow::Result<Self> {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    fn from_variables(get: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<Self> {
        let families = FAMILIES.iter().map(|family| family.read(get));
        let mut found: Vec<(Self, bool)> =
            families.collect::<anyhow::Result<Vec<_>>>()?.into_iter().flatten().collect();
        if let Some(index) = get("JOB_COMPLETION_INDEX") {
            let index = number("JOB_COMPLETION_INDEX", &index)?;
            match found.first() {
                // mpirun inside a pod numbers its own ranks.
                Some((inner, _)) if inner.launcher != "torchrun" => {}
                // torchrun starts several processes in a pod and numbers them itself.
                Some((by_hand, _)) if by_hand.n_local.is_some_and(|n_local| n_local > 1) => {}
                Some((by_hand, _)) if by_hand.rank != index => {
                    bail!("RANK is {} and JOB_COMPLETION_INDEX {index}: which is it?", by_hand.rank)
                }
                Some(_) => {}
                None => {
                    let size = get("WORLD_SIZE").context(
                        "JOB_COMPLETION_INDEX is set and WORLD_SIZE is not: set it to the job's completions, or to 1 \
                         where every pod works for itself",
                    )?;
                    let rank = if size == "1" { 0 } else { index };
                    // Every pod numbers its own devices.
                    let local = [None, Some(0)];
                    found.push((Self::new("kubernetes", rank, number("WORLD_SIZE", &size)?, local)?, false));
                }
            }
        }
        let first = agreed(&found, get)?;
        let chosen = first.or(found.first().map(|(launch, _)| launch));
        Ok(chosen.cloned().unwrap_or(Self::ALONE))
    }

    fn new(
        launcher: &'static str,
        rank: usize,
        world_size: usize,
        [n_local, local_rank]: [Option<usize>; 2],
    ) -> anyhow::Result<Self> {
        if rank >= world_size {
            bail!("{launcher} says rank {rank} of {world_size}: ranks are counted from 0");
        }
        if let Some(n_local) = n_local
            && (n_local == 0 || n_local > world_size)
        {
            bail!("{launcher} says {n_local} ranks on this machine, of {world_size} in all");
        }
        // Launchers without a local rank fill one machine after another.
        let local_rank = local_rank.unwrap_or_else(|| rank % n_local.unwrap_or(world_size));
        if let Some(n_local) = n_local
            && local_rank >= n_local
        {
            bail!("{launcher} says local rank {local_rank} of {n_local}: they are counted from 0");
        }
        Ok(Self { launcher, rank, world_size, n_local, local_rank })
    }
}

/// Environment variables of one launcher.
struct Family {
    launcher: &'static str,
    rank: &'static str,
    size: &'static str,
    n_local: &'static str,
    local_rank: &'static str,
    /// `true` if another launcher may run inside this one.
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
    fn read(&self, get: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<Option<(Launch, bool)>> {
        let (rank, size) = match (get(self.rank), get(self.size)) {
            (Some(rank), Some(size)) => (number(self.rank, &rank)?, number(self.size, &size)?),
            // An sbatch script has the size without the rank; a pod of an indexed job has
            // WORLD_SIZE only.
            (Some(_), None) if self.is_outer => return Ok(None),
            (Some(_), None) => bail!("{} is set and {} is not", self.rank, self.size),
            _ => return Ok(None),
        };
        // `2(x3),1` means two tasks on each of three nodes and one on the last. Only equal counts
        // are used.
        let local = get(self.n_local).and_then(|text| text.split('(').next()?.parse().ok());
        let n_local = local.filter(|_| !get(self.n_local).is_some_and(|text| text.contains(',')));
        let local_rank = get(self.local_rank).map(|text| number(self.local_rank, &text)).transpose()?;
        Ok(Some((Launch::new(self.launcher, rank, size, [n_local, local_rank])?, self.is_outer)))
    }
}

fn number(name: &str, text: &str) -> anyhow::Result<usize> {
    text.trim().parse().with_context(|| format!("{name} is {text:?}, which is no number"))
}

/// Returns the innermost launcher, if the launchers whose variables are set agree with one another.
fn agreed<'f>(
    found: &'f [(Launch, bool)],
    get: &dyn Fn(&str) -> Option<String>,
) -> anyhow::Result<Option<&'f Launch>> {
    let mut inner = found.iter().filter(|(_, is_outer)| !is_outer).map(|(launch, _)| launch);
    let first = inner.next();
    if let (Some(a), Some(b)) = (first, inner.next())
        && (a.rank, a.world_size) != (b.rank, b.world_size)
    {
        bail!(
            "{} says rank {} of {}, {} says rank {} of {}: start with one of them only",
            a.launcher,
            a.rank,
            a.world_size,
            b.launcher,
            b.rank,
            b.world_size
        );
    }
    if let (Some(inner), Some((outer, _))) = (first, found.iter().find(|(_, is_outer)| *is_outer))
        && inner.world_size == 1
        && outer.world_size > 1
    {
        bail!(
            "{} says {} ranks, {} says one: {} processes would each do the whole run; unset what {} has set",
            outer.launcher,
            outer.world_size,
            inner.launcher,
            outer.world_size,
            inner.launcher
        );
    }
    if found.is_empty()
        && let Some(name) = ["PMIX_RANK", "MV2_COMM_WORLD_RANK"].into_iter().find(|name| get(name).is_some())
    {
        bail!("{name} is set, and nothing that says how many ranks there are: set RANK and WORLD_SIZE");
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn launch(variables: &[(&str, &str)]) -> anyhow::Result<Launch> {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        Launch::from_variables(&|name| variables.get(name).map(ToString::to_string))
    }

    fn ranks(variables: &[(&str, &str)]) -> (usize, usize) {
        let launch = launch(variables).unwrap();
        (launch.rank, launch.world_size)
    }

    #[test]
    fn every_launcher_is_understood() {
        assert_eq!(launch(&[]).unwrap(), Launch::ALONE);
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
        let said = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "3")];
        assert_eq!(launch(&said).unwrap().local_rank, 3);
        assert_eq!(launch(&[("JOB_COMPLETION_INDEX", "3"), ("WORLD_SIZE", "8")]).unwrap().local_rank, 0);
    }

    /// The script of `#SBATCH --ntasks=8` is one process, although its environment says eight
    /// tasks.
    #[test]
    fn an_sbatch_script_is_alone_and_what_runs_inside_slurm_counts() {
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
    fn contradictions_are_errors() {
        for (variables, word) in [
            (&[("RANK", "4"), ("WORLD_SIZE", "4")][..], "counted from 0"),
            (&[("RANK", "1")], "WORLD_SIZE is not"),
            (&[("PMIX_RANK", "0")], "how many ranks"),
            (
                &[("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "8"), ("RANK", "0"), ("WORLD_SIZE", "1")],
                "the whole run",
            ),
            (&[("RANK", "x"), ("WORLD_SIZE", "4")], "no number"),
            (
                &[("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "2")],
                "local rank 2",
            ),
            (&[("JOB_COMPLETION_INDEX", "1")], "WORLD_SIZE"),
            (&[("JOB_COMPLETION_INDEX", "1"), ("RANK", "0"), ("WORLD_SIZE", "2")], "which is it"),
            (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "3")], "on this machine"),
            (
                &[
                    ("RANK", "0"),
                    ("WORLD_SIZE", "2"),
                    ("OMPI_COMM_WORLD_RANK", "1"),
                    ("OMPI_COMM_WORLD_SIZE", "2"),
                ],
                "one of them only",
            ),
        ] {
            let error = format!("{:#}", launch(variables).unwrap_err());
            assert!(error.contains(word), "{variables:?}: {error}");
        }
    }
}
