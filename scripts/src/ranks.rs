//! From what the launcher says to a line between ranks.
//!
//! | engine | ranks meet | started by |
//! |---|---|---|
//! | mpi | as MPI has arranged | mpirun, srun --mpi=pmix |
//! | nccl | over MPI, where it has started them and is built in; else at MASTER_ADDR:MASTER_PORT | anything |

use std::str::FromStr;
use std::time::Duration;

use anyhow::bail;
use trainer::TrainError;
use trainer::config::RunConfig;
use trainer::device::{DeviceKind, Opened};
use trainer::shard::comm::{Comm, CommConfig, EngineFactory};
use trainer::shard::engine::{Engine, EngineError, Reduction};
use trainer::shard::mesh::Place;

use crate::launch::Launch;

/// What ranks talk over, as flags name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum EngineChoice {
    /// NCCL where every rank has a GPU of its own, else MPI.
    #[default]
    Auto,
    /// MPI; what lies on a GPU goes over the host.
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

/// The line to the other ranks of `launch`, in one group.
pub(crate) fn connect(
    launch: &Launch,
    run: &RunConfig,
    device: &Opened,
    engine: EngineChoice,
) -> anyhow::Result<Comm> {
    let Launch { rank, world_size, .. } = *launch;
    if world_size == 1 && engine == EngineChoice::Auto {
        return Ok(Comm::solo());
    }
    let place = Place { rank, world_size, group_size: world_size };
    let config = CommConfig { place, exact: run.exact_sums, deadline: Duration::from_secs(run.deadline_s) };
    Ok(Comm::start(config, factory(launch, device, engine, None)?)?)
}

/// What this rank has opened, if all ranks have opened theirs. All ranks call it.
pub(crate) fn all_ready<T>(comm: &Comm, opened: anyhow::Result<T>) -> anyhow::Result<T> {
    let failed = f64::from(u8::from(opened.is_err()));
    let n_failed = comm.all_reduce("what is opened", vec![failed], Reduction::Sum)?[0];
    let opened = opened?;
    if n_failed > 0.0 {
        return Err(TrainError::PeersFailed { n_ranks: n_failed as usize }.into());
    }
    Ok(opened)
}

/// The engine of `launch`, in this thread; `max_count` as of `Mpi::with_max_count`.
pub(crate) fn start(
    launch: &Launch,
    device: &Opened,
    engine: EngineChoice,
    max_count: Option<usize>,
) -> anyhow::Result<Box<dyn Engine>> {
    Ok(factory(launch, device, engine, max_count)?()?)
}

/// Makes the engine of `launch`.
fn factory(
    launch: &Launch,
    device: &Opened,
    engine: EngineChoice,
    max_count: Option<usize>,
) -> anyhow::Result<EngineFactory> {
    let launch = launch.clone();
    let nccl_device = match (engine, device.kind) {
        (EngineChoice::Mpi, _) | (EngineChoice::Auto, DeviceKind::Cpu | DeviceKind::Wgpu) => None,
        // NCCL takes a GPU for one rank only.
        (EngineChoice::Auto, DeviceKind::Cuda(_)) if shares_gpu(&launch) => None,
        (EngineChoice::Auto | EngineChoice::Nccl, DeviceKind::Cuda(number)) => Some(number),
        (EngineChoice::Nccl, DeviceKind::Cpu | DeviceKind::Wgpu) => {
            bail!("--engine nccl needs --device cuda, and rank {} computes on {}", launch.rank, device.name)
        }
    };
    if let Some(number) = nccl_device {
        return Ok(Box::new(move || nccl::start(&launch, number)));
    }
    can_start_mpi(&launch)?;
    Ok(Box::new(move || start_mpi(&launch, max_count)))
}

/// Whether this machine has fewer GPUs than ranks.
#[cfg(feature = "cuda")]
fn shares_gpu(launch: &Launch) -> bool {
    launch.n_local.is_some_and(|n_local| trainer::device::n_cuda_devices() < n_local)
}

#[cfg(not(feature = "cuda"))]
fn shares_gpu(_: &Launch) -> bool {
    false
}

