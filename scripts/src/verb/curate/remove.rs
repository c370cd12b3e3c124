//! `ocelli curate remove`: removes images that are too much like those of an evaluation set, which
//! would make its scores mean less.

use std::path::Path;
use std::process::ExitCode;

use curate::Metric;
use curate::selection::{Retrieved, most_similar, most_similar_in_blocks};
use kernels::rows::Rows;
use pipeline::Storage;
use ranks::communicator::Communicator;
use serde_json::{Map, json};

use crate::cluster::compute;
use crate::curation::comparison_parts::{check_rows, compared_in_parts, part_results, share_of_work};
use crate::curation::input::{Input, InputFlags};
use crate::curation::others::OtherFlags;
use crate::curation::output::{OutputFlags, PAIRS, six_digits};
use crate::curation::pairs::{Match, draw_matches};
use crate::curation::progress::Bars;
use crate::curation::ranks::{connect, finish, together};
use crate::curation::threshold::ThresholdFlag;
use crate::parts::{PartFlags, PartResults, Work};

/// Flags of `curate remove`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli curate remove --checkpoint runs/mine --shards data/ --like test/ --out clean/ --pack\n  ocelli curate remove --features features.npy --like-features test.npy --threshold 0.9 --out clean/\n  ocelli curate remove --features features.npy --like-features test.npy --out clean/ --part 3/16\n  ocelli curate remove --features features.npy --like-features test.npy --out clean/ --join 16"
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
    let results = part_results(work, "remove", &settings, (&input, &like), &args.output)?;
    let ranks = connect(&launch, &args.input.compute)?;
    let claimed = args.output.claim_for(work, "remove", settings, &input, &launch, storage);
    let output = together(&ranks, claimed)?;
    let Some(found) = find(work, &results, (&input, &like), &ranks)? else { return Ok(ExitCode::SUCCESS) };
    let write = || -> anyhow::Result<()> {
        let kept: Vec<bool> =
            found.iter().map(|one| one.similarity < args.threshold.least_product()).collect();
        if output.is_writer {
            let n_removed = kept.iter().filter(|is_kept| !**is_kept).count();
            out!(
                "{n_removed} images are like one of {} others, at a cosine similarity of {} or more",
                like.rows.len(),
                threshold
            );
            draw(&output.path(PAIRS), &input, &like, &found, threshold)?;
        }
        let summary = Map::from_iter([("threshold".to_string(), six_digits(threshold))]);
        output.write(
            &input,
            &kept,
            &|row: usize| {
                let one = &found[row];
                let name = &like.names[one.query as usize];
                let mut columns =
                    vec![("like_key", json!(name.key)), ("similarity", six_digits(one.similarity))];
                columns.extend(name.shard.as_ref().map(|shard| ("like_shard", json!(shard))));
                columns
            },
            summary,
        )
    };
    finish(ranks, write())
}

/// Finds the most similar one of `like` for each image, or joins what parts have found; a part
/// saves what it finds and returns `None`.
fn find(
    work: Work,
    results: &PartResults,
    (input, like): (&Input, &Input),
    ranks: &Communicator,
) -> anyhow::Result<Option<Vec<Retrieved>>> {
    let rows = &input.rows;
    let others = &like.rows;
    check_rows(work, (input, like), ranks)?;
    if work == Work::Whole {
        return Ok(Some(most_similar(rows, others, ranks, &Bars::new(ranks))?));
    }
    compared_in_parts(
        work,
        results,
        (input, like),
        |n_rows| n_rows,
        |blocks| most_similar_in_blocks(rows, blocks, others, &Bars::new(ranks)),
    )
}

/// Draws pairs of `found` around the threshold, if there are images.
fn draw(path: &Path, input: &Input, like: &Input, found: &[Retrieved], threshold: f32) -> anyhow::Result<()> {
    let (Some(images), Some(others)) = (&input.images, &like.images) else { return Ok(()) };
    let all: Vec<Match> = found
        .iter()
        .map(|one| Match { row: one.row as usize, other: one.query as usize, similarity: one.similarity })
        .collect();
    if draw_matches(path, (images, &all), (others, &like.names), threshold)? {
        out!("pairs around the threshold: {}", path.display());
    }
    Ok(())
}
