//! `ocelli pretrain`: trains a recipe on shards and writes checkpoints. The same command continues
//! a run.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::bail;
use augment::Transform;
use eval::image_sets::open_images;
use eval::{Check, Protocol, Split};
use kernels::device::{Device, Opened};
use networks::probe::Probe;
use pipeline::words::counted;
use pipeline::{Dataset, Progress, Storage};
use prep::bits::report_bits;
use prep::open::report_turned;
use report::Start;
use serde_json::json;
use session::{
    Initial, RetrievalProbe, ScoringProbe, Session, check_export, few_images_warning, initial_model,
};
use trainer::checkpoint::steps;
use trainer::run::Outcome;
use trainer::run::fault::Fault;
use trainer::run::status::Status;
use trainer::{Length, Plan, Recipe};
use weights::Format;

use super::export::export_beside;
use super::report::{candidates_after, write_beside};
use crate::cluster::compute;
use crate::console::{chain, command_line, say};
use crate::exit::PREEMPTED;
use crate::forecast::Forecast;
use crate::initial::InitialFlags;
use crate::progress::{Activity, StageBar};
use crate::run_end::{EndedRun, print_scores, warn_of_missing_probes};
use crate::run_progress::RunProgress;
use crate::signals::Signals;
use crate::{pictures, recipes, values};

/// Flags of `pretrain`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
        ocelli pretrain --recipe lejepa_cifar --shards photos/ --workdir runs/mine\n  \
        ocelli pretrain --recipe dino_vits16 --shards 'data/*.tar' --workdir runs/a\n  \
        ocelli pretrain --hours 8 --shards photos/ --workdir runs/c\n  \
        mpirun -n 4 ocelli pretrain --recipe ibot_vits16 --shards d/ --workdir runs/b\n  \
        ocelli pretrain --recipe dinov2_continue --init w.pth --shards d/ --workdir r\n  \
        ocelli pretrain --recipe lejepa_cifar --shards d/ --workdir r --export timm")]
