//! `ocelli bench probe`: what protocols cost on features of a size, without images.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use augment::ViewRng;
use eval::{Columns, FeatureSet, Silent, Table, Task};
use serde_json::{Map, Value, json};

use crate::evaluation::flags::ProtocolFlags;

/// Flags of `bench probe`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rows to fit on.
    #[arg(long, default_value_t = 10_000)]
    train: usize,
    /// Rows to report on.
    #[arg(long, default_value_t = 2000)]
    test: usize,
    /// Numbers of one class token.
    #[arg(long, default_value_t = 384)]
    width: usize,
    /// Classes.
    #[arg(long, default_value_t = 10)]
    classes: usize,
    #[command(flatten)]
    protocols: ProtocolFlags,
    /// End with one line of JSON: seconds by protocol.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let protocols = args.protocols.protocols()?;
    let n_levels = protocols.iter().map(eval::Protocol::n_levels).max().unwrap_or(1);
    let average = if protocols.iter().any(eval::Protocol::wants_average) { args.width } else { 0 };
    let columns = Columns { levels: vec![args.width; n_levels], average };
    let (train, test) = (noise(args, args.train, &columns, 0), noise(args, args.test, &columns, 1));
    let task = Task {
        train: &train,
        test: &test,
        n_classes: args.classes,
        seed: 0,
        views: None,
        sets: None,
        progress: &Silent,
    };
    let mut seconds = Map::new();
    for protocol in &protocols {
        let start = Instant::now();
        let scored = protocol.score(&task)?;
        let took = start.elapsed().as_secs_f64();
        // Noise around a center for each class: more than chance, or something is wrong.
        let best = scored.iter().map(|scored| scored.outcome.value()).fold(0.0, f64::max);
        out!("{:<16} {took:>8.2} s  (accuracy {best:.1} on noise with classes)", protocol.name());
        seconds.insert(protocol.name().to_string(), json!(took));
    }
    if args.json {
        out!("{}", Value::Object(seconds));
    }
    Ok(ExitCode::SUCCESS)
}

/// `n` rows of noise around a center for each class.
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
    FeatureSet::of(Arc::new(table), |image| Some((image % classes) as u32))
}
