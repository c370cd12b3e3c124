//! `ocelli bench probe`: measures the time of protocols on features of a given size, without
//! images.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use augment::ViewRng;
use eval::{Columns, FeatureSet, Table, Task};
use pipeline::NoProgress;
use serde_json::{Map, Value, json};

use super::compare::{CompareFlag, compare_figures};
use crate::evaluation_flags::ProtocolFlags;

/// Flags of `bench probe`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of training rows.
    #[arg(long, default_value_t = 10_000)]
    train: usize,
    /// Number of test rows.
    #[arg(long, default_value_t = 2000)]
    test: usize,
    /// Width of a class token.
    #[arg(long, default_value_t = 384)]
    width: usize,
    /// Number of classes.
    #[arg(long, default_value_t = 10)]
    classes: usize,
    /// Number of runs per protocol.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    #[command(flatten)]
    protocols: ProtocolFlags,
    #[command(flatten)]
    compare: CompareFlag,
    /// Print a line of JSON at the end: median seconds by protocol.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let before = args.compare.read()?;
    let protocols = args.protocols.protocols()?;
    let n_levels = protocols.iter().map(|protocol| protocol.needs().n_levels).max().unwrap_or(1);
    let needs_average = protocols.iter().any(|protocol| protocol.needs().average);
    let average = if needs_average { args.width } else { 0 };
    let columns = Columns { levels: vec![args.width; n_levels], average };
    let train = noise(args, args.train, &columns, 0);
    let test = noise(args, args.test, &columns, 1);
    let task = Task {
        train: &train,
        test: &test,
        n_classes: args.classes,
        seed: 0,
        views: None,
        sets: None,
        progress: &NoProgress,
    };
    let mut figures = Map::new();
    for protocol in &protocols {
        let mut seconds = Vec::new();
        let mut best = 0.0;
        for _ in 0..args.repeats {
            let start = Instant::now();
            let scored = protocol.score(&task)?;
            seconds.push(start.elapsed().as_secs_f64());
            // On noise around a center for each class, accuracy is above chance.
            best = scored.iter().map(|scored| scored.outcome.value()).fold(0.0, f64::max);
        }
        seconds.sort_by(f64::total_cmp);
        let name = protocol.name();
        let median = seconds[seconds.len() / 2];
        let spread = match seconds[..] {
            [shortest, .., longest] => format!("; {shortest:.2} to {longest:.2}"),
            _ => String::new(),
        };
        out!("{name:<16} {median:>8.2} s{spread}  (accuracy {best:.1} on noise with classes)");
        figures.insert(format!("{name}_s"), json!(median));
    }
    let figures = Value::Object(figures);
    if let Some(before) = before {
        for line in compare_figures(&before, &figures) {
            out!("{line}");
        }
    }
    if args.json {
        out!("{figures}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Draws `n` rows of noise around a center for each class.
fn noise(args: &Args, n: usize, columns: &Columns, stream: u64) -> FeatureSet {
    let width = columns.width();
    let classes = args.classes.max(1);
    let mut centers = ViewRng::from_words([1, 0, 0, 0]);
    let centers: Vec<f32> = (0..classes * width).map(|_| centers.normal()).collect();
    let mut rng = ViewRng::from_words([2, stream, 0, 0]);
    let mut rows = Vec::with_capacity(n * width);
    for i in 0..n {
        let center = &centers[i % classes * width..][..width];
        rows.extend(center.iter().map(|center| center + 20.0 * (rng.uniform() - 0.5)));
    }
    let table = Table::new(columns.clone(), (0..n as u32).collect(), rows);
    FeatureSet::from_table(Arc::new(table), |image| Some((image % classes) as u32))
}
