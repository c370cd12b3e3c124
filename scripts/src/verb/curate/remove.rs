//! `ocelli curate remove`: removes images that are too similar to those of an evaluation set, which
//! would invalidate its scores.

use std::process::ExitCode;

use curate::Metric;
use curate::io::{Comparison, PAIRS, Removal, removal_columns, six_digits};
use pipeline::words::{counted, thousands};
use serde_json::json;

use crate::curation::{Call, InputFlags, OtherFlags, OutputFlags, ThresholdFlag, bars, draw_pairs, finish};
use crate::parts::{PartFlags, result_of_all};

/// Flags of `curate remove`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
        ocelli curate remove --checkpoint runs/a --shards data/ --like test/ --out r/\n  \
        ocelli curate remove --features f.npy --like-features t.npy --out r/")]
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

pub(crate) fn run(args: &Args, call: &Call<'_>) -> anyhow::Result<ExitCode> {
    let threshold = args.threshold.threshold;
    let work = args.input.work(args.parts, call)?;
    work.check_overwrite(args.output.overwrite)?;
    let input = args.input.open(Metric::Cosine, call)?;
    let like = args.like.open(&args.input, &input, call)?;
    let removal = Removal { threshold };
    let job = removal.job(&like, work);
    let comparison = Comparison::new(&job, &input, &like, &args.output.out)?;
    let ranks = call.connect(&args.input.compute)?;
    let output = args.output.settings().claim(&job, &input, call.storage, &ranks)?;
    let share = removal.run(&comparison, &ranks, &bars(&ranks))?;
    let Some(nearest) = result_of_all(share) else { return Ok(ExitCode::SUCCESS) };
    let kept = removal.kept(&nearest);
    finish(ranks, || {
        let n_removed = kept.iter().filter(|is_kept| !**is_kept).count();
        let n_others = like.names.len();
        out!(
            "{} with a match among {} others, at a cosine similarity of {threshold} or more",
            counted(n_removed as u64, "image"),
            thousands(n_others as u64)
        );
        draw_pairs(&args.output.out.join(PAIRS), removal.pairs(&input, &like, &nearest), threshold)?;
        let summary = json!({ "threshold": six_digits(threshold) });
        args.output.write(&output, &kept, &|row| removal_columns(&like, &nearest[row]), summary)
    })
}
