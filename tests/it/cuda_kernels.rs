//! Every kernel of a step, compiled for NVIDIA GPUs on a machine without one.
//!
//! The program runs a step on a driver that computes nothing (`tests/cuda/driver.c`), so that
//! CubeCL generates CUDA C++ for each kernel and NVIDIA's NVRTC compiles it; `ptxas` then assembles
//! it, and reports the number of registers. The results and times of such a step are meaningless.
//!
//! `OCELLI_CUDA_TOOLKIT` names a folder with `include`, `lib` and `bin`, of CUDA itself or of the
//! Python packages nvidia-cuda-nvrtc, -runtime, -cccl, -crt and -nvcc. Add `--nocapture` for the
//! table.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cuda_launches::build_stub;
use crate::support::{ok, program};

/// A step that is run.
struct Step {
    name: &'static str,
    recipe: &'static str,
    sets: &'static [&'static str],
    /// Whether the driver returns zeros for whatever is read, so that no check finds a fault, and
    /// the check of a gradient follows that of its forward pass. Otherwise most checks fail, and
    /// fallbacks are launched.
    reads_zeros: bool,
}

/// Returns the step of `recipe` with the settings `sets`, in which fallbacks are launched.
const fn step(name: &'static str, recipe: &'static str, sets: &'static [&'static str]) -> Step {
    Step { name, recipe, sets, reads_zeros: false }
}

const STEPS: [Step; 9] = [
    step("ViT-S/16, f32", "lejepa_vits16", &[]),
    step("ViT-S/16, bf16", "lejepa_vits16", &["optim.precision.compute=bf16"]),
    Step {
        reads_zeros: true,
        ..step("ViT-S/16, bf16, without fallbacks", "lejepa_vits16", &["optim.precision.compute=bf16"])
    },
    step("ViT-S/16 by DINO, bf16", "dino_vits16", &["optim.precision.compute=bf16"]),
    step(
        "ViT-S/16, SwiGLU, rotary, LayerScale",
        "lejepa_vits16",
        &["model.mlp=swiglu", "model.positions=rope", "model.layer_scale=1e-5"],
    ),
    step("ResNet-18, f32", "swav_cifar", &[]),
    step("ResNet-18, bf16", "swav_cifar", &["optim.precision.compute=bf16"]),
    step("RegNetY-800MF, f32", "swav_cifar", &[REGNETY]),
    step("RegNetY-800MF, bf16", "swav_cifar", &[REGNETY, "optim.precision.compute=bf16"]),
];

/// The setting of a RegNetY, with groups and squeeze-and-excitation.
const REGNETY: &str = "model={arch=\"regnet_y\",image_px=32,size=\"800mf\"}";

/// Compute capabilities: A100 and H100.
const CAPABILITIES: [&str; 2] = ["80", "90"];

/// Resources of a kernel, as reported by `ptxas`.
#[derive(Debug, Clone, Copy, Default)]
struct Resources {
    registers: u32,
    /// Bytes of spill stores and loads.
    spilled_bytes: u32,
}

#[test]
#[ignore = "an hour, and NVIDIA's compiler in OCELLI_CUDA_TOOLKIT"]
fn every_kernel_of_a_step_compiles() {
    let toolkit = std::env::var_os("OCELLI_CUDA_TOOLKIT").map(PathBuf::from);
    let toolkit = toolkit.expect("OCELLI_CUDA_TOOLKIT names a folder with NVIDIA's compiler");
    let folder = tempfile::tempdir().unwrap();
    // With a cuBLASLt that computes nothing, the kernels that check products are launched, and then
    // CubeCL's kernels for products.
    for (source, library) in [("driver", "cuda"), ("cublaslt", "cublasLt")] {
        build_stub(folder.path(), source, library);
    }
    let mut launched: BTreeSet<String> = BTreeSet::new();
    println!(
        "| step | sm | kernels | ours | registers of ours, at most | with spills |\n|---|---|---|---|---|---|"
    );
    for step in STEPS {
        let name = step.name;
        for sm in CAPABILITIES {
            let ptx = folder.path().join(format!("{name}-{sm}").replace('/', "-"));
            std::fs::create_dir(&ptx).unwrap();
            run_step(&step, &toolkit, folder.path(), sm, &ptx);
            let kernels = assemble(&toolkit, &ptx);
            let mut ours: Vec<(&str, Resources)> = Vec::new();
            let mut spilling: Vec<&str> = Vec::new();
            for (entry, resources) in &kernels {
                if let Some(name) = our_name(entry) {
                    ours.push((name, *resources));
                }
                if resources.spilled_bytes > 0 {
                    spilling.push(entry);
                }
            }
            let (largest, resources) =
                ours.iter().max_by_key(|(_, resources)| resources.registers).expect("kernels of ours");
            println!(
                "| {name} | {sm} | {} | {} | {} ({largest}) | {} |",
                kernels.len(),
                ours.len(),
                resources.registers,
                spilling.len()
            );
            for entry in spilling {
                println!("  spills: {entry}, {} bytes", kernels[entry].spilled_bytes);
            }
            for (name, resources) in &ours {
                assert_eq!(resources.spilled_bytes, 0, "the kernel {name} spills");
                launched.insert(name.to_string());
            }
        }
    }
    let mut missing = our_kernels();
    missing.retain(|kernel| !launched.contains(kernel));
    assert!(missing.is_empty(), "no step has launched {missing:?}");
}

