//! Release, commit and features of a build, for `ocelli --version`.

// Cargo reads what a build script prints.
#![allow(clippy::print_stdout)]

use std::path::Path;
use std::process::Command;

fn main() {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    // Sources without a repository, such as an unpacked archive, have none.
    let commit = git(&["rev-parse", "--short=10", "HEAD"]).unwrap_or_else(|| "unknown".into());
    let features = ["mpi", "cuda", "wgpu"]
        .into_iter()
        .filter(|name| std::env::var_os(format!("CARGO_FEATURE_{}", name.to_uppercase())).is_some());
    let features: Vec<&str> = features.collect();
    let release = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let features = if features.is_empty() { "none".into() } else { features.join(", ") };
    println!("cargo:rustc-env=OCELLI_VERSION={release} (commit {commit}, features: {features})");
    println!("cargo:rerun-if-changed=build.rs");
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", name]).filter(|path| Path::new(path).exists()) {
            println!("cargo:rerun-if-changed={path}");
        }
    }
}
