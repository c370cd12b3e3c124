//! Connecting the ranks of a launch through an engine.
//!
//! | engine | ranks meet | started by |
//! |---|---|---|
//! | mpi | as MPI has arranged | mpirun, srun --mpi=pmix |
//! | nccl | over MPI, where it has started them and is built in; else at MASTER_ADDR:MASTER_PORT | anything |
//!
//! Ranks that MPI started exchange their devices first: `auto` chooses NCCL only if all ranks have it and each has a GPU of
//! its own.

use std::str::FromStr;
use std::time::Duration;

use anyhow::bail;
use kernels::device::{DeviceKind, Opened};
use ranks::EngineError;
use ranks::communicator::{Communicator, CommunicatorConfig, START_TIMEOUT};
use ranks::engine::{Engine, Participant, Reduction, Rendezvous};
use ranks::topology::Topology;
use trainer::TrainError;
use trainer::recipe::RunConfig;

use super::launch::Launch;

/// Engine that a flag requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum EngineChoice {
    /// NCCL if every rank has a GPU of its own, otherwise MPI.
    #[default]
    Auto,
    /// MPI. Tensors on a GPU are copied through host memory.
    Mpi,
    /// NCCL.
    Nccl,
}

impl FromStr for EngineChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "mpi" => Ok(Self::Mpi),
            "nccl" => Ok(Self::Nccl),
            other => Err(format!("{other:?} names no engine: say auto, mpi or nccl")),
        }
    }
}

/// Connects to the other ranks of `launch`, all in one shard group.
pub(crate) fn connect(
    launch: &Launch,
    run: &RunConfig,
    device: &Opened,
    choice: EngineChoice,
) -> anyhow::Result<Communicator> {
    let Launch { rank, world_size, .. } = *launch;
    if world_size == 1 && choice == EngineChoice::Auto {
        return Ok(Communicator::solo());
    }
    let topology = Topology { rank, world_size, group_size: world_size };
    let deadline = Duration::from_secs(run.deadline_s);
    let config = CommunicatorConfig { topology, exact: run.exact_sums, deadline };
    let wish = Wish::new(launch, device, choice, deadline.max(START_TIMEOUT))?;
    Ok(Communicator::start(config, Box::new(move || wish.start(None)))?)
}

/// Returns the number of ranks that compute on the device of this one, including itself. All ranks call it.
pub(crate) fn n_sharers(comm: &Communicator, device: &Opened) -> anyhow::Result<usize> {
    let ids = comm.gather_bytes("devices", device.id.to_vec())?;
    Ok(ids.iter().filter(|id| **id == device.id).count().max(1))
}

/// Returns `opened` if no rank has failed to open its own. All ranks call it.
pub(crate) fn all_ready<T>(comm: &Communicator, opened: anyhow::Result<T>) -> anyhow::Result<T> {
    let failed = f64::from(u8::from(opened.is_err()));
    let n_failed = comm.all_reduce("what is opened", vec![failed], Reduction::Sum)?[0];
    let opened = opened?;
    if n_failed > 0.0 {
        return Err(TrainError::PeersFailed { n_ranks: n_failed as usize }.into());
    }
    Ok(opened)
}

/// Starts the engine of `launch` in this thread; `max_count` is that of `Mpi::with_max_count`.
pub(crate) fn start(
    launch: &Launch,
    device: &Opened,
    choice: EngineChoice,
    deadline: Duration,
    max_count: Option<usize>,
) -> anyhow::Result<Box<dyn Engine>> {
    Ok(Wish::new(launch, device, choice, deadline)?.start(max_count)?)
}

/// Engines that a rank could use, before the ranks have agreed on one.
struct Wish {
    launch: Launch,
    choice: EngineChoice,
    /// Number of the GPU if NCCL may be used.
    nccl: Option<usize>,
    device: Opened,
    deadline: Duration,
}

impl Wish {
    fn new(
        launch: &Launch,
        device: &Opened,
        choice: EngineChoice,
        deadline: Duration,
    ) -> anyhow::Result<Self> {
        let nccl = match (choice, device.kind) {
            (EngineChoice::Mpi, _) | (EngineChoice::Auto, DeviceKind::Cpu | DeviceKind::Wgpu) => None,
            (EngineChoice::Auto | EngineChoice::Nccl, DeviceKind::Cuda(number)) => Some(number),
            (EngineChoice::Nccl, DeviceKind::Cpu | DeviceKind::Wgpu) => {
                bail!(
                    "--engine nccl needs --device cuda, and rank {} computes on {}",
                    launch.rank,
                    device.name
                )
            }
        };
        if nccl.is_none() {
            can_start_mpi(launch)?;
        }
        // Shorter than the caller's own deadline, so that this one names the missing ranks.
        let deadline = deadline.saturating_sub(Duration::from_secs(10)).max(Duration::from_secs(5));
        Ok(Self { launch: launch.clone(), choice, nccl, device: device.clone(), deadline })
    }

