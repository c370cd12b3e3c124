//! `ocelli curate remove`: removes images that are too much like those of an evaluation set, which would make its scores mean less.

use std::path::Path;
use std::process::ExitCode;

use curate::Metric;
use curate::selection::most_similar;
use kernels::rows::Rows;
use pipeline::Storage;
use serde_json::{Map, json};

use crate::cluster::launch::Launch;
use crate::curation::input::InputFlags;
use crate::curation::others::OtherFlags;
use crate::curation::output::{OutputFlags, PAIRS, six_digits};
use crate::curation::pairs::{Match, draw_matches};
use crate::curation::progress::Bars;
use crate::curation::ranks::{connect, finish, together};
use crate::curation::threshold::ThresholdFlag;

/// Flags of `curate remove`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli curate remove --checkpoint runs/mine --shards data/ --like test/ --out clean/ --pack\n  ocelli curate remove --features features.npy --like-features test.npy --threshold 0.9 --out clean/"
)]
pub(crate) struct Args {
    #[command(flatten)]
    input: InputFlags,
    #[command(flatten)]
    like: OtherFlags,
    #[command(flatten)]
    threshold: ThresholdFlag,
    #[command(flatten)]
    output: OutputFlags,
}

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    let threshold = args.threshold.threshold;
    let launch = Launch::from_env()?;
    let input = args.input.open(Metric::Cosine, &launch, storage, folder)?;
    let like = args.like.open(&args.input, &input, &launch, storage, folder)?;
    let settings = json!({ "like": like.identity, "threshold": threshold.to_string() });
    let ranks = connect(&launch, &args.input.compute)?;
    let claimed = args.output.claim("remove", settings, &input, &launch, storage);
    let output = together(&ranks, claimed)?;
    let n = input.rows.len();
    input.rows.largest(0..n)?;
    like.rows.largest(0..like.rows.len())?;
    let found = {
        let bars = Bars::new(&ranks);
        most_similar(&input.rows, &like.rows, &ranks, &bars)?
    };
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
            if let (Some(images), Some(others)) = (&input.images, &like.images) {
                let matches = |one: &curate::selection::Retrieved| Match {
                    row: one.row as usize,
                    other: one.query as usize,
                    similarity: one.similarity,
                };
                let path = output.path(PAIRS);
                let all: Vec<Match> = found.iter().map(matches).collect();
                if draw_matches(&path, (images, &all), (others, &like.names), threshold)? {
                    out!("pairs around the threshold: {}", path.display());
                }
            }
        }
        let columns = |row: usize| {
            let one = &found[row];
            let name = &like.names[one.query as usize];
            let mut columns = vec![("like_key", json!(name.key)), ("similarity", six_digits(one.similarity))];
            columns.extend(name.shard.as_ref().map(|shard| ("like_shard", json!(shard))));
            columns
        };
        let summary = Map::from_iter([("threshold".to_string(), six_digits(threshold))]);
        output.write(&input, &kept, &columns, summary)
    };
    finish(ranks, write())
}
