//! The work directory of a run, and the check that the run owns it.
//!
//! The folder shows any reader what its run is and what state it is in. Readers do not lock it. A
//! reader may hold a checkpoint (`checkpoint::Hold`), which only delays its removal.
//!
//! ```text
//! plan.toml               the recipe with every default filled in; identifies the run
//! starts.jsonl            a line for each start: time, machine, folder, command
//! metrics.jsonl           a row for each logged step
//! events.out.tfevents.*   the same for TensorBoard, with plan, hyperparameters and pictures
//! checkpoints/            a folder for each step: a file for each rank, and manifest.json
//! warnings.jsonl          step, subject and text; cut back with the metrics if the run goes back
//! kernels.jsonl           on a GPU, by each start: kernels of matrix products, and their checks
//! evaluations.jsonl       scores of checkpoints
//! evaluations/            which checkpoints have been scored, or are being scored
//! validations.json        the number by which a run is validated, and which of them is the best
//! quarantine*.jsonl       samples that could not be used, a file for each rank
//! heartbeats/             each rank, once a second: step, phase, and why it has left
//! flight/                 the last collectives of ranks that have lost one another
//! forked-from.txt         run and step that a fork began with
//! mlflow.json             what `ocelli track` has sent, by server and experiment
//! .lock                   kept locked by rank 0
//! ```
//!
//! After every step rank 0 checks that the folder is still the one that it has locked, and no rank
//! writes a checkpoint into a folder without a plan.

use std::fs;
use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use pipeline::file;
use pipeline::words::{counted, thousands};
use ranks::communicator::Communicator;

use crate::checkpoint::{Checkpoint, steps_of_run};
use crate::error::TrainError;
use crate::recipe::compare::{difference, difference_of_images, with_length_of};
use crate::recipe::plan::Plan;
use crate::recipe::warnings::reopened_lengths;

/// Name of the file that rank 0 of a run keeps locked.
const LOCK: &str = ".lock";

/// Allowed differences between the plan of a start and the plan of the run that it resumes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AllowedDifferences {
    /// Whether the run may become longer.
    pub(crate) lengthen: bool,
    /// Step of the checkpoint of another run from which this run is forked.
    pub(crate) forked_step: Option<u64>,
}

/// Writes the plan into `workdir`, or checks that the run in it has this plan: by plan.toml, and by
/// the newest checkpoint of the run, even if plan.toml is missing. Returns the plan to follow: if
/// the recipe leaves the number of workers open, a run resumes with the number that it started
/// with.
fn claim(
    workdir: &Path,
    plan: &Plan,
    allowed: AllowedDifferences,
    warn: &mut dyn FnMut(&str),
) -> Result<Plan, TrainError> {
    let path = Plan::path_in(workdir);
    let mut plan = plan.clone();
    let stored = read_plan(workdir)?;
    let checkpoint = newest_plan(workdir, allowed.forked_step);
    if stored.is_none()
        && let Some((step, _)) = &checkpoint
    {
        warn(&format!("plan.toml is missing: restoring it from the checkpoint of step {step}"));
    }
    let stored_plan = stored.as_ref().map(|(_, plan)| plan);
    let checkpoint_plan = checkpoint.as_ref().map(|(_, plan)| plan);
    if let Some(previous) = stored_plan.or(checkpoint_plan) {
        let lengthens = allowed.lengthen && plan.total_steps > previous.total_steps;
        if lengthens {
            warn(&format!(
                "lengthening the run from {} to {}: rates that depend on its length jump to the values of \
                 the longer run",
                thousands(previous.total_steps),
                counted(plan.total_steps, "step")
            ));
        }
        if lengthens && let Some((step, _)) = &checkpoint {
            for warning in reopened_lengths(previous, &plan, *step) {
                warn(&warning);
            }
        }
        // The length of a run that becomes longer may differ.
        let known = if lengthens { with_length_of(previous, &plan) } else { previous.clone() };
        compare(workdir, &known, &plan)?;
        resume_settings(&mut plan, previous, warn);
    }
    if let Some(checkpoint_plan) = checkpoint_plan {
        // The run may have become longer since.
        compare(workdir, &with_length_of(checkpoint_plan, &plan), &plan)?;
    }
    let text = toml::to_string_pretty(&plan).map_err(|error| TrainError::Recipe {
        recipe: path.display().to_string(),
        reason: error.to_string(),
    })?;
    if stored.is_none_or(|(stored_text, _)| stored_text != text) {
        file::replace(&path, text.as_bytes()).map_err(|error| TrainError::io("write", &path, error))?;
    }
    Ok(plan)
}

