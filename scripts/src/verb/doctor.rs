//! `ocelli doctor`: hardware and libraries of this machine, and a test of communication between
//! ranks.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::bail;
use kernels::device::workers::n_or_all_cores;
use kernels::device::{Device, DeviceError, DeviceKind, Opened, cuda_devices};
use kernels::ops::{choose_kernels, try_products};
use kernels::products::{self, Kernels};
use ranks::EngineError;
use ranks::conformance;
use ranks::conformance::{CheckContext, ConformanceError};
use ranks::engine::{self, Engine, EngineChoice, Solo, connectors};
use trainer::estimate::LONG_MESSAGE_BYTES;

use ranks::launch::Launch;
use session::{connect, machine};

use crate::cluster::compute;
use crate::exit::CHECK_FAILED;

/// Bytes that are written to measure the speed of a disk.
const DISK_BYTES: usize = 64 << 20;

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
    if !args.fabric && launch.rank == 0 {
        print_machine(&args.folder);
    }
    if launch.rank == 0 {
        out!("launcher       {}: {} rank(s)", launch.launcher, launch.world_size);
    }
    let device = args.compute.open(&launch)?;
    let mut n_wrong_products = 0;
    if !args.fabric && launch.rank == 0 {
        out!("device         {}", device.name);
        n_wrong_products = print_products(&device);
    }
    // The test runs in a thread of its own, because it waits forever for ranks that do not arrive.
    let (sender, receiver) = std::sync::mpsc::channel();
    let rank = launch.rank;
    let max_count = args.max_count;
    let choice = args.compute.engine;
    let timed_bytes = timed_bytes(launch.world_size, (args.buffer_mb as usize) << 20);
    let last = Arc::new(Mutex::new(None));
    let passed = Arc::clone(&last);
    let deadline = Duration::from_secs(args.deadline_s);
    std::thread::spawn(move || {
        let engine = match (launch.world_size, choice) {
            (1, EngineChoice::Auto) => Ok(Box::new(Solo) as Box<dyn Engine>),
            _ => engine::start(&connect::site(&launch, &device, deadline, max_count), choice),
        };
        let mut engine = match engine {
            Ok(engine) => engine,
            Err(error) => return drop(sender.send(Err(error.into()))),
        };
        let result = test_fabric(&launch, &device, engine.as_mut(), timed_bytes, &passed);
        // Dropping an engine may wait for other ranks, which may never arrive after a failure.
        if result.is_ok() {
            drop(engine);
            return drop(sender.send(result));
        }
        let _ = sender.send(result);
    });
    match receiver.recv_timeout(deadline) {
        Ok(result) => result?,
        Err(RecvTimeoutError::Disconnected) => bail!("the fabric test panicked; see above"),
        Err(RecvTimeoutError::Timeout) => {
            let last = *last.lock().unwrap_or_else(PoisonError::into_inner);
            let suspects = match last {
                None => {
                    format!("rank {rank} is waiting for other ranks that did not start or cannot be reached")
                }
                Some((operation, n)) => {
                    format!("rank {rank} is waiting in the test after {operation} of {n} elements")
                }
            };
            let collective = "the fabric test";
            let unit = "the ranks".to_string();
            return Err(EngineError::Deadline {
                collective,
                unit,
                number: 0,
                seconds: args.deadline_s,
                suspects,
            }
            .into());
        }
    }
    if n_wrong_products > 0 {
        return Ok(ExitCode::from(CHECK_FAILED));
    }
    Ok(ExitCode::SUCCESS)
}

/// Multiplies a few matrices on a GPU, and prints which kernels did it and the results of checks.
/// Returns the number of sizes with a wrong result.
fn print_products(device: &Opened) -> usize {
    if device.kind == DeviceKind::Cpu {
        return 0;
    }
    // It fails only if the caller insists on a library.
    let Ok(kernels) = choose_kernels(Kernels::Auto, &device.device) else { return 0 };
    for notice in products::notices() {
        out!("               {notice}");
    }
    try_products(&device.device);
    compute::print_products(&kernels)
}

