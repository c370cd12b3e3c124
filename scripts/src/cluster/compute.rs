//! Flags for the device and the engine, which several verbs share.
use anyhow::bail;
use kernels::device::{DeviceChoice, DeviceError, DeviceKind, Opened};
use ranks::engine::EngineChoice;
use ranks::wire::Wire;
use trainer::Plan;
use trainer::step::precision::Precision;

use super::launch::Launch;
use crate::console::say;

/// Flags for the device and the engine.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ComputeFlags {
    /// Device: auto, cpu, cuda, cuda:1 or wgpu. `auto` is the NVIDIA GPU of the local rank if there is one, otherwise the CPU.
    #[arg(long, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Engine between ranks: auto, mpi or nccl (`ocelli doctor` lists them). `auto` is NCCL if every rank has a GPU of its own, otherwise MPI.
    #[arg(long, default_value = "auto")]
    pub(crate) engine: EngineChoice,
}

/// Flag for the device of verbs that run as one process.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct DeviceFlag {
    /// Device: auto, cpu, cuda, cuda:1 or wgpu. `auto` is an NVIDIA GPU if there is one, otherwise the CPU.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

impl ComputeFlags {
    /// Opens the device of this rank, and prints its name unless it is the CPU.
    pub(crate) fn open(&self, launch: &Launch) -> anyhow::Result<Opened> {
        open(self.device, launch)
    }
}

impl DeviceFlag {
    /// Opens the device, and prints its name unless it is the CPU.
    pub(crate) fn open(&self) -> anyhow::Result<Opened> {
        open(self.device, &Launch::ALONE)
    }
}

/// Checks that `device` supports the types in which `plan` computes and communicates.
pub(crate) fn check(plan: &Plan, device: &Opened) -> anyhow::Result<()> {
    let Precision { compute, memory: _, gather, reduce, head_gather, head_reduce } =
        plan.recipe.optim.precision;
    let types = [gather, reduce, head_gather, head_reduce].map(Wire::dtype);
    for dtype in [&types[..], &[compute.dtype()]].concat() {
        if !device.device.supports_dtype(dtype) {
            bail!("{} does not know {}: set optim.precision to something else", device.name, dtype.name());
        }
    }
    Ok(())
}

fn open(choice: DeviceChoice, launch: &Launch) -> anyhow::Result<Opened> {
    let opened = choice.open(launch.local_rank)?;
    match &opened.fallback_error {
        // A build without GPU support is not expected to find one.
        None | Some(DeviceError::NotBuilt { .. }) => {}
        Some(error) => say(format!("on the CPU: {error}")),
    }
    if opened.kind != DeviceKind::Cpu {
        match launch.world_size {
            1 => say(format!("on {}", opened.name)),
            _ => say(format!("rank {} on {}", launch.rank, opened.name)),
        }
    }
    Ok(opened)
}
