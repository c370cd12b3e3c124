//! Connecting the ranks of a launch through an engine.

use std::time::Duration;

use anyhow::bail;
use kernels::device::Opened;
use kernels::products::Kernels;
use ranks::communicator::{Communicator, CommunicatorConfig, START_TIMEOUT};
use ranks::engine::{self, EngineChoice, Reduction, Site};
use ranks::topology::Topology;
use trainer::recipe::{KernelChoice, RunConfig};
use trainer::{Plan, TrainError};

use super::launch::Launch;
use crate::console::say;

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
    let topology = Topology { rank, world_size, group_size: world_size, ..Topology::SINGLE_RANK };
    let deadline = Duration::from_secs(run.deadline_s);
    let config = CommunicatorConfig { topology, exact: run.exact_sums, deadline };
    let site = site(launch, device, deadline.max(START_TIMEOUT), None);
    Ok(Communicator::start(config, Box::new(move || engine::start(&site, choice)))?)
}

/// Returns the number of ranks that compute on the device of this one, including itself. All ranks
/// call it.
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

/// Checks that all ranks were given groups of the same sizes: ranks that split differently would
/// wait for one another. All ranks call it.
pub(crate) fn agree_on_groups(comm: &Communicator, topology: Topology) -> anyhow::Result<()> {
    let sizes = [topology.group_size as f64, topology.column_group_size as f64];
    let both = sizes.iter().flat_map(|size| [*size, -size]).collect();
    let most = comm.all_reduce("groups", both, Reduction::Max)?;
    let keys = ["run.shard, run.shard_group", "method.prototype_group"];
    for ((key, size), ends) in keys.iter().zip(sizes).zip(most.chunks_exact(2)) {
        if ends[0] != -ends[1] {
            bail!(
                "{key}: ranks were given different values, which make groups of {} to {} ranks; this one's {size}",
                -ends[1],
                ends[0]
            );
        }
    }
    Ok(())
}

/// Makes all ranks multiply with the same kernels: with CubeCL's, where their libraries differ or
/// some have none. All ranks call it.
pub(crate) fn agree_on_kernels(comm: &Communicator, plan: &mut Plan, device: &Opened) -> anyhow::Result<()> {
    // The name as a number that a sum of floats keeps.
    let name = f64::from(xxhash_rust::xxh3::xxh3_64(plan.kernels.as_bytes()) as u32);
    let most = comm.all_reduce("kernels", vec![name, -name], Reduction::Max)?;
    if most[0] == -most[1] {
        return Ok(());
    }
    if plan.recipe.run.kernels == KernelChoice::Cublaslt {
        bail!(
            "run.kernels = \"cublaslt\": ranks have different versions of it, or some have none; this one's is {}: give all ranks the same library, \
             or set it to \"auto\"",
            plan.kernels
        );
    }
    say(format!(
        "products are computed by CubeCL's kernels: ranks have different libraries; this one's is {}",
        plan.kernels
    ));
    Ok(plan.use_kernels(Kernels::Cubecl, &device.device)?)
}

/// Returns the launch and device of this rank as engines see them; `max_count` limits the elements
/// of a call.
pub(crate) fn site(launch: &Launch, device: &Opened, deadline: Duration, max_count: Option<usize>) -> Site {
    Site {
        launcher: launch.launcher,
        rank: launch.rank,
        world_size: launch.world_size,
        is_started_by_mpi: is_started_by_mpi(launch),
        address: address(launch),
        device: device.clone(),
        // Shorter than the caller's own deadline, so that this one names the missing ranks.
        deadline: deadline.saturating_sub(Duration::from_secs(10)).max(Duration::from_secs(5)),
        max_count,
    }
}

/// Returns `true` if MPI started the ranks of `launch`. Under srun this requires `--mpi=pmix`.
fn is_started_by_mpi(launch: &Launch) -> bool {
    match launch.launcher {
        "mpirun" | "mpiexec" => true,
        "srun" => std::env::var_os("PMIX_RANK").is_some(),
        _ => false,
    }
}

/// Returns host and port of rank 0, as torchrun and similar launchers set them, or the reason why
/// there are none.
fn address(launch: &Launch) -> Result<(String, u16), String> {
    let get = |name: &str| {
        std::env::var(name).map_err(|_| {
            format!(
                "{} says rank {} of {}, and {name} is not set: set MASTER_ADDR to the machine of rank 0 and \
                 MASTER_PORT to a free port there, on all ranks",
                launch.launcher, launch.rank, launch.world_size
            )
        })
    };
    let host = get("MASTER_ADDR")?;
    let port = get("MASTER_PORT")?;
    let port: u16 = port.trim().parse().map_err(|_| format!("MASTER_PORT is {port:?}, which is no port"))?;
    // torchrun's own store listens on the port in MASTER_PORT.
    let taken = std::env::var("TORCHELASTIC_USE_AGENT_STORE").is_ok_and(|value| value == "True");
    Ok((host, if taken { port.wrapping_add(1) } else { port }))
}
