//! Launches of a step on an NVIDIA GPU, seen on a machine without one.
//!
//! The program runs with three libraries that compute nothing: a driver (`tests/cuda/driver.c`), a
//! compiler (`nvrtc.c`) and a cuBLASLt (`cublaslt.c`). They write each launch, product, copy,
//! allocation and wait to one file, in the order in which the driver receives them. The times and
//! results of such a step are meaningless.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use tempfile::TempDir;

use crate::support::{ok, program};

/// The most launches of a step of ViT-S/16 by DINO in bf16: kernels and products of a library.
const MOST_LAUNCHES: usize = 700;

/// Products of the twelve blocks of ViT-S, of four layers each: forwards in teacher and student,
/// and two for each layer backwards. Views of all sizes are one stream of tokens, and attention has
/// its own kernels.
const LAYER_PRODUCTS: usize = 12 * (4 + 4 + 8);

/// Held by the test whose log depends on the order of two threads, and by the longest other tests.
static BUSY: Mutex<()> = Mutex::new(());

/// Compiles `tests/cuda/SOURCE.c` to `libLIBRARY.so` in `folder`.
pub(crate) fn build_stub(folder: &Path, source: &str, library: &str) {
    let source = format!("{}/cuda/{source}.c", env!("CARGO_MANIFEST_DIR"));
    // Contains the kernels that the driver can run.
    let kernels = format!("{}/../kernels/src/native", env!("CARGO_MANIFEST_DIR"));
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-ffp-contract=off", "-pthread", "-I", &kernels, "-o"])
        .arg(folder.join(format!("lib{library}.so")))
        .args([&source, "-lm"])
        .output()
        .unwrap();
    ok(&built);
}

/// Folder with the libraries and headers that the program looks for.
struct Stubs {
    folder: TempDir,
}

impl Stubs {
    fn build() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (source, library) in [("driver", "cuda"), ("nvrtc", "nvrtc"), ("cublaslt", "cublasLt")] {
            build_stub(folder.path(), source, library);
        }
        let include = folder.path().join("toolkit/include");
        std::fs::create_dir_all(&include).unwrap();
        std::fs::write(include.join("cuda_fp16.h"), "").unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs the program with these libraries and the environment variables `settings`; the log is
    /// written to `log`.
    fn run(&self, arguments: &[&str], settings: &[(&str, &str)], log: &Path) -> Output {
        let _ = std::fs::remove_file(log);
        program()
            .args(arguments)
            .env("CUDA_PATH", self.path("toolkit"))
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("OCELLI_DRIVER_SM", "90")
            .env("OCELLI_DRIVER_LOG", log)
            .env("OCELLI_CACHE", self.path("cache"))
            .envs(settings.iter().copied())
            .output()
            .unwrap()
    }

    /// Runs steps of `recipe` on noise, without checks, and returns the log.
    fn steps(&self, recipe: &str, batch: &str, sets: &[&str]) -> String {
        // The first run tunes reductions and caches the result.
        self.steps_once(recipe, batch, "1", sets, &[]);
        self.steps_once(recipe, batch, "2", sets, &[("OCELLI_DRIVER_WAIT_MS", "1000")])
    }

    fn steps_once(
        &self,
        recipe: &str,
        batch: &str,
        repeats: &str,
        sets: &[&str],
        settings: &[(&str, &str)],
    ) -> String {
        let log = self.path("log");
        let mut arguments = vec!["bench", "step", "--unchecked", "--device", "cuda", "--recipe", recipe];
        arguments.extend(["--batch", batch, "--repeats", repeats, "--matrix", "64"]);
        arguments.extend(sets.iter().flat_map(|set| ["--set", set]));
        ok(&self.run(&arguments, settings, &log));
        std::fs::read_to_string(log).unwrap()
    }
}

/// Returns the lines of a log that begin with one of these words.
fn lines<'l>(log: &'l str, words: &[&str]) -> Vec<&'l str> {
    log.lines().filter(|line| words.contains(&line.split(' ').next().unwrap_or_default())).collect()
}

