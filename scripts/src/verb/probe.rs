//! `ocelli probe`: what a checkpoint's features are worth.

use std::fs::OpenOptions;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use eval::{Check, Effort, ImageSet, Measures, Source, Split, label_free};
use pipeline::{Dataset, Storage};
use serde_json::{Value, json};
use trainer::Network;
use trainer::device::Device;
use trainer::run::telemetry::append_scalars;

use crate::cluster::compute::DeviceFlag;
use crate::evaluation::flags::{CacheFlags, NetworkFlags, OpenNetwork, ProtocolFlags, SeenBar};
use crate::evaluation::scores::{Table, print_table, rows, set_name, to_json};

/// Flags of `probe`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    network: NetworkFlags,
    /// Shards with classes to fit on.
    #[arg(long, num_args = 1.., required_unless_present = "label_free")]
    train: Vec<String>,
    /// Shards with classes to report on; with --label-free, any images.
    #[arg(long, num_args = 1.., required = true)]
    test: Vec<String>,
    /// Measure what needs no labels, and nothing else: RankMe, α-ReQ, LiDAR, alignment and uniformity.
    #[arg(long, conflicts_with_all = ["train", "baseline", "protocol"])]
    label_free: bool,
    /// What the numbers are filed under [default: the folder and the name of the test shards].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    #[command(flatten)]
    protocols: ProtocolFlags,
    /// Score a randomly initialized network and raw pixels too.
    #[arg(long)]
    baseline: bool,
    /// Write nothing into the checkpoint's run: without this, the numbers are added to its evaluations.jsonl and
    /// TensorBoard.
    #[arg(long)]
    no_record: bool,
    #[command(flatten)]
    cache: CacheFlags,
    #[command(flatten)]
    device: DeviceFlag,
    /// End with one line of JSON: every number with its interval, settings, classes and confusions.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage, folder: &std::path::Path) -> anyhow::Result<ExitCode> {
    let protocols = args.protocols.protocols()?;
    let device = args.device.open()?.device;
    let open = args.network.open(&device)?;
    let images = |specs: &[String], name: String| -> anyhow::Result<ImageSet> {
        let source = Source::Shards(Arc::new(Dataset::open(specs, storage)?));
        Ok(ImageSet::open(source, open.transform, open.rules, name)?)
    };
    let test_name = args.name.clone().unwrap_or_else(|| set_name(&args.test));
    if args.label_free {
        return measure(args, &open, &images(&args.test, test_name)?);
    }
    let split = Split::new(images(&args.train, set_name(&args.train))?, images(&args.test, test_name)?)?;
    let check = Check::of(&split.train, &split.test)?;
    for warning in check.warnings().iter().chain(&open.warnings()) {
        eprintln!("warning: {warning}");
    }
    let cache = args.cache.open(folder);
    let scores = {
        let progress = SeenBar::new(split.train.len() + split.test.len());
        split.score(&open.network, &protocols, cache.as_ref(), &progress)?
    };
    let mut table: Table = vec![(open.which, scores)];
    if args.baseline {
        table.extend(baselines(&open.network, &split, &protocols, &device)?);
    }
    println!(
        "{} images of {}, {} of {} to fit on; {}",
        table[0].1.n_test, split.test.name, table[0].1.n_train, split.train.name, open.transform
    );
    println!("{check}");
    print_table(&table);
    if table[0].1.n_bad > 0 {
        println!("{} images could not be decoded and do not count", table[0].1.n_bad);
    }
    let about = open.about(&args.network.checkpoint);
    if !args.no_record
        && let Err(error) = record(args, &open, &table, &split, &about)
    {
        eprintln!("warning: the scores are not written into the run: {error:#}");
    }
    if args.json {
        println!("{}", to_json(&table, &split, &about));
    }
    Ok(ExitCode::SUCCESS)
}

/// What can be said without labels.
fn measure(args: &Args, open: &OpenNetwork, images: &ImageSet) -> anyhow::Result<ExitCode> {
    let effort = Effort::default();
    let measures = {
        let progress = SeenBar::new(images.len().min(effort.n_images));
        label_free(&open.network, images, &open.multicrop(), effort, &progress)?
    };
    println!("{}: {} images; {}", images.name, images.len().min(effort.n_images), open.transform);
    for (name, value, meaning) in &measures {
        println!("{name:<12} {value:>10.4}  {meaning}");
    }
    let about = open.about(&args.network.checkpoint);
    if !args.no_record
        && let Err(error) = record_measures(args, open, &measures, images, &about)
    {
        eprintln!("warning: the measures are not written into the run: {error:#}");
    }
    if args.json {
        let values: serde_json::Map<String, Value> =
            measures.iter().map(|(name, value, _)| ((*name).to_string(), json!(value))).collect();
        println!("{}", json!({ "about": about, "test": { "set": images.name }, "measures": values }));
    }
    Ok(ExitCode::SUCCESS)
}

/// A random network of the same form, and pixels.
pub(crate) fn baselines(
    network: &Network,
    split: &Split,
    protocols: &[eval::Protocol],
    device: &Device,
) -> anyhow::Result<Table> {
    let random = Network::random(&network.model, network.normalization, 0, 0, device)?;
    let of_random = {
        let progress = SeenBar::new(split.train.len() + split.test.len());
        split.score(&random, protocols, None, &progress)?
    };
    Ok(vec![("random init", of_random), ("pixels", split.score_pixels()?)])
}

/// Adds the scores to the run that the checkpoint belongs to.
fn record(
    args: &Args,
    open: &OpenNetwork,
    table: &Table,
    split: &Split,
    about: &Value,
) -> anyhow::Result<()> {
    let Some((_, scores)) = table.first() else { return Ok(()) };
    let numbers = scores.numbers().map(|(_, scored)| (scored.metric.clone(), scored.classified.accuracy()));
    add_to_run(args, open, &split.test.name, &rows(scores, split, about), &numbers.collect::<Vec<_>>())
}

/// Adds measures to the run that the checkpoint belongs to.
fn record_measures(
    args: &Args,
    open: &OpenNetwork,
    measures: &Measures,
    images: &ImageSet,
    about: &Value,
) -> anyhow::Result<()> {
    let row = |(name, value, _): &(&str, f64, &str)| json!({ "metric": name, "value": value, "test": { "set": images.name }, "about": about });
    let rows: Vec<Value> = measures.iter().map(row).collect();
    let numbers: Vec<_> = measures.iter().map(|(name, value, _)| ((*name).to_string(), *value)).collect();
    add_to_run(args, open, &images.name, &rows, &numbers)
}

/// Adds rows that say all that they depend on to a run's evaluations, and scalars at the training step under a name of
/// their own, apart from those of the probe within the run.
fn add_to_run(
    args: &Args,
    open: &OpenNetwork,
    set: &str,
    rows: &[Value],
    numbers: &[(String, f64)],
) -> anyhow::Result<()> {
    let (Some(workdir), Some(step)) = (args.network.workdir(), open.step()) else { return Ok(()) };
    let path = workdir.join("evaluations.jsonl");
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let file = OpenOptions::new().create(true).append(true).open(&path);
    let written = file.and_then(|mut file| file.write_all(lines.as_bytes()));
    written.with_context(|| format!("cannot write {}", path.display()))?;
    let prefix = format!("eval/{set}/{}/{}px", open.which, open.transform.size_px);
    let scalars: Vec<(String, f64)> =
        numbers.iter().map(|(name, value)| (format!("{prefix}/{name}"), *value)).collect();
    Ok(append_scalars(workdir, step.saturating_sub(1), &scalars)?)
}
