//! `ocelli doctor`: hardware and libraries of this machine, and a test of communication between
//! ranks.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use kernels::device::{DeviceKind, Opened};
use kernels::ops::{choose_kernels, try_products};
use kernels::product_kernels::{self, Kernels};
use pipeline::words::{counted, thousands};
use ranks::launch::Launch;
use session::doctor::examine;
use session::fabric::{FabricResult, FabricTest, FabricTimes, Links};

use crate::cluster::compute;
use crate::columns::{Arrangement, Column, print_columns};
use crate::console::print_paragraph;
use crate::exit::CHECK_FAILED;

/// Width of the names of findings, with the space after them.
const NAME_WIDTH: usize = 15;

/// Flags of `doctor`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder on the disk to benchmark.
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    #[command(flatten)]
    compute: compute::ComputeFlags,
    /// Only test communication: all operations with odd lengths, then the speed of large transfers.
    /// Run it under mpirun.
    #[arg(long)]
    fabric: bool,
    /// Size of the largest timed transfer, in MiB; at least 256 KiB per rank. Speed depends on it:
    /// for `ocelli plan`, use about the size of a unit's weights.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    buffer_mb: u32,
    /// Seconds to wait for ranks that do not respond.
    #[arg(long, default_value_t = 120)]
    deadline_s: u64,
    /// Largest number of elements that one MPI call may move; a small number tests transfers that
    /// need several calls.
    #[arg(long, hide = true)]
    max_count: Option<usize>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let launch = compute::launch()?;
    let is_first = launch.rank == 0;
    let world_size = launch.world_size;
    if !args.fabric && is_first {
        out!("ocelli {}", env!("CARGO_PKG_VERSION"));
        let library_path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        examine(&args.folder, &library_path, &mut |finding| print_finding(&finding.name, &finding.text));
    }
    if is_first {
        if launch.launcher == Launch::ALONE.launcher {
            print_finding("launcher", "none: a single process");
        } else {
            let ranks = counted(world_size as u64, "rank");
            print_finding("launcher", &format!("{}: {ranks}", launch.launcher));
        }
    }
    let device = args.compute.open(&launch)?;
    let mut n_wrong_products = 0;
    if !args.fabric && is_first {
        print_finding("device", &device.name);
        n_wrong_products = try_and_print_products(&device);
    }
    let test = FabricTest {
        launch,
        device,
        engine: args.compute.engine,
        deadline: Duration::from_secs(args.deadline_s),
        max_count: args.max_count,
        buffer_bytes: (args.buffer_mb as usize) << 20,
    };
    test.run(move |result| match result {
        _ if !is_first => {}
        FabricResult::Passed(engine) => {
            let ranks = counted(world_size as u64, "rank");
            print_finding("fabric", &format!("{engine} on {ranks}: all operations passed"));
        }
        FabricResult::Timed(times) => print_times(&times),
    })?;
    if n_wrong_products > 0 {
        return Ok(ExitCode::from(CHECK_FAILED));
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a finding. Its further lines continue below its text.
fn print_finding(name: &str, text: &str) {
    print_paragraph(NAME_WIDTH, &format!("{name:<NAME_WIDTH$}{text}"));
}

/// Multiplies a few matrices on a GPU, and prints which kernels were used and the results of
/// checks. Returns the number of sizes with a wrong result.
fn try_and_print_products(device: &Opened) -> usize {
    if device.kind == DeviceKind::Cpu {
        return 0;
    }
    // It fails only if the caller insists on a library.
    let Ok(kernels) = choose_kernels(Kernels::Auto, &device.device) else { return 0 };
    for notice in product_kernels::notices() {
        print_finding("", &notice);
    }
    try_products(&device.device);
    compute::print_products(&kernels)
}

/// Prints the times, and the flags of `ocelli plan` for this fabric.
fn print_times(times: &FabricTimes) {
    let mut sizes = Vec::new();
    let mut gathers = Vec::new();
    let mut gather_rates = Vec::new();
    let mut exchanges = Vec::new();
    let mut exchange_rates = Vec::new();
    for buffer in times.buffers {
        sizes.push(thousands(buffer.bytes as u64 >> 10));
        gathers.push(format!("{:.3}", buffer.gather_ms));
        gather_rates.push(format!("{:.2}", buffer.moved_bytes / buffer.gather_ms / 1e6));
        exchanges.push(format!("{:.3}", buffer.exchange_ms));
        exchange_rates.push(format!("{:.2}", buffer.moved_bytes / buffer.exchange_ms / 1e6));
    }
    let columns = [
        Column::numbers("buffer KiB", sizes),
        Column::numbers("gather ms", gathers),
        Column::numbers("GB/s", gather_rates),
        Column::numbers("exchange ms", exchanges),
        Column::numbers("GB/s", exchange_rates),
    ];
    print_columns(&columns, Arrangement { n_keys: 1, gap: 2 });
    let Links { n_local, is_one_node, bytes_per_s, long_us, short_us } = times.links;
    let place = if is_one_node { "local" } else { "node" };
    let flags = format!(
        "--ranks-per-node {n_local} --{place}-gb-s {:.4} --{place}-us {} --{place}-short-us {}",
        bytes_per_s / 1e9,
        tenths(long_us),
        tenths(short_us)
    );
    print_finding("for a plan", &flags);
}

/// Rounds to tenths: a latency within a node is often less than a microsecond.
fn tenths(value: f64) -> f64 {
    (10.0 * value).round() / 10.0
}