/// Prints the hardware and libraries of this machine.
fn print_machine(folder: &Path) {
    out!("ocelli {}", env!("CARGO_PKG_VERSION"));
    out!("cores          {} for this process{}", n_or_all_cores(0), machine::bound_note());
    out!("instructions   {}", instructions());
    out!("memory         {}", available());
    out!("disk           {}", disk(folder));
    out!("mpirun         {}", mpirun());
    out!("NVIDIA driver  {}", cuda_driver());
    out!("CUDA           {}", cuda());
    for connector in connectors() {
        let library = match connector.library() {
            Ok(version) => format!("built in: {version}"),
            Err(reason) => reason,
        };
        out!("{:<14} {library}", connector.name().to_uppercase());
    }
}

/// Names the instruction sets of the CPU for which kernels are compiled, and says if bf16 is slower
/// than f32.
fn instructions() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        let sets = [
            ("AVX2", is_x86_feature_detected!("avx2")),
            ("FMA", is_x86_feature_detected!("fma")),
            ("AVX-512", is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")),
            ("AVX512-BF16", is_x86_feature_detected!("avx512bf16")),
        ];
        let names: Vec<&str> =
            sets.iter().filter(|(_, is_supported)| *is_supported).map(|(name, _)| *name).collect();
        if sets[3].1 {
            names.join(", ")
        } else {
            format!("{}; none for bf16, so bf16 is slower than f32", names.join(", "))
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    format!("{}; vectorized kernels exist only for x86-64", std::env::consts::ARCH)
}

fn available() -> String {
    match machine::available_bytes() {
        Some(bytes) => format!("{:.1} GB available", bytes / 1e9),
        None => "unknown: cannot read /proc/meminfo".into(),
    }
}

/// Describes the speed of the disk of `folder`.
fn disk(folder: &Path) -> String {
    match measure_disk(folder) {
        Ok(rate) => format!("{}: {:.0} MB/s written and synced", folder.display(), rate / 1e6),
        Err(error) => format!("cannot write to {}: {error}", folder.display()),
    }
}

/// Writes and syncs a temporary file; returns the bytes per second.
fn measure_disk(folder: &Path) -> std::io::Result<f64> {
    let mut file = tempfile::tempfile_in(folder)?;
    let block = vec![0x5a; 1 << 20];
    let start = Instant::now();
    for _ in 0..DISK_BYTES / block.len() {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    Ok(DISK_BYTES as f64 / start.elapsed().as_secs_f64())
}

/// Names the version of `mpirun`.
fn mpirun() -> String {
    const NONE: &str = "mpirun not found in PATH";
    let Ok(output) = Command::new("mpirun").arg("--version").output() else { return NONE.into() };
    if !output.status.success() {
        return NONE.into();
    }
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().find(|line| !line.is_empty()).unwrap_or(NONE).to_string()
}

/// Names the CUDA devices that this build can use.
fn cuda() -> String {
    match cuda_devices() {
        Ok(names) => format!("built in: {}", names.join(", ")),
        Err(error @ DeviceError::NotBuilt { .. }) => format!("not built in: {error}"),
        Err(error) => format!("built in: {error}"),
    }
}

/// Returns the path of the NVIDIA driver's library in the folders of the loader.
fn cuda_driver() -> String {
    let mut folders: Vec<PathBuf> =
        std::env::var("LD_LIBRARY_PATH").unwrap_or_default().split(':').map(PathBuf::from).collect();
    folders.extend(
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64", "/usr/lib"].map(PathBuf::from),
    );
    for name in ["libcuda.so.1", "libcuda.so"] {
        for folder in &folders {
            let path = folder.join(name);
            if fs::exists(&path).unwrap_or(false) {
                return path.display().to_string();
            }
        }
    }
    "none: using the CPU".into()
}

/// Smallest length of the shortest buffer that is timed.
const SHORTEST_BYTES: usize = 4 << 10;

/// Smallest length of the middle buffer that is timed.
const MIDDLE_BYTES: usize = 256 << 10;

/// Returns the lengths of the timed buffers, in bytes; the longest has at least `buffer_bytes`. A
/// message carries one rank's part of a buffer, `1 / world_size`: messages are short for the
/// shortest buffer, and long for the others. Those of the shortest buffer are still short where a
/// gather sends half of the buffer at once.
fn timed_bytes(world_size: usize, buffer_bytes: usize) -> [usize; 3] {
    let middle = MIDDLE_BYTES.max(world_size * LONG_MESSAGE_BYTES as usize);
    [SHORTEST_BYTES.max(16 * world_size), middle, buffer_bytes.max(4 * middle)]
}

/// Runs the conformance suite on the ranks of `launch`, and times the most frequent operations of a
/// step on buffers of `timed_bytes`.
fn test_fabric(
    launch: &Launch,
    device: &Opened,
    engine: &mut dyn Engine,
    timed_bytes: [usize; 3],
    last: &Mutex<Option<(&'static str, usize)>>,
) -> anyhow::Result<()> {
    let mut context = CheckContext {
        device: &device.device,
        passed: &mut |operation, n| {
            *last.lock().unwrap_or_else(PoisonError::into_inner) = Some((operation, n));
        },
    };
    match conformance::check(engine, &mut context) {
        Ok(()) => {}
        // The error keeps its type, which determines the exit code.
        Err(ConformanceError::Failed(error)) => {
            return Err(anyhow::Error::new(error).context(format!("rank {}", launch.rank)));
        }
        Err(error @ ConformanceError::Wrong { .. }) => bail!("rank {}: {error}", launch.rank),
    }
    let is_first = launch.rank == 0;
    if is_first {
        out!("fabric         {} on {} rank(s): all operations passed", engine.name(), launch.world_size);
    }
    if launch.world_size == 1 {
        return Ok(());
    }
    // The longest buffer comes first, so that short ones are timed with a TCP window as wide as
    // that of a run.
    let mut times_ms = Vec::new();
    for bytes in timed_bytes.into_iter().rev() {
        times_ms.push(time(engine, &device.device, bytes)?);
    }
    times_ms.reverse();
    if !is_first {
        return Ok(());
    }
    for (bytes, [gather_ms, exchange_ms]) in timed_bytes.into_iter().zip(&times_ms) {
        let moved = bytes as f64 * (launch.world_size - 1) as f64 / launch.world_size as f64;
        out!(
            "  {:>6} kB  gather {gather_ms:8.3} ms, {:6.2} GB/s   exchange {exchange_ms:8.3} ms, {:6.2} GB/s",
            bytes >> 10,
            moved / gather_ms / 1e6,
            moved / exchange_ms / 1e6
        );
    }
    let both_s: Vec<f64> =
        times_ms.iter().map(|[gather_ms, exchange_ms]| (gather_ms + exchange_ms) / 1e3).collect();
    out!("for a plan     {}", plan_flags(launch, timed_bytes, &both_s));
    Ok(())
}

/// Returns the flags of `ocelli plan` for this fabric. `both_s` are the seconds of a gather and an
/// exchange together, for each of `timed_bytes`. The bandwidth is the difference in bytes of the
/// two longest buffers over the difference of their times; the latency of long messages is the rest
/// of the time of the middle one, which is as long as the weights of a unit of a small network;
/// that of short messages is the rest of the time of the shortest one.
fn plan_flags(launch: &Launch, timed_bytes: [usize; 3], both_s: &[f64]) -> String {
    let n_local = launch.n_local.unwrap_or(1).clamp(1, launch.world_size);
    let is_one_node = n_local == launch.world_size;
    // Parts of the buffer that a link carries in an exchange: those of a rank from all others, or
    // those of a node's ranks from other nodes. In a gather all parts but one pass a link.
    let exchanged = if is_one_node { n_local - 1 } else { n_local * (launch.world_size - n_local) };
    let n_parts = exchanged + launch.world_size - 1;
    let [shortest, middle, longest] =
        timed_bytes.map(|bytes| bytes as f64 * n_parts as f64 / launch.world_size as f64);
    let bytes_per_s = (longest - middle) / (both_s[2] - both_s[1]).max(1e-9);
    // Counted as in a plan: the ranks or nodes that a gather passes, and one message of the
    // exchange.
    let n = if is_one_node { launch.world_size } else { launch.world_size.div_ceil(n_local) };
    let n_latencies = (n - 1).min((n as f64).log2().ceil() as usize) + 1;
    let short_us = 1e6 * (both_s[0] - shortest / bytes_per_s).max(0.0) / n_latencies as f64;
    let long_us = 1e6 * (both_s[1] - middle / bytes_per_s).max(0.0) / n_latencies as f64;
    let long_us = long_us.max(short_us);
    let place = if is_one_node { "local" } else { "node" };
    format!(
        "--ranks-per-node {n_local} --{place}-gb-s {:.4} --{place}-us {} --{place}-short-us {}",
        bytes_per_s / 1e9,
        tenths(long_us),
        tenths(short_us),
    )
}

/// Rounds to tenths: a latency within a node is often less than a microsecond.
fn tenths(value: f64) -> f64 {
    (10.0 * value).round() / 10.0
}

/// Returns the median times, in milliseconds, of a gather and an exchange of a buffer of `bytes` in
/// the engine's memory.
fn time(engine: &mut dyn Engine, device: &Device, bytes: usize) -> Result<[f64; 2], EngineError> {
    let mut buffers = conformance::TimingBuffers::new(engine, device, bytes)?;
    let mut gathers = Vec::new();
    let mut exchanges = Vec::new();
    for _ in 0..9 {
        let start = Instant::now();
        buffers.gather(engine)?;
        let between = Instant::now();
        buffers.exchange(engine)?;
        gathers.push((between - start).as_secs_f64() * 1e3);
        exchanges.push(between.elapsed().as_secs_f64() * 1e3);
    }
    gathers.sort_by(f64::total_cmp);
    exchanges.sort_by(f64::total_cmp);
    Ok([gathers[gathers.len() / 2], exchanges[exchanges.len() / 2]])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes of two ranks, whose links carry 1 GB/s: all parts but one pass a link in a gather,
    /// and four of them in an exchange, each after one message.
    #[test]
    fn plan_flags_are_the_bandwidth_and_the_latencies_of_the_links() {
        let launch = Launch { world_size: 4, n_local: Some(2), ..Launch::ALONE };
        let timed_bytes = timed_bytes(4, 16 << 20);
        let latencies_s = [4e-7, 0.003, 0.003];
        let both_s: [f64; 3] =
            std::array::from_fn(|i| 2.0 * latencies_s[i] + timed_bytes[i] as f64 * (3.0 + 4.0) / 4.0 / 1e9);
        let expected = "--ranks-per-node 2 --node-gb-s 1.0000 --node-us 3000 --node-short-us 0.4";
        assert_eq!(plan_flags(&launch, timed_bytes, &both_s), expected);
    }

    /// On any number of ranks, parts of the shortest buffer are short messages that are not empty,
    /// and those of the others are long ones.
    #[test]
    fn parts_of_timed_buffers_are_short_and_long_messages() {
        for world_size in [2, 4, 8, 64, 496, 2048] {
            for buffer_bytes in [1 << 20, 16 << 20] {
                let [shortest, middle, longest] = timed_bytes(world_size, buffer_bytes);
                assert!(shortest as f64 / world_size as f64 >= 4.0, "{world_size} ranks");
                assert!((shortest as f64) / 2.0 < LONG_MESSAGE_BYTES, "{world_size} ranks");
                assert!(middle as f64 / world_size as f64 >= LONG_MESSAGE_BYTES, "{world_size} ranks");
                assert!(longest >= 4 * middle && longest >= buffer_bytes);
            }
        }
    }
}
