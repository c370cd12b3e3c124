//! Hardware and libraries of this machine, as far as they matter to a run.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use kernels::device::workers::n_or_all_cores;
use kernels::device::{DeviceError, cuda_devices};
use ranks::engine::connectors;

use crate::machine;

/// Bytes that are written to measure the speed of a disk.
const DISK_BYTES: usize = 64 << 20;

/// Folders in which a loader looks for libraries, besides the folders that its environment names.
const LIBRARY_FOLDERS: [&str; 4] =
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64", "/usr/lib"];

/// A fact about the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Subject, such as `memory`.
    pub name: String,
    /// The fact in words, with a remedy where something is missing.
    pub text: String,
}

impl Finding {
    fn new(name: &str, text: String) -> Self {
        Self { name: name.to_string(), text }
    }
}

/// Examines this machine, and the speed of the disk of `folder`; reports each finding as soon as it
/// is known. `library_path` lists the folders of the loader's environment (`LD_LIBRARY_PATH`), with
/// a colon between two.
pub fn examine(folder: &Path, library_path: &str, report: &mut dyn FnMut(Finding)) {
    let n_cores = n_or_all_cores(0);
    report(Finding::new("cores", format!("{n_cores} for this process{}", machine::bound_note())));
    report(Finding::new("instructions", instructions()));
    report(Finding::new("memory", available()));
    report(Finding::new("disk", disk(folder)));
    report(Finding::new("mpirun", mpirun()));
    report(Finding::new("NVIDIA driver", cuda_driver(library_path)));
    report(Finding::new("CUDA", cuda()));
    for connector in connectors() {
        let library = match connector.library() {
            Ok(version) => format!("built in: {version}"),
            Err(reason) => reason,
        };
        report(Finding::new(&connector.name().to_uppercase(), library));
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
fn cuda_driver(library_path: &str) -> String {
    let mut folders: Vec<PathBuf> = library_path.split(':').map(PathBuf::from).collect();
    folders.extend(LIBRARY_FOLDERS.map(PathBuf::from));
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
