//! The folder of checkpoints: names, holds and removal of checkpoints.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{fs, io};

use super::LATEST;

/// Prefix of the name of a folder that is being written.
const WRITING: &str = ".writing-";

/// Separator between the name of a checkpoint and the name of its reader, in the name of a hold
/// file.
const HOLD_SEPARATOR: &str = ".held-";

/// Time after which a hold that has not been dropped expires.
const HOLD_DURATION: Duration = Duration::from_secs(15 * 60);

/// Returns the folder of the checkpoints of the run in `workdir`.
pub fn checkpoints_folder(workdir: &Path) -> PathBuf {
    workdir.join("checkpoints")
}

/// Returns the folder of the checkpoint of `step`.
pub(super) fn step_folder(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step:010}"))
}

/// Returns the folder of the checkpoint of `step` while it is written.
pub(super) fn temporary_step_folder(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("{WRITING}{step:010}"))
}

/// Returns the folders of finished checkpoints, oldest first.
pub(super) fn steps_in(folder: &Path) -> Vec<PathBuf> {
    entries(folder, is_step)
}

/// Returns the finished checkpoints under `folder` with their steps, oldest first.
pub fn steps(folder: &Path) -> Vec<(u64, PathBuf)> {
    steps_in(folder).into_iter().filter_map(|path| Some((step_number(&path)?, path))).collect()
}

/// Returns the finished checkpoints of the run in `workdir` with their steps, oldest first.
pub fn steps_of_run(workdir: &Path) -> Vec<(u64, PathBuf)> {
    steps(&checkpoints_folder(workdir))
}

fn step_number(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

/// Removes checkpoints under `folder` except for the newest `n_keep` up to that of `step`, that of
/// `kept_step`, and those that a reader holds. Newer ones, which could not be read when this run
/// started, are kept and not counted.
pub fn prune(folder: &Path, step: u64, n_keep: usize, kept_step: Option<u64>) {
    let mut steps = steps_in(folder);
    let newest = step_folder(folder, step);
    let kept = kept_step.map(|step| step_folder(folder, step));
    steps.retain(|path| *path <= newest);
    for path in &steps[..steps.len().saturating_sub(n_keep.max(1))] {
        if kept.as_ref() == Some(path) {
            continue;
        }
        if let Err(error) = remove_unless_held(folder, path) {
            tracing::warn!("cannot remove the old checkpoint {}: {error}", path.display());
        }
    }
}

/// Removes a checkpoint unless a reader holds it. The folder is renamed first, so that no reader
/// finds an incomplete one.
fn remove_unless_held(folder: &Path, path: &Path) -> io::Result<()> {
    let Some(name) = path.file_name().map(|name| name.to_string_lossy().into_owned()) else { return Ok(()) };
    if is_held(folder, &name) {
        return Ok(());
    }
    let hidden = folder.join(format!("{WRITING}pruned-{name}"));
    remove_if_present(&hidden)?;
    fs::rename(path, &hidden)?;
    if is_held(folder, &name) {
        // A reader has taken a hold in between.
        return fs::rename(&hidden, path);
    }
    fs::remove_dir_all(&hidden)
}

/// Guard that keeps a checkpoint from being pruned until it is dropped, or for [`HOLD_DURATION`] if
/// this process dies.
#[derive(Debug)]
pub struct Hold(PathBuf);

impl Hold {
    /// Holds the checkpoint in `path`, a step's folder.
    ///
    /// # Errors
    /// Fails if no file can be created in the same folder.
    pub fn new(path: &Path) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // Processes on two machines may have the same number, and then share a file, which holds
        // for both.
        let file = path.with_file_name(format!("{name}{HOLD_SEPARATOR}{}-{number}", std::process::id()));
        fs::write(&file, [])?;
        Ok(Self(file))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A file that cannot be removed expires.
        let _ = fs::remove_file(&self.0);
    }
}

