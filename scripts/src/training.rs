//! How a training command is run: its recipe, its stages with signals and a progress bar, and what
//! it prints at its end.

use std::path::Path;
use std::sync::Arc;

use anyhow::bail;
use networks::probe::Probe;
use pipeline::words::{counted, thousands};
use pipeline::{Dataset, Progress, Storage};
use prep::bits::report_bits;
use prep::open::report_turned;
use report::Start;
use session::{Fitted, Initial, RetrievalProbe, Session, few_images_warning, initial_model};
use trainer::checkpoint::steps;
use trainer::run::Outcome;
use trainer::run::status::Status;
use trainer::{Plan, Recipe};

use crate::console::{chain, command_line, say};
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
    Ok(recipe)
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
    let timed = {
        let is_shown = rank == 0 && fitted.is_untimed();
        let _activity =
            is_shown.then(|| Activity::new("timing steps, to find how many fit into optim.length …"));
        fitted.timed()?
    };
    let Some(fitted) = timed else {
        return Ok(Trained { plan: untimed_plan, outcome: Outcome::Stopped, dataset });
    };
    let Probes { mut probes, mut n_images } = fitted.all_ready(probes(&fitted))?;
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

/// Warns if the run of `plan` begins in `workdir` with fewer images than its recipe is meant for.
fn warn_of_few_images(plan: &Plan, workdir: &Path) {
    if !steps(&workdir.join("checkpoints")).is_empty() {
        return;
    }
    let has_weights = plan.recipe.init.is_some();
    if let Some(warning) = few_images_warning(&plan.recipe.name, has_weights, plan.n_samples) {
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
pub(crate) fn print_stopped(workdir: &Path) {
    let has_checkpoint = !steps(&workdir.join("checkpoints")).is_empty();
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
    let checkpoints = workdir.join("checkpoints");
    out!("{} done; checkpoints in {}", counted(plan.total_steps, "step"), checkpoints.display());
}

/// Prints the same of a validated run, which has ended early if `status` says so.
pub(crate) fn print_validated(status: &Status, plan: &Plan, workdir: &Path) {
    if status.early_end.is_some() {
        let steps = counted(plan.total_steps, "step");
        let checkpoints = workdir.join("checkpoints");
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

/// Says which weights are scored, those after `step` steps, of a run that keeps its best ones.
pub(crate) fn describe_best(status: &Status, step: u64) -> Option<String> {
    let validations = status.validations.as_ref().filter(|validations| validations.patience.is_some())?;
    Some(format!(
        "weights after {} of {}, the best of {} by {}",
        thousands(step),
        counted(status.plan.total_steps, "step"),
        counted(validations.numbers.len() as u64, "validation"),
        validations.score
    ))
}
