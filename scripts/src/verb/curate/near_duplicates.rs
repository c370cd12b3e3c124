//! `ocelli curate near-duplicates`: groups of images whose features are nearly the same, of which
//! the best is kept.

use std::cmp::Reverse;
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
use crate::curation::ranks::{connect, finish, together};
use crate::curation::threshold::ThresholdFlag;

/// Flags of `curate near-duplicates`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli curate near-duplicates --checkpoint runs/mine --shards data/ --out unique/ --pack\n  ocelli curate near-duplicates --features features.npy --threshold 0.97 --out unique/"
)]
pub(crate) struct Args {
    #[command(flatten)]
    input: InputFlags,
    #[command(flatten)]
    threshold: ThresholdFlag,
    /// Compare an image with better ones that are kept, or with all better ones, as SemDeDup does:
    /// then more go.
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
    let output = together(&ranks, claimed)?;
    let quality = quality_of(&input, &output, &ranks)?;
    let cells = args.cells.cells(&input.rows, &args.output.out, &ranks)?;
    let least = args.threshold.least_product();
    let rule = match args.compare_with {
        CompareWith::Kept => ComparedWith::Kept,
        CompareWith::All => ComparedWith::All,
    };
    let found = find(&input.rows, cells, quality.as_deref(), least, rule, &ranks)?;
    let write = || -> anyhow::Result<()> {
        let kept: Vec<bool> = (0..input.rows.len()).map(|row| found.original(row).is_none()).collect();
        let n_copies = kept.iter().filter(|is_kept| !**is_kept).count();
        if output.is_writer {
            let groups = group_sizes(&found);
            out!(
                "{n_copies} near-duplicates of {} images, at a cosine similarity of {} or more",
                groups.len(),
                threshold
            );
            if 2 * n_copies > kept.len() {
                say(format!(
                    "warning: {} % of the images are near-duplicates: pairs.png (with --shards) shows whether {} is too low for this network",
                    100 * n_copies / kept.len(),
                    threshold
                ));
            }
            if let Some(images) = &input.images {
                let path = output.path(PAIRS);
                if draw_pairs(&path, images, &input.names, &found)? {
                    out!("pairs around the threshold: {}", path.display());
                }
            }
        }
        let summary = Map::from_iter([
            ("near_duplicates".to_string(), json!(n_copies)),
            ("threshold".into(), six_digits(threshold)),
        ]);
        output.write(
            &input,
            &kept,
            &|row: usize| columns_of(&input, &found, quality.as_deref(), row),
            summary,
        )
    };
    finish(ranks, write())
}

/// Returns the quality of each image, which the first rank looks at; `None` without images.
fn quality_of(
    input: &Input,
    output: &Output<'_>,
    ranks: &Communicator,
) -> anyhow::Result<Option<Vec<Quality>>> {
    let Some(images) = &input.images else {
        if output.is_writer {
            say(
                "note: without --shards, the first of several near-duplicates is kept; with them, the one with the most \
                 pixels, then the sharpest",
            );
        }
        return Ok(None);
    };
    let found = if output.is_writer {
        qualities(images, input.rows.len(), &output.path(QUALITIES))
    } else {
        Ok(Vec::new())
    };
    let found = together(ranks, found)?;
    let words: Vec<[u64; 2]> = found.iter().map(|one| [one.n_pixels, one.sharpness.to_bits()]).collect();
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
fn group_sizes(found: &Duplicates) -> std::collections::BTreeMap<u32, usize> {
    let mut sizes = std::collections::BTreeMap::new();
    for row in 0..found.nearest.len() {
        if let Some(original) = found.original(row) {
            *sizes.entry(original.row).or_default() += 1;
        }
    }
    sizes
}

fn columns_of(
    input: &Input,
    found: &Duplicates,
    quality: Option<&[Quality]>,
    row: usize,
) -> Vec<(&'static str, Value)> {
    let mut columns = Vec::new();
    // The group is named by the row of the image that is kept.
    let original = found.original(row);
    columns.push(("group", json!(original.map_or(row as u32, |original| original.row))));
    if let Some(NearestKept { row: nearest, similarity }) = found.nearest[row] {
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
