//! `ocelli probe`: scores of a checkpoint's features, or of every checkpoint of a run.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use eval::image_sets::SplitShards;
use eval::probe::Scores;
use eval::row::EvaluationRow;
use eval::scores::{measure_rows, measures_to_json, rows, to_json};
use eval::{Check, SampleSizes, label_free};
use pipeline::Storage;
use pipeline::words::counted;
use serde_json::json;
use session::{EvaluatedNetwork, Evaluation, WatchEvent, find_workdir};

use crate::cluster::compute::DeviceFlag;
use crate::console::say;
use crate::evaluation_flags::{CacheFlags, ProtocolFlags};
use crate::network_flags::NetworkFlags;
use crate::progress::StageBar;

/// Width of the column of names, in characters.
const WIDTH: usize = 22;

/// Flags of `probe`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
        ocelli probe --checkpoint runs/a --train 'a/train-*.tar' --test 'a/test-*.tar'\n  \
        ocelli probe --watch runs/a --train a/train/ --test a/test/ --protocol logreg")]
pub(crate) struct Args {
    /// Run, checkpoint, or weights: a file or a folder. Weights are from `ocelli export`, DINO,
    /// DINOv2, DINOv3, timm, torchvision or transformers.
    #[arg(long, value_name = "PATH", required_unless_present = "watch")]
    checkpoint: Option<PathBuf>,
    /// Score every checkpoint of a run as it appears. Each is scored once, until the run ends. Any
    /// number of watchers can share a run, on any machine that sees the folder; a restarted one
    /// picks up where it stopped.
    #[arg(long, value_name = "WORKDIR", conflicts_with_all = ["checkpoint", "baseline", "label_free",
        "no_record"])]
    watch: Option<PathBuf>,
    #[command(flatten)]
    network: NetworkFlags,
    /// Shards with classes or masks to train on.
    #[arg(long, value_name = "SHARDS", num_args = 1.., conflicts_with = "leave_one_out",
        required_unless_present_any = ["label_free", "leave_one_out"])]
    train: Vec<String>,
    /// Shards with classes or masks to test on. With --label-free, they can be any images.
    #[arg(long, value_name = "SHARDS", num_args = 1.., required = true)]
    test: Vec<String>,
    /// Compute only measures that need no labels. They are RankMe, α-ReQ, LiDAR, alignment,
    /// uniformity and the retrieval of views.
    #[arg(long, conflicts_with_all = ["train", "baseline", "protocol", "leave_one_out",
        "settings", "seed"])]
    label_free: bool,
    /// Name to record the results under [default: the folder and name of the test shards].
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    name: Option<String>,
    #[command(flatten)]
    protocols: ProtocolFlags,
    /// Also score a randomly initialized network and raw pixels.
    #[arg(long)]
    baseline: bool,
    /// Do not add the scores to the run's files. Those are evaluations.jsonl and TensorBoard's.
    #[arg(long)]
    no_record: bool,
    #[command(flatten)]
    cache: CacheFlags,
    #[command(flatten)]
    device: DeviceFlag,
    /// Print a line of JSON at the end. It has every score with its interval, settings, classes and
    /// confusions.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    let network = args.network.settings();
    let images = SplitShards {
        train: args.train.clone(),
        test: args.test.clone(),
        test_name: args.name.clone(),
        leave_one_out: args.protocols.leave_one_out,
        seed: args.protocols.seed,
        overrides_transform: network.resize_px.is_some(),
    };
    let evaluation = Evaluation {
        network,
        images,
        protocols: args.protocols.protocols()?,
        device: args.device.open()?.device,
        cache: args.cache.open(folder),
        storage,
    };
    if let Some(workdir) = &args.watch {
        return watch(args, workdir, &evaluation);
    }
    // One of the two flags is required.
    let checkpoint = args.checkpoint.as_deref().context("pass --checkpoint or --watch")?;
    let open = EvaluatedNetwork::open(checkpoint, &evaluation.network, &evaluation.device)?;
    if args.label_free {
        measure(args, checkpoint, &open, &evaluation)
    } else {
        score(args, checkpoint, &open, &evaluation)
    }
}

/// Scores the checkpoints of the run in `workdir` until it has ended and all are scored.
fn watch(args: &Args, workdir: &Path, evaluation: &Evaluation<'_>) -> anyhow::Result<ExitCode> {
    let watched = evaluation.watch(workdir, &|| Box::new(StageBar::new()), &mut |event| {
        say(event_in_words(workdir, &event));
    })?;
    if args.json {
        out!("{}", json!({ "scored": watched.n_scored, "missed": watched.missed }));
    }
    Ok(ExitCode::SUCCESS)
}

/// Describes what happens while the run in `workdir` is watched.
fn event_in_words(workdir: &Path, event: &WatchEvent<'_>) -> String {
    match event {
        WatchEvent::Waiting => format!("waiting for a run in {}", workdir.display()),
        WatchEvent::Scored { step, scores } => {
            let numbers: Vec<String> =
                scores.by_name().map(|(name, value)| format!("{name} {value:.2}")).collect();
            format!("step {step}: {}", numbers.join("  "))
        }
        WatchEvent::NotScorable { step, reason } => format!("cannot score step {step}: {reason}"),
        WatchEvent::Missed { step } => {
            format!("step {step} was pruned before it was scored; increase run.keep_checkpoints to keep more")
        }
    }
}

