//! How a training command is run: its recipe, its stages with signals and a progress bar, and what
//! it prints at its end.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::bail;
use eval::image_sets::set_name;
use eval::{Check, ImageSet};
use networks::probe::Probe;
use pipeline::words::{counted, thousands};
use pipeline::{Dataset, Progress, Storage};
use prep::bits::report_bits;
use prep::open::report_turned;
use report::Start;
use serde_json::{Value, json};
use session::{Fitted, Initial, RetrievalProbe, Session, few_images_warning, initial_model};
use trainer::checkpoint::{checkpoints_folder, steps_of_run};
use trainer::run::status::Status;
use trainer::run::{Outcome, Validations};
use trainer::{Plan, Recipe};

use crate::console::{chain, command_line, say};
use crate::exit::PREEMPTED;
use crate::forecast::Forecast;
use crate::progress::{Activity, StageBar};
use crate::run_end::print_scores;
use crate::run_progress::RunProgress;
use crate::signals::Signals;
use crate::{pictures, recipes};

/// Loads the recipe called `name` for a run in `workdir` that starts as `initial` says, and applies
/// the `--set` entries and, unless they are empty, the shards of the command line.
pub(crate) fn load_recipe(
    name: &str,
    overrides: &[String],
    shards: &[String],
    workdir: &Path,
    initial: &Initial,
) -> anyhow::Result<Recipe> {
    let loaded = recipes::load_with_model(name, overrides, |weights| {
        initial_model(initial, Some(workdir), weights).map_err(|error| error.to_string())
    });
    // The backbone may be that of the run in the folder, with which another recipe makes no sense.
    let mut recipe = match (loaded, Status::read(workdir)) {
        (Err(error), Ok(run)) if is_other_recipe(name, &run) => bail!(
            "{}; {} holds a run of recipe {}: for another recipe, choose another --workdir",
            chain(&error),
            workdir.display(),
            run.plan.recipe.name
        ),
        (loaded, _) => loaded?,
    };
    take_shards(&mut recipe, overrides, shards)?;
    // A run that has begun does not read its weights again.
    if recipe.init.is_none() && !Plan::path_in(workdir).exists() {
        check_hints(initial)?;
    }
    Ok(recipe)
}

/// Checks that facts about weights are stated only where `initial` has weights.
pub(crate) fn check_hints(initial: &Initial) -> anyhow::Result<()> {
    if initial.hints.is_empty() || initial.weights.is_some() {
        return Ok(());
    }
    bail!(
        "--network, --source, --heads, --normalization, --norm-epsilon and --bits state facts about the \
         weights of --init or --checkpoint, and there are none: leave them out, or give the weights"
    )
}

/// Applies the shards of the command line to a recipe, unless they are empty.
pub(crate) fn take_shards(
    recipe: &mut Recipe,
    overrides: &[String],
    shards: &[String],
) -> anyhow::Result<()> {
    if shards.is_empty() {
        recipe.refuse_commands(overrides)?
    } else {
        recipe.data.shards = shards.to_vec()
    }
    Ok(())
}

/// Returns whether `name` is a recipe of the program, and not that of `run`.
fn is_other_recipe(name: &str, run: &Status) -> bool {
    recipes::names().contains(&name) && run.plan.recipe.name != name
}

/// Probes of a run.
#[derive(Default)]
pub(crate) struct Probes {
    pub(crate) probes: Vec<Box<dyn Probe>>,
    /// Number of images whose features they compute.
    pub(crate) n_images: usize,
}

/// A run after its last step, or after it was asked to stop.
pub(crate) struct Trained {
    /// Plan of the run.
    pub(crate) plan: Plan,
    /// Outcome of the run.
    pub(crate) outcome: Outcome,
    /// Images of the run.
    pub(crate) dataset: Arc<Dataset>,
}

