//! Every kernel of a step, compiled for NVIDIA GPUs on a machine without one.
//!
//! The program runs a step on a driver that computes nothing (`tests/cuda/driver.c`), so that
//! CubeCL turns each kernel into CUDA C++ and NVIDIA's NVRTC compiles it; `ptxas` then assembles
//! it, and reports how many registers it takes. The results and times of such a step are
//! meaningless.
//!
//! `OCELLI_CUDA_TOOLKIT` names a folder with `include`, `lib` and `bin`, of CUDA itself or of the
//! Python packages nvidia-cuda-nvrtc, -runtime, -cccl, -crt and -nvcc. Add `--nocapture` for the
//! table.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cuda_launches::build_stub;
use crate::support::{ok, program};

/// Steps: name, recipe and settings.
const STEPS: [(&str, &str, &[&str]); 8] = [
    ("ViT-S/16, f32", "lejepa_vits16", &[]),
    ("ViT-S/16, bf16", "lejepa_vits16", &["optim.precision.compute=bf16"]),
    ("ViT-S/16 by DINO, bf16", "dino_vits16", &["optim.precision.compute=bf16"]),
    (
        "ViT-S/16, SwiGLU, rotary, LayerScale",
        "lejepa_vits16",
        &["model.mlp=swiglu", "model.positions=rope", "model.layer_scale=1e-5"],
    ),
    ("ResNet-18, f32", "swav_cifar", &[]),
    ("ResNet-18, bf16", "swav_cifar", &["optim.precision.compute=bf16"]),
    ("RegNetY-800MF, f32", "swav_cifar", &[REGNETY]),
    ("RegNetY-800MF, bf16", "swav_cifar", &[REGNETY, "optim.precision.compute=bf16"]),
];

/// The setting of a RegNetY, with groups and squeeze-and-excitation.
const REGNETY: &str = "model={arch=\"regnet_y\",image_px=32,size=\"800mf\"}";

/// Compute capabilities: A100 and H100.
const CAPABILITIES: [&str; 2] = ["80", "90"];

/// Resources of a kernel, as reported by `ptxas`.
#[derive(Debug, Clone, Copy, Default)]
struct Use {
    registers: u32,
    /// Bytes of spill stores and loads.
    spilled_bytes: u32,
}

#[test]
fn every_kernel_of_a_step_compiles() {
    let Some(toolkit) = std::env::var_os("OCELLI_CUDA_TOOLKIT").map(PathBuf::from) else { return };
    let folder = tempfile::tempdir().unwrap();
    // With a cuBLASLt that computes nothing, the kernels that check products are launched; then
    // CubeCL's multiply.
    for (source, library) in [("driver", "cuda"), ("cublaslt", "cublasLt")] {
        build_stub(folder.path(), source, library);
    }
    let mut seen: BTreeSet<String> = BTreeSet::new();
    println!(
        "| step | sm | kernels | ours | registers of ours, at most | with spills |\n|---|---|---|---|---|---|"
    );
    for ((name, recipe, sets), sm) in STEPS.iter().flat_map(|step| CAPABILITIES.map(|sm| (step, sm))) {
        let ptx = folder.path().join(format!("{name}-{sm}").replace('/', "-"));
        std::fs::create_dir(&ptx).unwrap();
        step(&toolkit, folder.path(), [recipe, sm], sets, &ptx);
        let kernels = assembled(&toolkit, &ptx);
        let ours: Vec<(&str, &Use)> =
            kernels.iter().filter_map(|(entry, used)| Some((our_name(entry)?, used))).collect();
        let spilling: Vec<&String> =
            kernels.iter().filter(|(_, used)| used.spilled_bytes > 0).map(|(entry, _)| entry).collect();
        let most = ours.iter().max_by_key(|(_, used)| used.registers).expect("kernels of ours");
        println!(
            "| {name} | {sm} | {} | {} | {} ({}) | {} |",
            kernels.len(),
            ours.len(),
            most.1.registers,
            most.0,
            spilling.len()
        );
        spilling
            .iter()
            .for_each(|entry| println!("  spills: {entry}, {} bytes", kernels[*entry].spilled_bytes));
        assert!(ours.iter().all(|(_, used)| used.spilled_bytes == 0), "a kernel of ours spills: {ours:?}");
        seen.extend(ours.iter().map(|(name, _)| name.to_string()));
    }
    let missing: Vec<String> = our_kernels().into_iter().filter(|kernel| !seen.contains(kernel)).collect();
    assert!(missing.is_empty(), "no step has launched {missing:?}");
}

