//! Flags for the device and the engine, which several verbs share.
use kernels::device::{DeviceChoice, DeviceError, DeviceKind, Opened};
use kernels::ops::product_reports;
use kernels::product_kernels::{self, Checked, ProductReport};
use pipeline::words::counted;
use ranks::engine::EngineChoice;
use ranks::launch::{Launch, LaunchError};

use crate::console::{print_paragraph, say};

/// Width of `products` before its text.
const PRODUCTS_WIDTH: usize = 21;

/// Reads the position of this process among the ranks of its launch from the environment.
pub(crate) fn launch() -> Result<Launch, LaunchError> {
    Launch::from_variables(&|name| std::env::var(name).ok())
}

/// Flags for the device and the engine.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ComputeFlags {
    /// Device: auto, cpu, cuda, cuda:1 or wgpu. `auto` uses the local rank's NVIDIA GPU if there is
    /// one, otherwise the CPU.
    #[arg(long, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Communication engine: auto, mpi or nccl (`ocelli doctor` lists them). `auto` uses NCCL if
    /// every rank has its own GPU, otherwise MPI.
    #[arg(long, default_value = "auto", hide_short_help = true)]
    pub(crate) engine: EngineChoice,
}

/// Flag for the device of verbs that run as one process.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct DeviceFlag {
    /// Device: auto, cpu, cuda, cuda:1 or wgpu. `auto` uses an NVIDIA GPU if there is one,
    /// otherwise the CPU.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

impl ComputeFlags {
    /// Opens the device of this rank, and prints its name unless it is the CPU.
    pub(crate) fn open(&self, launch: &Launch) -> anyhow::Result<Opened> {
        let opened = self.device.open(launch.local_rank)?;
        match &opened.fallback_error {
            // A build without GPU support is not expected to find one.
            None | Some(DeviceError::NotBuilt { .. }) => {}
            Some(error) => say(format!("using the CPU: {error}")),
        }
        if opened.kind != DeviceKind::Cpu {
            match launch.world_size {
                1 => say(format!("using {}", opened.name)),
                _ => say(format!("rank {} uses {}", launch.rank, opened.name)),
            }
        }
        Ok(opened)
    }
}

impl DeviceFlag {
    /// Opens the device, and prints its name unless it is the CPU.
    pub(crate) fn open(&self) -> anyhow::Result<Opened> {
        ComputeFlags { device: self.device, ..ComputeFlags::default() }.open(&Launch::ALONE)
    }
}

/// Prints notices about requested kernels that cannot be used, each once.
pub(crate) fn print_notices() {
    for notice in product_kernels::notices() {
        say(notice);
    }
}

/// Prints which kernels have multiplied matrices in this process, and the results of checks.
/// Returns the number of sizes with a wrong result.
pub(crate) fn print_products(kernels: &str) -> usize {
    let reports = product_reports();
    if reports.is_empty() {
        if !kernels.is_empty() {
            prose!("products             by {kernels}");
        }
        return 0;
    }
    let mut n_right = 0;
    let mut n_wrong = 0;
    let mut n_refused = 0;
    for report in &reports {
        n_right += usize::from(matches!(report.checked, Checked::Right(_)));
        n_wrong += usize::from(matches!(report.checked, Checked::Wrong(_)));
        n_refused += usize::from(matches!(report.checked, Checked::Refused(_)));
    }
    let n_unchecked = reports.len() - n_right - n_wrong - n_refused;
    let sizes = counted(reports.len() as u64, "size");
    let text = format!(
        "products             by {kernels}: {sizes}; {n_right} right, {n_wrong} wrong, {n_refused} refused, \
         {n_unchecked} not checked"
    );
    print_paragraph(PRODUCTS_WIDTH, &text);
    for ProductReport { size, kernel, checked } in &reports {
        print_paragraph(4, &format!("  {size:<52} {kernel}; {checked}"));
    }
    n_wrong
}