/// Runs the stages of `session`, with signals and a progress bar. The recipe is checked before
/// `probes` is called, with a plan whose length may still change.
pub(crate) fn train_session(
    session: Session,
    storage: &Storage,
    probes: impl FnOnce(&Fitted) -> anyhow::Result<Probes>,
) -> anyhow::Result<Trained> {
    let rank = session.launch.rank;
    let world_size = session.launch.world_size;
    let n_local = session.launch.n_local.unwrap_or(1);
    let stop = Arc::clone(&session.stop);
    let fitted = {
        let _activity = (rank == 0).then(|| Activity::new("opening the weights and the images …"));
        session.open(storage)?.resolve()?.fit()?
    };
    let dataset = Arc::clone(fitted.dataset());
    let progress = RunProgress::new(rank, world_size);
    let signals = Signals::listen(stop, progress.answer())?;
    let untimed_plan = fitted.plan().clone();
    // Before steps are timed, which may take minutes: images may not fit.
    let Probes { mut probes, mut n_images } = fitted.all_ready(probes(&fitted))?;
    let timed = {
        let is_shown = rank == 0 && fitted.is_untimed();
        let _activity =
            is_shown.then(|| Activity::new("timing steps, to find how many fit into optim.length …"));
        fitted.timed()?
    };
    let Some(fitted) = timed else {
        return Ok(Trained { plan: untimed_plan, outcome: Outcome::Stopped, dataset });
    };
    let fitted = fitted.rehearsed(&mut probes, pictures::candidates_after)?;
    // Its number of images follows from the final length.
    let retrieval = RetrievalProbe::for_run(fitted.plan(), fitted.dataset(), fitted.workdir(), retrieval_bar);
    if let Some(retrieval) = fitted.all_ready(retrieval)? {
        n_images += retrieval.n_views();
        // Before the scores, which are the newest that the bar shows.
        probes.insert(0, Box::new(retrieval));
    }
    let plan = fitted.plan().clone();
    let mut step_s = None;
    if rank == 0 {
        report_images(&plan, &dataset);
        warn_of_few_images(&plan, fitted.workdir());
        let device = fitted.device();
        let timed_step_s = fitted.step_s();
        let forecast =
            Forecast::new(&plan, fitted.workdir(), device, n_local, &dataset, n_images, timed_step_s);
        if let Some(forecast) = forecast {
            forecast.print();
            step_s = Some(forecast.step_s);
        }
    }
    let workdir = fitted.workdir().to_path_buf();
    let pictured = Arc::clone(&dataset);
    let pictures_plan = plan.clone();
    let progress = progress.with_estimate(step_s).on_training(signals.training());
    let mut progress = progress.on_start(move || {
        record_start(&workdir, world_size);
        pictures::views(&workdir, &pictured, &pictures_plan);
    });
    let outcome = fitted.train(&mut probes, &mut progress);
    signals.idle();
    Ok(Trained { plan, outcome: outcome?, dataset })
}

/// Creates the bars of a probe after `step` steps.
pub(crate) fn probe_bar(step: u64) -> Box<dyn Progress> {
    let job = match step {
        0 => "scoring before the first step".to_string(),
        step => format!("scoring after step {step}"),
    };
    Box::new(StageBar::named(job))
}

/// Creates the bar of a search of views after `step` steps.
fn retrieval_bar(step: u64) -> Box<dyn Progress> {
    Box::new(StageBar::named(format!("searching views after step {step}")))
}

/// Prints notes on the images.
fn report_images(plan: &Plan, dataset: &Dataset) {
    report_turned(dataset, &plan.recipe.data.rules());
    report_bits(dataset, &plan.recipe.data.rules());
}

/// Warns if the run of `plan` begins in `workdir` with few images for its network.
fn warn_of_few_images(plan: &Plan, workdir: &Path) {
    if !steps_of_run(workdir).is_empty() {
        return;
    }
    if let Some(warning) = few_images_warning(plan, false) {
        say(format!("warning: {warning}"));
    }
}

