//! `ocelli curate map`: draws clusters as a page.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use curate::Metric;
use curate::io::{Input, MAP, Map, MappedCluster, MappedLevel};
use pipeline::words::counted;
use rayon::prelude::*;
use report::{ClusterMap, DrawnCluster, MapTile, map_html};
use serde_json::json;

use crate::curation::{Call, ClusterFlags, InputFlags, OutputFlags, bars, finish};

/// Flags of `curate map`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
        ocelli curate map --checkpoint runs/a --shards data/ --clusters 99,9 --out m/\n  \
        ocelli curate map --features f.npy --shards data/ --clusters-of b/ --out m/")]
pub(crate) struct Args {
    #[command(flatten)]
    input: InputFlags,
    /// Kept images: the keep.txt of another curate command.
    #[arg(long, value_name = "FILE")]
    kept: Option<PathBuf>,
    /// Level of the clusters to draw, counted from 1 at the bottom [default: the highest].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    level: Option<u32>,
    /// Maximum number of clusters to draw: half of them the largest, half the smallest.
    #[arg(long, default_value_t = 60, value_name = "N")]
    max_clusters: usize,
    /// Maximum number of images to draw per cluster, spread over their distances from the center.
    #[arg(long, default_value_t = 18, value_name = "N")]
    max_images: usize,
    #[command(flatten)]
    clusters: ClusterFlags,
    #[command(flatten)]
    output: OutputFlags,
}

pub(crate) fn run(args: &Args, call: &Call<'_>) -> anyhow::Result<ExitCode> {
    let input = args.input.open(Metric::Cosine, call)?;
    let map = Map {
        kept: args.kept.clone(),
        level: args.level,
        max_clusters: args.max_clusters,
        max_images: args.max_images,
        clusters: args.clusters.settings(),
    };
    let kept = map.read_kept(&input)?;
    let job = map.job();
    if !input.has_images() {
        bail!("a map needs images: pass --shards");
    }
    let ranks = call.connect(&args.input.compute)?;
    let output = args.output.settings().claim(&job, &input, call.storage, &ranks)?;
    let clusters = map.clusters.run(&input.rows, output.folder(), &ranks, &bars(&ranks))?;
    finish(ranks, || {
        let chosen = map.choose(&input, &clusters, kept.as_deref())?;
        draw(&args.output.out.join(MAP), chosen, &input, kept.as_deref())?;
        let kept = kept.unwrap_or_else(|| vec![true; input.names.len()]);
        args.output.write(
            &output,
            &kept,
            &|row| vec![("clusters", json!(clusters.tree.clusters_of(row)))],
            json!({}),
        )
    })
}

/// Writes the page.
fn draw(path: &Path, chosen: MappedLevel, input: &Input, kept: Option<&[bool]>) -> anyhow::Result<()> {
    let MappedLevel { level, n_clusters, sizes, clusters } = chosen;
    let drawn: anyhow::Result<Vec<DrawnCluster>> =
        clusters.into_par_iter().map(|cluster| draw_cluster(input, kept, cluster)).collect();
    let n = n_clusters[level - 1];
    let page = map_html(&ClusterMap {
        name: input.sources().join(" "),
        n_images: input.names.len(),
        n_kept: kept.map(|kept| kept.iter().filter(|is_kept| **is_kept).count()),
        n_clusters,
        sizes,
        level,
        clusters: drawn?,
        about: "Clusters come from hierarchical k-means on the features, by cosine similarity.".into(),
    });
    pipeline::file::replace(path, page.as_bytes())
        .with_context(|| format!("cannot write {}", path.display()))?;
    out!("{} of level {level}: {}", counted(n as u64, "cluster"), path.display());
    Ok(())
}

/// Draws the images of a cluster.
fn draw_cluster(
    input: &Input,
    kept: Option<&[bool]>,
    cluster: MappedCluster,
) -> anyhow::Result<DrawnCluster> {
    let MappedCluster { index, n_images, n_kept, classes, rows } = cluster;
    let mut tiles = Vec::with_capacity(rows.len());
    for row in rows {
        let Some(pixels) = input.picture(row) else { continue };
        tiles.push(MapTile::new(pixels, input.caption(row), kept.map(|kept| kept[row]))?);
    }
    Ok(DrawnCluster { index, n_images, n_kept, classes, tiles })
}
