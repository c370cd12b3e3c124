//! `ocelli pretrain`: a recipe and shards into checkpoints. The same command continues a run.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::bail;
use eval::probe::{InTraining, Split};
use pipeline::Dataset;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR2};
use trainer::probe::Probe;
use trainer::run::{Outcome, run as train};
use trainer::{Plan, Recipe};

use crate::exit::PREEMPTED;
use crate::progress::RunProgress;
use crate::recipes;

/// Flags of `pretrain`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A recipe's name (quickstart, dino_cifar, dino_vits16) or file.
    #[arg(long)]
    recipe: String,
    /// Where plan, metrics and checkpoints go. A run that is there already is continued.
    #[arg(long)]
    workdir: PathBuf,
    /// Shards to learn from, in place of the recipe's: `train-{000000..000009}.tar`.
    #[arg(long, num_args = 1..)]
    shards: Vec<String>,
    /// Labelled shards that the in-training probe fits on (see run.probe_every_steps).
    #[arg(long, num_args = 1.., requires = "probe_test")]
    probe_train: Vec<String>,
    /// Labelled shards that the in-training probe reports on.
    #[arg(long, num_args = 1.., requires = "probe_train")]
    probe_test: Vec<String>,
    /// Change a value of the recipe: `--set optim.batch_size=32`. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// End with one line of JSON: step, seconds, loss.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut recipe = recipes::load(&args.recipe, &args.overrides)?;
    if !args.shards.is_empty() {
        recipe.data.shards.clone_from(&args.shards);
    }
    let mut probes: Vec<Box<dyn Probe>> = Vec::new();
    if !args.probe_train.is_empty() {
        let open = |specs: &[String]| Dataset::open(specs);
        let size_px = recipe.model.image_px();
        let split = Split::load(&open(&args.probe_train)?, &open(&args.probe_test)?, size_px)?;
        probes.push(Box::new(InTraining(split)));
    }
    let start = Instant::now();
    let (plan, outcome) = pretrain(recipe, &args.workdir, &mut probes)?;
    if outcome == Outcome::Stopped {
        eprintln!("stopped as asked; a checkpoint is written: the same command continues");
        return Ok(ExitCode::from(PREEMPTED));
    }
    if args.json {
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{}",
            serde_json::json!({ "steps": plan.total_steps, "seconds": seconds, "workdir": args.workdir })
        );
    } else {
        println!(
            "{} steps taken; checkpoints in {}",
            plan.total_steps,
            args.workdir.join("checkpoints").display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Trains `recipe` in `workdir`, with signals and a progress bar.
pub(crate) fn pretrain(
    recipe: Recipe,
    workdir: &Path,
    probes: &mut [Box<dyn Probe>],
) -> anyhow::Result<(Plan, Outcome)> {
    if recipe.data.shards.is_empty() {
        bail!("no shards: give --shards, or data.shards in the recipe");
    }
    let dataset = Arc::new(Dataset::open(&recipe.data.shards)?);
    let plan = Plan::resolve(recipe, dataset.n_samples())?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGUSR2, SIGINT] {
        // A second interrupt from the keyboard ends the program at once.
        if signal == SIGINT {
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop))?;
        }
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let mut progress = RunProgress::new();
    let outcome = train(&plan, dataset, workdir, &stop, probes, &mut progress)?;
    Ok((plan, outcome))
}