/// Scores one checkpoint.
fn score(
    args: &Args,
    checkpoint: &Path,
    open: &EvaluatedNetwork,
    evaluation: &Evaluation<'_>,
) -> anyhow::Result<ExitCode> {
    let Evaluation { images, protocols, device, cache, storage, .. } = evaluation;
    let split = images.open(protocols, open.transform, open.rules, storage)?;
    let check = Check::new(&split.train, &split.test)?;
    // With leave-one-out, both sets are the same images.
    let warnings = if images.leave_one_out { Vec::new() } else { check.warnings() };
    for warning in warnings.iter().chain(&open.warnings()) {
        say(format!("warning: {warning}"));
    }
    let scores = split.score(&open.network, protocols, cache.as_ref(), &StageBar::new())?;
    let mut table = vec![(open.network_name.clone(), scores)];
    if args.baseline {
        table.extend(split.score_baselines(&open.network, protocols, device, &StageBar::new())?);
    }
    let scores = &table[0].1;
    out!(
        "{} test images of {}, {} training images of {}",
        scores.n_test,
        split.test.name,
        scores.n_train,
        split.train.name
    );
    if protocols.iter().any(|protocol| protocol.needs().has_classes()) {
        out!("{check}");
    }
    print_table(&table);
    if scores.n_bad > 0 {
        let unusable = counted(scores.n_bad as u64, "unusable image");
        out!("{unusable} excluded; run `ocelli shards verify` to see why");
    }
    let about = open.info(checkpoint)?;
    record(args, checkpoint, open, &rows(scores, &split, &about));
    if args.json {
        out!("{}", to_json(&table, &split, &about));
    }
    Ok(ExitCode::SUCCESS)
}

/// Computes measures that need no labels.
fn measure(
    args: &Args,
    checkpoint: &Path,
    open: &EvaluatedNetwork,
    evaluation: &Evaluation<'_>,
) -> anyhow::Result<ExitCode> {
    let images = evaluation.images.open_test(open.transform, open.rules, evaluation.storage)?;
    let sizes = SampleSizes::default();
    let measures = label_free(&open.network, &images, &open.multicrop(), sizes, &StageBar::new())?;
    let n_images = counted(images.len().min(sizes.n_images) as u64, "image");
    out!("{}: {n_images}; {}", images.name, open.transform);
    for (name, value, meaning) in &measures {
        out!("{name:<12} {value:>10.4}  {meaning}");
    }
    let about = open.info(checkpoint)?;
    record(args, checkpoint, open, &measure_rows(&measures, &images, &about));
    if args.json {
        out!("{}", measures_to_json(&measures, &images, &about));
    }
    Ok(ExitCode::SUCCESS)
}

/// Adds rows to the run that the checkpoint belongs to, unless a flag forbids it.
fn record(args: &Args, checkpoint: &Path, open: &EvaluatedNetwork, rows: &[EvaluationRow]) {
    if args.no_record || open.step().is_none() {
        return;
    }
    if let Some(workdir) = find_workdir(checkpoint)
        && let Err(error) = open.record(workdir, rows)
    {
        say(format!("warning: could not add the scores to the run: {error}"));
    }
}

/// Prints one line per metric and one column per network, the first network's with its interval;
/// then a description of each protocol.
pub(crate) fn print_table(table: &[(String, Scores)]) {
    let Some((_, first)) = table.first() else { return };
    let names: String = table[1..].iter().map(|(name, _)| format!(" {name:>12}")).collect();
    out!("{:<WIDTH$} {:>8} {:<15}{names}", heading(first), table[0].0, "");
    for (_, scored) in first.numbers() {
        let [low, high] = scored.outcome.interval();
        let interval = format!("({low:.1} - {high:.1})");
        let others: String = table[1..]
            .iter()
            .map(|(_, scores)| match scores.accuracy(&scored.metric) {
                Some(accuracy) => format!(" {accuracy:>12.2}"),
                None => format!(" {:>12}", "-"),
            })
            .collect();
        out!("{:<WIDTH$} {:>8.2} {interval:<15}{others}", scored.metric, scored.outcome.value());
    }
    for scores in &first.by_protocol {
        let protocol = &scores.protocol;
        out!("{}: {}; {}", protocol.name(), protocol.in_words(&scores.numbers), scores.transform);
    }
}

/// Returns a description of the percentages.
fn heading(scores: &Scores) -> String {
    let mut measures: Vec<&str> = scores.numbers().map(|(_, scored)| scored.outcome.measure()).collect();
    measures.sort_unstable();
    measures.dedup();
    match measures.as_slice() {
        [measure] => format!("{measure} in %"),
        _ => "in %".into(),
    }
}