pub(crate) struct Args {
    /// Recipe: a name, such as dino_vits16, or a file. `ocelli recipe` lists, explains and creates
    /// recipes; the plan.toml of a run is one, too. With --hours it may be left out: then one is
    /// chosen for the images, the machine and the weights of --init, and a run that is resumed has
    /// its own.
    #[arg(long, required_unless_present = "hours")]
    recipe: Option<String>,
    /// Folder for the plan, metrics and checkpoints. If it already holds a run, the run resumes.
    #[arg(long)]
    workdir: PathBuf,
    /// Time of the whole run, instead of the recipe's optim.length. A few steps, a checkpoint and
    /// the probes are timed, and as many steps as fit are written into the plan; a run that is
    /// resumed takes as many, however long it was interrupted.
    #[arg(long, value_name = "HOURS", value_parser = values::hours)]
    hours: Option<f64>,
    /// Shards or folders to train on, instead of the recipe's. They are
    /// `train-{000000..000009}.tar`,
    /// `'data/train-*.tar'`, a folder of shards, Parquet files of images, or a folder of images,
    /// read in place.
    #[arg(long, num_args = 1..)]
    shards: Vec<String>,
    /// Labeled shards to fit the in-training probe on. It runs before the first step, every
    /// run.probe_every_steps steps, and at the end.
    #[arg(long, value_name = "PATH", num_args = 1.., requires = "probe_test")]
    probe_train: Vec<String>,
    /// Labeled shards to test the in-training probe on.
    #[arg(long, value_name = "PATH", num_args = 1.., requires = "probe_train")]
    probe_test: Vec<String>,
    /// Protocols of the in-training probe, comma-separated: see `ocelli probe --help`.
    #[arg(long, value_delimiter = ',', default_values = ["knn"], requires = "probe_test",
        hide_short_help = true)]
    probe_protocols: Vec<String>,
    /// Override a recipe value: `--set optim.batch_size=32`. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Export the backbone after the last step, into the folder export-FORMAT of the work
    /// directory: safetensors, timm, torchvision, transformers, dinov2, dinov3 or onnx.
    #[arg(long, value_name = "FORMAT")]
    export: Option<Format>,
    #[command(flatten)]
    initial: InitialFlags,
    #[command(flatten)]
    compute: compute::ComputeFlags,
    /// Inject a fault: `kill:rank=1,step=5,phase=backward`; also hang, slow, nan, product. Phases:
    /// targets, forward, head, backward, data, update, checkpoint.
    #[arg(long, value_name = "WHAT:WHERE", hide_short_help = true)]
    inject_fault: Option<Fault>,
    /// Print a line of JSON at the end: steps, seconds, workdir; with --export: export.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    check_length(args)?;
    let initial = args.initial.initial()?;
    let Beginning { mut recipe, initial, device } = match (&args.recipe, args.hours) {
        (Some(name), _) => {
            let recipe = load_recipe(name, &args.overrides, &args.shards, &args.workdir, &initial)?;
            Beginning { recipe, initial, device: None }
        }
        (None, Some(hours)) => chosen_recipe(args, hours, initial, storage)?,
        (None, None) => bail!("give --recipe, or --hours, with which one is chosen"),
    };
    if let Some(hours) = args.hours {
        recipe.optim.length = Length::from_hours(hours);
    }
    if args.probe_train.is_empty() && recipe.run.probe_every_steps > 0 {
        bail!("run.probe_every_steps is set: give the probe's shards with --probe-train and --probe-test");
    }
    check_format(args.export, &recipe)?;
    let launch = compute::launch()?;
    let rank = launch.rank;
    if rank == 0 && args.probe_train.is_empty() {
        warn_of_missing_probes(&args.workdir);
    }
    let session = Session {
        recipe,
        workdir: args.workdir.clone(),
        device: match device {
            Some(device) => device,
            None => args.compute.open(&launch)?,
        },
        engine: args.compute.engine,
        launch,
        initial,
        fault: args.inject_fault.clone(),
        stop: Arc::default(),
        started: start,
    };
    let Trained { plan, outcome, dataset } =
        pretrain(session, storage, |plan| scoring_probe(args, plan, rank, storage))?;
    if outcome == Outcome::Stopped {
        if rank == 0 {
            print_stopped(&args.workdir);
        }
        return Ok(ExitCode::from(PREEMPTED));
    }
    if rank > 0 {
        return Ok(ExitCode::SUCCESS);
    }
    print_bad_samples(&args.workdir);
    let device = args.compute.device.open(0)?.device;
    write_report(&args.workdir, storage, &device);
    print_scores(&args.workdir);
    let exported = export(&args.workdir, args.export)?;
    let ended = EndedRun {
        workdir: &args.workdir,
        plan: &plan,
        dataset: &dataset,
        probe_train: &args.probe_train,
        probe_test: &args.probe_test,
        is_exported: exported.is_some(),
    };
    ended.print_next();
    if args.json {
        let seconds = start.elapsed().as_secs_f64();
        let mut line = json!({ "steps": plan.total_steps, "seconds": seconds, "workdir": args.workdir });
        if let Some(path) = &exported {
            line["export"] = json!(path);
        }
        out!("{line}");
    } else {
        print_done(&plan, &args.workdir);
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks that the length of the run is given once.
fn check_length(args: &Args) -> anyhow::Result<()> {
    let Some(hours) = args.hours else { return Ok(()) };
    for entry in &args.overrides {
        if recipes::is_set(std::slice::from_ref(entry), "optim.length") {
            bail!("--hours {hours} and --set {entry} are both the length of the run: give one of them");
        }
    }
    Ok(())
}

/// Recipe of a run, its initial state, and its device, if that is open already.
struct Beginning {
    recipe: Recipe,
    initial: Initial,
    device: Option<Opened>,
}

/// Returns the recipe of the run in the work directory, or chooses one for a run of `hours`.
fn chosen_recipe(args: &Args, hours: f64, initial: Initial, storage: &Storage) -> anyhow::Result<Beginning> {
    let plan = args.workdir.join("plan.toml");
    if plan.exists() {
        let mut recipe = recipes::load(&plan.display().to_string(), &args.overrides)?;
        take_shards(&mut recipe, &args.overrides, &args.shards)?;
        // Weights that the run distills are named by its recipe.
        let weights = initial.weights.filter(|_| recipe.init.is_some());
        return Ok(Beginning { recipe, initial: Initial { weights, ..initial }, device: None });
    }
    if initial.fork.is_some() {
        bail!("--fork needs a recipe, such as that of the run: --recipe RUN/plan.toml");
    }
    let launch = compute::launch()?;
    if launch.world_size > 1 {
        bail!(
            "without --recipe, --hours chooses one for a single process, not for {} ranks: `ocelli plan \
             --hours {hours} --shards FOLDER` prints the choice as a command",
            launch.world_size
        );
    }
    let device = args.compute.open(&launch)?;
    let advice = recipes::choose(hours, &args.shards, &args.overrides, &initial, &device, storage)?;
    for line in &advice.lines {
        say(format!("note: {line}"));
    }
    let initial = Initial { weights: advice.weights, ..initial };
    let mut recipe = advice.recipe;
    take_shards(&mut recipe, &args.overrides, &args.shards)?;
    Ok(Beginning { recipe, initial, device: Some(device) })
}

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
fn take_shards(recipe: &mut Recipe, overrides: &[String], shards: &[String]) -> anyhow::Result<()> {
    if shards.is_empty() {
        recipe.refuse_commands(overrides)?
    } else {
        recipe.data.shards = shards.to_vec()
    }
    Ok(())
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

/// Writes the page of the run in `workdir`; a failure is reported.
pub(crate) fn write_report(workdir: &Path, storage: &Storage, device: &Device) {
    match write_beside(workdir, true, storage, device) {
        Ok(page) => say(format!("report: {}", page.display())),
        Err(error) => say(format!("warning: could not write the report: {error:#}")),
    }
}

/// Prints how many steps a run has taken, and where its checkpoints are.
pub(crate) fn print_done(plan: &Plan, workdir: &Path) {
    let checkpoints = workdir.join("checkpoints");
    out!("{} done; checkpoints in {}", counted(plan.total_steps, "step"), checkpoints.display());
}

/// Returns whether `name` is a recipe of the program, and not that of `run`.
fn is_other_recipe(name: &str, run: &Status) -> bool {
    recipes::names().contains(&name) && run.plan.recipe.name != name
}

/// Checks that the requested format of the export, if there is one, can hold the network of
/// `recipe`.
pub(crate) fn check_format(requested: Option<Format>, recipe: &Recipe) -> anyhow::Result<()> {
    let Some(format) = requested else { return Ok(()) };
    let Err(error) = check_export(recipe, format) else { return Ok(()) };
    let mut possible = Format::ALL.to_vec();
    possible.retain(|format| check_export(recipe, *format).is_ok());
    let names: Vec<&str> = possible.into_iter().map(Format::name).collect();
    bail!("--export {}: {error}; choose one of {}", format.name(), names.join(", "));
}

/// Exports the backbone of the run in `workdir` if a format is requested; returns the file or
/// folder.
pub(crate) fn export(workdir: &Path, requested: Option<Format>) -> anyhow::Result<Option<PathBuf>> {
    let Some(format) = requested else { return Ok(None) };
    let path = {
        let _activity = Activity::new("exporting …");
        export_beside(workdir, format)?
    };
    say(format!("exported for {}: {}", format.name(), path.display()));
    Ok(Some(path))
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

/// Probes of a run.
#[derive(Default)]
pub(crate) struct Probes {
    probes: Vec<Box<dyn Probe>>,
    /// Number of images whose features they compute.
    n_images: usize,
}

/// Creates the scoring probe that the flags request.
fn scoring_probe(args: &Args, plan: &Plan, rank: usize, storage: &Storage) -> anyhow::Result<Probes> {
    if args.probe_train.is_empty() {
        return Ok(Probes::default());
    }
    let _activity = (rank == 0).then(|| Activity::new("opening the images of the probe …"));
    let transform = Transform::new(plan.recipe.evaluated_px() as u32);
    let rules = plan.recipe.data.rules();
    let mut protocols = Vec::new();
    for name in &args.probe_protocols {
        protocols.push(Protocol::named(name).map_err(anyhow::Error::msg)?);
    }
    let train = open_images(&args.probe_train, transform, rules, storage)?;
    let test = open_images(&args.probe_test, transform, rules, storage)?;
    let split = Split::for_protocols(&protocols, train, test)?;
    // Only when the run begins: images of equal length are compared byte for byte.
    if rank == 0 && !args.workdir.join("plan.toml").exists() {
        for warning in Check::new(&split.train, &split.test)?.warnings() {
            say(format!("warning: probe: {warning}"));
        }
    }
    let workdir = args.workdir.clone();
    let plan = plan.clone();
    let n_images = split.train.len() + split.test.len();
    let probe = ScoringProbe { split, protocols, workdir, plan, new_progress: probe_bar };
    Ok(Probes { probes: vec![Box::new(probe)], n_images })
}

/// Creates the bars of a probe after `step` steps.
fn probe_bar(step: u64) -> Box<dyn Progress> {
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

/// A run after its last step, or after a step at which it was asked to stop.
pub(crate) struct Trained {
    /// Plan of the run.
    pub(crate) plan: Plan,
    /// Outcome of the run.
    pub(crate) outcome: Outcome,
    /// Images of the run.
    pub(crate) dataset: Arc<Dataset>,
}

/// Runs the stages of `session`, with signals and a progress bar. The recipe is checked before
/// `probes` is called.
pub(crate) fn pretrain(
    session: Session,
    storage: &Storage,
    probes: impl FnOnce(&Plan) -> anyhow::Result<Probes>,
) -> anyhow::Result<Trained> {
    let rank = session.launch.rank;
    let world_size = session.launch.world_size;
    let n_local = session.launch.n_local.unwrap_or(1);
    let stop = Arc::clone(&session.stop);
    let fitted = {
        let _activity = (rank == 0).then(|| Activity::new("opening the weights and the images …"));
        session.open(storage)?.resolve()?.fit()?
    };
    let fitted = {
        let is_shown = rank == 0 && fitted.is_untimed();
        let _activity =
            is_shown.then(|| Activity::new("timing steps, to find how many fit into optim.length …"));
        fitted.timed()?
    };
    let Probes { mut probes, mut n_images } = fitted.all_ready(probes(fitted.plan()))?;
    let retrieval = RetrievalProbe::for_run(fitted.plan(), fitted.dataset(), fitted.workdir(), retrieval_bar);
    if let Some(retrieval) = fitted.all_ready(retrieval)? {
        n_images += retrieval.n_views();
        // Before the scores, which are the newest that the bar shows.
        probes.insert(0, Box::new(retrieval));
    }
    let fitted = fitted.rehearsed(&mut probes, candidates_after)?;
    let plan = fitted.plan().clone();
    let mut step_s = None;
    if rank == 0 {
        report_images(&plan, fitted.dataset());
        warn_of_few_images(&plan, fitted.workdir());
        let dataset = fitted.dataset();
        let device = fitted.device();
        let timed_step_s = fitted.step_s();
        let forecast =
            Forecast::new(&plan, fitted.workdir(), device, n_local, dataset, n_images, timed_step_s);
        if let Some(forecast) = forecast {
            forecast.print();
            step_s = Some(forecast.step_s);
        }
    }
    let progress = RunProgress::new(rank, world_size).with_estimate(step_s);
    let signals = Signals::listen(stop, progress.answer())?;
    let workdir = fitted.workdir().to_path_buf();
    let dataset = Arc::clone(fitted.dataset());
    let pictured = Arc::clone(&dataset);
    let pictures_plan = plan.clone();
    let mut progress = progress.on_training(signals.training()).on_start(move || {
        record_start(&workdir, world_size);
        pictures::views(&workdir, &pictured, &pictures_plan);
    });
    let outcome = fitted.train(&mut probes, &mut progress);
    signals.idle();
    Ok(Trained { plan, outcome: outcome?, dataset })
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
    if let Some(warning) = few_images_warning(&plan.recipe.name, plan.n_samples) {
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
