//! The folder of checkpoints: which are there, and which go.

use std::fs;
use std::path::{Path, PathBuf};

/// What a folder that is being written begins with.
const WRITING: &str = ".writing-";

/// The folder of `step`.
pub(super) fn of_step(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step:010}"))
}

/// Where it is written.
pub(super) fn temporary_of_step(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("{WRITING}{step:010}"))
}

/// Folders of finished checkpoints, oldest first.
pub(super) fn steps_in(folder: &Path) -> Vec<PathBuf> {
    entries(folder, is_step)
}

/// Keeps the newest `n_keep` checkpoints under `folder` up to that of `step`. Newer ones could not be read
/// when this run started; they are in nobody's way, and do not count.
pub fn prune(folder: &Path, step: u64, n_keep: usize) {
    let mut steps = steps_in(folder);
    let newest = of_step(folder, step);
    steps.retain(|path| *path <= newest);
    for path in &steps[..steps.len().saturating_sub(n_keep.max(1))] {
        if let Err(error) = fs::remove_dir_all(path) {
            tracing::warn!("cannot remove the old checkpoint {}: {error}", path.display());
        }
    }
}

/// Takes away what a killed run has begun to write.
pub(super) fn sweep(folder: &Path) {
    for path in entries(folder, |name| name.starts_with(WRITING)) {
        if let Err(error) = fs::remove_dir_all(&path) {
            tracing::warn!("cannot remove the unfinished checkpoint {}: {error}", path.display());
        }
    }
}

pub(super) fn remove_if_there(path: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn entries(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.file_name().is_some_and(|name| wanted(&name.to_string_lossy())))
        .collect();
    paths.sort();
    paths
}

/// `step-` and ten digits: a folder that a user has renamed is the user's.
fn is_step(name: &str) -> bool {
    name.strip_prefix("step-").is_some_and(|n| n.len() == 10 && n.bytes().all(|b| b.is_ascii_digit()))
}
