//! `ocelli probe`: scores of a checkpoint's features.
mod job;
mod ledger;
mod watch;

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use eval::{Check, Protocol, SampleSizes, Split, label_free};
use kernels::device::Device;
use networks::Network;
use pipeline::Storage;
use report::{EvaluationRow, ImageSetInfo, Number};
use serde_json::{Value, json};

use crate::console::say;
use crate::evaluation::network::{OpenNetwork, find_workdir};
use crate::evaluation::record;
use crate::evaluation::scores::{Table, print_table, rows, to_json};
use crate::progress::StageBar;

pub(crate) use job::Args;
use job::{Means, images, split, test_name};

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    let means = Means {
        storage,
        protocols: args.protocols.protocols()?,
        device: args.device.open()?.device,
        cache: args.cache.open(folder),
    };
    if let Some(workdir) = &args.watch {
        return watch::watch(args, workdir, &means);
    }
    // One of the two flags is required.
    let checkpoint = args.checkpoint.as_deref().context("pass --checkpoint or --watch")?;
    let open = args.network.open(checkpoint, &means.device)?;
    if args.label_free {
        measure(args, checkpoint, &open, &means)
    } else {
        score(args, checkpoint, &open, &means)
    }
}

/// Scores one checkpoint.
fn score(args: &Args, checkpoint: &Path, open: &OpenNetwork, means: &Means<'_>) -> anyhow::Result<ExitCode> {
    let split = split(args, open, &means.protocols, means.storage)?;
    let check = Check::new(&split.train, &split.test)?;
    // With leave-one-out, both sets are the same images.
    let warnings = if args.protocols.leave_one_out { Vec::new() } else { check.warnings() };
    for warning in warnings.iter().chain(&open.warnings()) {
        say(format!("warning: {warning}"));
    }
    let scores = {
        let progress = StageBar::new();
        split.score(&open.network, &means.protocols, means.cache.as_ref(), &progress)?
    };
    let mut table: Table = vec![(open.which.clone(), scores)];
    if args.baseline {
        table.extend(baselines(&open.network, &split, &means.protocols, &means.device)?);
    }
    let scores = &table[0].1;
    out!(
        "{} test images of {}, {} training images of {}",
        scores.n_test,
        split.test.name,
        scores.n_train,
        split.train.name
    );
    if means.protocols.iter().any(|protocol| protocol.needs().has_classes()) {
        out!("{check}");
    }
    print_table(&table);
    if scores.n_bad > 0 {
        out!("{} unusable images were excluded; run `ocelli shards verify` to see why", scores.n_bad);
    }
    let about = open.about(checkpoint);
    record_rows(args, checkpoint, open, &rows(scores, &split, &about));
    if args.json {
        out!("{}", to_json(&table, &split, &about));
    }
    Ok(ExitCode::SUCCESS)
}

/// Computes measures that need no labels.
fn measure(
    args: &Args,
    checkpoint: &Path,
    open: &OpenNetwork,
    means: &Means<'_>,
) -> anyhow::Result<ExitCode> {
    let images = images(&args.test, test_name(args), open, means.storage)?;
    let sizes = SampleSizes::default();
    let measures = {
        let progress = StageBar::new();
        label_free(&open.network, &images, &open.multicrop(), sizes, &progress)?
    };
    out!("{}: {} images; {}", images.name, images.len().min(sizes.n_images), open.transform);
    for (name, value, meaning) in &measures {
        out!("{name:<12} {value:>10.4}  {meaning}");
    }
    let about = open.about(checkpoint);
    let rows: Vec<EvaluationRow> = measures
        .iter()
        .map(|(name, value, _)| EvaluationRow {
            metric: (*name).to_string(),
            number: Number::new("", *value),
            interval: None,
            by_class: None,
            protocol: None,
            protocol_in_words: None,
            settings: serde_json::Map::new(),
            details: Value::Null,
            seed: 0,
            train: None,
            test: ImageSetInfo { set: images.name.clone(), images: None },
            about: about.clone(),
            classes: None,
            confusion: None,
            confused: None,
            watch: None,
        })
        .collect();
    record_rows(args, checkpoint, open, &rows);
    if args.json {
        let values: serde_json::Map<String, Value> =
            measures.iter().map(|(name, value, _)| ((*name).to_string(), json!(value))).collect();
        out!("{}", json!({ "about": about, "test": { "set": images.name }, "measures": values }));
    }
    Ok(ExitCode::SUCCESS)
}

/// Adds rows to the run that the checkpoint belongs to, unless a flag forbids it.
fn record_rows(args: &Args, checkpoint: &Path, open: &OpenNetwork, rows: &[EvaluationRow]) {
    if args.no_record {
        return;
    }
    let (Some(workdir), Some(step)) = (find_workdir(checkpoint), open.step()) else { return };
    let scalars = record::scalars(open, rows);
    if let Err(error) = record::add(workdir, step, rows, &scalars) {
        say(format!("warning: could not add the scores to the run: {error:#}"));
    }
}

/// Scores a randomly initialized network of the same form, and raw pixels.
pub(crate) fn baselines(
    network: &Network,
    split: &Split,
    protocols: &[Protocol],
    device: &Device,
) -> anyhow::Result<Table> {
    let random = Network::random(&network.model, network.pixels.clone(), 0, 0, device);
    let random_scores = {
        let progress = StageBar::new();
        split.score(&random, protocols, None, &progress)?
    };
    Ok(vec![("random init".into(), random_scores), ("pixels".into(), split.score_pixels(protocols)?)])
}