/// Records the command of this start in the work directory, so that the run can be resumed.
fn record_start(workdir: &Path, world_size: usize) {
    let start = Start::now(world_size, std::env::current_dir().unwrap_or_default(), command_line());
    if let Err(error) = start.note(workdir) {
        say(format!("warning: could not record the command in {}: {error}", workdir.display()));
    }
}

/// Prints that a run was asked to stop, and the scores that it has.
fn print_stopped(workdir: &Path) {
    let has_checkpoint = !steps_of_run(workdir).is_empty();
    say(if has_checkpoint {
        "stopped by a signal; checkpoint saved: run the same command to resume"
    } else {
        "stopped by a signal before anything was saved: the same command starts over"
    });
    print_scores(workdir);
}

/// Prints how many samples of the run in `workdir` could not be used.
pub(crate) fn print_bad_samples(workdir: &Path) {
    let ledger = workdir.join("quarantine.jsonl");
    let rows = std::fs::read(&ledger).unwrap_or_default();
    let n_bad = rows.split(|byte| *byte == b'\n').filter(|row| !row.is_empty()).count();
    if n_bad > 0 {
        say(format!("warning: {n_bad} unusable samples were replaced by others: see {}", ledger.display()));
    }
}

/// Prints how many steps a run has taken, and where its checkpoints are.
pub(crate) fn print_done(plan: &Plan, workdir: &Path) {
    let checkpoints = checkpoints_folder(workdir);
    out!("{} done; checkpoints in {}", counted(plan.total_steps, "step"), checkpoints.display());
}

/// Prints how many steps a validated run has taken, which has ended early if `status` says so, and
/// where its checkpoints are.
pub(crate) fn print_validated(status: &Status, plan: &Plan, workdir: &Path) {
    if status.early_end.is_some() {
        let steps = counted(plan.total_steps, "step");
        let checkpoints = checkpoints_folder(workdir);
        out!("{} of {steps} done; checkpoints in {}", thousands(status.step), checkpoints.display());
    } else {
        print_done(plan, workdir);
    }
}

/// Prints why a run ended early, if it did.
pub(crate) fn print_early_end(status: &Status) {
    if let Some(words) = &status.early_end {
        say(format!("note: the run {words}; a larger run.patience continues it"));
    }
}

/// Weights that are scored at the end of a run that keeps its best ones.
pub(crate) struct ScoredWeights {
    /// Which weights they are.
    pub(crate) words: String,
    /// Number of steps after which they were the best, if they are.
    pub(crate) best_step: Option<u64>,
}

/// Describes the weights that are scored, those after `step` steps, of a run that keeps its best
/// ones; `None` for a run that does not.
pub(crate) fn describe_best(status: &Status, step: u64) -> Option<ScoredWeights> {
    let validations = status.validations.as_ref().filter(|validations| validations.patience.is_some())?;
    Some(scored_weights(validations, step, status.step, status.plan.total_steps))
}

/// Describes the weights after `step` steps of a run of `total_steps` steps with `validations`,
/// which has taken `newest` steps.
fn scored_weights(validations: &Validations, step: u64, newest: u64, total_steps: u64) -> ScoredWeights {
    let described = format!("weights after {} of {}", thousands(step), counted(total_steps, "step"));
    let best_step = validations.kept_step().filter(|kept| *kept == step);
    if best_step.is_some() {
        let n_validations = counted(validations.numbers.len() as u64, "validation");
        let words = format!("{described}, the best of {n_validations} by {}", validations.score);
        return ScoredWeights { words, best_step };
    }
    // Others than the newest are the best of those that are left.
    let which = if step == newest { ", the newest" } else { "" };
    let reason = if validations.kept_step().is_some() {
        "the best ones cannot be read"
    } else {
        "no validation has given a number"
    };
    ScoredWeights { words: format!("{described}{which}: {reason}"), best_step }
}

/// Prints on rank 0 that a run was asked to stop, and returns the exit code of that.
pub(crate) fn end_stopped(rank: usize, workdir: &Path) -> ExitCode {
    if rank == 0 {
        print_stopped(workdir);
    }
    ExitCode::from(PREEMPTED)
}

