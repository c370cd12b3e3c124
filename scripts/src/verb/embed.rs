//! `ocelli embed`: writes the features of images to a file for other programs.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use eval::features::file::{FeatureFile, Format, export_files, read, write};
use eval::{Columns, FeatureKind, ImageFile, ImageSet, Source, Table, features};
use pipeline::Storage;
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use crate::cluster::compute;
use crate::console::one_line;
use crate::evaluation::flags::CacheFlags;
use crate::evaluation::image_sets::{report_image_set_bits, with_names};
use crate::evaluation::network::{NetworkFlags, OpenNetwork};
use crate::evaluation::scores::set_name;
use crate::parts::PartFlags;
use crate::progress::StageBar;
use prep::files::{FoundFiles, find_images, name_of, report_skipped};
use prep::folder_lock::{FolderLock, lock_part};
use prep::open::open_dataset;
use prep::parts::{Part, Work, check_none_missing};

/// Largest number of images without a row that are named.
const NAMED: usize = 5;

/// Flags of `embed`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli embed --checkpoint runs/mine --images photos/ --out features.npy\n  \
        ocelli embed --checkpoint dinov2_vits14_pretrain.pth --shards 'data/train-*.tar' --out \
        features.parquet\n  ocelli embed --checkpoint runs/mine --shards data/ --out features.npy --part \
        3/16\n  ocelli embed --checkpoint runs/mine --shards data/ --out features.npy --join 16"
)]
pub(crate) struct Args {
    /// A run's work directory, a checkpoint folder, or weights: a file or folder from `ocelli
    /// export`, DINO, DINOv2, timm, torchvision or transformers.
    #[arg(long)]
    checkpoint: PathBuf,
    #[command(flatten)]
    network: NetworkFlags,
    /// Shards of images to embed.
    #[arg(long, num_args = 1.., required_unless_present = "images", conflicts_with = "images")]
    shards: Vec<String>,
    /// Folder of images, with or without one sub-folder per class, or a .txt, .csv, .tsv or .jsonl
    /// list of paths.
    #[arg(long, value_name = "FOLDER|LIST")]
    images: Option<PathBuf>,
    /// Output file: .npy, with the images' keys and classes in FILE.rows.jsonl; .parquet; or
    /// .safetensors.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Concatenate the class tokens of the last N blocks, or the mean feature maps of the last N
    /// stages.
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
    /// Print a line of JSON at the end: images, undecodable, width, cached, seconds, images_per_s.
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
    let work = args.parts.work_alone(&launch)?;
    // Each rank of a launcher computes a part.
    let (rank, n_parts) = match work {
        Work::Part(part) => part.rank(),
        Work::Whole | Work::Join(_) => (launch.rank, launch.world_size),
    };
    let out = part_path(&args.out, rank, n_parts);
    let existing = export_files(&out, format).into_iter().find(|path| path.exists() && !args.overwrite);
    if let Some(path) = &existing
        && !matches!(work, Work::Part(_))
    {
        bail!("{} exists; pass --overwrite to replace it", path.display());
    }
    pipeline::file::create_parent(&out)
        .with_context(|| format!("cannot create the folder of {}", out.display()))?;
    let device = args.compute.open(&launch)?.device;
    let open = args.network.open(&args.checkpoint, &device)?;
    let images = open_images(args, storage, &open)?;
    if images.len() < n_parts {
        bail!("{} images cannot be divided into {n_parts} parts", images.len());
    }
    let kind = args.kind();
    let mut description = describe(args, &open, &images)?;
    if let Work::Join(n_parts) = work {
        return join(args, format, &images, description, n_parts);
    }
    let _lock = lock_output(&args.out, work)?;
    let images = images.part(rank, n_parts);
    if existing.is_some() && out.exists() {
        check_description(&out, &read(&out)?, &description)?;
        out!("{} already exists", out.display());
        return Ok(ExitCode::SUCCESS);
    }
    let start = Instant::now();
    let cache = args.cache.open(folder);
    let is_cached = match &cache {
        Some(cache) => cache.holds(&open.network, &images, kind)?,
        None => false,
    };
    let table = {
        let progress = StageBar::new();
        features(cache.as_ref(), &open.network, &images, kind, &progress)?
    };
    let seconds = start.elapsed().as_secs_f64();
    description["columns"] = json!(table.columns);
    if out.exists() {
        // If the program is stopped between the two writes, the new list of images must not be
        // beside the old features.
        fs::remove_file(&out).with_context(|| format!("cannot remove {}", out.display()))?;
    }
    write(&out, format, &table, &images, &description)?;
    let rate = images.len() as f64 / seconds;
    let source = if is_cached { "from the cache".to_string() } else { format!("{rate:.0} images/s") };
    out!("{} rows of width {} written to {} ({source})", table.len(), table.columns.width(), out.display());
    out!("network: {}; images: {}", open.which, open.transform);
    let timing = json!({ "cached": is_cached, "seconds": seconds, "images_per_s": rate });
    print_summary(args, &images, &table, &timing);
    Ok(ExitCode::SUCCESS)
}

