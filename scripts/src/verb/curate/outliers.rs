//! `ocelli curate outliers`: images that are unlike all others.

use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use curate::Metric;
use curate::selection::mean_similarities;
use kernels::rows::Rows;
use pipeline::Storage;
use serde_json::{Map, json};

use crate::cluster::compute;
use crate::curation::cells::CellFlags;
use crate::curation::input::{Input, InputFlags};
use crate::curation::output::{OUTLIERS, Output, OutputFlags, six_digits};
use crate::curation::pairs::draw_images;
use crate::curation::progress::Bars;
use crate::curation::ranks::{all_succeed, connect, finish};

/// Flags of `curate outliers`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli curate outliers --checkpoint runs/mine --shards data/ --out \
        outliers/\n  ocelli curate outliers --features features.npy --share 0.02 --out outliers/")]
pub(crate) struct Args {
    #[command(flatten)]
    input: InputFlags,
    /// Number of nearest neighbors to average an image's similarity over.
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    neighbors: u32,
    /// Fraction of the images to drop: those with the lowest mean similarity.
    #[arg(long, default_value_t = 0.01, value_name = "SHARE")]
    share: f64,
    #[command(flatten)]
    cells: CellFlags,
    #[command(flatten)]
    output: OutputFlags,
}

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    if !(0.0..1.0).contains(&args.share) {
        bail!("--share {}: expected a number of at least 0 and below 1", args.share);
    }
    let launch = compute::launch()?;
    let input = args.input.open(Metric::Cosine, &launch, storage, folder)?;
    let n = input.rows.len();
    input.rows.largest(0..n)?;
    let settings = json!({ "neighbors": args.neighbors, "share": args.share.to_string(),
        "cells": args.cells.identity() });
    let ranks = connect(&launch, &args.input.compute)?;
    let claimed = args.output.claim("outliers", settings, &input, &launch, storage);
    let output = all_succeed(&ranks, claimed)?;
    let cells = args.cells.cells(&input.rows, &args.output.out, &ranks)?;
    let means = {
        let bars = Bars::new(&ranks);
        mean_similarities(&input.rows, &cells, args.neighbors as usize, &ranks, &bars)?
    };
    let written = write(args, &input, &output, &means);
    finish(ranks, written)
}

/// Prints the range of the similarities, draws the most outlying images, and writes the lists.
/// `means` are the mean similarities of the rows.
fn write(args: &Args, input: &Input, output: &Output<'_>, means: &[f32]) -> anyhow::Result<()> {
    let n = means.len();
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|a, b| means[*a].total_cmp(&means[*b]).then(a.cmp(b)));
    let n_out = (n as f64 * args.share).round() as usize;
    let mut kept = vec![true; n];
    for row in &order[..n_out] {
        kept[*row] = false;
    }
    if output.is_writer {
        out!(
            "mean cosine similarity to the {} most similar images: {:.3} to {:.3}, median {:.3}",
            args.neighbors,
            means[order[0]],
            means[order[n - 1]],
            means[order[((n - 1) as f64 * 0.5) as usize]]
        );
        if let Some(images) = &input.images {
            let path = output.path(OUTLIERS);
            let shown: Vec<(usize, String, bool)> =
                order.iter().take(60).map(|row| (*row, format!("{:.3}", means[*row]), !kept[*row])).collect();
            let legend = "most outlying first, with their mean similarity; red: dropped";
            if draw_images(&path, images, &shown, legend)? {
                out!("most outlying images: {}", path.display());
            }
        }
    }
    let summary = Map::from_iter([("outliers".to_string(), json!(n_out))]);
    output.write(input, &kept, &|row: usize| vec![("mean_similarity", six_digits(means[row]))], summary)
}
