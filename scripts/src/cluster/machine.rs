//! Memory and cores of this machine.
use std::fs;
use std::path::{Path, PathBuf};

use kernels::device::workers::n_or_all_cores;
use kernels::device::{DeviceKind, Opened};
use trainer::recipe::plan::RankResources;

/// Returns the bytes of memory that this process can still allocate: what the kernel reports as available, within the limits
/// of the process and of its control group.
pub(crate) fn available_bytes() -> Option<f64> {
    let available = kilobytes("/proc/meminfo", "MemAvailable:")?;
    let used = kilobytes("/proc/self/status", "VmSize:").unwrap_or_default();
    let own = address_space_bytes().map(|limit| (limit - used).max(0.0));
    Some([group_limit(), own].into_iter().flatten().fold(available, f64::min))
}

/// Returns the limit of this process's address space (`ulimit -v`), in bytes.
pub(crate) fn address_space_bytes() -> Option<f64> {
    rustix::process::getrlimit(rustix::process::Resource::As).current.map(|bytes| bytes as f64)
}

/// Returns the value of the line `name` of a kernel file, converted from kilobytes to bytes.
fn kilobytes(file: &str, name: &str) -> Option<f64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? * 1024.0)
}

/// Returns the bytes left within the limits of this process's control groups (version 2). Cached files count as used there,
/// although they are evicted on demand, so they are added back.
fn group_limit() -> Option<f64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let mut groups = vec![PathBuf::from("/sys/fs/cgroup")];
    for part in own.split('/').filter(|part| !part.is_empty()) {
        groups.push(groups[groups.len() - 1].join(part));
    }
    groups.iter().filter_map(|group| left_in(group)).reduce(f64::min)
}

fn left_in(group: &Path) -> Option<f64> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<f64>().ok();
    let (limit, used) = (number("memory.max")?, number("memory.current")?);
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse::<f64>().ok());
    Some((limit - used + cached.unwrap_or(0.0)).max(0.0))
}

/// Returns the resources of one rank if `n_local` ranks share this machine and `n_sharers` its `device`. A fifth of the memory
/// is reserved for the data path and other programs.
pub(crate) fn room(n_local: usize, n_sharers: usize, device: &Opened) -> RankResources {
    let n_local = n_local.max(1);
    // Cores that the launcher has bound to this process alone are not shared.
    let sharers = if is_bound() { 1 } else { n_local };
    let n_cores = (n_or_all_cores(0) / sharers).max(1);
    let own = device.free_bytes.map(|bytes| 0.8 * bytes as f64 / n_sharers.max(1) as f64);
    let shared = || available_bytes().map_or(f64::MAX, |bytes| 0.8 * bytes / n_local as f64);
    let is_gpu = device.kind != DeviceKind::Cpu;
    let n_workers = if is_gpu { 1 } else { n_cores };
    RankResources { n_cores, n_workers, bytes: own.unwrap_or_else(shared), is_gpu }
}

/// Returns a note if this process may use fewer cores than the machine has.
pub(crate) fn bound_note() -> &'static str {
    if is_bound() { ", to which its launcher has bound it" } else { "" }
}

/// Returns `true` if this process may use fewer cores than its parent: mpirun and srun bind their ranks.
fn is_bound() -> bool {
    let allowed = |process: &str| {
        let text = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("Cpus_allowed:")).map(|mask| mask.trim().to_string())
    };
    let parent = std::os::unix::process::parent_id().to_string();
    matches!((allowed("self"), allowed(&parent)), (Some(own), Some(parent)) if own != parent)
}
