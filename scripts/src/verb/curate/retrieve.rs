//! `ocelli curate retrieve`: keeps the images that are most like given ones.

use std::process::ExitCode;

use anyhow::bail;
use clap::ValueEnum;
use curate::Metric;
use curate::io::{Comparison, Retrieval, RetrievedImages};
use pipeline::words::{counted, thousands};
use prep::parts::Work;
use serde_json::json;

use crate::curation::{Call, ClusterFlags, InputFlags, OtherFlags, OutputFlags, bars, finish};
use crate::parts::{PartFlags, result_of_all};

/// Flags of `curate retrieve`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
        ocelli curate retrieve --checkpoint runs/a --shards data/ --like q/ --out r/\n  \
        ocelli curate retrieve --features f.npy --like-features q.npy --out r/")]
pub(crate) struct Args {
    #[command(flatten)]
    input: InputFlags,
    #[command(flatten)]
    like: OtherFlags,
    /// Number of images to retrieve per given image.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Retrieve the nearest images of each given one, or random images of its cluster. DINOv2 did
    /// the latter for small sets of given images.
    #[arg(long, value_enum, default_value_t = By::Image)]
    by: By,
    #[command(flatten)]
    clusters: ClusterFlags,
    #[command(flatten)]
    parts: PartFlags,
    #[command(flatten)]
    output: OutputFlags,
}

/// Which images to retrieve for a given one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    /// The nearest images.
    Image,
    /// Random images of its cluster.
    Cluster,
}

pub(crate) fn run(args: &Args, call: &Call<'_>) -> anyhow::Result<ExitCode> {
    let work = args.input.work(args.parts, call)?;
    work.check_overwrite(args.output.overwrite)?;
    let by_cluster = args.by == By::Cluster;
    if work != Work::Whole && by_cluster {
        bail!(
            "--part and --join need --by image: clustering needs all rows at once, on one machine or under \
             mpirun"
        );
    }
    if args.clusters.is_given() && !by_cluster {
        bail!(
            "--clusters, --splits, --resample-rows and --clusters-of are for --by cluster, and nearest images \
             are searched without clusters: add --by cluster, or leave them out"
        );
    }
    let input = args.input.open(Metric::Cosine, call)?;
    let like = args.like.open(&args.input, &input, call)?;
    let count = args.count as usize;
    let retrieval = Retrieval { count, by_cluster, clusters: args.clusters.settings() };
    let job = retrieval.job(&like, work);
    let comparison = Comparison::new(&job, &input, &like, &args.output.out)?;
    let ranks = call.connect(&args.input.compute)?;
    let output = args.output.settings().claim(&job, &input, call.storage, &ranks)?;
    let share = retrieval.run(&comparison, &output, &ranks, &bars(&ranks))?;
    let Some(retrieved) = result_of_all(share) else { return Ok(ExitCode::SUCCESS) };
    let images = RetrievedImages::new(&retrieved, input.names.len());
    finish(ranks, || {
        let n_given = like.names.len();
        let n_retrieved = counted(retrieved.len() as u64, "image");
        out!("{n_retrieved} retrieved for {} given", thousands(n_given as u64));
        let summary = json!({ "queries": n_given });
        args.output.write(&output, &images.kept, &|row| images.columns(&like, row), summary)
    })
}
