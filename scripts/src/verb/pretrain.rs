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
use pipeline::Storage;
use serde_json::json;
use session::{Initial, ScoringProbe, Session, trained_head};
use trainer::run::Outcome;
use trainer::run::fault::Fault;
use trainer::run::status::Status;
use trainer::{Length, Plan, Recipe};
use weights::Format;

use super::export::{check_format, export_requested};
use super::report::write_or_warn;
use crate::cluster::compute;
use crate::console::say;
use crate::initial::InitialFlags;
use crate::progress::Activity;
use crate::run_end::{EndedRun, print_scores, warn_of_missing_probes};
use crate::training::{
    Probes, Trained, check_hints, end_stopped, load_recipe, print_bad_samples, print_done, probe_bar,
    take_shards, train_session,
};
use crate::{recipes, values};

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
    recipes::check_length(args.hours, &args.overrides)?;
    let initial = args.initial.initial()?;
    let Beginning { mut recipe, initial, device } = match &args.recipe {
        Some(name) => {
            let recipe = load_recipe(name, &args.overrides, &args.shards, &args.workdir, &initial)?;
            Beginning { recipe, initial, device: None }
        }
        None => chosen_recipe(args, initial, storage)?,
    };
    if let Some(hours) = args.hours {
        recipe.optim.length = Length::from_hours(hours);
    }
    if trained_head(&recipe).is_some() && recipe.data.validation.is_some_and(|share| share > 0.0) {
        if let Ok(run) = Status::read(&args.workdir)
            && run.plan.recipe.data.validation.is_some_and(|share| share > 0.0)
        {
            bail!(
                "{} holds a run of `ocelli finetune`: continue it with that command, or choose another \
                 --workdir",
                args.workdir.display()
            );
        }
        bail!(
            "data.validation holds out images to validate on, and `ocelli pretrain` validates none: use \
             `ocelli finetune`, or remove it"
        );
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
        train_session(session, storage, |fitted| scoring_probe(args, fitted.plan(), rank, storage))?;
    if outcome == Outcome::Stopped {
        return Ok(end_stopped(rank, &args.workdir));
    }
    if rank > 0 {
        return Ok(ExitCode::SUCCESS);
    }
    print_bad_samples(&args.workdir);
    let device = args.compute.device.open(0)?.device;
    write_or_warn(&args.workdir, storage, &device);
    print_scores(&args.workdir);
    let exported = export_requested(&args.workdir, args.export)?;
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

/// Recipe of a run, its initial state, and its device, if that is open already.
struct Beginning {
    recipe: Recipe,
    initial: Initial,
    device: Option<Opened>,
}

/// Returns the recipe of the run in the work directory, or chooses one for a run of `--hours`.
fn chosen_recipe(args: &Args, initial: Initial, storage: &Storage) -> anyhow::Result<Beginning> {
    let plan = Plan::path_in(&args.workdir);
    if plan.exists() {
        let mut recipe = recipes::load(&plan.display().to_string(), &args.overrides)?;
        take_shards(&mut recipe, &args.overrides, &args.shards)?;
        if let Some(weights) = &initial.weights {
            check_resumed_weights(&mut recipe, weights, &args.workdir)?;
        }
        // Weights that the run distills are named by its recipe.
        let weights = initial.weights.filter(|_| recipe.init.is_some());
        return Ok(Beginning { recipe, initial: Initial { weights, ..initial }, device: None });
    }
    if initial.fork.is_some() {
        bail!("--fork needs a recipe, such as that of the run: --recipe RUN/plan.toml");
    }
    check_hints(&initial)?;
    // The flags have one where they have no recipe.
    let hours = args.hours.unwrap_or_default();
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
    Ok(Beginning { recipe: advice.recipe, initial, device: Some(device) })
}

/// Checks that the run of `recipe` in `workdir`, if it began with random weights, distills the
/// weights of `--init`. Initial weights of a run are compared when they are opened.
fn check_resumed_weights(recipe: &mut Recipe, weights: &Path, workdir: &Path) -> anyhow::Result<()> {
    if recipe.init.is_some() {
        return Ok(());
    }
    let mut distilled = Vec::new();
    for entry in recipe.method.frozen() {
        let path = entry.weights.weights.clone();
        if is_same_path(Path::new(&path), weights) {
            return Ok(());
        }
        distilled.push(path);
    }
    match distilled.first() {
        Some(path) => bail!(
            "the run in {} distills {path}, not {}: give --init {path} as before, or choose another --workdir",
            workdir.display(),
            weights.display()
        ),
        None => bail!(
            "the run in {} started from random weights: leave out --init, or choose another --workdir",
            workdir.display()
        ),
    }
}

/// Returns whether two paths are the same, or lead to the same file or folder.
fn is_same_path(path: &Path, other: &Path) -> bool {
    if path == other {
        return true;
    }
    match (path.canonicalize(), other.canonicalize()) {
        (Ok(path), Ok(other)) => path == other,
        _ => false,
    }
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
    if rank == 0 && !Plan::path_in(&args.workdir).exists() {
        for warning in Check::new(&split.train, &split.test)?.warnings() {
            say(format!("warning: probe: {warning}"));
        }
    }
    let n_images = split.train.len() + split.test.len();
    let probe = ScoringProbe {
        split,
        protocols,
        workdir: args.workdir.clone(),
        network_name: plan.evaluated()?,
        recipe: plan.recipe.name.clone(),
        new_progress: probe_bar,
    };
    Ok(Probes { probes: vec![Box::new(probe)], n_images })
}
