//! `ocelli curate outliers`: images that are unlike all others.

use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use curate::Metric;
use curate::io::{FoundOutliers, Input, OUTLIERS, Outliers};
use report::picture::sheets::{Captioned, image_sheet};
use serde_json::json;

use crate::curation::{Call, CellFlags, InputFlags, OutputFlags, bars, finish};

/// Number of images in the picture.
const N_SHOWN: usize = 60;

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

pub(crate) fn run(args: &Args, call: &Call<'_>) -> anyhow::Result<ExitCode> {
    let share = args.share;
    if !(0.0..1.0).contains(&share) {
        bail!("--share {share}: expected a number of at least 0 and below 1");
    }
    let input = args.input.open(Metric::Cosine, call)?;
    input.rows.largest(0..input.names.len())?;
    let n_neighbors = args.neighbors as usize;
    let search = Outliers { n_neighbors, share, cells: args.cells.settings() };
    let ranks = call.connect(&args.input.compute)?;
    let output = args.output.settings().claim(&search.job(), &input, call.storage, &ranks)?;
    let found = search.run(&output, &ranks, &bars(&ranks))?;
    finish(ranks, || {
        let [least, median, most] = found.range();
        out!(
            "mean cosine similarity to the {n_neighbors} most similar images: {least:.3} to {most:.3}, \
             median {median:.3}"
        );
        draw(&args.output.out.join(OUTLIERS), &input, &found)?;
        let summary = json!({ "outliers": found.n_outliers });
        args.output.write(&output, &found.kept, &|row| found.columns(row), summary)
    })
}

/// Draws the most outlying images, if there are images.
fn draw(path: &Path, input: &Input, found: &FoundOutliers) -> anyhow::Result<()> {
    let mut shown = Vec::new();
    for row in found.order.iter().take(N_SHOWN) {
        if let Some(image) = input.picture(*row) {
            let caption = format!("{:.3}", found.means[*row]);
            shown.push(Captioned { image, caption, is_marked: !found.kept[*row] });
        }
    }
    if !shown.is_empty() {
        image_sheet(path, &shown, "most outlying first, with their mean similarity; red: dropped")?;
        out!("most outlying images: {}", path.display());
    }
    Ok(())
}
