//! `ocelli bench clusters`: measures k-means on features of a file, or on noise.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use augment::ViewRng;
use curate::clusters::KMeans;
use curate::io::read_features;
use curate::{FeatureRows, Metric};
use kernels::rows::Rows;
use pipeline::NoProgress;
use ranks::communicator::Communicator;
use serde_json::json;

use super::compare::{CompareFlag, compare_figures};

/// Flags of `bench clusters`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Feature file, scaled to unit length [default: noise around random centers].
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rows", "width"])]
    features: Option<PathBuf>,
    /// Number of noise rows.
    #[arg(long, default_value_t = 100_000)]
    rows: usize,
    /// Width of noise rows.
    #[arg(long, default_value_t = 384)]
    width: usize,
    /// Number of clusters.
    #[arg(long, default_value_t = 1000)]
    clusters: usize,
    /// Number of iterations after seeding.
    #[arg(long, default_value_t = 10)]
    iterations: usize,
    /// Number of k-means runs.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    #[command(flatten)]
    compare: CompareFlag,
    /// Print a line of JSON at the end: median seconds for seeding and in total, inertia.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let before = args.compare.read()?;
    let rows = match &args.features {
        Some(path) => read_features(std::slice::from_ref(path), Metric::Cosine)?.rows,
        None => noise(args)?,
    };
    let largest = rows.largest(0..rows.len())?;
    let mut seeds_s = Vec::new();
    let mut seconds = Vec::new();
    let mut inertia = 0.0;
    for _ in 0..args.repeats {
        let (without_iterations_s, _) = time_kmeans(&rows, largest, args.clusters, 0)?;
        seeds_s.push(without_iterations_s);
        let (all_s, final_inertia) = time_kmeans(&rows, largest, args.clusters, args.iterations)?;
        seconds.push(all_s);
        inertia = final_inertia;
    }
    let n = rows.len();
    let d = rows.width();
    let k = args.clusters;
    let seeds_s = median(seeds_s);
    let all_s = median(seconds);
    let per_iteration_s = (all_s - seeds_s) / args.iterations.max(1) as f64;
    out!("{n} x {d} features into {k} clusters");
    out!("seeds and distances   {seeds_s:>8.2} s");
    out!("{:>3} iterations        {all_s:>8.2} s in total, {per_iteration_s:.2} s each", args.iterations);
    out!("products of an iteration at {:.0} GFLOP/s", 2e-9 * (n * d * k) as f64 / per_iteration_s.max(1e-9));
    out!("inertia               {inertia:>12.2}");
    let figures = json!({ "seeds_s": seeds_s, "seconds": all_s, "inertia": inertia });
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

/// Runs k-means; returns its seconds and the inertia. `largest` is the largest absolute value of
/// `rows`.
fn time_kmeans(
    rows: &FeatureRows,
    largest: f32,
    n_clusters: usize,
    n_iterations: usize,
) -> anyhow::Result<(f64, f64)> {
    let settings = KMeans { n_clusters, n_iterations, seed: 0 };
    let start = Instant::now();
    let clusters = settings.run(rows, largest, None, &Communicator::solo(), &NoProgress)?;
    Ok((start.elapsed().as_secs_f64(), clusters.inertia))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Draws rows of noise around as many centers as there are clusters.
fn noise(args: &Args) -> anyhow::Result<FeatureRows> {
    let mut centers = ViewRng::from_words([1, 0, 0, 0]);
    let centers: Vec<f32> = (0..args.clusters.max(1) * args.width).map(|_| centers.normal()).collect();
    let mut rng = ViewRng::from_words([2, 0, 0, 0]);
    let mut values = Vec::with_capacity(args.rows * args.width);
    for i in 0..args.rows {
        let center = &centers[i % args.clusters.max(1) * args.width..][..args.width];
        values.extend(center.iter().map(|center| center + 4.0 * (rng.uniform() - 0.5)));
    }
    Ok(FeatureRows::new(args.width, vec![Arc::new(values)], Metric::Cosine)?)
}
