//! `ocelli curate balance`: chooses images evenly over clusters, or weighs all images so.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use clap::ValueEnum;
use curate::Metric;
use curate::io::{Balance, LevelSizes};
use pipeline::words::{counted, thousands};
use serde_json::json;

use crate::console::say;
use crate::curation::{Call, ClusterFlags, InputFlags, OutputFlags, bars, finish};

/// Flags of `curate balance`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
        ocelli curate balance --checkpoint runs/a --shards data/ --count 900 --out b/\n  \
        ocelli curate balance --features f.npy --clusters 5000,50 --count 900 --out b/\n  \
        ocelli curate balance --features f.npy --by class --count 900 --out b/")]
pub(crate) struct Args {
    #[command(flatten)]
    input: InputFlags,
    /// Number of images to select.
    #[arg(long, value_name = "N")]
    count: usize,
    /// Keep all images, and add a column `weight` to the list. It is for a recipe's `data.weights`:
    /// the probability that an image would be among the N.
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
    #[arg(long, value_enum, default_value_t = Distance::Cosine, hide_short_help = true)]
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

pub(crate) fn run(args: &Args, call: &Call<'_>) -> anyhow::Result<ExitCode> {
    let metric = match args.metric {
        Distance::Cosine => Metric::Cosine,
        Distance::Euclidean => Metric::Euclidean,
    };
    if args.by.is_some() && args.order == Choice::Nearest {
        bail!("--order nearest needs clusters: the groups of --by have no centers");
    }
    let input = args.input.open(metric, call)?;
    let n = input.names.len();
    if args.count == 0 || args.count > n {
        bail!("--count {}: expected a number from 1 to {n}, the number of images", args.count);
    }
    let balance = Balance {
        count: args.count,
        has_weights: args.weights,
        column: args.by.clone(),
        list: args.list.clone(),
        nearest_first: args.order == Choice::Nearest,
        clusters: args.clusters.settings(),
    };
    let job = balance.job(&input);
    let ranks = call.connect(&args.input.compute)?;
    let output = args.output.settings().claim(&job, &input, call.storage, &ranks)?;
    let balanced = balance.run(&output, &ranks, &bars(&ranks))?;
    finish(ranks, || {
        for (level, sizes) in balanced.level_sizes().iter().enumerate() {
            let LevelSizes { n_clusters, least, most, median } = sizes;
            let number = level + 1;
            let clusters = counted(*n_clusters as u64, "cluster");
            let least = thousands(*least);
            let most = thousands(*most);
            let median = thousands(*median);
            out!("level {number}: {clusters} of {least} to {most} images, median {median}");
        }
        let [least, most] = balanced.probability_range();
        out!(
            "an image is selected with probability {least:.4} to {most:.4}, depending on the size of its \
             cluster"
        );
        let summary = json!({ "count": args.count });
        args.output.write(&output, &balanced.kept, &|row| balanced.columns(row), summary)?;
        if args.weights {
            say("note: to train with these weights, pass --set data.weights=LIST, the path of list.jsonl");
        }
        Ok(())
    })
}