/// Returns the word after `name`.
fn value<'l>(line: &'l str, name: &str) -> &'l str {
    let mut words = line.split(' ').skip_while(|word| *word != name);
    words.nth(1).unwrap_or_else(|| panic!("no {name} in {line}"))
}

/// Returns `true` for a launch of a kernel or a product of the library.
fn is_launch(line: &str) -> bool {
    line.starts_with("launch") || line.starts_with("product")
}

/// Splits a log into steps, each of which ends with the last launch of its update. Lines after the
/// last step are left out.
fn split_steps(log: &str) -> Vec<Vec<&str>> {
    let mut steps = Vec::new();
    let mut step = Vec::new();
    let mut in_update = false;
    for line in log.lines() {
        if is_launch(line) {
            let is_update = line.starts_with("launch adam_w");
            if in_update && !is_update {
                steps.push(std::mem::take(&mut step));
            }
            in_update = is_update;
        }
        step.push(line);
    }
    steps
}

/// Returns the launches and products of a step.
fn launches<'l>(step: &[&'l str]) -> Vec<&'l str> {
    step.iter().copied().filter(|line| is_launch(line)).collect()
}

/// Returns the kernel and the grid of a launch, without addresses and without the number that
/// distinguishes the variants of an elementwise kernel: whether a kernel writes in place depends on
/// whether the launching thread has already dropped the tensor, and the values do not depend on
/// that.
fn kernel_and_grid(line: &str) -> String {
    let launch = line.split(" stream").next().unwrap();
    let Some((name, grid)) = launch.split_once(" grid") else { return launch.to_string() };
    match name.rsplit_once('_') {
        Some((name, variant))
            if variant.len() == 8 && variant.bytes().all(|byte| byte.is_ascii_hexdigit()) =>
        {
            format!("{name} grid{grid}")
        }
        _ => launch.to_string(),
    }
}

/// Asserts that the host does not wait for the stream of a step between its first launch and its
/// last one, the update. Loss and norms are copied before the update; a wait for their copies ends
/// after it, since waits are long.
fn assert_nothing_waits(step: &[&str]) {
    let first = step.iter().position(|line| is_launch(line)).unwrap();
    let last = step.iter().rposition(|line| is_launch(line)).unwrap();
    let step = &step[first..=last];
    let stream = value(step[0], "stream");
    let mut n_copies = 0;
    for line in step {
        let waits = line.starts_with("waited") && [stream, "(nil)"].contains(&value(line, "stream"));
        assert!(!waits, "{line}");
        n_copies += usize::from(line.starts_with("copy out"));
    }
    assert!(n_copies > 1, "nothing is copied before the update");
}

