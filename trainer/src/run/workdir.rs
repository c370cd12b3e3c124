//! The work directory of a run, and the check that the run owns it.

use std::fs;
use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pipeline::file;
use ranks::communicator::Communicator;
use ranks::engine::Reduction;

use crate::checkpoint::{Checkpoint, steps};
use crate::error::TrainError;
use crate::recipe::compare::{difference, difference_of_images, with_length_of};
use crate::recipe::plan::Plan;

/// Name of the file that rank 0 of a run keeps locked.
const LOCK: &str = ".lock";

/// Allowed differences between a start and the run that it continues.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AllowedDifferences {
    /// Whether the run may become longer.
    pub(crate) lengthen: bool,
    /// Step of the checkpoint that another run has left as the beginning of this one.
    pub(crate) forked_step: Option<u64>,
}

/// Writes the plan into `workdir`, or checks that it belongs to this plan: by plan.toml, and by the
/// newest checkpoint of the run, even if plan.toml is missing. Returns the plan to follow: where
/// the recipe leaves the number of workers open, a run continues with the number that it started
/// with.
fn claim(
    workdir: &Path,
    plan: &Plan,
    allowed: AllowedDifferences,
    warn: &mut dyn FnMut(&str),
) -> Result<Plan, TrainError> {
    let path = plan_path(workdir);
    let mut plan = plan.clone();
    let before = read_plan(workdir)?;
    let checkpoint = newest_plan(workdir, allowed.forked_step);
    if let Some((step, _)) = checkpoint.as_ref().filter(|_| before.is_none()) {
        warn(&format!("plan.toml is missing: it is restored from the checkpoint of step {step}"));
    }
    let there = before.as_ref().map(|(_, plan)| plan).or(checkpoint.as_ref().map(|(_, plan)| plan));
    if let Some(there) = there {
        let longer = allowed.lengthen && plan.total_steps > there.total_steps;
        if longer {
            warn(&format!(
                "the run becomes longer, from {} to {} steps: rates that follow its length jump to where the longer run \
                 has them",
                there.total_steps, plan.total_steps
            ));
        }
        // The length of a run that becomes longer may differ.
        let known = if longer { with_length_of(there, &plan) } else { there.clone() };
        compare(workdir, &known, &plan)?;
        continue_as(&mut plan, there, warn);
    }
    if let Some((_, of_checkpoint)) = &checkpoint {
        // The run may have become longer since.
        compare(workdir, &with_length_of(of_checkpoint, &plan), &plan)?;
    }
    let text = toml::to_string_pretty(&plan).map_err(|error| TrainError::Recipe {
        recipe: path.display().to_string(),
        reason: error.to_string(),
    })?;
    if before.is_none_or(|(before, _)| before != text) {
        file::replace(&path, text.as_bytes()).map_err(|error| TrainError::io("write", &path, error))?;
    }
    Ok(plan)
}

/// Returns the plan of the newest readable checkpoint, and its step, unless another run has left
/// that checkpoint.
fn newest_plan(workdir: &Path, forked_step: Option<u64>) -> Option<(u64, Plan)> {
    let manifest = steps(&workdir.join("checkpoints"))
        .iter()
        .rev()
        .find_map(|(_, path)| Checkpoint::read(path).ok())?
        .manifest;
    (forked_step != Some(manifest.step)).then_some((manifest.step, manifest.plan))
}

/// Checks that `plan` equals `known`, the plan of `workdir`.
fn compare(workdir: &Path, known: &Plan, plan: &Plan) -> Result<(), TrainError> {
    if known.views_version != plan.views_version {
        return Err(TrainError::ViewsMismatch { workdir: workdir.to_path_buf() });
    }
    let Some((key, there, mut here)) = difference(known, plan) else {
        return match difference_of_images(known, plan) {
            Some(difference) => Err(TrainError::DataMismatch { workdir: workdir.to_path_buf(), difference }),
            None => Ok(()),
        };
    };
    if plan.total_steps > known.total_steps && difference(&with_length_of(known, plan), plan).is_none() {
        here.push_str(" (--lengthen goes on with it)");
    }
    Err(TrainError::RecipeMismatch { workdir: workdir.to_path_buf(), key, there, here })
}

/// Takes over the number of workers of the run `there`, and warns of changes that make results
/// differ by rounding.
fn continue_as(plan: &mut Plan, there: &Plan, warn: &mut dyn FnMut(&str)) {
    if plan.recipe.run.workers == 0 && plan.world_size == there.world_size {
        plan.n_workers = there.n_workers;
    }
    let groups = [there, &*plan].map(|plan| plan.method().map_or(1, |method| method.column_group_size()));
    if groups[0] != groups[1] {
        warn(&format!(
            "the run was started with method.prototype_group {} and continues with {}: results will differ by rounding",
            groups[0], groups[1]
        ));
    }
    let sizes = [there, &*plan].map(|plan| plan.recipe.run.max_unit_parameters);
    if sizes[0] != sizes[1] {
        let [there, here] = sizes.map(|size| size.map_or("none".into(), |size| size.to_string()));
        warn(&format!(
            "the run was started with run.max_unit_parameters {there} and continues with {here}: results may differ by rounding"
        ));
    }
    if there.kernels != plan.kernels {
        let name = |kernels: &str| {
            if kernels.is_empty() {
                "of a CPU or of an older release".to_string()
            } else {
                kernels.to_string()
            }
        };
        warn(&format!(
            "the run was started with the kernels {} and continues with {}: results will differ by rounding",
            name(&there.kernels),
            name(&plan.kernels)
        ));
    }
    if plan.n_micro_batches() != there.n_micro_batches() {
        warn(&format!(
            "the run was started on {} ranks and continues on {}: results will differ by rounding, because the \
             order of sums depends on the number of ranks unless optim.micro_batches is set",
            there.world_size, plan.world_size
        ));
    } else if plan.n_workers != there.n_workers {
        warn(&format!(
            "the run was started with {} workers per rank and continues with {}: results will differ by rounding",
            there.n_workers, plan.n_workers
        ));
    }
}

