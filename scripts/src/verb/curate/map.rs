//! `ocelli curate map`: draws clusters as a page.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use curate::Metric;
use curate::clusters::Hierarchy;
use eval::features::file::ImageName;
use kernels::rows::Rows;
use pipeline::Storage;
use pipeline::secrets::redact_list;
use rayon::prelude::*;
use report::{ClusterMap, DrawnCluster, MapTile, map_html};
use serde_json::{Map, json};

use crate::cluster::compute;
use crate::curation::clusters::ClusterFlags;
use crate::curation::content::content_identity;
use crate::curation::input::{Images, Input, InputFlags};
use crate::curation::output::{MAP, Output, OutputFlags};
use crate::curation::pairs::image;
use crate::curation::ranks::{all_succeed, connect, finish};
use prep::samples::KeyList;

/// Number of classes that are named for a cluster.
const N_CLASSES: usize = 4;

/// Flags of `curate map`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli curate map --checkpoint runs/mine --shards data/ --clusters 200,20 \
        --out map/\n  ocelli curate map --features features.npy --shards data/ --clusters-of balanced/ \
        --kept balanced/keep.txt --out map/"
)]
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

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    let launch = compute::launch()?;
    let input = args.input.open(Metric::Cosine, &launch, storage, folder)?;
    let kept = args.kept.as_deref().map(|path| read_kept(path, &input.names)).transpose()?;
    let settings = json!({
        "kept": content_identity(args.kept.as_ref()), "level": args.level,
        "max_clusters": args.max_clusters, "max_images": args.max_images,
        "clusters": args.clusters.identity(),
    });
    let Some(images) = &input.images else { bail!("a map needs images: pass --shards") };
    let ranks = connect(&launch, &args.input.compute)?;
    let claimed = args.output.claim("map", settings, &input, &launch, storage);
    let output = all_succeed(&ranks, claimed)?;
    let clusters = args.clusters.run(&input.rows, &args.output.out, &ranks)?;
    let written = write(args, &input, images, &output, &clusters, kept.as_deref());
    finish(ranks, written)
}

/// Writes the page and the lists.
fn write(
    args: &Args,
    input: &Input,
    images: &Images,
    output: &Output<'_>,
    clusters: &Hierarchy,
    kept: Option<&[bool]>,
) -> anyhow::Result<()> {
    if output.is_writer {
        let n_levels = clusters.tree.n_levels();
        let level = args.level.map_or(n_levels, |level| level as usize);
        if level > n_levels {
            bail!("--level {level}: there are only {n_levels} levels of clusters");
        }
        let map = cluster_map(args, input, images, clusters, kept, level - 1)?;
        let path = output.path(MAP);
        pipeline::file::replace(&path, map_html(&map).as_bytes())
            .with_context(|| format!("cannot write {}", path.display()))?;
        out!("{} clusters of level {level}: {}", clusters.tree.n_clusters(level - 1), path.display());
    }
    let all = vec![true; input.rows.len()];
    output.write(
        input,
        kept.unwrap_or(&all),
        &|row: usize| vec![("clusters", json!(clusters.tree.clusters_of(row)))],
        Map::new(),
    )
}

/// Reads which images are kept: a line is a key, or shard, tab and key.
fn read_kept(path: &Path, names: &[ImageName]) -> anyhow::Result<Vec<bool>> {
    let list = KeyList::read(path)?;
    let kept: Vec<bool> = names.iter().map(|name| list.names(name.shard.as_deref(), &name.key)).collect();
    if kept.contains(&true) { Ok(kept) } else { bail!("{} lists none of these images", path.display()) }
}

/// Returns the map of the clusters of `level`, counted from 0.
fn cluster_map(
    args: &Args,
    input: &Input,
    images: &Images,
    clusters: &Hierarchy,
    kept: Option<&[bool]>,
    level: usize,
) -> anyhow::Result<ClusterMap> {
    let mut members: Vec<Vec<usize>> = vec![Vec::new(); clusters.tree.n_clusters(level)];
    for row in 0..input.rows.len() {
        members[clusters.tree.clusters_of(row)[level] as usize].push(row);
    }
    let mut order: Vec<usize> = (0..members.len()).collect();
    order.sort_by_key(|cluster| (std::cmp::Reverse(members[*cluster].len()), *cluster));
    let mut sizes = Vec::new();
    for cluster in &order {
        let rows = &members[*cluster];
        sizes.push([rows.len(), count_kept(rows, kept).unwrap_or(rows.len())]);
    }
    if order.len() > args.max_clusters {
        let first = args.max_clusters.div_ceil(2);
        let last = args.max_clusters / 2;
        order.drain(first..order.len() - last);
    }
    let drawn_clusters: anyhow::Result<Vec<DrawnCluster>> = order
        .par_iter()
        .map(|number| draw_cluster(args, input, images, clusters, kept, *number, &members[*number]))
        .collect();
    Ok(ClusterMap {
        name: images.specs.iter().map(|spec| redact_list(spec)).collect::<Vec<_>>().join(" "),
        n_images: input.rows.len(),
        n_kept: kept.map(|kept| kept.iter().filter(|is_kept| **is_kept).count()),
        n_clusters: (0..clusters.tree.n_levels()).map(|level| clusters.tree.n_clusters(level)).collect(),
        sizes: spread(&sizes),
        level: level + 1,
        clusters: drawn_clusters?,
        about: "Clusters come from hierarchical k-means on the features, by cosine similarity.".into(),
    })
}

/// Returns the number of `rows` that are kept, if `kept` is given.
fn count_kept(rows: &[usize], kept: Option<&[bool]>) -> Option<usize> {
    kept.map(|kept| rows.iter().filter(|row| kept[**row]).count())
}

/// Returns sizes that are spread evenly over `sizes`, at most as many as a page has room for bars.
fn spread(sizes: &[[usize; 2]]) -> Vec<[usize; 2]> {
    const MAX_BARS: usize = 200;
    let n = sizes.len().min(MAX_BARS);
    (0..n).map(|i| sizes[i * sizes.len() / n]).collect()
}

/// Returns cluster `number` with the most frequent classes of its `rows`, and with images that are
/// spread over the distances of the rows from their centers.
fn draw_cluster(
    args: &Args,
    input: &Input,
    images: &Images,
    clusters: &Hierarchy,
    kept: Option<&[bool]>,
    number: usize,
    rows: &[usize],
) -> anyhow::Result<DrawnCluster> {
    let n_kept = count_kept(rows, kept);
    let mut rows = rows.to_vec();
    rows.sort_by(|a, b| clusters.distances[*a].total_cmp(&clusters.distances[*b]).then(a.cmp(b)));
    let n = args.max_images.min(rows.len());
    let mut tiles = Vec::with_capacity(n);
    for row in (0..n).map(|i| rows[i * rows.len() / n]) {
        let Some(pixels) = image(images, row) else { continue };
        let name = &input.names[row];
        let caption = match &name.class {
            Some(class) => format!("{}, {class}", name.key),
            None => name.key.clone(),
        };
        tiles.push(MapTile::new(pixels, caption, kept.map(|kept| kept[row]))?);
    }
    let mut classes: HashMap<&str, usize> = HashMap::new();
    for class in rows.iter().filter_map(|row| input.names[*row].class.as_deref()) {
        *classes.entry(class).or_default() += 1;
    }
    let mut classes: Vec<(String, usize)> =
        classes.into_iter().map(|(name, n)| (name.to_string(), n)).collect();
    classes.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    classes.truncate(N_CLASSES);
    Ok(DrawnCluster { number: number as u32, n_images: rows.len(), n_kept, classes, tiles })
}
