//! Connection of the ranks of a launch, and the settings on which they must agree.

use std::time::Duration;

use kernels::device::Opened;
use kernels::product_kernels::Kernels;
use ranks::EngineError;
use ranks::communicator::{Communicator, CommunicatorConfig, START_TIMEOUT};
use ranks::engine::{self, EngineChoice, Reduction, Site};
use ranks::launch::Launch;
use ranks::topology::Topology;
use trainer::recipe::{KernelChoice, RunConfig};
use trainer::{Plan, TrainError};

use crate::error::SessionError;

/// Connects to the other ranks of `launch`, all in one shard group.
///
/// # Errors
/// [`EngineError`] when no engine is available or ranks do not meet.
pub fn connect(
    launch: &Launch,
    run: &RunConfig,
    device: &Opened,
    choice: EngineChoice,
) -> Result<Communicator, EngineError> {
    let rank = launch.rank;
    let world_size = launch.world_size;
    if world_size == 1 && choice == EngineChoice::Auto {
        return Ok(Communicator::solo());
    }
    let topology = Topology { rank, world_size, group_size: world_size, ..Topology::SINGLE_RANK };
    let deadline = Duration::from_secs(run.deadline_s);
    let config = CommunicatorConfig { topology, exact: run.exact_sums, deadline };
    let site = site(launch, device, deadline.max(START_TIMEOUT), None);
    Communicator::start(config, Box::new(move || engine::start(&site, choice)))
}

/// Returns the launch and device of this rank as engines see them; `max_count` limits the elements
/// of a call.
pub fn site(launch: &Launch, device: &Opened, deadline: Duration, max_count: Option<usize>) -> Site {
    Site {
        launcher: launch.launcher,
        rank: launch.rank,
        world_size: launch.world_size,
        is_started_by_mpi: launch.is_started_by_mpi,
        address: launch.address.clone(),
        device: device.clone(),
        // Shorter than the caller's own deadline, so that this one names the missing ranks.
        deadline: deadline.saturating_sub(Duration::from_secs(10)).max(Duration::from_secs(5)),
        max_count,
    }
}

/// Returns the number of ranks that compute on the device of this one, including itself. All ranks
/// call it.
///
/// # Errors
/// [`EngineError`] of the collective.
pub fn n_sharers(comm: &Communicator, device: &Opened) -> Result<usize, EngineError> {
    let ids = comm.gather_bytes("devices", device.id.to_vec())?;
    Ok(ids.iter().filter(|id| **id == device.id).count().max(1))
}

/// Returns `result` if no rank has failed. All ranks call it.
///
/// # Errors
/// The error of this rank, or [`TrainError::PeersFailed`] if others have failed.
pub fn all_ready<T, E>(comm: &Communicator, result: Result<T, E>) -> Result<T, E>
where
    E: From<SessionError>,
{
    let n_failed = comm.count("readiness", result.is_err()).map_err(SessionError::from)?;
    let value = result?;
    if n_failed > 0 {
        return Err(SessionError::from(TrainError::PeersFailed { n_ranks: n_failed }).into());
    }
    Ok(value)
}

/// Checks that all ranks have groups of the same sizes: ranks that split differently would wait for
/// one another. All ranks call it.
pub(crate) fn agree_on_groups(comm: &Communicator, topology: Topology) -> Result<(), SessionError> {
    let sizes = [
        ("run.shard, run.shard_group", topology.group_size as f64),
        ("method.prototype_group", topology.column_group_size as f64),
    ];
    let with_signs = sizes.iter().flat_map(|(_, size)| [*size, -size]).collect();
    let largest = comm.all_reduce("groups", with_signs, Reduction::Max)?;
    for ((key, this_rank), ends) in sizes.into_iter().zip(largest.chunks_exact(2)) {
        let most = ends[0];
        let least = -ends[1];
        if most != least {
            return Err(SessionError::Groups { key, least, most, this_rank });
        }
    }
    Ok(())
}

/// Returns the number of steps that a rank has found for a length in `minutes`, for all ranks;
/// `None` if none has. All ranks call it.
///
/// # Errors
/// [`SessionError::Minutes`] if ranks have different lengths: those that measure theirs would wait
/// for the others.
pub(crate) fn agree_on_length(
    comm: &Communicator,
    minutes: Option<f64>,
    n_steps: Option<u64>,
) -> Result<Option<u64>, SessionError> {
    let this_rank = minutes.unwrap_or_default();
    let n_steps = n_steps.unwrap_or_default() as f64;
    let largest = comm.all_reduce("length", vec![this_rank, -this_rank, n_steps], Reduction::Max)?;
    let most = largest[0];
    let least = -largest[1];
    if most != least {
        return Err(SessionError::Minutes { least, most, this_rank });
    }
    Ok((largest[2] > 0.0).then_some(largest[2] as u64))
}

/// Selects the same matrix multiplication kernels on all ranks: CubeCL's, if their libraries differ
/// or some have none. All ranks call it.
pub(crate) fn agree_on_kernels(
    comm: &Communicator,
    plan: &mut Plan,
    device: &Opened,
) -> Result<(), SessionError> {
    // The name as a number that floating point represents exactly.
    let name = f64::from(xxhash_rust::xxh3::xxh3_64(plan.kernels.as_bytes()) as u32);
    let largest = comm.all_reduce("kernels", vec![name, -name], Reduction::Max)?;
    if largest[0] == -largest[1] {
        return Ok(());
    }
    if plan.recipe.run.kernels == KernelChoice::Cublaslt {
        return Err(SessionError::Kernels { this_rank: plan.kernels.clone() });
    }
    tracing::info!(
        "using CubeCL's kernels for products: ranks have different libraries; this one's is {}",
        plan.kernels
    );
    Ok(plan.use_kernels(Kernels::Cubecl, &device.device)?)
}