/// A step of ViT-S/16 launches few kernels, all of them on one stream, in a fixed order, without a
/// wait before the update, and allocates nothing.
#[test]
fn a_step_is_few_launches_on_one_stream() {
    let _busy = BUSY.lock().unwrap_or_else(PoisonError::into_inner);
    let stubs = Stubs::build();
    let bf16 = ["optim.precision={compute=\"bf16\"}"];
    let log = stubs.steps("dino_vits16", "64", &bf16);
    let steps = split_steps(&log);
    for step in steps.iter().rev().take(3).map(|step| launches(step)) {
        let n_products = step.iter().filter(|line| line.starts_with("product")).count();
        println!("{} launches, {n_products} of them products of cuBLASLt", step.len());
        assert!(step.len() <= MOST_LAUNCHES, "{} launches", step.len());
        assert!(n_products >= LAYER_PRODUCTS, "{n_products} products");
        // All computation is on the stream of one thread.
        let streams: Vec<&str> = step.iter().map(|line| value(line, "stream")).collect();
        assert!(streams.iter().all(|stream| *stream == streams[0]), "{streams:?}");
        // One launch each for the norms of all units, the clip factors, the update of all units.
        for (name, n) in [("sum_squares", 1), ("clip_factors", 1), ("adam_w", 1)] {
            let launch = format!("launch {name}");
            assert_eq!(step.iter().filter(|line| line.starts_with(&launch)).count(), n, "{name}");
        }
        // CubeCL computes no product.
        assert!(!step.iter().any(|line| line.contains("matmul")), "CubeCL multiplies");
    }
    // Without drop-path, which is random in each step, all steps have the same launches in the same
    // order.
    let log = stubs.steps("dino_vits16", "64", &[&bf16[..], &["model.drop_path=0"]].concat());
    let steps = split_steps(&log);
    let [.., previous, last] = steps.as_slice() else { panic!("{} steps", steps.len()) };
    // Steps allocate nothing, except one in which the host drops a tensor later than before: on a
    // busy machine the pool then grows once more.
    let mut n_allocations = Vec::new();
    for step in &steps {
        n_allocations.push(step.iter().filter(|line| line.starts_with("allocate")).count());
    }
    println!("allocations of each step: {n_allocations:?}");
    assert!(n_allocations[1..].contains(&0), "every step allocates: {n_allocations:?}");
    assert_nothing_waits(last);
    let last = launches(last);
    // The update rounds the weights: only a few other values are cast.
    let n_casts = last.iter().filter(|line| line.starts_with("launch cast_element_i_f32_o_bf16")).count();
    assert!(n_casts < 8, "{n_casts} casts to bf16");
    let previous = launches(previous);
    assert_eq!(last.len(), previous.len());
    for (number, (launch, earlier)) in last.iter().zip(&previous).enumerate() {
        assert_eq!(kernel_and_grid(launch), kernel_and_grid(earlier), "launch {number} of a step");
    }
}

/// The running statistics of a ResNet are written before the update, without a wait for the values
/// that decide on both.
#[test]
fn statistics_are_written_without_a_wait() {
    let _busy = BUSY.lock().unwrap_or_else(PoisonError::into_inner);
    let stubs = Stubs::build();
    let log = stubs.steps("swav_cifar", "8", &["optim.algorithm=adamw"]);
    let steps = split_steps(&log);
    assert_nothing_waits(steps.last().unwrap());
}

/// Returns the sizes `[m, k, n]` of a product.
fn product_size(line: &str) -> [usize; 3] {
    ["m", "k", "n"].map(|name| value(line, name).parse().unwrap())
}

