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
use kernels::device::Opened;
use networks::probe::Probe;
use pipeline::{Dataset, Storage};
use prep::bits::report_bits;
use prep::open::report_turned;
use report::Start;
use serde_json::json;
use session::{ScoringProbe, Session, initial_model};
use trainer::Plan;
use trainer::bench::step::least_step_s;
use trainer::checkpoint::steps;
use trainer::run::Outcome;
use trainer::run::fault::Fault;

use super::report::write_beside;
use crate::cluster::compute;
use crate::console::{command_line, say};
use crate::exit::PREEMPTED;
use crate::initial::InitialFlags;
use crate::progress::{Activity, format_duration};
use crate::run_progress::RunProgress;
use crate::signals::Signals;
use crate::{pictures, recipes};

/// Flags of `pretrain`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
        ocelli pretrain --recipe lejepa_cifar --shards photos/ --workdir runs/mine\n  \
        ocelli pretrain --recipe dino_vits16 --shards 'data/*.tar' --workdir runs/a\n  \
        mpirun -n 4 ocelli pretrain --recipe ibot_vits16 --shards d/ --workdir runs/b\n  \
        ocelli pretrain --recipe dinov2_continue --init w.pth --shards d/ --workdir r")]
pub(crate) struct Args {
    /// Recipe: a name, such as dino_vits16, or a file. `ocelli recipe` lists, explains and creates
    /// recipes; the plan.toml of a run is one, too.
    #[arg(long)]
    recipe: String,
    /// Folder for the plan, metrics and checkpoints. If it already holds a run, the run resumes.
    #[arg(long)]
    workdir: PathBuf,
    /// Shards or folders to train on, instead of the recipe's. They are `train-{000000..000009}.tar`,
    /// `'data/train-*.tar'`, a folder of shards, Parquet files of images, or a folder of images,
    /// read in place.
    #[arg(long, num_args = 1..)]
    shards: Vec<String>,
    /// Labeled shards to fit the in-training probe on. It runs at the end, and every
    /// run.probe_every_steps steps.
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
    #[command(flatten)]
    initial: InitialFlags,
    #[command(flatten)]
    compute: compute::ComputeFlags,
    /// Inject a fault: `kill:rank=1,step=5,phase=backward`; also hang, slow, nan, product. Phases:
    /// targets, forward, head, backward, data, update, checkpoint.
    #[arg(long, value_name = "WHAT:WHERE", hide_short_help = true)]
    inject_fault: Option<Fault>,
    /// Print a line of JSON at the end. It has steps, seconds and workdir.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let initial = args.initial.initial()?;
    let mut recipe = recipes::load_with_model(&args.recipe, &args.overrides, |weights| {
        initial_model(&initial, Some(&args.workdir), weights).map_err(|error| error.to_string())
    })?;
    if args.shards.is_empty() {
        recipe.refuse_commands(&args.overrides)?
    } else {
        recipe.data.shards.clone_from(&args.shards)
    }
    if args.probe_train.is_empty() && recipe.run.probe_every_steps > 0 {
        bail!("run.probe_every_steps is set: give the probe's shards with --probe-train and --probe-test");
    }
    let start = Instant::now();
    let launch = compute::launch()?;
    let rank = launch.rank;
    let session = Session {
        recipe,
        workdir: args.workdir.clone(),
        device: args.compute.open(&launch)?,
        engine: args.compute.engine,
        launch,
        initial,
        fault: args.inject_fault.clone(),
        stop: Arc::default(),
    };
    let (plan, outcome) = pretrain(session, storage, |plan| probes(args, plan, rank, storage))?;
    let checkpoints = args.workdir.join("checkpoints");
    if outcome == Outcome::Stopped {
        if rank == 0 {
            let has_checkpoint = !steps(&checkpoints).is_empty();
            say(if has_checkpoint {
                "stopped by a signal; checkpoint saved: run the same command to resume"
            } else {
                "stopped by a signal before anything was saved: the same command starts over"
            });
        }
        return Ok(ExitCode::from(PREEMPTED));
    }
    if rank > 0 {
        return Ok(ExitCode::SUCCESS);
    }
    print_bad_samples(&args.workdir);
    let device = args.compute.device.open(0)?.device;
    match write_beside(&args.workdir, true, storage, &device) {
        Ok(page) => say(format!("report: {}", page.display())),
        Err(error) => say(format!("warning: could not write the report: {error:#}")),
    }
    if args.json {
        let seconds = start.elapsed().as_secs_f64();
        out!("{}", json!({ "steps": plan.total_steps, "seconds": seconds, "workdir": args.workdir }));
    } else {
        out!("{} steps done; checkpoints in {}", plan.total_steps, checkpoints.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints how many samples of the run in `workdir` could not be used.
fn print_bad_samples(workdir: &Path) {
    let ledger = workdir.join("quarantine.jsonl");
    let rows = std::fs::read(&ledger).unwrap_or_default();
    let n_bad = rows.split(|byte| *byte == b'\n').filter(|row| !row.is_empty()).count();
    if n_bad > 0 {
        say(format!("warning: {n_bad} unusable samples were replaced by others: see {}", ledger.display()));
    }
}

/// Creates the probes that the flags request.
fn probes(args: &Args, plan: &Plan, rank: usize, storage: &Storage) -> anyhow::Result<Vec<Box<dyn Probe>>> {
    if args.probe_train.is_empty() {
        return Ok(Vec::new());
    }
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
    Ok(vec![Box::new(ScoringProbe { split, protocols, workdir, plan })])
}

/// Runs the stages of `session`, with signals and a progress bar. The recipe is checked before
/// `probes` is called.
pub(crate) fn pretrain(
    session: Session,
    storage: &Storage,
    probes: impl FnOnce(&Plan) -> anyhow::Result<Vec<Box<dyn Probe>>>,
) -> anyhow::Result<(Plan, Outcome)> {
    let rank = session.launch.rank;
    let world_size = session.launch.world_size;
    let stop = Arc::clone(&session.stop);
    let fitted = {
        let _activity = (rank == 0).then(|| Activity::new("opening the weights and the images …"));
        session.open(storage)?.resolve()?.fit()?
    };
    let mut probes = fitted.all_ready(probes(fitted.plan()))?;
    let plan = fitted.plan().clone();
    if rank == 0 {
        print_notes(&plan, fitted.dataset(), fitted.device());
    }
    let progress = RunProgress::new(rank, world_size);
    let signals = Signals::listen(stop, progress.answer())?;
    let workdir = fitted.workdir().to_path_buf();
    let dataset = Arc::clone(fitted.dataset());
    let pictures_plan = plan.clone();
    let mut progress = progress.on_training(signals.training()).on_start(move || {
        record_start(&workdir, world_size);
        pictures::views(&workdir, &dataset, &pictures_plan);
    });
    let outcome = fitted.train(&mut probes, &mut progress);
    signals.idle();
    Ok((plan, outcome?))
}

/// Prints notes on the images, and a forecast, before the first step.
fn print_notes(plan: &Plan, dataset: &Dataset, device: &Opened) {
    report_turned(dataset, &plan.recipe.data.rules());
    report_bits(dataset, &plan.recipe.data.rules());
    // A forecast that fails must not delay the run.
    if let Ok(step_s) = least_step_s(plan, &device.device) {
        say(format!(
            "note: {} steps of {} images: matrix products alone take {:.0} ms per step on this device, {} \
             in total (a lower bound)",
            plan.total_steps,
            plan.recipe.optim.batch_size,
            1e3 * step_s,
            format_duration(step_s * plan.total_steps as f64),
        ));
    }
}

/// Records the command of this start in the work directory, so that the run can be resumed.
fn record_start(workdir: &Path, world_size: usize) {
    let start = Start::now(world_size, std::env::current_dir().unwrap_or_default(), command_line());
    if let Err(error) = start.note(workdir) {
        say(format!("warning: could not record the command in {}: {error}", workdir.display()));
    }
}
