//! Memory and cores of this machine.

use std::fs;
use std::path::Path;

use kernels::device::workers::n_or_all_cores;
use kernels::device::{DeviceKind, Opened};
use trainer::recipe::plan::RankResources;

/// Returns the bytes of memory that this process can still allocate: what the kernel reports as
/// available, within the limits of the process and of its control group.
pub fn available_bytes() -> Option<f64> {
    let available = kilobytes("/proc/meminfo", "MemAvailable:")?;
    let used = kilobytes("/proc/self/status", "VmSize:").unwrap_or_default();
    let address_space = address_space_bytes().map(|limit| (limit - used).max(0.0));
    Some([group_limit(), address_space].into_iter().flatten().fold(available, f64::min))
}

/// Returns the bytes of memory that this process holds.
pub fn resident_bytes() -> Option<f64> {
    kilobytes("/proc/self/status", "VmRSS:")
}

/// Returns the limit of this process's address space (`ulimit -v`), in bytes.
pub fn address_space_bytes() -> Option<f64> {
    rustix::process::getrlimit(rustix::process::Resource::As).current.map(|bytes| bytes as f64)
}

/// Returns the value of the line `name` of a kernel file, converted from kilobytes to bytes.
fn kilobytes(file: &str, name: &str) -> Option<f64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? * 1024.0)
}

/// Returns the bytes left within the limits of this process's control groups. Cached files, which
/// the groups count as used, are added back, because they are evicted on demand.
fn group_limit() -> Option<f64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    bytes_left_in_cgroups(&text, Path::new("/sys/fs/cgroup"))
}

/// Names of the files about memory in a version of control groups.
struct GroupFiles {
    limit: &'static str,
    used: &'static str,
    /// Name of the line of `memory.stat` with the bytes of cached files.
    cached: &'static str,
}

const VERSION_1: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: "total_inactive_file ",
};

const VERSION_2: GroupFiles =
    GroupFiles { limit: "memory.max", used: "memory.current", cached: "inactive_file " };

/// Returns the bytes that the control groups of a process and their parents leave it, by the
/// tightest limit; `None` if there is no limit. `text` is the process's `/proc/self/cgroup`, and
/// `root` the folder where control groups are mounted. In a container, the container's own group is
/// the root.
fn bytes_left_in_cgroups(text: &str, root: &Path) -> Option<f64> {
    let mut left: Option<f64> = None;
    for line in text.lines() {
        // `hierarchy:controllers:group`.
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else { continue };
        let (files, mut folder) = if controllers.is_empty() {
            (&VERSION_2, root.to_path_buf())
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (&VERSION_1, root.join("memory"))
        } else {
            continue;
        };
        let mut folders = vec![folder.clone()];
        for part in group.split('/').filter(|part| !part.is_empty()) {
            folder.push(part);
            folders.push(folder.clone());
        }
        for folder in &folders {
            if let Some(bytes) = bytes_left(folder, files) {
                left = Some(left.map_or(bytes, |left| left.min(bytes)));
            }
        }
    }
    left
}

fn bytes_left(group: &Path, files: &GroupFiles) -> Option<f64> {
    let limit = read_number(&group.join(files.limit))?;
    let used = read_number(&group.join(files.used))?;
    // Version 1 states no limit as the largest number of pages.
    if limit >= 2f64.powi(62) {
        return None;
    }
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix(files.cached)?.parse::<f64>().ok());
    Some((limit - used + cached.unwrap_or(0.0)).max(0.0))
}

fn read_number(path: &Path) -> Option<f64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the resources of one rank if `n_local` ranks share this machine and `n_sharers` its
/// `device`. A fifth of the memory is reserved for the data path and other programs.
pub fn rank_resources(n_local: usize, n_sharers: usize, device: &Opened) -> RankResources {
    let n_local = n_local.max(1);
    // Cores that the launcher has bound to this process alone are not shared.
    let sharers = if is_bound() { 1 } else { n_local };
    let n_cores = (n_or_all_cores(0) / sharers).max(1);
    let device_bytes = device.free_bytes.map(|bytes| 0.8 * bytes as f64 / n_sharers.max(1) as f64);
    let is_gpu = device.kind != DeviceKind::Cpu;
    let n_workers = if is_gpu { 1 } else { n_cores };
    RankResources {
        n_cores,
        n_workers,
        bytes: device_bytes
            .unwrap_or_else(|| available_bytes().map_or(f64::MAX, |bytes| 0.8 * bytes / n_local as f64)),
        is_gpu,
    }
}

/// Returns a note if this process may use fewer cores than the machine has.
pub fn bound_note() -> &'static str {
    if is_bound() { ", to which its launcher has bound it" } else { "" }
}

/// Returns `true` if this process may use fewer cores than its parent: mpirun and srun bind their
/// ranks.
fn is_bound() -> bool {
    let parent = std::os::unix::process::parent_id().to_string();
    matches!((allowed_cores("self"), allowed_cores(&parent)), (Some(own), Some(parent)) if own != parent)
}

/// Returns the mask of the cores that a process may use.
fn allowed_cores(process: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("Cpus_allowed:")).map(|mask| mask.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn write_group(folder: PathBuf, files: &[(&str, &str)]) {
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), format!("{text}\n")).unwrap();
        }
    }

    /// Files of both versions of control groups, as the kernel writes them: the lowest limit of a
    /// group and its parents counts.
    #[test]
    fn limits_of_both_versions_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let none = "9223372036854771712";
        write_group(
            root.join("memory"),
            &[("memory.limit_in_bytes", none), ("memory.usage_in_bytes", "5000")],
        );
        let stat = "cache 9\ntotal_inactive_file 300";
        write_group(
            root.join("memory/job/step"),
            &[("memory.limit_in_bytes", "4000"), ("memory.usage_in_bytes", "1000"), ("memory.stat", stat)],
        );
        write_group(
            root.join("memory/job"),
            &[("memory.limit_in_bytes", "9000"), ("memory.usage_in_bytes", "1000")],
        );
        let first = "11:memory:/job/step\n4:cpu,cpuacct:/job\n1:name=systemd:/x\n";
        assert_eq!(bytes_left_in_cgroups(first, root), Some(3300.0));
        assert_eq!(bytes_left_in_cgroups("4:cpu,cpuacct:/job\n", root), None);
        write_group(root.join("user/one"), &[("memory.max", "max"), ("memory.current", "1")]);
        write_group(root.join("user"), &[("memory.max", "2000"), ("memory.current", "500")]);
        assert_eq!(bytes_left_in_cgroups("0::/user/one\n", root), Some(1500.0));
        assert_eq!(bytes_left_in_cgroups("0::/\n", root), None);
    }
}