/// Whether MPI has started the ranks of `launch`, so that they can meet over it.
fn is_of_mpi(launch: &Launch) -> bool {
    !matches!(launch.launcher, "torchrun" | "kubernetes")
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
    let mut engine = trainer::shard::engine::Mpi::start()?;
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

/// Without an engine between processes there is nothing to start.
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
    use super::{Engine, EngineError, Launch};
    use trainer::shard::engine::{Nccl, new_nccl_id};

    /// Ranks meet, and join a communicator on the GPU `number`.
    pub(super) fn start(launch: &Launch, number: usize) -> Result<Box<dyn Engine>, EngineError> {
        let bytes = share(launch, || new_nccl_id().map(Vec::from))?;
        let id = bytes.try_into().map_err(|_| EngineError::Unavailable {
            engine: "nccl",
            reason: "rank 0 has sent something else than an id".into(),
        })?;
        Ok(Box::new(Nccl::start(id, launch.rank, launch.world_size, number)?))
    }

    /// The bytes that rank 0 makes, on all ranks.
    fn share(
        launch: &Launch,
        make: impl FnOnce() -> Result<Vec<u8>, EngineError>,
    ) -> Result<Vec<u8>, EngineError> {
        if launch.world_size == 1 {
            return make();
        }
        #[cfg(feature = "mpi")]
        if super::is_of_mpi(launch) {
            return over_mpi(launch, make);
        }
        super::rendezvous(launch)?.share(launch.rank, launch.world_size, make)
    }

    /// MPI is left again: it is not asked for anything else.
    #[cfg(feature = "mpi")]
    fn over_mpi(
        launch: &Launch,
        make: impl FnOnce() -> Result<Vec<u8>, EngineError>,
    ) -> Result<Vec<u8>, EngineError> {
        let mut mpi = super::start_mpi(launch, None)?;
        let made = if launch.rank == 0 { make().map(Some) } else { Ok(None) };
        // The length is zero where rank 0 has failed, so that nobody waits for what does not come.
        let mut len = [0u8; 8];
        if let Ok(Some(bytes)) = &made {
            len = (bytes.len() as u64).to_ne_bytes();
        }
        mpi.broadcast(&mut len, 0)?;
        let mut bytes = made?.unwrap_or_default();
        bytes.resize(u64::from_ne_bytes(len) as usize, 0);
        mpi.broadcast(&mut bytes, 0)?;
        Ok(bytes)
    }
}

#[cfg(not(feature = "cuda"))]
mod nccl {
    use super::{Engine, EngineError, Launch};

    /// No build without CUDA gets here: it knows no such device.
    pub(super) fn start(_: &Launch, _: usize) -> Result<Box<dyn Engine>, EngineError> {
        Err(EngineError::Unavailable { engine: "nccl", reason: "it is not built in".into() })
    }
}

/// Where ranks meet that MPI has not started: rank 0's address, as torchrun and its like say it.
#[cfg(feature = "cuda")]
fn rendezvous(launch: &Launch) -> Result<trainer::shard::engine::Rendezvous, EngineError> {
    let unset = |name: &str| EngineError::Unavailable {
        engine: "rendezvous",
        reason: format!(
            "{} says rank {} of {}, and {name} is not set: set MASTER_ADDR to the machine of rank 0 and \
             MASTER_PORT to a free port there, on all ranks",
            launch.launcher, launch.rank, launch.world_size
        ),
    };
    let get = |name: &str| std::env::var(name).map_err(|_| unset(name));
    let (host, port) = (get("MASTER_ADDR")?, get("MASTER_PORT")?);
    let port: u16 = port.trim().parse().map_err(|_| EngineError::Unavailable {
        engine: "rendezvous",
        reason: format!("MASTER_PORT is {port:?}, which is no port"),
    })?;
    // torchrun's own store listens on the port that it hands out.
    let taken = std::env::var("TORCHELASTIC_USE_AGENT_STORE").is_ok_and(|value| value == "True");
    let port = if taken { port.wrapping_add(1) } else { port };
    Ok(trainer::shard::engine::Rendezvous { host, port, deadline: Duration::from_secs(100) })
}
