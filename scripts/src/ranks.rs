//! From what the launcher says to a line between ranks.

use std::time::Duration;

use anyhow::bail;
use trainer::TrainError;
use trainer::config::RunConfig;
use trainer::shard::comm::{Comm, CommConfig, EngineFactory};
use trainer::shard::engine::{Engine, EngineError, Reduction};
use trainer::shard::mesh::Place;

use crate::launch::Launch;

/// The line to the other ranks of `launch`, in one group.
pub(crate) fn connect(launch: &Launch, run: &RunConfig) -> anyhow::Result<Comm> {
    let Launch { rank, world_size, .. } = *launch;
    if world_size == 1 {
        return Ok(Comm::solo());
    }
    let place = Place { rank, world_size, group_size: world_size };
    let config = CommConfig { place, exact: run.exact_sums, deadline: Duration::from_secs(run.deadline_s) };
    Ok(Comm::start(config, engine(launch.clone())?)?)
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

/// Makes the engine of `launch`.
fn engine(launch: Launch) -> anyhow::Result<EngineFactory> {
    can_start(&launch)?;
    Ok(Box::new(move || start_mpi(&launch, None)))
}

/// The engine of `launch`, in this thread; `max_count` as of `Mpi::with_max_count`.
pub(crate) fn start(launch: &Launch, max_count: Option<usize>) -> anyhow::Result<Box<dyn Engine>> {
    can_start(launch)?;
    Ok(start_mpi(launch, max_count)?)
}

#[cfg(feature = "mpi")]
fn can_start(launch: &Launch) -> anyhow::Result<()> {
    if matches!(launch.launcher, "torchrun" | "kubernetes") {
        bail!(
            "{} says rank {} of {}, and this build knows MPI only: start it with mpirun or srun --mpi=pmix",
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
fn can_start(launch: &Launch) -> anyhow::Result<()> {
    bail!(
        "{} says rank {} of {}, and this build knows no MPI: build with `cargo build --release --features mpi`",
        launch.launcher,
        launch.rank,
        launch.world_size
    )
}