/// Runs one step on the driver without a device, which writes its kernels into `ptx`.
fn step(toolkit: &Path, driver: &Path, [recipe, sm]: [&str; 2], sets: &[&str], ptx: &Path) {
    let mut libraries = vec![driver.to_path_buf(), toolkit.join("lib"), toolkit.join("lib64")];
    libraries.extend(std::env::var_os("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths));
    let out = program()
        .args(["bench", "step", "--device", "cuda", "--recipe", recipe])
        .args(["--batch", "2", "--repeats", "1", "--matrix", "256"])
        .args(sets.iter().flat_map(|set| ["--set", set]))
        .env("CUDA_PATH", toolkit)
        .env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap())
        .env("OCELLI_DRIVER_SM", sm)
        .env("OCELLI_DRIVER_PTX", ptx)
        // Kernels that an earlier run has compiled are not compiled again.
        .env("OCELLI_CACHE", ptx.with_extension("cache"))
        // One way to multiply for each shape, not all that could be tried.
        .env("CUBECL_AUTOTUNE_LEVEL", "minimal")
        .output()
        .unwrap();
    ok(&out);
    let said = String::from_utf8_lossy(&out.stderr);
    for trouble in ["launch error", "ompilation", "panicked"] {
        assert!(!said.contains(trouble), "{recipe}, sm_{sm}: {said}");
    }
}

/// Assembles every module in `folder`; returns registers and spills by kernel.
fn assembled(toolkit: &Path, folder: &Path) -> BTreeMap<String, Use> {
    let modules = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    modules.flat_map(|module| uses(toolkit, &module)).collect()
}

fn uses(toolkit: &Path, module: &Path) -> Vec<(String, Use)> {
    let ptx = std::fs::read_to_string(module).unwrap();
    // Such as sm_90a, where a kernel uses what only that GPU has.
    let target = ptx.lines().find_map(|line| line.strip_prefix(".target ")).expect("PTX has a target");
    let arch = format!("-arch={}", target.split(',').next().unwrap().trim());
    let assembler = toolkit.join("bin/ptxas");
    let out = Command::new(assembler).args(["-v", &arch, "-o", "/dev/null"]).arg(module).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{}: {said}", module.display());
    let mut kernels: Vec<(String, Use)> = Vec::new();
    for line in said.lines() {
        if let Some((_, entry)) = line.split_once("Compiling entry function '") {
            kernels.push((entry.split('\'').next().unwrap().to_string(), Use::default()));
        }
        let Some((_, used)) = kernels.last_mut() else { continue };
        used.registers += number_before(line, " registers");
        used.spilled_bytes +=
            number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
    }
    assert!(!kernels.is_empty(), "{}: {said}", module.display());
    kernels
}

/// Returns the number in front of `words`, or zero.
fn number_before(line: &str, words: &str) -> u32 {
    let before = line.split_once(words).map(|(before, _)| before);
    before.and_then(|before| before.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
}

/// Returns the kernel of the trainer that `entry` was compiled from, if any: CubeCL adds types and
/// a hash to its name.
fn our_name(entry: &str) -> Option<&'static str> {
    static OURS: std::sync::OnceLock<Vec<String>> = std::sync::OnceLock::new();
    let ours = OURS.get_or_init(our_kernels);
    ours.iter()
        .filter(|kernel| entry.strip_prefix(kernel.as_str()).is_some_and(|rest| rest.starts_with('_')))
        .max_by_key(|kernel| kernel.len())
        .map(String::as_str)
}

/// Names of the kernels in the source of the trainer and of its crate of kernels.
fn our_kernels() -> Vec<String> {
    let mut kernels = Vec::new();
    let trainer = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../trainer"));
    let mut folders = vec![trainer.join("src"), trainer.join("kernels/src")];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let source = std::fs::read_to_string(path).unwrap();
                let source = source.split("#[cfg(test)]").next().unwrap();
                let marked = source.split("#[cube(launch").skip(1);
                kernels.extend(marked.filter_map(|rest| {
                    let name = rest.split_once("fn ")?.1.split(['<', '(']).next()?;
                    Some(name.to_string())
                }));
            }
        }
    }
    // Kernels in CUDA C++.
    let update = std::fs::read_to_string(trainer.join("kernels/src/native/update.cu")).unwrap();
    let named = update.split("\nKERNEL(").skip(1).filter_map(|rest| rest.split(',').next());
    kernels.extend(named.map(str::to_string));
    assert!(kernels.iter().any(|name| name == "clip_factors") && kernels.len() > 8, "{kernels:?}");
    kernels
}
