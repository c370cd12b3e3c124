//! The folder of checkpoints: their names, their holds and their removal.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{fs, io};

use super::LATEST;

/// Prefix of a folder that is being written.
const WRITING: &str = ".writing-";

/// Separator between a checkpoint's name and its reader's, in the name of the file that holds it.
const HOLD_SEPARATOR: &str = ".held-";

/// Time for which a checkpoint is held for a reader who does not end the hold.
const HOLD_DURATION: Duration = Duration::from_secs(15 * 60);

/// The folder of `step`.
pub(super) fn of_step(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step:010}"))
}

/// Folder of `step` while it is written.
pub(super) fn temporary_of_step(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("{WRITING}{step:010}"))
}

/// Folders of finished checkpoints, oldest first.
pub(super) fn steps_in(folder: &Path) -> Vec<PathBuf> {
    entries(folder, is_step)
}

/// Finished checkpoints under `folder` by the steps that they follow, oldest first.
pub fn steps(folder: &Path) -> Vec<(u64, PathBuf)> {
    let step = |path: &Path| path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok();
    steps_in(folder).into_iter().filter_map(|path| Some((step(&path)?, path))).collect()
}

/// Keeps the newest `n_keep` checkpoints under `folder` up to that of `step`, and those that a
/// reader holds. Newer ones could not be read when this run started; they stay, and do not count.
pub fn prune(folder: &Path, step: u64, n_keep: usize) {
    let mut steps = steps_in(folder);
    let newest = of_step(folder, step);
    steps.retain(|path| *path <= newest);
    for path in &steps[..steps.len().saturating_sub(n_keep.max(1))] {
        if let Err(error) = remove_unless_held(folder, path) {
            tracing::warn!("cannot remove the old checkpoint {}: {error}", path.display());
        }
    }
}

/// Removes a checkpoint unless a reader holds it. The folder is hidden first, so that no reader
/// finds half of it.
fn remove_unless_held(folder: &Path, path: &Path) -> io::Result<()> {
    let Some(name) = path.file_name().map(|name| name.to_string_lossy().into_owned()) else { return Ok(()) };
    if is_held(folder, &name) {
        return Ok(());
    }
    let hidden = folder.join(format!("{WRITING}pruned-{name}"));
    remove_if_there(&hidden)?;
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
    /// Fails if no file can be made beside it.
    pub fn new(path: &Path) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // Processes of two machines may have the same number, and then the same file: it holds for
        // both.
        let file = path.with_file_name(format!("{name}{HOLD_SEPARATOR}{}-{number}", std::process::id()));
        fs::write(&file, [])?;
        Ok(Self(file))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A file that is left holds until it expires.
        let _ = fs::remove_file(&self.0);
    }
}

/// Returns whether a reader holds the checkpoint called `name`. Expired holds are removed.
fn is_held(folder: &Path, name: &str) -> bool {
    let beginning = format!("{name}{HOLD_SEPARATOR}");
    let holds = entries(folder, |entry| entry.starts_with(&beginning));
    holds.into_iter().any(|path| {
        let age =
            fs::metadata(&path).and_then(|about| about.modified()).ok().and_then(|time| time.elapsed().ok());
        match age {
            Some(age) if age > HOLD_DURATION => {
                let _ = fs::remove_file(path);
                false
            }
            _ => true,
        }
    })
}

/// Removes files that a killed run has begun to write.
pub(super) fn sweep(folder: &Path) {
    for path in entries(folder, |name| name.starts_with(WRITING)) {
        if let Err(error) = fs::remove_dir_all(&path) {
            tracing::warn!("cannot remove the unfinished checkpoint {}: {error}", path.display());
        }
    }
    // New versions of `latest` that have not been renamed yet.
    let pointers = entries(folder, |name| name.starts_with(LATEST) && name.ends_with(".tmp"));
    pointers.iter().for_each(|path| drop(fs::remove_file(path)));
}

pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
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

/// Returns whether `name` is `step-` and ten digits: a folder that a user has renamed is the
/// user's.
fn is_step(name: &str) -> bool {
    name.strip_prefix("step-").is_some_and(|n| n.len() == 10 && n.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_not_pruned() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        for step in 1..=4 {
            fs::create_dir(of_step(folder, step)).unwrap();
        }
        let there = || steps(folder).into_iter().map(|(step, _)| step).collect::<Vec<_>>();
        let hold = Hold::new(&of_step(folder, 2)).unwrap();
        prune(folder, 4, 1);
        assert_eq!(there(), [2, 4]);
        drop(hold);
        prune(folder, 4, 1);
        assert_eq!(there(), [4]);
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1, "nothing is left of the others");
    }

    #[test]
    fn a_killed_run_leaves_nothing_for_long() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        fs::create_dir(temporary_of_step(folder, 3)).unwrap();
        for name in [LATEST, "latest.17-0.tmp", "notes.tmp"] {
            fs::write(folder.join(name), []).unwrap();
        }
        sweep(folder);
        let left = entries(folder, |_| true).into_iter().map(|path| path.file_name().unwrap().to_owned());
        assert_eq!(left.collect::<Vec<_>>(), [LATEST, "notes.tmp"]);
    }

    #[test]
    fn the_dead_hold_nothing_for_long() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        (1..=2).for_each(|step| fs::create_dir(of_step(folder, step)).unwrap());
        let hold = Hold::new(&of_step(folder, 1)).unwrap();
        let long_ago = std::time::SystemTime::now() - HOLD_DURATION - Duration::from_secs(60);
        fs::File::options().append(true).open(&hold.0).unwrap().set_modified(long_ago).unwrap();
        prune(folder, 2, 1);
        assert_eq!(steps(folder).len(), 1);
    }
}