/// Runs `step` on the driver without a device, which writes its kernels to `ptx`.
fn run_step(step: &Step, toolkit: &Path, driver: &Path, sm: &str, ptx: &Path) {
    let mut libraries = vec![driver.to_path_buf(), toolkit.join("lib"), toolkit.join("lib64")];
    libraries.extend(std::env::var_os("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths));
    let mut command = program();
    if step.reads_zeros {
        command.env("OCELLI_DRIVER_READS_ZEROS", "1");
    }
    let out = command
        .args(["bench", "step", "--device", "cuda", "--recipe", step.recipe])
        .args(["--batch", "2", "--repeats", "1", "--matrix", "256"])
        .args(step.sets.iter().flat_map(|set| ["--set", set]))
        .env("CUDA_PATH", toolkit)
        .env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap())
        .env("OCELLI_DRIVER_SM", sm)
        .env("OCELLI_DRIVER_PTX", ptx)
        // A new cache: kernels in an existing one would not be compiled again.
        .env("OCELLI_CACHE", ptx.with_extension("cache"))
        // One kernel for the products of each shape, instead of all candidates.
        .env("CUBECL_AUTOTUNE_LEVEL", "minimal")
        .output()
        .unwrap();
    ok(&out);
    let stderr = String::from_utf8_lossy(&out.stderr);
    for failure in ["launch error", "ompilation", "panicked"] {
        assert!(!stderr.contains(failure), "{}, sm_{sm}: {stderr}", step.name);
    }
}

/// Assembles every module in `folder`; returns the resources of each kernel.
fn assemble(toolkit: &Path, folder: &Path) -> BTreeMap<String, Resources> {
    let modules = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    modules.flat_map(|module| assemble_module(toolkit, &module)).collect()
}

fn assemble_module(toolkit: &Path, module: &Path) -> Vec<(String, Resources)> {
    let ptx = std::fs::read_to_string(module).unwrap();
    // Such as sm_90a for a kernel with instructions of that GPU only.
    let target = ptx.lines().find_map(|line| line.strip_prefix(".target ")).expect("PTX has a target");
    let arch = format!("-arch={}", target.split(',').next().unwrap().trim());
    let assembler = toolkit.join("bin/ptxas");
    let out = Command::new(assembler).args(["-v", &arch, "-o", "/dev/null"]).arg(module).output().unwrap();
    let report = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{}: {report}", module.display());
    let mut kernels: Vec<(String, Resources)> = Vec::new();
    for line in report.lines() {
        if let Some((_, entry)) = line.split_once("Compiling entry function '") {
            kernels.push((entry.split('\'').next().unwrap().to_string(), Resources::default()));
        }
        let Some((_, resources)) = kernels.last_mut() else { continue };
        resources.registers += number_before(line, " registers");
        resources.spilled_bytes +=
            number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
    }
    assert!(!kernels.is_empty(), "{}: {report}", module.display());
    kernels
}

/// Returns the number before `words`, or zero if there is none.
fn number_before(line: &str, words: &str) -> u32 {
    let Some((before, _)) = line.split_once(words) else { return 0 };
    before.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Returns our kernel from which `entry` was compiled, if any: CubeCL adds types and a hash to its
/// name, unless it is in CUDA C++.
fn our_name(entry: &str) -> Option<&'static str> {
    static OURS: std::sync::OnceLock<Vec<String>> = std::sync::OnceLock::new();
    let ours = OURS.get_or_init(our_kernels);
    ours.iter()
        .filter(|kernel| {
            let rest = entry.strip_prefix(kernel.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        })
        .max_by_key(|kernel| kernel.len())
        .map(String::as_str)
}

/// Returns the names of the kernels in the sources of the crates trainer and kernels.
fn our_kernels() -> Vec<String> {
    let mut kernels = Vec::new();
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut folders = vec![root.join("trainer/src"), root.join("kernels/src")];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let source = std::fs::read_to_string(path).unwrap();
                let source = source.split("#[cfg(test)]").next().unwrap();
                for rest in source.split("#[cube(launch").skip(1) {
                    let Some((_, signature)) = rest.split_once("fn ") else { continue };
                    kernels.extend(signature.split(['<', '(']).next().map(str::to_string));
                }
            }
        }
    }
    // Kernels in CUDA C++.
    for source in ["update.cu", "attention.cu"] {
        let source = std::fs::read_to_string(root.join("kernels/src/native").join(source)).unwrap();
        let names = source.split("\nKERNEL(").skip(1).filter_map(|rest| rest.split(',').next());
        kernels.extend(names.map(str::to_string));
    }
    assert!(kernels.iter().any(|name| name == "clip_factors") && kernels.len() > 8, "{kernels:?}");
    kernels
}
