//! `ocelli probe`: what a checkpoint's features are worth.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use augment::DecodeRules;
use eval::probe::{ProbeScores, Split};
use pipeline::{Dataset, Storage};
use serde_json::{Value, json};
use trainer::Network;
use trainer::checkpoint::{Checkpoint, Manifest};
use trainer::device::Device;
use trainer::run::telemetry::Telemetry;

use crate::cluster::compute::DeviceFlag;

/// Flags of `probe`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A run's work directory, a checkpoint's folder, or a file of `ocelli export`.
    #[arg(long)]
    checkpoint: PathBuf,
    /// Labelled shards to fit on.
    #[arg(long, num_args = 1.., required = true)]
    train: Vec<String>,
    /// Labelled shards to report on.
    #[arg(long, num_args = 1.., required = true)]
    test: Vec<String>,
    /// Score the student even if the method has a teacher.
    #[arg(long)]
    student: bool,
    /// Score a randomly initialized network and raw pixels too.
    #[arg(long)]
    baseline: bool,
    /// Side of the images, in place of the model's.
    #[arg(long)]
    image_px: Option<usize>,
    #[command(flatten)]
    device: DeviceFlag,
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
}

/// A table of scores by name.
pub(crate) type Table = Vec<(&'static str, ProbeScores)>;

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let device = args.device.open()?.device;
    let (network, which) = Network::open(&args.checkpoint, args.student, 0, &device)?;
    let size_px = args.image_px.unwrap_or(network.model.image_px());
    let plan = run_of(args).map(|run| run.plan);
    let rules = plan.map_or_else(DecodeRules::default, |plan| plan.recipe.data.rules());
    let open = |specs: &[String]| Dataset::open(specs, storage).map(Arc::new);
    let split = Split::open(open(&args.train)?, open(&args.test)?, size_px, rules)?;
    let mut table: Table = vec![(which, split.score(&network)?)];
    if args.baseline {
        table.extend(baselines(&network, &split, &device)?);
    }
    print_table(&table);
    if table[0].1.n_bad > 0 {
        println!("{} labelled images could not be decoded and do not count", table[0].1.n_bad);
    }
    if let Err(error) = record(args, &table[0].1) {
        eprintln!("warning: the scores are not written into the run: {error:#}");
    }
    if args.json {
        println!("{}", to_json(&table));
    }
    Ok(ExitCode::SUCCESS)
}

/// A random network of the same form, and pixels.
pub(crate) fn baselines(network: &Network, split: &Split, device: &Device) -> anyhow::Result<Table> {
    let random = Network::random(&network.model, network.normalization, 0, 0, device)?;
    Ok(vec![("random init", split.score(&random)?), ("pixels", split.score_pixels()?)])
}

/// What the checkpoint says of its run; an exported file says nothing.
fn run_of(args: &Args) -> Option<Manifest> {
    Checkpoint::open(&args.checkpoint).ok().map(|checkpoint| checkpoint.manifest)
}

/// Adds the scores to the run's TensorBoard and metrics, where the checkpoint belongs to a run: in
/// the row of the step that the checkpoint follows, as a probe within the run would.
fn record(args: &Args, scores: &ProbeScores) -> anyhow::Result<()> {
    let Some(workdir) = args.checkpoint.ancestors().find(|folder| folder.join("plan.toml").exists()) else {
        return Ok(());
    };
    let Some(run) = run_of(args) else { return Ok(()) };
    let prefix = if args.student { "probe_student" } else { "probe" };
    let mut row: Vec<(String, f64)> =
        scores.knn.0.iter().map(|(k, accuracy)| (format!("{prefix}/knn_{k}"), *accuracy)).collect();
    row.extend(scores.linear.iter().map(|linear| (format!("{prefix}/linear"), linear.accuracy)));
    Ok(Telemetry::append(workdir)?.write(run.step.saturating_sub(1), &row)?)
}

/// Prints scores as people read them.
pub(crate) fn print_table(table: &Table) {
    println!("{:<14} {:>8} {:>8} {:>8} {:>8} {:>9}", "", "knn 10", "knn 20", "knn 100", "knn 200", "linear");
    for (name, scores) in table {
        let knn: Vec<String> = scores.knn.0.iter().map(|(_, accuracy)| format!("{accuracy:8.2}")).collect();
        let linear = scores.linear.as_ref().map_or("-".into(), |linear| format!("{:.2}", linear.accuracy));
        println!("{name:<14} {} {linear:>9}", knn.join(" "));
    }
}

fn to_json(table: &Table) -> Value {
    let entry = |(name, scores): &(&str, ProbeScores)| {
        let knn: serde_json::Map<String, Value> =
            scores.knn.0.iter().map(|(k, accuracy)| (k.to_string(), json!(accuracy))).collect();
        let linear = scores.linear.as_ref().map(|linear| linear.accuracy);
        (name.replace(' ', "_"), json!({ "knn": knn, "linear": linear }))
    };
    Value::Object(table.iter().map(entry).collect())
}
