//! `ocelli curate remove`: removes images that are too similar to those of an evaluation set, which
//! would invalidate its scores.

use std::path::Path;
use std::process::ExitCode;

use curate::Metric;
use curate::selection::{Retrieved, most_similar, most_similar_in_blocks};
use kernels::rows::Rows;
use pipeline::Storage;
use ranks::communicator::Communicator;
use serde_json::{Map, json};

use crate::cluster::compute;
use crate::curation::comparison_parts::{check_rows, compare_in_parts, part_results, share_of_work};
use crate::curation::input::{Input, InputFlags};
use crate::curation::others::OtherFlags;
use crate::curation::output::{Output, OutputFlags, PAIRS, six_digits};
use crate::curation::pairs::{Match, draw_matches};
use crate::curation::progress::Bars;
use crate::curation::ranks::{all_succeed, connect, finish};
use crate::curation::threshold::ThresholdFlag;
use crate::parts::PartFlags;
use prep::parts::{PartResults, Work};

/// Flags of `curate remove`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli curate remove --checkpoint runs/mine --shards data/ --like test/ \
        --out clean/ --pack\n  ocelli curate remove --features features.npy --like-features test.npy \
        --threshold 0.9 --out clean/\n  ocelli curate remove --features features.npy --like-features \
        test.npy --out clean/ --part 3/16\n  ocelli curate remove --features features.npy --like-features \
        test.npy --out clean/ --join 16"
)]
pub(crate) struct Args {
    #[command(flatten)]
    input: InputFlags,
    #[command(flatten)]
    like: OtherFlags,
    #[command(flatten)]
    threshold: ThresholdFlag,
    #[command(flatten)]
    parts: PartFlags,
    #[command(flatten)]
    output: OutputFlags,
}

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    let threshold = args.threshold.threshold;
    let launch = compute::launch()?;
    let work = share_of_work(args.parts, &args.input, &args.output, &launch)?;
    let input = args.input.open(Metric::Cosine, &launch, storage, folder)?;
    let like = args.like.open(&args.input, &input, &launch, storage, folder)?;
    let settings = json!({ "like": like.identity, "threshold": threshold.to_string() });
    let results = part_results(work, "remove", &settings, &input, &like, &args.output)?;
    let ranks = connect(&launch, &args.input.compute)?;
    let claimed = args.output.claim_for(work, "remove", settings, &input, &launch, storage);
    let output = all_succeed(&ranks, claimed)?;
    let Some(nearest) = find(work, &results, &input, &like, &ranks)? else { return Ok(ExitCode::SUCCESS) };
    let written = write(args, &input, &like, &output, &nearest);
    finish(ranks, written)
}

/// Prints the number of removed images, draws pairs around the threshold, and writes the lists.
/// `nearest` are the images of `like` most similar to each row.
fn write(
    args: &Args,
    input: &Input,
    like: &Input,
    output: &Output<'_>,
    nearest: &[Retrieved],
) -> anyhow::Result<()> {
    let threshold = args.threshold.threshold;
    let least = args.threshold.least_product();
    let kept: Vec<bool> = nearest.iter().map(|image| image.similarity < least).collect();
    if output.is_writer {
        let n_removed = kept.iter().filter(|is_kept| !**is_kept).count();
        out!(
            "{n_removed} images match one of {} others, at a cosine similarity of {} or more",
            like.rows.len(),
            threshold
        );
        draw(&output.path(PAIRS), input, like, nearest, threshold)?;
    }
    let summary = Map::from_iter([("threshold".to_string(), six_digits(threshold))]);
    output.write(
        input,
        &kept,
        &|row: usize| {
            let image = &nearest[row];
            let name = &like.names[image.query as usize];
            let mut columns =
                vec![("like_key", json!(name.key)), ("similarity", six_digits(image.similarity))];
            columns.extend(name.shard.as_ref().map(|shard| ("like_shard", json!(shard))));
            columns
        },
        summary,
    )
}

/// Finds the image of `like` most similar to each image, or joins the results of parts; a part
/// saves its result and returns `None`.
fn find(
    work: Work,
    results: &PartResults,
    input: &Input,
    like: &Input,
    ranks: &Communicator,
) -> anyhow::Result<Option<Vec<Retrieved>>> {
    let rows = &input.rows;
    let others = &like.rows;
    check_rows(work, input, like, ranks)?;
    if work == Work::Whole {
        return Ok(Some(most_similar(rows, others, ranks, &Bars::new(ranks))?));
    }
    compare_in_parts(
        work,
        results,
        input,
        like,
        |n_rows| n_rows,
        |blocks| most_similar_in_blocks(rows, blocks, others, &Bars::new(ranks)),
    )
}

/// Draws pairs of an image and its `nearest` one around the threshold, if there are images.
fn draw(
    path: &Path,
    input: &Input,
    like: &Input,
    nearest: &[Retrieved],
    threshold: f32,
) -> anyhow::Result<()> {
    let (Some(images), Some(others)) = (&input.images, &like.images) else { return Ok(()) };
    let matches: Vec<Match> = nearest
        .iter()
        .map(|image| Match {
            row: image.row as usize,
            other: image.query as usize,
            similarity: image.similarity,
        })
        .collect();
    if draw_matches(path, images, &matches, others, &like.names, threshold)? {
        out!("pairs around the threshold: {}", path.display());
    }
    Ok(())
}