/// Returns the step and the plan of the newest readable checkpoint, unless that checkpoint comes
/// from another run.
fn newest_plan(workdir: &Path, forked_step: Option<u64>) -> Option<(u64, Plan)> {
    let manifest =
        steps_of_run(workdir).iter().rev().find_map(|(_, path)| Checkpoint::read(path).ok())?.manifest;
    (forked_step != Some(manifest.step)).then_some((manifest.step, manifest.plan))
}

/// Returns the plan of the run in `workdir`, from its file or else from its newest checkpoint;
/// `None` if there is no run, or nothing but the checkpoint of another run after `forked_step`
/// steps.
///
/// # Errors
/// [`TrainError::Io`], and [`TrainError::Recipe`] for a plan of another release.
pub fn recorded_plan(workdir: &Path, forked_step: Option<u64>) -> Result<Option<Plan>, TrainError> {
    if let Some((_, plan)) = read_plan(workdir)? {
        return Ok(Some(plan));
    }
    Ok(newest_plan(workdir, forked_step).map(|(_, plan)| plan))
}

/// Checks that `plan` equals `known`, the plan of `workdir`.
fn compare(workdir: &Path, known: &Plan, plan: &Plan) -> Result<(), TrainError> {
    if known.views_version != plan.views_version {
        return Err(TrainError::ViewsMismatch { workdir: workdir.to_path_buf() });
    }
    let method_there = known.recipe.method.title();
    let method_here = plan.recipe.method.title();
    if method_there != method_here {
        return Err(TrainError::OtherMethod {
            workdir: workdir.to_path_buf(),
            there: method_there,
            recipe: known.recipe.name.clone(),
            here: method_here,
        });
    }
    let Some((key, there, mut here)) = difference(known, plan) else {
        return match difference_of_images(known, plan) {
            Some(difference) => Err(TrainError::DataMismatch { workdir: workdir.to_path_buf(), difference }),
            None => Ok(()),
        };
    };
    if plan.total_steps > known.total_steps && difference(&with_length_of(known, plan), plan).is_none() {
        here.push_str(" (--lengthen continues it)");
    }
    Err(TrainError::RecipeMismatch { workdir: workdir.to_path_buf(), key, there, here })
}

/// Sets what a resumed run takes from `previous`, the plan of the run so far: the number of
/// workers, if the recipe leaves it open, the minutes from which its length was measured, and the
/// weights that the run began with. Warns of changes that make results differ by rounding.
fn resume_settings(plan: &mut Plan, previous: &Plan, warn: &mut dyn FnMut(&str)) {
    if plan.total_steps == previous.total_steps {
        plan.minutes = previous.minutes;
    }
    if plan.recipe.run.workers == 0 && plan.world_size == previous.world_size {
        plan.n_workers = previous.n_workers;
    }
    // They are not opened again.
    if plan.origins.is_empty() {
        plan.origins.clone_from(&previous.origins);
    }
    let group_before = column_group_size(previous);
    let group_now = column_group_size(plan);
    if group_before != group_now {
        warn(&format!(
            "the run was started with method.prototype_group {group_before} and continues with {group_now}: \
             results will differ by rounding"
        ));
    }
    let limit_before = previous.recipe.run.max_unit_parameters;
    let limit_now = plan.recipe.run.max_unit_parameters;
    if limit_before != limit_now {
        warn(&format!(
            "the run was started with run.max_unit_parameters {} and continues with {}: results may differ \
             by rounding",
            describe_limit(limit_before),
            describe_limit(limit_now)
        ));
    }
    if previous.kernels != plan.kernels {
        warn(&format!(
            "the run was started with kernels {} and continues with {}: results will differ by rounding",
            describe_kernels(&previous.kernels),
            describe_kernels(&plan.kernels)
        ));
    }
    if plan.n_micro_batches() != previous.n_micro_batches() {
        warn(&format!(
            "the run was started on {} and continues on {}: results will differ by rounding, because the \
             order of sums depends on the number of ranks unless optim.micro_batches is set",
            counted(previous.world_size as u64, "rank"),
            thousands(plan.world_size as u64)
        ));
    } else if plan.n_workers != previous.n_workers {
        warn(&format!(
            "the run was started with {} per rank and continues with {}: results will differ by rounding",
            counted(previous.n_workers as u64, "worker"),
            plan.n_workers
        ));
    }
}

/// Returns the number of ranks that share the prototypes of a plan's method.
fn column_group_size(plan: &Plan) -> usize {
    plan.method().map_or(1, |method| method.column_group_size())
}

