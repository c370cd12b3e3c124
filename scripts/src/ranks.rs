//! From what the launcher says to a line between ranks.

use std::time::Duration;

use anyhow::bail;
use trainer::Plan;
use trainer::shard::comm::{Comm, CommConfig, EngineFactory};

use crate::launch::Launch;

/// The line to the other ranks of `plan`'s run, which is over the ranks of `launch`.
pub(crate) fn connect(launch: &Launch, plan: &Plan) -> anyhow::Result<Comm> {
    if launch.world_size == 1 {
        return Ok(Comm::solo());
    }
    let run = &plan.recipe.run;
    // Plan::over has checked it.
    let place = plan.place(launch.rank).map_err(anyhow::Error::msg)?;
    let config = CommConfig { place, exact: run.exact_sums, deadline: Duration::from_secs(run.deadline_s) };
    Ok(Comm::start(config, engine(launch.clone())?)?)
}

/// Makes the engine of `launch`, which may be one rank.
#[cfg(feature = "mpi")]
pub(crate) fn engine(launch: Launch) -> anyhow::Result<EngineFactory> {
    use trainer::shard::engine::{Engine, EngineError, Mpi};
    if matches!(launch.launcher, "torchrun" | "kubernetes") {
        bail!(
            "{} says rank {} of {}, and this build knows MPI only: start it with mpirun or srun --mpi=pmix",
            launch.launcher,
            launch.rank,
            launch.world_size
        );
    }
    let start = move || -> Result<Box<dyn Engine>, EngineError> {
        let engine = Mpi::start()?;
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
    };
    Ok(Box::new(start))
}

/// Without an engine between processes there is nothing to make.
#[cfg(not(feature = "mpi"))]
pub(crate) fn engine(launch: Launch) -> anyhow::Result<EngineFactory> {
    bail!(
        "{} says rank {} of {}, and this build knows no MPI: build with `cargo build --release --features mpi`",
        launch.launcher,
        launch.rank,
        launch.world_size
    )
}
