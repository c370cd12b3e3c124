//! `ocelli embed`: writes the features of images to a file for other programs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use eval::embed::{EmbedJob, Embedded};
use eval::features::file::Format;
use eval::image_sets::{open_files, open_images, report_bits};
use eval::{FeatureKind, ImageSet};
use pipeline::Storage;
use pipeline::words::counted;
use prep::parts::Work;
use serde_json::{Value, json};
use session::EvaluatedNetwork;

use crate::cluster::compute;
use crate::console::one_line;
use crate::evaluation_flags::CacheFlags;
use crate::network_flags::NetworkFlags;
use crate::parts::PartFlags;
use crate::progress::StageBar;

/// Largest number of images without a row that are named.
const NAMED: usize = 5;

/// Flags of `embed`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
        ocelli embed --checkpoint runs/mine --images photos/ --out features.npy\n  \
        ocelli embed --checkpoint dinov2_vits14.pth --shards data/ --out f.parquet\n  \
        ocelli embed --checkpoint runs/mine --shards data/ --out f.npy --part 3/16\n  \
        ocelli embed --checkpoint runs/mine --shards data/ --out f.npy --join 16")]
pub(crate) struct Args {
    /// Run, checkpoint, or weights: a file or a folder. Weights are from `ocelli export`, DINO,
    /// DINOv2, DINOv3, timm, torchvision or transformers.
    #[arg(long, value_name = "PATH")]
    checkpoint: PathBuf,
    #[command(flatten)]
    network: NetworkFlags,
    /// Shards of images to embed.
    #[arg(long, num_args = 1.., required_unless_present = "images", conflicts_with = "images")]
    shards: Vec<String>,
    /// Folder of images, or a list of their paths. A folder may have one sub-folder per class; a
    /// list is .txt, .csv, .tsv or .jsonl.
    #[arg(long, value_name = "FOLDER|LIST")]
    images: Option<PathBuf>,
    /// Output file: .npy, .parquet or .safetensors. Keys and classes of the images of a .npy are in
    /// FILE.rows.jsonl.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Concatenate the class tokens of the last N blocks. Of convolutional networks, these are the
    /// mean feature maps of the last N stages.
    #[arg(long, default_value_t = 1, value_name = "N", conflicts_with = "patches")]
    levels: usize,
    /// Append the mean patch token of the last block.
    #[arg(long, conflicts_with = "patches")]
    average: bool,
    /// Write all patch tokens, or all cells of the last feature map, instead.
    #[arg(long)]
    patches: bool,
    /// Replace existing files.
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    parts: PartFlags,
    #[command(flatten)]
    cache: CacheFlags,
    #[command(flatten)]
    compute: compute::ComputeFlags,
    /// Print a line of JSON at the end. It has images, undecodable, left_out, flaws and width, and
    /// without --join also cached, seconds and images_per_s.
    #[arg(long)]
    json: bool,
}

impl Args {
    fn kind(&self) -> FeatureKind {
        if self.patches {
            FeatureKind::Patches
        } else {
            FeatureKind::Vectors { n_levels: self.levels.max(1), average: self.average }
        }
    }
}

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    let format = Format::from_path(&args.out).map_err(anyhow::Error::msg)?;
    let launch = compute::launch()?;
    let job = EmbedJob {
        out: args.out.clone(),
        format,
        kind: args.kind(),
        work: args.parts.work_alone(&launch)?,
        rank: launch.rank,
        world_size: launch.world_size,
        overwrites: args.overwrite,
    };
    job.prepare()?;
    let device = args.compute.open(&launch)?.device;
    let open = EvaluatedNetwork::open(&args.checkpoint, &args.network.settings(), &device)?;
    let images = match &args.images {
        Some(input) => open_files(input, storage.columns(), open.transform, open.rules)?,
        None => open_images(&args.shards, open.transform, open.rules, storage)?,
    };
    report_bits(&images)?;
    let about = open.info(&args.checkpoint)?;
    let cache = args.cache.open(folder);
    let embedded = job.run(&open.network, images, &about, cache.as_ref(), &StageBar::new())?;
    let out = job.path();
    let Some(embedded) = embedded else {
        out!("{} already exists", out.display());
        return Ok(ExitCode::SUCCESS);
    };
    let n = embedded.table.len();
    let width = embedded.table.columns.width();
    if let Work::Join(n_parts) = job.work {
        let rows = counted(n as u64, "row");
        let parts = counted(n_parts as u64, "part");
        out!("{rows} of width {width} from {parts} written to {}", out.display());
        print_summary(args, &embedded, json!({}));
        return Ok(ExitCode::SUCCESS);
    }
    let Embedded { is_cached, seconds, .. } = embedded;
    let rate = embedded.images.len() as f64 / seconds;
    let source = if is_cached { "from the cache".to_string() } else { format!("{rate:.0} images/s") };
    out!("{} of width {width} written to {} ({source})", counted(n as u64, "row"), out.display());
    out!("network: {}; images: {}", open.network_name, open.transform);
    let timing = json!({ "cached": is_cached, "seconds": seconds, "images_per_s": rate });
    print_summary(args, &embedded, timing);
    Ok(ExitCode::SUCCESS)
}

/// Prints the images without a row, and the line of JSON with the fields of `line`.
fn print_summary(args: &Args, embedded: &Embedded, mut line: Value) {
    let images = &embedded.images;
    let missing = embedded.missing();
    let left_out: Vec<String> = missing.iter().map(|index| image_name(images, *index)).collect();
    let flaws: Vec<String> = missing.iter().take(NAMED).map(|index| image_flaw(images, *index)).collect();
    if !missing.is_empty() {
        let unusable = counted(missing.len() as u64, "unusable image");
        out!("{unusable} without a row: {}", list_flaws(&left_out, &flaws));
    }
    if args.json {
        line["images"] = json!(embedded.table.len());
        line["undecodable"] = json!(missing.len());
        line["left_out"] = json!(left_out);
        // Of the first of them.
        line["flaws"] = json!(flaws);
        line["width"] = json!(embedded.table.columns.width());
        out!("{line}");
    }
}

fn image_name(images: &ImageSet, index: usize) -> String {
    match images.describe(index) {
        (Some(shard), key) => format!("{shard}: {key}"),
        (None, name) => name,
    }
}

/// Returns why the image `index` has no row.
fn image_flaw(images: &ImageSet, index: usize) -> String {
    // An image may have been repaired since its features were computed.
    let flaw = images.flaw(index).ok().flatten();
    flaw.unwrap_or_else(|| "cached result; the image is readable now".into())
}

/// Lists the first of the images `left_out` in one line, each with its flaw.
fn list_flaws(left_out: &[String], flaws: &[String]) -> String {
    let mut parts = Vec::new();
    for (name, flaw) in left_out.iter().zip(flaws) {
        parts.push(format!("{} ({})", one_line(name), one_line(flaw)));
    }
    let rest = if left_out.len() > flaws.len() { ", …: pass --json to list all" } else { "" };
    format!("{}{rest}", parts.join(", "))
}