/// Returns a limit of the parameters of a unit, for messages.
fn describe_limit(limit: Option<usize>) -> String {
    limit.map_or("none".into(), |limit| limit.to_string())
}

/// Returns the name of a set of kernels, for messages.
fn describe_kernels(kernels: &str) -> &str {
    if kernels.is_empty() { "of a CPU or of an older release" } else { kernels }
}

/// Reads the plan of the run in `workdir`, as text and parsed; `None` if there is none.
///
/// # Errors
/// [`TrainError::Io`], and [`TrainError::Recipe`] for a plan of another release.
pub(super) fn read_plan(workdir: &Path) -> Result<Option<(String, Plan)>, TrainError> {
    let path = Plan::path_in(workdir);
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
                "this release cannot read it ({}): finish the run with the release that started it, \
                 or use another folder; if the file was damaged, remove it: it will be restored from the \
                 newest checkpoint",
                error.message()
            ),
        }),
    }
}

/// Locks `workdir` against other runs until the returned file is closed. Returns `None` if the file
/// system does not support locks.
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
    let current = fs::metadata(workdir.join(LOCK)).ok().map(file_id);
    let held = lock.and_then(|lock| lock.metadata().ok()).map(file_id);
    if Plan::path_in(workdir).exists() && (held.is_none() || held == current) {
        Ok(())
    } else {
        Err(TrainError::WorkdirMissing { workdir: workdir.to_path_buf() })
    }
}

/// Returns the device and the inode of a file.
fn file_id(metadata: fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Runs [`lock`] and [`claim`].
fn lock_and_claim(
    workdir: &Path,
    plan: &Plan,
    allowed: AllowedDifferences,
    warn: &mut dyn FnMut(&str),
) -> Result<(Plan, Option<File>), TrainError> {
    let lock = lock(workdir)?;
    Ok((claim(workdir, plan, allowed, warn)?, lock))
}

/// Encodes a plan for the other ranks; empty if this fails.
fn encode_plan(plan: &Plan) -> Vec<u8> {
    toml::to_string(plan).unwrap_or_default().into_bytes()
}

/// Decodes a plan that rank 0 has sent.
fn decode_plan(bytes: &[u8]) -> Option<Plan> {
    toml::from_str(std::str::from_utf8(bytes).ok()?).ok()
}

/// Locks the work directory and claims it on rank 0 for all ranks. All ranks call it. The lock is
/// held until the returned file is closed.
///
/// # Errors
/// Errors of [`lock`] and [`claim`] on rank 0; [`TrainError::RanksDiffer`] on a rank that was given
/// another recipe or sees other data; [`TrainError::PeersFailed`] if another rank has failed.
pub(crate) fn agree(
    workdir: &Path,
    plan: &Plan,
    allowed: AllowedDifferences,
    comm: &Communicator,
    warn: &mut dyn FnMut(&str),
) -> Result<(Plan, Option<File>), TrainError> {
    let rank = comm.topology().rank;
    if comm.topology().world_size == 1 {
        return lock_and_claim(workdir, plan, allowed, warn);
    }
    let requested = comm.broadcast("plan", encode_plan(plan))?;
    let requested = decode_plan(&requested).ok_or(TrainError::PeersFailed { n_ranks: 1 })?;
    let difference = difference(plan, &requested);
    let n_differ = comm.count("plan", difference.is_some())?;
    if let Some((what, theirs, ours)) = difference {
        return Err(TrainError::RanksDiffer { rank, what, theirs, ours });
    }
    if n_differ > 0 {
        return Err(TrainError::PeersFailed { n_ranks: n_differ });
    }
    if rank == 0 {
        let claimed = lock_and_claim(workdir, &requested, allowed, warn);
        // Empty after a failure, so that the other ranks stop as well.
        let text = claimed.as_ref().map_or_else(|_| Vec::new(), |(plan, _)| encode_plan(plan));
        comm.broadcast("plan", text)?;
        return claimed;
    }
    let text = comm.broadcast("plan", Vec::new())?;
    Ok((decode_plan(&text).ok_or(TrainError::PeersFailed { n_ranks: 1 })?, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_of_another_release_is_refused_in_one_line() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("plan.toml"), "freeze_last_layer_steps = 63\n").unwrap();
        let plan = crate::conformance::plans(&[]).remove(0);
        let error = claim(folder.path(), &plan, AllowedDifferences::default(), &mut |_| {}).unwrap_err();
        let TrainError::Recipe { reason, .. } = &error else { panic!("{error}") };
        assert!(
            reason.contains("freeze_last_layer_steps") && reason.contains("the release that started it"),
            "{error}"
        );
        assert!(!reason.contains('\n'), "{error}");
    }
}
