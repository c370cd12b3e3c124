//! `ocelli curate near-duplicates`: groups of images whose features are nearly the same, of which
//! the best is kept.

use std::process::ExitCode;

use curate::Metric;
use curate::io::{NearDuplicates, PAIRS, qualities, six_digits};
use curate::selection::ComparedWith;
use pipeline::words::counted;
use serde_json::json;

use crate::console::say;
use crate::curation::{Call, CellFlags, InputFlags, OutputFlags, ThresholdFlag, bars, draw_pairs, finish};

/// Flags of `curate near-duplicates`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
        ocelli curate near-duplicates --checkpoint runs/a --shards data/ --out n/\n  \
        ocelli curate near-duplicates --features f.npy --threshold 0.97 --out n/")]
pub(crate) struct Args {
    #[command(flatten)]
    input: InputFlags,
    #[command(flatten)]
    threshold: ThresholdFlag,
    /// Compare an image with the better images that are kept, or with all better images. SemDeDup
    /// does the latter, which removes more.
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

pub(crate) fn run(args: &Args, call: &Call<'_>) -> anyhow::Result<ExitCode> {
    let threshold = args.threshold.threshold;
    let input = args.input.open(Metric::Cosine, call)?;
    input.rows.largest(0..input.names.len())?;
    let compared_with = match args.compare_with {
        CompareWith::Kept => ComparedWith::Kept,
        CompareWith::All => ComparedWith::All,
    };
    let search = NearDuplicates { threshold, compared_with, cells: args.cells.settings() };
    let ranks = call.connect(&args.input.compute)?;
    let output = args.output.settings().claim(&search.job(), &input, call.storage, &ranks)?;
    if !input.has_images() && output.is_writer {
        say("note: without --shards, the first image of each group of near-duplicates is kept; with \
             --shards, the one with the most pixels, then the sharpest");
    }
    let measured = qualities(&input, output.folder(), &ranks, &bars(&ranks))?;
    let found = search.run(&output, measured, &ranks, &bars(&ranks))?;
    finish(ranks, || {
        let n_images = found.kept.len();
        let n_copies = found.n_copies;
        out!(
            "{} of {}, at a cosine similarity of {threshold} or more",
            counted(n_copies as u64, "near-duplicate"),
            counted(found.n_originals as u64, "image")
        );
        if 2 * n_copies > n_images {
            say(format!(
                "warning: {} % of the images are near-duplicates: check pairs.png (with --shards) to see \
                 whether {threshold} is too low for this network",
                100 * n_copies / n_images
            ));
        }
        draw_pairs(&args.output.out.join(PAIRS), found.pairs(&input), found.threshold())?;
        let summary = json!({ "near_duplicates": n_copies, "threshold": six_digits(threshold) });
        args.output.write(&output, &found.kept, &|row| found.columns(&input, row), summary)
    })
}