/// Reads the plan of the run in `workdir`, as text and parsed; `None` if there is none.
///
/// # Errors
/// [`TrainError::Io`], and [`TrainError::Recipe`] for a plan of another release.
pub(super) fn read_plan(workdir: &Path) -> Result<Option<(String, Plan)>, TrainError> {
    let path = plan_path(workdir);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(TrainError::io("read", &path, error)),
    };
    match toml::from_str(&text) {
        Ok(plan) => Ok(Some((text, plan))),
        Err(error) => Err(TrainError::Recipe {
            recipe: path.display().to_string(),
            reason: format!(
                "this program cannot read it ({}): finish the run with the release that started it, or use another \
                 folder; if the file was damaged, remove it: it will be restored from the newest checkpoint",
                error.message()
            ),
        }),
    }
}

fn plan_path(workdir: &Path) -> PathBuf {
    workdir.join("plan.toml")
}

/// Locks `workdir` against other runs for as long as the file is held. `None` where the file system
/// does not support locks.
///
/// # Errors
/// [`TrainError::Busy`], [`TrainError::Io`].
fn lock(workdir: &Path) -> Result<Option<File>, TrainError> {
    fs::create_dir_all(workdir).map_err(|error| TrainError::io("create folder", workdir, error))?;
    let path = workdir.join(LOCK);
    let file = file::open_lock(&path).map_err(|error| TrainError::io("create", &path, error))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(TrainError::Busy { workdir: workdir.to_path_buf() }),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

/// Checks that `workdir` is still the folder whose lock rank 0 holds, and has its plan.
///
/// # Errors
/// [`TrainError::WorkdirMissing`].
pub(super) fn check(workdir: &Path, lock: Option<&File>) -> Result<(), TrainError> {
    let place = |about: fs::Metadata| (about.dev(), about.ino());
    let here = fs::metadata(workdir.join(LOCK)).ok().map(place);
    let held = lock.and_then(|lock| lock.metadata().ok()).map(place);
    if plan_path(workdir).exists() && (held.is_none() || held == here) {
        Ok(())
    } else {
        Err(TrainError::WorkdirMissing { workdir: workdir.to_path_buf() })
    }
}

/// Runs [`lock`] and [`claim`] on rank 0 for all. All ranks call it. The lock is held as long as
/// the file is.
///
/// # Errors
/// Errors of both on rank 0; [`TrainError::RanksDiffer`] where a rank was given another recipe or
/// sees other data; [`TrainError::PeersFailed`] where another rank has failed.
pub(crate) fn agree(
    workdir: &Path,
    plan: &Plan,
    allowed: AllowedDifferences,
    comm: &Communicator,
    warn: &mut dyn FnMut(&str),
) -> Result<(Plan, Option<File>), TrainError> {
    let rank = comm.topology().rank;
    let mut take = |plan: &Plan| {
        let lock = lock(workdir)?;
        Ok((claim(workdir, plan, allowed, warn)?, lock))
    };
    if comm.topology().world_size == 1 {
        return take(plan);
    }
    let write = |plan: &Plan| toml::to_string(plan).unwrap_or_default().into_bytes();
    let read = |bytes: &[u8]| -> Option<Plan> { toml::from_str(std::str::from_utf8(bytes).ok()?).ok() };
    let asked = read(&comm.broadcast("plan", write(plan))?).ok_or(TrainError::PeersFailed { n_ranks: 1 })?;
    let difference = difference(plan, &asked);
    let differs = f64::from(u8::from(difference.is_some()));
    let n_differ = comm.all_reduce("plan", vec![differs], Reduction::Sum)?[0] as usize;
    if let Some((what, theirs, ours)) = difference {
        return Err(TrainError::RanksDiffer { rank, what, theirs, ours });
    }
    if n_differ > 0 {
        return Err(TrainError::PeersFailed { n_ranks: n_differ });
    }
    let taken = (rank == 0).then(|| take(&asked));
    let text = taken.as_ref().and_then(|taken| taken.as_ref().ok()).map(|(plan, _)| write(plan));
    let text = comm.broadcast("plan", text.unwrap_or_default())?;
    match taken {
        Some(taken) => taken,
        None => Ok((read(&text).ok_or(TrainError::PeersFailed { n_ranks: 1 })?, None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_of_another_release_is_refused_in_one_line() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("plan.toml"), "freeze_last_layer_steps = 63\n").unwrap();
        let plan = crate::conformance::plans(&[]).remove(0);
        let error =
            claim(folder.path(), &plan, AllowedDifferences::default(), &mut |_| {}).unwrap_err().to_string();
        assert!(
            error.contains("freeze_last_layer_steps") && error.contains("the release that started it"),
            "{error}"
        );
        assert!(!error.contains('\n'), "{error}");
    }
}
