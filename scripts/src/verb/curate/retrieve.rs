//! `ocelli curate retrieve`: keeps the images that are most like given ones.

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use clap::ValueEnum;
use curate::Metric;
use curate::selection::{Retrieved, from_clusters, join_nearest, nearest_images, nearest_in_blocks};
use kernels::rows::Rows;
use pipeline::Storage;
use ranks::communicator::Communicator;
use serde_json::{Map, json};

use crate::cluster::compute;
use crate::curation::clusters::ClusterFlags;
use crate::curation::comparison_parts::{check_rows, compare_in_parts, part_results, share_of_work};
use crate::curation::input::{Input, InputFlags};
use crate::curation::others::OtherFlags;
use crate::curation::output::{Output, OutputFlags, six_digits};
use crate::curation::progress::Bars;
use crate::curation::ranks::{all_succeed, connect, finish};
use crate::parts::PartFlags;
use prep::parts::{PartResults, Work};

/// Flags of `curate retrieve`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli curate retrieve --checkpoint runs/mine --shards data/ --like \
        queries/ --count 4 --out found/ --pack\n  ocelli curate retrieve --features features.npy \
        --like-features queries.npy --by cluster --count 100 --out found/\n  ocelli curate retrieve \
        --features features.npy --like-features queries.npy --out found/ --part 3/16\n  ocelli curate \
        retrieve --features features.npy --like-features queries.npy --out found/ --join 16")]
pub(crate) struct Args {
    #[command(flatten)]
    input: InputFlags,
    #[command(flatten)]
    like: OtherFlags,
    /// Number of images to retrieve per given image.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Retrieve the nearest images of each given one, or random images of its cluster, as DINOv2
    /// did for small sets of given images.
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

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    let launch = compute::launch()?;
    let work = share_of_work(args.parts, &args.input, &args.output, &launch)?;
    if work != Work::Whole && args.by == By::Cluster {
        bail!(
            "--part and --join need --by image: clustering needs all rows at once, on one machine or under \
             mpirun"
        );
    }
    let input = args.input.open(Metric::Cosine, &launch, storage, folder)?;
    let like = args.like.open(&args.input, &input, &launch, storage, folder)?;
    let settings = json!({
        "like": like.identity, "count": args.count, "by": format!("{:?}", args.by),
        "clusters": args.clusters.identity(),
    });
    let results = part_results(work, "retrieve", &settings, &input, &like, &args.output)?;
    let ranks = connect(&launch, &args.input.compute)?;
    let claimed = args.output.claim_for(work, "retrieve", settings, &input, &launch, storage);
    let output = all_succeed(&ranks, claimed)?;
    let Some(retrieved) = retrieve(args, work, &results, &input, &like, &ranks)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let written = write(&input, &like, &output, &retrieved);
    finish(ranks, written)
}

/// Prints the number of retrieved images, and writes the lists.
fn write(input: &Input, like: &Input, output: &Output<'_>, retrieved: &[Retrieved]) -> anyhow::Result<()> {
    let by_row: HashMap<u32, Retrieved> = retrieved.iter().map(|image| (image.row, *image)).collect();
    let kept: Vec<bool> = (0..input.rows.len() as u32).map(|row| by_row.contains_key(&row)).collect();
    if output.is_writer {
        out!("{} images retrieved for {} given ones", retrieved.len(), like.rows.len());
    }
    let summary = Map::from_iter([("queries".to_string(), json!(like.rows.len()))]);
    output.write(
        input,
        &kept,
        &|row: usize| match by_row.get(&(row as u32)) {
            Some(image) => vec![
                ("query", json!(like.names[image.query as usize].key)),
                ("similarity", six_digits(image.similarity)),
            ],
            None => Vec::new(),
        },
        summary,
    )
}

/// Retrieves the images like `like`, or joins the results of parts; a part saves its result and
/// returns `None`.
fn retrieve(
    args: &Args,
    work: Work,
    results: &PartResults,
    input: &Input,
    like: &Input,
    ranks: &Communicator,
) -> anyhow::Result<Option<Vec<Retrieved>>> {
    let rows = &input.rows;
    let others = &like.rows;
    let count = args.count as usize;
    check_rows(work, input, like, ranks)?;
    if args.by == By::Cluster {
        let clusters = args.clusters.run(rows, &args.output.out, ranks)?;
        let parents = clusters.tree.parents(0);
        let seed = args.clusters.limits.seed;
        return Ok(Some(from_clusters(rows, others, &clusters.centers[0], parents, count, seed)?));
    }
    if work == Work::Whole {
        return Ok(Some(nearest_images(rows, others, count, ranks, &Bars::new(ranks))?));
    }
    let retrieved = compare_in_parts(
        work,
        results,
        input,
        like,
        |n_rows: usize| others.len() * count.min(n_rows),
        |blocks| nearest_in_blocks(rows, blocks, others, count, &Bars::new(ranks)),
    )?;
    Ok(retrieved.map(|retrieved| join_nearest(retrieved, count)))
}
