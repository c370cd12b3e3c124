//! `ocelli curate near-duplicates`: groups of images whose features are nearly the same, of which
//! the best is kept.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use curate::selection::{Cells, ComparedWith, Duplicates, NearestKept};
use curate::{FeatureRows, Metric};
use kernels::rows::Rows;
use pipeline::Storage;
use ranks::communicator::Communicator;
use serde_json::{Map, Value, json};

use crate::cluster::compute;
use crate::console::say;
use crate::curation::cells::CellFlags;
use crate::curation::input::{Input, InputFlags};
use crate::curation::output::{Output, OutputFlags, PAIRS, QUALITIES, six_digits};
use crate::curation::pairs::draw_pairs;
use crate::curation::progress::Bars;
use crate::curation::quality::{Quality, qualities};
use crate::curation::ranks::{all_succeed, connect, finish};
use crate::curation::threshold::ThresholdFlag;

/// Flags of `curate near-duplicates`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli curate near-duplicates --checkpoint runs/mine --shards data/ --out \
        unique/ --pack\n  ocelli curate near-duplicates --features features.npy --threshold 0.97 --out \
        unique/"
)]
pub(crate) struct Args {
    #[command(flatten)]
    input: InputFlags,
    #[command(flatten)]
    threshold: ThresholdFlag,
    /// Compare each image only with better images that are kept, or with all better images, like
    /// SemDeDup, which removes more.
    #[arg(long, value_enum, default_value_t, value_name = "RULE")]
    compare_with: CompareWith,
    #[command(flatten)]
    cells: CellFlags,
    #[command(flatten)]
    output: OutputFlags,
}

/// Rule for the images that an image is compared with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
enum CompareWith {
    #[default]
    Kept,
    All,
}

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    let threshold = args.threshold.threshold;
    let launch = compute::launch()?;
    let input = args.input.open(Metric::Cosine, &launch, storage, folder)?;
    input.rows.largest(0..input.rows.len())?;
    let mut settings = json!({ "threshold": threshold.to_string(), "cells": args.cells.identity() });
    if args.compare_with == CompareWith::All {
        settings["compare_with"] = json!("all");
    }
    let ranks = connect(&launch, &args.input.compute)?;
    let claimed = args.output.claim("near-duplicates", settings, &input, &launch, storage);
    let output = all_succeed(&ranks, claimed)?;
    let quality = measure_qualities(&input, &output, &ranks)?;
    let cells = args.cells.cells(&input.rows, &args.output.out, &ranks)?;
    let least = args.threshold.least_product();
    let rule = match args.compare_with {
        CompareWith::Kept => ComparedWith::Kept,
        CompareWith::All => ComparedWith::All,
    };
    let duplicates = find(&input.rows, cells, quality.as_deref(), least, rule, &ranks)?;
    let written = write(&input, &output, &duplicates, quality.as_deref(), threshold);
    finish(ranks, written)
}

/// Prints the number of near-duplicates, draws pairs around the threshold, and writes the lists.
fn write(
    input: &Input,
    output: &Output<'_>,
    duplicates: &Duplicates,
    quality: Option<&[Quality]>,
    threshold: f32,
) -> anyhow::Result<()> {
    let kept: Vec<bool> = (0..input.rows.len()).map(|row| duplicates.original(row).is_none()).collect();
    let n_copies = kept.iter().filter(|is_kept| !**is_kept).count();
    if output.is_writer {
        let groups = group_sizes(duplicates);
        out!(
            "{n_copies} near-duplicates of {} images, at a cosine similarity of {} or more",
            groups.len(),
            threshold
        );
        if 2 * n_copies > kept.len() {
            say(format!(
                "warning: {} % of the images are near-duplicates: check pairs.png (with --shards) to see \
                 whether {} is too low for this network",
                100 * n_copies / kept.len(),
                threshold
            ));
        }
        if let Some(images) = &input.images {
            let path = output.path(PAIRS);
            if draw_pairs(&path, images, &input.names, duplicates)? {
                out!("pairs around the threshold: {}", path.display());
            }
        }
    }
    let summary = Map::from_iter([
        ("near_duplicates".to_string(), json!(n_copies)),
        ("threshold".into(), six_digits(threshold)),
    ]);
    output.write(input, &kept, &|row: usize| row_columns(input, duplicates, quality, row), summary)
}

/// Returns the quality of each image, which the first rank measures; `None` without images.
fn measure_qualities(
    input: &Input,
    output: &Output<'_>,
    ranks: &Communicator,
) -> anyhow::Result<Option<Vec<Quality>>> {
    let Some(images) = &input.images else {
        if output.is_writer {
            say("note: without --shards, the first image of each group of near-duplicates is kept; with \
                 --shards, the one with the most pixels, then the sharpest");
        }
        return Ok(None);
    };
    let measured = if output.is_writer {
        qualities(images, input.rows.len(), &output.path(QUALITIES))
    } else {
        Ok(Vec::new())
    };
    let measured = all_succeed(ranks, measured)?;
    let words: Vec<[u64; 2]> =
        measured.iter().map(|quality| [quality.n_pixels, quality.sharpness.to_bits()]).collect();
    let bytes = ranks.broadcast("qualities", bytemuck::cast_slice(&words).to_vec())?;
    let words: Vec<[u64; 2]> = bytemuck::pod_collect_to_vec(&bytes);
    Ok(Some(
        words
            .into_iter()
            .map(|[n_pixels, bits]| Quality { n_pixels, sharpness: f64::from_bits(bits) })
            .collect(),
    ))
}

/// Finds the near-duplicates in `cells`, the images with the best `quality` first.
fn find(
    rows: &FeatureRows,
    cells: Cells,
    quality: Option<&[Quality]>,
    threshold: f32,
    rule: ComparedWith,
    ranks: &Communicator,
) -> anyhow::Result<Duplicates> {
    let ranking = cells.ranked(|row| {
        let quality = quality.map(|quality| quality[row as usize]);
        // Sharpness is finite and not negative, so that its bits are in its order.
        Reverse(quality.map(|quality| (quality.n_pixels, quality.sharpness.max(0.0).to_bits())))
    });
    let bars = Bars::new(ranks);
    Ok(Duplicates::find(rows, &ranking, threshold, rule, ranks, &bars)?)
}

/// Returns the number of near-duplicates of each row that has any.
fn group_sizes(duplicates: &Duplicates) -> BTreeMap<u32, usize> {
    let mut sizes = BTreeMap::new();
    for row in 0..duplicates.nearest.len() {
        if let Some(original) = duplicates.original(row) {
            *sizes.entry(original.row).or_default() += 1;
        }
    }
    sizes
}

/// Returns the columns of a row of the list.
fn row_columns(
    input: &Input,
    duplicates: &Duplicates,
    quality: Option<&[Quality]>,
    row: usize,
) -> Vec<(&'static str, Value)> {
    let mut columns = Vec::new();
    // The group is named by the row of the image that is kept.
    let original = duplicates.original(row);
    columns.push(("group", json!(original.map_or(row as u32, |original| original.row))));
    if let Some(NearestKept { row: nearest, similarity }) = duplicates.nearest[row] {
        let name = &input.names[nearest as usize];
        columns.push(("nearest_key", json!(name.key)));
        columns.extend(name.shard.as_ref().map(|shard| ("nearest_shard", json!(shard))));
        columns.push(("similarity", six_digits(similarity)));
    }
    if let Some(quality) = quality {
        columns.push(("pixels", json!(quality[row].n_pixels)));
        columns.push(("sharpness", json!((quality[row].sharpness * 100.0).round() / 100.0)));
    }
    columns
}