/// The products of layers have the sizes of a transformer's layers, forwards and backwards, and are
/// written to the right memory: the gradient of a weight into the flat gradient of its unit.
#[test]
fn products_have_the_sizes_and_memory_of_the_layers() {
    let stubs = Stubs::build();
    let sets = ["optim.precision={compute=\"bf16\"}", "model.drop_path=0"];
    let log = stubs.steps("dino_vits16", "4", &sets);
    let steps = split_steps(&log);
    let step = launches(steps.last().unwrap());
    let products: Vec<&str> = step.into_iter().filter(|line| line.starts_with("product")).collect();
    let mut counts: BTreeMap<([usize; 3], &str), usize> = BTreeMap::new();
    for line in products.iter().filter(|line| value(line, "batches") == "1") {
        *counts.entry((product_size(line), value(line, "transposed"))).or_default() += 1;
    }
    // Two views of 197 tokens and eight of 37, four images each: the student sees all of them in
    // one stream, the teacher the first two.
    let global = 4 * 2 * 197;
    let all = global + 4 * 8 * 37;
    for (o, d) in [(1152, 384), (384, 384), (1536, 384), (384, 1536)] {
        let teacher_forward = counts.get(&([global, d, o], "01"));
        let forward = counts.get(&([all, d, o], "01"));
        let input_gradients = counts.get(&([all, o, d], "00"));
        let weight_gradients = counts.get(&([o, all, d], "10"));
        assert_eq!(teacher_forward, Some(&12), "{o} x {d}");
        assert_eq!(forward, Some(&12), "{o} x {d}");
        assert_eq!(input_gradients, Some(&12), "{o} x {d}");
        assert_eq!(weight_gradients, Some(&12), "{o} x {d}");
    }
    // Lengths of the rows of [M, K] · [N, K]ᵀ, [M, K] · [K, N], [K, M]ᵀ · [K, N]. Rows of the
    // operands may be padded, those of the result not.
    for line in products.iter().filter(|line| value(line, "batches") == "1") {
        let [m, k, n] = product_size(line);
        let [a, b] = match value(line, "transposed") {
            "01" => [k, k],
            "00" => [k, n],
            "10" => [m, n],
            other => panic!("{other}: {line}"),
        };
        let strides: Vec<usize> = line
            .split(' ')
            .skip_while(|word| *word != "strides")
            .skip(1)
            .take(3)
            .map(|word| word.parse().unwrap())
            .collect();
        let fits = strides[0] >= a && strides[1] >= b && strides[2] == n;
        assert!(fits && strides[0] < 2 * a + 256 && strides[1] < 2 * b + 256, "{line}");
    }
    // One product computes the gradient of a weight over the views of all sizes: none adds.
    let mut n_gradients = 0;
    for line in &products {
        let is_weight_gradient = value(line, "transposed") == "10" && value(line, "to") == "0";
        if is_weight_gradient && product_size(line)[0] == 1152 {
            assert_eq!(value(line, "adds"), "0", "{line}");
            n_gradients += 1;
        }
    }
    assert_eq!(n_gradients, 12);
}

/// Without a library, and with one that fails in each of three ways, a step runs with CubeCL's
/// kernels, and one message reports that.
#[test]
fn a_library_that_fails_is_not_used() {
    let stubs = Stubs::build();
    let arguments = ["bench", "step", "--device", "cuda", "--recipe", "dino_shapes", "--batch", "4"];
    let arguments = [&arguments[..], &["--repeats", "1", "--matrix", "64"]].concat();
    let cases = [
        ("create", "cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED"),
        ("heuristic", "cuBLASLt has no kernel for"),
        ("matmul", "cuBLASLt computes"),
    ];
    let log = stubs.path("log");
    for (fails, message) in cases {
        let out = stubs.run(&arguments, &[("OCELLI_CUBLASLT_FAILS", fails)], &log);
        ok(&out);
        let log = std::fs::read_to_string(&log).unwrap();
        assert!(lines(&log, &["product"]).is_empty(), "{fails}: the library multiplies");
        assert!(log.contains("matmul"), "{fails}: CubeCL does not multiply");
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(stderr.contains(message), "{fails}: {stderr}");
    }
    // A run that requires the library does not start.
    let required = [&arguments[..], &["--set", "run.kernels=cublaslt"]].concat();
    let out = stubs.run(&required, &[("OCELLI_CUBLASLT_FAILS", "create")], &log);
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("run.kernels = \"cublaslt\""), "{out:?}");
    // A library and a GPU that are too old, and no memory for a workspace of 32 MiB: one message,
    // and CubeCL's products.
    for (setting, value, message) in [
        (
            "OCELLI_CUBLASLT_VERSION",
            "111104",
            "libcublasLt.so is of version 11.11.4; 12.0 or later is needed",
        ),
        ("OCELLI_DRIVER_REFUSES", "34603008", "no memory for a workspace of 32 MiB"),
        ("OCELLI_DRIVER_SM", "75", "the GPU has compute capability 7.5; 8.0 or later is needed"),
    ] {
        let out = stubs.run(&arguments, &[(setting, value)], &log);
        ok(&out);
        let stderr = String::from_utf8_lossy(&out.stderr);
        let lines: Vec<&str> = stderr.lines().filter(|line| line.contains(message)).collect();
        assert_eq!(lines.len(), 1, "{setting}: {stderr}");
        assert!(!stderr.contains("Caused by"), "{setting}: {stderr}");
        assert!(std::fs::read_to_string(&log).unwrap().contains("matmul"), "{setting}: no kernel multiplies");
    }
    // A driver that is too old for the output of the compiler.
    let out = stubs.run(&arguments, &[("OCELLI_DRIVER_VERSION", "12040")], &log);
    assert_eq!(out.status.code(), Some(2), "{out:?}");
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(stderr.contains("driver supports CUDA 12.4") && stderr.contains("of CUDA 13.0"), "{stderr}");
    // A GPU that is too old.
    let out = stubs.run(&required, &[("OCELLI_DRIVER_SM", "75")], &log);
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("compute capability 7.5"), "{out:?}");
    // No library.
    std::fs::remove_file(stubs.path("libcublasLt.so")).unwrap();
    let installed = Command::new("ldconfig").arg("-p").output();
    if installed.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).contains("libcublasLt")) {
        return;
    }
    let out = stubs.run(&arguments, &[], &log);
    ok(&out);
    assert!(String::from_utf8_lossy(&out.stderr).contains("libcublasLt.so (of CUDA 12 or 13)"), "{out:?}");
}