/// Prints the images without a row, and the line of JSON with the fields `more`.
fn print_summary(args: &Args, images: &ImageSet, table: &Table, more: &Value) {
    let n = table.len();
    let n_bad = images.len() - table.len();
    let missing = missing_images(images, table);
    let left_out: Vec<String> = missing.iter().map(|number| image_name(images, *number)).collect();
    if n_bad > 0 {
        out!("{n_bad} unusable images have no row: {}", list_flaws(images, &missing));
    }
    if args.json {
        let mut line = json!({ "images": n, "undecodable": n_bad, "left_out": left_out,
            "width": table.columns.width() });
        for (key, value) in more.as_object().into_iter().flatten() {
            line[key] = value.clone();
        }
        out!("{line}");
    }
}

/// Writes the rows of `n_parts` files, which are all of `images`, to one file.
fn join(
    args: &Args,
    format: Format,
    images: &ImageSet,
    mut description: Value,
    n_parts: usize,
) -> anyhow::Result<ExitCode> {
    let missing: Vec<Part> =
        Part::all(n_parts).filter(|part| !part_path(&args.out, part.rank().0, n_parts).exists()).collect();
    check_none_missing(&missing)?;
    let mut numbers = Vec::new();
    let mut rows = Vec::new();
    let mut columns = None;
    for part in Part::all(n_parts) {
        let path = part_path(&args.out, part.rank().0, n_parts);
        let range = part.range(images.len());
        let file = read(&path)?;
        check_description(&path, &file, &description)?;
        let part_columns: Columns = serde_json::from_value(file.about["columns"].clone())
            .with_context(|| format!("{} does not describe its columns", path.display()))?;
        columns.get_or_insert(part_columns);
        let mut names = file.images.into_iter().flatten().peekable();
        for number in range {
            let (shard, key) = images.describe(number);
            // An image that could not be decoded has no row.
            if names.next_if(|name| name.shard == shard && name.key == key).is_some() {
                numbers.push(number as u32);
            }
        }
        if let Some(name) = names.next() {
            bail!("{} has a row for {}, which is not an image of its part", path.display(), name.key);
        }
        rows.extend_from_slice(file.table.rows());
    }
    let columns = columns.context("--join found no parts")?;
    description["columns"] = json!(columns);
    let table = Table::new(columns, numbers, rows);
    write(&args.out, format, &table, images, &description)?;
    out!(
        "{} rows of width {} from {n_parts} parts written to {}",
        table.len(),
        table.columns.width(),
        args.out.display()
    );
    print_summary(args, images, &table, &json!({}));
    Ok(ExitCode::SUCCESS)
}

/// Opens the images.
fn open_images(args: &Args, storage: &Storage, open: &OpenNetwork) -> anyhow::Result<ImageSet> {
    let (source, name) = open_source(args, storage)?;
    let images = ImageSet::open(source, open.transform, open.rules, name)?;
    report_image_set_bits(&images)?;
    if args.images.is_some() { Ok(images) } else { with_names(images, &args.shards, storage) }
}