    /// Starts the engine. All ranks call it, each in the thread that will own it.
    fn start(self, max_count: Option<usize>) -> Result<Box<dyn Engine>, EngineError> {
        // Checked before ranks connect: the others must not wait for a rank that lacks the library.
        let checked = self.nccl.map(nccl::check).transpose();
        if can_agree(&self.launch) {
            let can_nccl = self.nccl.is_some() && checked.is_ok();
            let choice = self.choice;
            let engine = self.agree(can_nccl, max_count);
            // The reason why this rank cannot use NCCL is more precise than the agreement that it cannot.
            return engine.map_err(|error| match (choice, checked) {
                (EngineChoice::Nccl, Err(own)) => own,
                _ => error,
            });
        }
        checked?;
        match self.nccl {
            Some(number) => self.meet(number),
            None => start_mpi(&self.launch, max_count),
        }
    }

    /// Agrees on an engine through MPI: NCCL only if all ranks can use it, each on a GPU of its own.
    fn agree(self, can_nccl: bool, max_count: Option<usize>) -> Result<Box<dyn Engine>, EngineError> {
        let mut mpi = start_mpi(&self.launch, max_count)?;
        let kind = match self.device.kind {
            DeviceKind::Cpu => 0,
            DeviceKind::Cuda(_) => 1,
            DeviceKind::Wgpu => 2,
        };
        let mut mine = vec![u8::from(can_nccl), kind];
        mine.extend(self.device.id);
        let mut said = vec![0; mine.len() * self.launch.world_size];
        mpi.all_gather(&mine, &mut said)?;
        let said: Vec<&[u8]> = said.chunks_exact(mine.len()).collect();
        if let Some(other) = said.iter().position(|theirs| theirs[1] != said[0][1]) {
            let names = ["the CPU", "an NVIDIA GPU", "another GPU"];
            let name = |rank: usize| names[usize::from(said[rank][1]).min(2)];
            let reason =
                format!("rank 0 computes on {}, rank {other} on {}; say --device", name(0), name(other));
            return Err(EngineError::Unavailable { engine: "ranks", reason });
        }
        let distinct: std::collections::BTreeSet<&[u8]> = said.iter().map(|theirs| &theirs[2..]).collect();
        let own_gpus = distinct.len() == said.len();
        let all_can = said.iter().all(|theirs| theirs[0] == 1);
        let refused = |reason: String| Err(EngineError::Unavailable { engine: "nccl", reason });
        match (self.choice, self.nccl) {
            (_, Some(number)) if all_can && own_gpus => {
                let made = nccl::over_mpi(&self.launch, mpi.as_mut(), number);
                if made.is_err() {
                    // Finalizing MPI would wait for the other ranks, which wait for this one.
                    std::mem::forget(mpi);
                }
                made
            }
            (EngineChoice::Nccl, _) if all_can => {
                refused("two ranks have the same GPU, which NCCL does not take; say --engine mpi".into())
            }
            (EngineChoice::Nccl, _) => {
                let rank = said.iter().position(|theirs| theirs[0] == 0).unwrap_or_default();
                refused(format!("rank {rank} cannot use it; see its message"))
            }
            _ => Ok(mpi),
        }
    }

    /// Connects ranks that MPI did not start at the launcher's address.
    fn meet(self, number: usize) -> Result<Box<dyn Engine>, EngineError> {
        if self.launch.world_size == 1 {
            return nccl::start(&self.launch, number, nccl::new_id()?);
        }
        let rendezvous = rendezvous(&self.launch, self.deadline)?;
        let Launch { rank, world_size, .. } = self.launch;
        let comer = Participant { rank, world_size, device: self.device.id };
        let id = rendezvous.share(comer, nccl::new_id)?;
        nccl::start(&self.launch, number, id)
    }
}

/// Returns `true` if MPI started the ranks of `launch`. Under srun this requires `--mpi=pmix`.
fn is_of_mpi(launch: &Launch) -> bool {
    match launch.launcher {
        "mpirun" | "mpiexec" => true,
        "srun" => std::env::var_os("PMIX_RANK").is_some(),
        _ => false,
    }
}

/// Returns `true` if ranks can agree on an engine through MPI.
fn can_agree(launch: &Launch) -> bool {
    cfg!(feature = "mpi") && is_of_mpi(launch)
}

#[cfg(feature = "mpi")]
fn can_start_mpi(launch: &Launch) -> anyhow::Result<()> {
    if !is_of_mpi(launch) {
        bail!(
            "{} says rank {} of {}: so started, ranks meet over NCCL, which wants a GPU for each (--device cuda, \
             in a build with --features cuda). For MPI start with mpirun or srun --mpi=pmix",
            launch.launcher,
            launch.rank,
            launch.world_size
        );
    }
    Ok(())
}

#[cfg(feature = "mpi")]
fn start_mpi(launch: &Launch, max_count: Option<usize>) -> Result<Box<dyn Engine>, EngineError> {
    let mut engine = ranks::engine::Mpi::start()?;
    if let Some(max_count) = max_count {
        engine = engine.with_max_count(max_count);
    }
    let (rank, world_size) = (engine.rank(), engine.world_size());
    if (rank, world_size) != (launch.rank, launch.world_size) {
        let reason = format!(
            "{} says rank {} of {}, MPI says {rank} of {world_size}: is this program built for the MPI that \
             starts it? With srun, say --mpi=pmix",
            launch.launcher, launch.rank, launch.world_size
        );
        return Err(EngineError::Unavailable { engine: "mpi", reason });
    }
    Ok(Box::new(engine))
}

