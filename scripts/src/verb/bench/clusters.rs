//! `ocelli bench clusters`: measures k-means on features of a file, or on noise.

use std::path::PathBuf;
use std::process::ExitCode;

use curate::Metric;
use curate::clusters::bench::{noise_rows, time_kmeans};
use curate::io::read_features;
use kernels::rows::Rows;
use serde_json::json;

use super::compare::{CompareFlag, print_figures};

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
        None => noise_rows(args.rows, args.width, args.clusters)?,
    };
    let k = args.clusters;
    let times = time_kmeans(&rows, k, args.iterations, args.repeats)?;
    let n = rows.len();
    let d = rows.width();
    let per_iteration_s = (times.seconds - times.seeds_s) / args.iterations.max(1) as f64;
    out!("{n} x {d} features into {k} clusters");
    out!("seeds and distances   {:>8.2} s", times.seeds_s);
    out!(
        "{:>3} iterations        {:>8.2} s in total, {per_iteration_s:.2} s each",
        args.iterations,
        times.seconds
    );
    out!("products of an iteration at {:.0} GFLOP/s", 2e-9 * (n * d * k) as f64 / per_iteration_s.max(1e-9));
    out!("inertia               {:>12.2}", times.inertia);
    let figures = json!({ "seeds_s": times.seeds_s, "seconds": times.seconds, "inertia": times.inertia });
    print_figures(before.as_ref(), &figures, args.json);
    Ok(ExitCode::SUCCESS)
}