/// The driver runs the kernels of the update on the CPU, with the arguments and the memory that the
/// program gives them, and the check at their first use passes. With a driver that does not run
/// them, the check fails, and CubeCL's kernels update instead.
#[test]
fn update_kernels_pass_the_check_at_their_first_use() {
    let _busy = BUSY.lock().unwrap_or_else(PoisonError::into_inner);
    let stubs = Stubs::build();
    let log = stubs.path("log");
    let arguments = ["bench", "step", "--device", "cuda", "--recipe", "dino_shapes", "--batch", "4"];
    let arguments = [&arguments[..], &["--repeats", "1", "--matrix", "64"]].concat();
    let notice = "using CubeCL's kernels to update weights: those for NVIDIA GPUs";
    for (settings, passes) in [(&[("OCELLI_DRIVER_RUNS", "1")][..], true), (&[], false)] {
        let out = stubs.run(&arguments, settings, &log);
        ok(&out);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(stderr.contains(notice), !passes, "{stderr}");
        let log = std::fs::read_to_string(&log).unwrap();
        let last = log.lines().rev().find(|line| line.starts_with("launch adam_w")).unwrap();
        assert_eq!(last.starts_with("launch adam_w_units "), passes, "{last}");
    }
}

/// The check at the first use of each size reports a device that computes nothing.
#[test]
fn a_device_that_computes_nothing_is_reported() {
    let stubs = Stubs::build();
    let log = stubs.path("log");
    let out = stubs.run(&["doctor", "--device", "cuda"], &[("OCELLI_DRIVER_FILL", "1")], &log);
    // The test of communication that follows fails as well.
    assert!(!out.status.success());
    let stdout = String::from_utf8_lossy(&out.stdout);
    assert!(stdout.contains("by cublaslt-13.2.0") && stdout.contains("WRONG"), "{stdout}");
}