/// Fails: this build has no engine between processes.
#[cfg(not(feature = "mpi"))]
fn start_mpi(_: &Launch, _: Option<usize>) -> Result<Box<dyn Engine>, EngineError> {
    Err(EngineError::Unavailable { engine: "mpi", reason: "it is not built in".into() })
}

#[cfg(not(feature = "mpi"))]
fn can_start_mpi(launch: &Launch) -> anyhow::Result<()> {
    let wanted = match is_of_mpi(launch) {
        true => "no MPI: build with `cargo build --release --features mpi`",
        false => {
            "neither MPI nor a GPU for each rank: build with --features cuda and start with --device cuda, \
                  or build with --features mpi and start with mpirun"
        }
    };
    bail!(
        "{} says rank {} of {}, and this program has {wanted}",
        launch.launcher,
        launch.rank,
        launch.world_size
    )
}

#[cfg(feature = "cuda")]
mod nccl {
    use crate::cluster::start::{Engine, EngineError, Launch};
    use ranks::engine::{Nccl, new_nccl_id};

    pub(super) fn check(number: usize) -> Result<(), EngineError> {
        Nccl::check(number)
    }

    pub(super) fn new_id() -> Result<Vec<u8>, EngineError> {
        new_nccl_id().map(Vec::from)
    }

    /// Joins the communicator `id` on the GPU `number`.
    pub(super) fn start(launch: &Launch, number: usize, id: Vec<u8>) -> Result<Box<dyn Engine>, EngineError> {
        let id = id.try_into().map_err(|_| EngineError::Unavailable {
            engine: "nccl",
            reason: "rank 0 has sent something else than an id".into(),
        })?;
        Ok(Box::new(Nccl::start(id, launch.rank, launch.world_size, number)?))
    }

    /// Connects ranks through MPI, which is not used afterwards.
    pub(super) fn over_mpi(
        launch: &Launch,
        mpi: &mut dyn Engine,
        number: usize,
    ) -> Result<Box<dyn Engine>, EngineError> {
        let made = if launch.rank == 0 { new_id().map(Some) } else { Ok(None) };
        // A length of zero says that rank 0 has failed, so that no rank waits for its message.
        let mut len = [0u8; 8];
        if let Ok(Some(bytes)) = &made {
            len = (bytes.len() as u64).to_ne_bytes();
        }
        mpi.broadcast(&mut len, 0)?;
        let mut bytes = made?.unwrap_or_default();
        bytes.resize(u64::from_ne_bytes(len) as usize, 0);
        mpi.broadcast(&mut bytes, 0)?;
        start(launch, number, bytes)
    }
}

/// Unreachable in a build without CUDA, which has no such device.
#[cfg(not(feature = "cuda"))]
mod nccl {
    use crate::cluster::start::{Engine, EngineError, Launch};

    fn left_out<T>() -> Result<T, EngineError> {
        Err(EngineError::Unavailable { engine: "nccl", reason: "it is not built in".into() })
    }

    pub(super) fn check(_: usize) -> Result<(), EngineError> {
        left_out()
    }

    pub(super) fn new_id() -> Result<Vec<u8>, EngineError> {
        left_out()
    }

    pub(super) fn start(_: &Launch, _: usize, _: Vec<u8>) -> Result<Box<dyn Engine>, EngineError> {
        left_out()
    }

    pub(super) fn over_mpi(_: &Launch, _: &mut dyn Engine, _: usize) -> Result<Box<dyn Engine>, EngineError> {
        left_out()
    }
}

/// Returns the meeting point of ranks that MPI did not start: rank 0's address, as torchrun and similar launchers set it.
fn rendezvous(launch: &Launch, deadline: Duration) -> Result<Rendezvous, EngineError> {
    let wrong = |reason: String| EngineError::Unavailable { engine: "rendezvous", reason };
    let get = |name: &str| {
        std::env::var(name).map_err(|_| {
            wrong(format!(
                "{} says rank {} of {}, and {name} is not set: set MASTER_ADDR to the machine of rank 0 and \
                 MASTER_PORT to a free port there, on all ranks",
                launch.launcher, launch.rank, launch.world_size
            ))
        })
    };
    let (host, port) = (get("MASTER_ADDR")?, get("MASTER_PORT")?);
    let port: u16 =
        port.trim().parse().map_err(|_| wrong(format!("MASTER_PORT is {port:?}, which is no port")))?;
    // torchrun's own store listens on the port in MASTER_PORT.
    let taken = std::env::var("TORCHELASTIC_USE_AGENT_STORE").is_ok_and(|value| value == "True");
    let port = if taken { port.wrapping_add(1) } else { port };
    Ok(Rendezvous { host, port, deadline })
}
