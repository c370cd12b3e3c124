//! What to compute on and what to talk over: the flags that several verbs share.

use anyhow::bail;
use kernels::device::{DeviceChoice, DeviceError, DeviceKind, Opened};
use ranks::wire::Wire;
use trainer::Plan;
use trainer::step::precision::Precision;

use super::launch::Launch;
use super::start::EngineChoice;
use crate::console::say;

/// The flags.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ComputeFlags {
    /// auto, cpu, cuda, cuda:1 or wgpu. `auto` takes the NVIDIA GPU of the local rank where there is one, else the CPU.
    #[arg(long, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// What ranks talk over: auto, mpi or nccl. `auto` takes NCCL where every rank has a GPU of its own.
    #[arg(long, default_value = "auto")]
    pub(crate) engine: EngineChoice,
}

/// The flag of verbs that no ranks run.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct DeviceFlag {
    /// auto, cpu, cuda, cuda:1 or wgpu. `auto` takes an NVIDIA GPU where there is one, else the CPU.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

impl ComputeFlags {
    /// The device of this rank. What is no CPU is said.
    pub(crate) fn open(&self, launch: &Launch) -> anyhow::Result<Opened> {
        open(self.device, launch)
    }
}

impl DeviceFlag {
    /// The device. What is no CPU is said.
    pub(crate) fn open(&self) -> anyhow::Result<Opened> {
        open(self.device, &Launch::ALONE)
    }
}

/// Checks that `device` knows the types that `plan` computes and travels in.
pub(crate) fn check(plan: &Plan, device: &Opened) -> anyhow::Result<()> {
    let Precision { compute, gather, reduce, head_gather, head_reduce } = plan.recipe.optim.precision;
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
    match &opened.instead_of {
        // Of a build for CPUs nobody expects anything else.
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
