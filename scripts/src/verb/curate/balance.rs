//! `ocelli curate balance`: chooses images evenly over clusters, or weighs all images so.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use clap::ValueEnum;
use curate::Metric;
use curate::clusters::{Hierarchy, Tree};
use curate::selection::{Order, sample, weights};
use kernels::rows::Rows;
use pipeline::Storage;
use serde_json::{Map, Value, json};

use crate::cluster::compute;
use crate::console::say;
use crate::curation::clusters::ClusterFlags;
use crate::curation::content::content_identity;
use crate::curation::groups::groups;
use crate::curation::input::{Input, InputFlags};
use crate::curation::output::{Output, OutputFlags, six_digits};
use crate::curation::ranks::{all_succeed, connect, finish};

/// Flags of `curate balance`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli curate balance --checkpoint runs/mine --shards data/ --count 100000 \
        --out balanced/ --pack\n  ocelli curate balance --features features.npy --clusters 20000,1000,50 \
        --count 100000 --out balanced/\n  ocelli curate balance --features features.npy --by class --count \
        5000 --weights --out weighted/"
)]
pub(crate) struct Args {
    #[command(flatten)]
    input: InputFlags,
    /// Number of images to select.
    #[arg(long, value_name = "N")]
    count: usize,
    /// Keep all images, and add a column `weight` to the list, for a recipe's `data.weights`: the
    /// probability that an image would be among the N.
    #[arg(long)]
    weights: bool,
    /// Balance by this column instead of by clusters: `class`, or a column of --list. Images
    /// without a value form a group of their own.
    #[arg(long, value_name = "COLUMN", conflicts_with_all = ["clusters", "clusters_of"])]
    by: Option<String>,
    /// List of images with the --by column: a list.jsonl, or a .csv or .tsv with a header. Images
    /// are matched by `key`, and by `shard` if there is such a column.
    #[arg(long, value_name = "FILE", requires = "by")]
    list: Option<PathBuf>,
    /// Which images of a cluster to select first.
    #[arg(long, value_enum, default_value_t = Choice::Random)]
    order: Choice,
    /// Distance to compare features with.
    #[arg(long, value_enum, default_value_t = Distance::Cosine)]
    metric: Distance,
    #[command(flatten)]
    clusters: ClusterFlags,
    #[command(flatten)]
    output: OutputFlags,
}

/// Which images of a cluster to select first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Choice {
    /// Random images.
    Random,
    /// Images nearest to the center.
    Nearest,
}

/// Distance to compare features with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Distance {
    /// Cosine: features are scaled to unit length.
    Cosine,
    /// Euclidean: features as they are.
    Euclidean,
}

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    let launch = compute::launch()?;
    let metric = match args.metric {
        Distance::Cosine => Metric::Cosine,
        Distance::Euclidean => Metric::Euclidean,
    };
    if args.by.is_some() && args.order == Choice::Nearest {
        bail!("--order nearest needs clusters: the groups of --by have no centers");
    }
    let input = args.input.open(metric, &launch, storage, folder)?;
    let n = input.rows.len();
    if args.count == 0 || args.count > n {
        bail!("--count {}: expected a number from 1 to {n}, the number of images", args.count);
    }
    let settings = json!({
        "count": args.count, "weights": args.weights, "by": args.by,
        "list": content_identity(args.list.as_ref()),
        "order": format!("{:?}", args.order), "metric": format!("{metric:?}"),
        "clusters": args.clusters.identity(),
    });
    let ranks = connect(&launch, &args.input.compute)?;
    let claimed = args.output.claim("balance", settings, &input, &launch, storage);
    let output = all_succeed(&ranks, claimed)?;
    let (clusters, names) = match &args.by {
        Some(column) => {
            let (tree, names) = groups(&input.names, column, args.list.as_deref())?;
            (Hierarchy { centers: Vec::new(), tree, distances: Vec::new(), inertia: 0.0 }, Some(names))
        }
        None => (args.clusters.run(&input.rows, &args.output.out, &ranks)?, None),
    };
    let written = write(args, &input, &output, &clusters, names.as_deref());
    finish(ranks, written)
}

/// Chooses or weighs the images, and writes the lists. `names` are those of groups, which stand in
/// place of clusters.
fn write(
    args: &Args,
    input: &Input,
    output: &Output<'_>,
    clusters: &Hierarchy,
    names: Option<&[String]>,
) -> anyhow::Result<()> {
    let seed = args.clusters.limits.seed;
    let order = match args.order {
        Choice::Random => Order::Random,
        Choice::Nearest => Order::Nearest(&clusters.distances),
    };
    let chosen = sample(&clusters.tree, args.count, order, seed);
    let mut kept = vec![args.weights; input.rows.len()];
    for row in chosen {
        kept[row as usize] = true;
    }
    let weights = args.weights.then(|| weights(&clusters.tree, args.count as f64));
    if output.is_writer {
        print_sizes(&clusters.tree, args.count);
    }
    output.write(
        input,
        &kept,
        &|row: usize| row_columns(clusters, names, weights.as_deref(), row),
        Map::from_iter([("count".to_string(), json!(args.count))]),
    )?;
    if args.weights && output.is_writer {
        say("note: to train with these weights, pass --set data.weights=LIST, the path of list.jsonl");
    }
    Ok(())
}

/// Prints the sizes of clusters by level, and the range of the probabilities of images.
fn print_sizes(tree: &Tree, count: usize) {
    let shares = weights(tree, count as f64);
    for (level, sizes) in tree.sizes().iter().enumerate() {
        let mut sizes = sizes.clone();
        sizes.sort_unstable();
        let last = sizes.len() - 1;
        out!(
            "level {}: {} clusters of {} to {} images, median {}",
            level + 1,
            sizes.len(),
            sizes[0],
            sizes[last],
            sizes[(last as f64 * 0.5) as usize]
        );
    }
    let most = shares.iter().copied().fold(0.0, f64::max);
    let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
    out!(
        "an image is selected with probability {least:.4} to {most:.4}, depending on the size of its cluster"
    );
}

/// Returns the columns of a row of the list.
fn row_columns(
    clusters: &Hierarchy,
    names: Option<&[String]>,
    weights: Option<&[f64]>,
    row: usize,
) -> Vec<(&'static str, Value)> {
    let mut columns = Vec::new();
    let numbers = clusters.tree.clusters_of(row);
    match names {
        Some(names) => columns.push(("group", json!(names[numbers[0] as usize]))),
        // The lowest level first.
        None => columns.push(("clusters", json!(numbers))),
    }
    columns.extend(clusters.distances.get(row).map(|distance| ("squared_distance", six_digits(*distance))));
    columns.extend(weights.map(|weights| ("weight", json!(weights[row]))));
    columns
}