/// Describes the features of `images`, except for their columns.
fn describe(args: &Args, open: &OpenNetwork, images: &ImageSet) -> anyhow::Result<Value> {
    let mut description = json!(open.about(&args.checkpoint));
    description["images"] = json!(images.name);
    description["features"] = json!(args.kind());
    description["classes"] = json!(images.classes());
    description["set"] = json!(set_identity(images)?);
    Ok(description)
}

/// Locks the part of `out` that this command writes, if it writes a part.
fn lock_output(out: &Path, work: Work) -> anyhow::Result<Option<FolderLock>> {
    let Work::Part(part) = work else { return Ok(None) };
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    Ok(Some(lock_part(folder, &name, part)?))
}

/// Identifies the images of a set: their number, and a hash of their names and contents.
fn set_identity(images: &ImageSet) -> anyhow::Result<String> {
    let mut hash = Xxh3::new();
    for number in 0..images.len() {
        let (shard, key) = images.describe(number);
        hash.update(json!([shard, key]).to_string().as_bytes());
    }
    hash.update(&images.recognition()?.to_le_bytes());
    Ok(format!("{} images, {:016x}", images.len(), hash.digest()))
}

/// Checks that the features in `file` are those of `description`.
fn check_description(path: &Path, file: &FeatureFile, description: &Value) -> anyhow::Result<()> {
    let mut existing = file.about.clone();
    if let Some(fields) = existing.as_object_mut() {
        fields.remove("columns");
    }
    if existing == *description {
        Ok(())
    } else {
        bail!(
            "{} holds features of another network, other images or another kind; pass --overwrite to \
             replace a part",
            path.display()
        )
    }
}

/// Returns the numbers of the images that have no row.
fn missing_images(images: &ImageSet, table: &Table) -> Vec<usize> {
    let present: HashSet<u32> = table.images.iter().copied().collect();
    (0..images.len()).filter(|number| !present.contains(&(*number as u32))).collect()
}

fn image_name(images: &ImageSet, number: usize) -> String {
    match images.describe(number) {
        (Some(shard), key) => format!("{shard}: {key}"),
        (None, name) => name,
    }
}

/// Lists the first of the images `missing` in one line, each with its flaw.
fn list_flaws(images: &ImageSet, missing: &[usize]) -> String {
    let mut parts = Vec::new();
    for number in missing.iter().take(NAMED) {
        // An image may have been repaired since its features were computed.
        let flaw = images
            .flaw(*number)
            .ok()
            .flatten()
            .unwrap_or_else(|| "cached result; the image is readable now".into());
        parts.push(format!("{} ({})", one_line(&image_name(images, *number)), one_line(&flaw)));
    }
    let rest = if missing.len() > NAMED { ", …: pass --json to list all" } else { "" };
    format!("{}{rest}", parts.join(", "))
}

/// Opens the images; returns them with the name of their set.
fn open_source(args: &Args, storage: &Storage) -> anyhow::Result<(Source, String)> {
    let Some(input) = &args.images else {
        return Ok((Source::Shards(Arc::new(open_dataset(&args.shards, storage)?)), set_name(&args.shards)));
    };
    let root = if input.is_dir() { input.as_path() } else { input.parent().unwrap_or(Path::new("")) };
    let FoundFiles { entries, skipped } = find_images(input, storage.columns())?;
    report_skipped(&skipped);
    let files: Vec<ImageFile> = entries
        .into_iter()
        .map(|entry| ImageFile {
            name: name_of(entry.path.strip_prefix(root).unwrap_or(&entry.path)),
            path: entry.path,
            class: entry.class,
        })
        .collect();
    if files.is_empty() {
        bail!("{} contains no images", input.display());
    }
    Ok((Source::Files(Arc::new(files)), input.display().to_string()))
}

/// Returns the path of a part's file, such as `x-00001-of-00004.npy`.
fn part_path(out: &Path, rank: usize, n_parts: usize) -> PathBuf {
    if n_parts == 1 {
        return out.to_path_buf();
    }
    let stem = out.file_stem().unwrap_or_default();
    let extension = out.extension().unwrap_or_default();
    let name =
        format!("{}-{rank:05}-of-{n_parts:05}.{}", stem.to_string_lossy(), extension.to_string_lossy());
    out.with_file_name(name)
}
