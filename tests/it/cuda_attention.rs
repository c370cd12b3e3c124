//! The kernels of attention for NVIDIA GPUs, run on the CPU: `tests/cuda/attention.c` compiles their
//! own source with a thread for each thread of a block, in an order drawn at random, and compares
//! results with sums in f64.

use std::process::Command;

use crate::support::ok;

/// Compiles and runs the test for heads of `d_head` channels, and prints the largest errors.
fn run(d_head: usize) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("attention");
    let root = env!("CARGO_MANIFEST_DIR");
    let built = Command::new("cc")
        .args(["-O2", "-ffp-contract=off", "-fno-strict-aliasing"])
        .arg(format!("-DHEAD={d_head}"))
        .args(["-I", &format!("{root}/../kernels/src/native"), "-o"])
        .arg(&program)
        .args([&format!("{root}/cuda/attention.c"), "-lm"])
        .output()
        .unwrap();
    ok(&built);
    let out = Command::new(program).output().unwrap();
    ok(&out);
    let stdout = String::from_utf8_lossy(&out.stdout);
    assert!(stdout.contains(&format!("heads of {d_head}: right")), "{stdout}");
}

#[test]
fn attention_of_heads_of_64_is_right() {
    run(64);
}

#[test]
fn attention_of_heads_of_128_is_right() {
    run(128);
}