/// Returns whether a reader holds the checkpoint called `name`. Expired holds are removed.
fn is_held(folder: &Path, name: &str) -> bool {
    let prefix = format!("{name}{HOLD_SEPARATOR}");
    for path in entries(folder, |entry| entry.starts_with(&prefix)) {
        if !is_expired(&path) {
            return true;
        }
        let _ = fs::remove_file(path);
    }
    false
}

/// Returns whether the hold in the file `path` is older than [`HOLD_DURATION`].
fn is_expired(path: &Path) -> bool {
    let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
    let age = modified.ok().and_then(|time| time.elapsed().ok());
    age.is_some_and(|age| age > HOLD_DURATION)
}

/// Removes unfinished files of a run that was killed.
pub(super) fn sweep(folder: &Path) {
    for path in entries(folder, |name| name.starts_with(WRITING)) {
        if let Err(error) = fs::remove_dir_all(&path) {
            tracing::warn!("cannot remove the unfinished checkpoint {}: {error}", path.display());
        }
    }
    // New versions of `latest` that have not been renamed.
    for path in entries(folder, |name| name.starts_with(LATEST) && name.ends_with(".tmp")) {
        let _ = fs::remove_file(path);
    }
}

pub(super) fn remove_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the entries of `folder` whose names match `predicate`, sorted.
fn entries(folder: &Path, predicate: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.file_name().is_some_and(|name| predicate(&name.to_string_lossy())))
        .collect();
    paths.sort();
    paths
}

/// Returns whether `name` is `step-` and ten digits. A folder that a user has renamed is not a
/// checkpoint of the run.
fn is_step(name: &str) -> bool {
    name.strip_prefix("step-").is_some_and(|n| n.len() == 10 && n.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step_numbers(folder: &Path) -> Vec<u64> {
        steps(folder).into_iter().map(|(step, _)| step).collect()
    }

    #[test]
    fn a_held_checkpoint_is_not_pruned() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        for step in 1..=4 {
            fs::create_dir(step_folder(folder, step)).unwrap();
        }
        let hold = Hold::new(&step_folder(folder, 2)).unwrap();
        prune(folder, 4, 1, None);
        assert_eq!(step_numbers(folder), [2, 4]);
        drop(hold);
        prune(folder, 4, 1, None);
        assert_eq!(step_numbers(folder), [4]);
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1, "nothing is left of the others");
    }

    /// A checkpoint that is kept does not count among the newest ones.
    #[test]
    fn the_kept_checkpoint_stays_beside_the_newest() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        for step in 1..=6 {
            fs::create_dir(step_folder(folder, step)).unwrap();
        }
        prune(folder, 5, 2, Some(2));
        assert_eq!(step_numbers(folder), [2, 4, 5, 6]);
        prune(folder, 6, 1, Some(6));
        assert_eq!(step_numbers(folder), [6], "the kept one is the newest");
    }

    #[test]
    fn sweep_removes_unfinished_files() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        fs::create_dir(temporary_step_folder(folder, 3)).unwrap();
        for name in [LATEST, "latest.17-0.tmp", "notes.tmp"] {
            fs::write(folder.join(name), []).unwrap();
        }
        sweep(folder);
        let paths = entries(folder, |_| true);
        let names = paths.iter().map(|path| path.file_name().unwrap());
        assert_eq!(names.collect::<Vec<_>>(), [LATEST, "notes.tmp"]);
    }

    #[test]
    fn an_expired_hold_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        for step in 1..=2 {
            fs::create_dir(step_folder(folder, step)).unwrap();
        }
        let hold = Hold::new(&step_folder(folder, 1)).unwrap();
        let long_ago = std::time::SystemTime::now() - HOLD_DURATION - Duration::from_secs(60);
        fs::File::options().append(true).open(&hold.0).unwrap().set_modified(long_ago).unwrap();
        prune(folder, 2, 1, None);
        assert_eq!(steps(folder).len(), 1);
    }
}