/// Returns the name of the test set of `shards`, other than `validation`, that of the validation
/// set: rows and pictures of sets of one name could not be told apart.
pub(crate) fn test_name(shards: &[String], validation: &str) -> String {
    let name = set_name(shards);
    if name == validation { format!("{name} test") } else { name }
}

/// Warns of what makes the scores on `images`, which were not held out, misleading, such as images
/// that the run of `fitted` is trained on, if the run begins.
pub(crate) fn warn_of_scored_images(fitted: &Fitted, images: &ImageSet) -> anyhow::Result<()> {
    // Only when the run begins: images of equal length are compared byte for byte.
    if Plan::path_in(fitted.workdir()).exists() {
        return Ok(());
    }
    let Some(train) = fitted.training_images() else { return Ok(()) };
    let method = &fitted.plan().recipe.method;
    let mut check = if method.classes().is_some() {
        Check::new(&train, images)?
    } else {
        Check::without_classes(&train, images)?
    };
    // An image of a single class may be one of several or of none.
    check.is_multi_label |= method.is_multi_label();
    for warning in check.warnings() {
        say(format!("warning: {}: {warning}", images.name));
    }
    Ok(())
}

/// Prints how many of `images`, which are of `n_classes` classes, were scored, and how many could
/// not be decoded.
pub(crate) fn print_scored_images(images: &ImageSet, n_scored: usize, n_classes: usize, n_bad: usize) {
    out!("{} of {}, {}", counted(n_scored as u64, "image"), images.name, counted(n_classes as u64, "class"));
    if n_bad > 0 {
        let unusable = thousands(n_bad as u64);
        out!("{unusable} more cannot be decoded and are left out; run `ocelli shards verify` to see why");
    }
}

/// Returns the line of JSON of a validated run in `workdir`, which was started at `start`; scores
/// are added to it.
pub(crate) fn result_line(
    status: &Status,
    workdir: &Path,
    start: Instant,
    exported: Option<&Path>,
    weights: Option<&ScoredWeights>,
) -> Value {
    let mut line = json!({
        "steps": status.step,
        "seconds": start.elapsed().as_secs_f64(),
        "workdir": workdir,
    });
    if let Some(path) = exported {
        line["export"] = json!(path);
    }
    if let Some(best_step) = weights.and_then(|weights| weights.best_step) {
        line["best_step"] = json!(best_step);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_set_has_a_name_of_its_own() {
        let shards = ["d/x-8.tar".to_string()];
        assert_eq!(test_name(&shards, "d/x"), "d/x test");
        assert_eq!(test_name(&shards, "d/x held-out"), "d/x");
        assert_eq!(test_name(&shards, "e/x"), "d/x");
    }

    /// Returns the validations of a run with patience after 10 and 20 steps.
    fn validations(values: [Option<f64>; 2]) -> Validations {
        let fields = json!({
            "score": "top1",
            "is_higher_better": true,
            "images": "9 images",
            "patience": 3,
            "numbers": [{ "step": 10, "value": values[0] }, { "step": 20, "value": values[1] }],
        });
        serde_json::from_value(fields).unwrap()
    }

    /// Weights are called the best only if they are.
    #[test]
    fn scored_weights_are_described_as_they_are() {
        let known = validations([Some(80.0), Some(70.0)]);
        let best = scored_weights(&known, 10, 20, 40);
        assert_eq!(best.words, "weights after 10 of 40 steps, the best of 2 validations by top1");
        assert_eq!(best.best_step, Some(10));
        let newest = scored_weights(&known, 20, 20, 40);
        assert_eq!(newest.words, "weights after 20 of 40 steps, the newest: the best ones cannot be read");
        assert_eq!(newest.best_step, None);
        let unknown = scored_weights(&validations([None, None]), 20, 20, 40);
        assert!(
            unknown.words.ends_with(", the newest: no validation has given a number"),
            "{}",
            unknown.words
        );
        assert_eq!(unknown.best_step, None);
    }
}