/// A run records the kernel of each size of products, and the result of its check.
#[test]
fn a_run_records_its_kernels() {
    let stubs = Stubs::build();
    let log = stubs.path("log");
    let data = stubs.path("data");
    let workdir = stubs.path("run");
    let synth = ["shards", "synth", "--out", data.to_str().unwrap(), "--count", "8", "--size-px", "48"];
    ok(&program().args(synth).output().unwrap());
    let shard = data.join("train-000000.tar");
    let sets = ["optim.batch_size=8", "optim.length={steps=1}", "optim.warmup={steps=0}"];
    let mut arguments = vec!["pretrain", "--recipe", "dino_shapes", "--device", "cuda"];
    arguments.extend(["--shards", shard.to_str().unwrap(), "--workdir", workdir.to_str().unwrap()]);
    arguments.extend(sets.iter().flat_map(|set| ["--set", set]));
    // Sums of memory that is all zero do not count as a check, and a later one would end the run.
    ok(&stubs.run(&arguments, &[("OCELLI_DRIVER_FILL", "1")], &log));
    let text = std::fs::read_to_string(workdir.join("kernels.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Forwards and backwards, in the backbone and the head.
    assert!(lines.len() > 20, "{text}");
    let mut n_wrong = 0;
    for line in lines {
        assert_eq!(line["kernels"], "cublaslt-13.2.0", "{line}");
        assert!(line["size"].as_str().unwrap().contains(" · ["), "{line}");
        // The driver computes nothing, not even the sums of the check: most sizes fail the check,
        // and a few pass it by what happens to be in memory.
        let is_wrong = line["checked"].as_str().unwrap().starts_with("WRONG: ");
        assert_eq!(line["kernel"] == "cubecl", is_wrong, "{line}");
        n_wrong += usize::from(is_wrong);
    }
    assert!(n_wrong > 10, "{text}");
    // The run resumes without the library, and reports that.
    let longer = ["--lengthen", "--set", "optim.length={steps=2}"];
    let out = stubs.run(&[&arguments[..], &longer].concat(), &[("OCELLI_CUBLASLT_FAILS", "create")], &log);
    let stderr = String::from_utf8_lossy(&out.stderr);
    let message = "was started with kernels cublaslt-13.2.0 and continues with cubecl";
    assert!(stderr.contains(message), "{stderr}");
}

/// Runs `parts` of the script for a lent GPU, or all of them, without a GPU; returns its output.
fn run_gpu_script(stubs: &Stubs, out: &Path, parts: &[&str]) -> String {
    let output = Command::new("bash")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/bench/gpu.sh"))
        .arg(out)
        .args(parts)
        .env("DRY", "1")
        .env("OCELLI", program().get_program())
        .env("CUDA_PATH", stubs.path("toolkit"))
        .env("LD_LIBRARY_PATH", stubs.folder.path())
        .env("OCELLI_DRIVER_SM", "90")
        .output()
        .unwrap();
    ok(&output);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The script for a lent GPU runs all of its parts, and continues with the next one when it is
/// called again.
#[test]
fn the_script_for_a_gpu_runs_without_one() {
    let _busy = BUSY.lock().unwrap_or_else(PoisonError::into_inner);
    let stubs = Stubs::build();
    let out = tempfile::tempdir().unwrap();
    let first = run_gpu_script(&stubs, out.path(), &["check", "step"]);
    assert!(first.contains("ViT-S/16, batch 64, Ocelli |"), "{first}");
    assert!(first.contains("ViT-S/16, batch 64, Ocelli, CubeCL's products |"), "{first}");
    let second = run_gpu_script(&stubs, out.path(), &[]);
    assert!(second.contains("step: done before") && second.contains("our step by kernel"), "{second}");
    let table = std::fs::read_to_string(out.path().join("table.md")).unwrap();
    assert!(!table.contains("WRONG") && !table.contains("NOT ENDED"), "{table}");
    assert!(table.contains("ViT-L/16, batch 32, Ocelli |"), "{table}");
    for model in ["S", "B", "L"] {
        assert!(table.contains(&format!("ViT-{model}, fc2, 64 |")), "{table}");
    }
}

/// A launch that fails after the checks ends the step with its cause.
#[test]
fn a_failed_product_ends_the_step() {
    let stubs = Stubs::build();
    let log = stubs.path("log");
    let arguments =
        ["bench", "step", "--unchecked", "--device", "cuda", "--recipe", "dino_shapes", "--batch", "4"];
    let out = stubs.run(&arguments, &[("OCELLI_CUBLASLT_FAILS", "matmul")], &log);
    assert!(!out.status.success(), "{out:?}");
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(stderr.contains("cublasLtMatmul: CUBLAS_STATUS_EXECUTION_FAILED"), "{stderr}");
}
