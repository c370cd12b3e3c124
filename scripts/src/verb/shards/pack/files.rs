//! A folder of images, or a list of paths, into shards.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use pipeline::shard::IMAGE_EXTENSIONS;
use pipeline::shard::write::{ShardLimits, ShardWriter};
use serde_json::json;

use super::flags::Args;
use crate::console::bar;
use crate::shards::classes::{Classes, write_classes};
use crate::shards::list;
use crate::shards::names::shard_list;
use crate::shards::order::shuffle;

/// An image to pack.
struct Entry {
    path: PathBuf,
    class: Option<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut entries = entries(&args.input)?;
    if entries.is_empty() {
        bail!(pipeline::PipelineError::Empty {
            n_shards: 0,
            wanted: IMAGE_EXTENSIONS.join(", "),
            first: args.input.display().to_string(),
        });
    }
    let classes = Classes::of(
        args.classes.as_deref(),
        &args.out,
        args.web.overwrite,
        entries.iter().filter_map(|entry| entry.class.as_ref()),
    )?;
    shuffle(&mut entries, args.seed);
    let limits = ShardLimits { max_samples: args.samples_per_shard.max(1), max_bytes: args.bytes_per_shard };
    let mut writer = ShardWriter::new(&args.out, &args.prefix, limits)?;
    let progress = bar(entries.len() as u64, "pack");
    for (number, entry) in entries.iter().enumerate() {
        let image =
            std::fs::read(&entry.path).map_err(|e| pipeline::PipelineError::io("read", &entry.path, e))?;
        let extension = extension(&entry.path).unwrap_or_default();
        let label = entry.class.as_ref().map(|class| classes.number(class)).transpose()?;
        let label = label.map(|label| label.to_string());
        let mut members: Vec<(&str, &[u8])> = vec![(&extension, &image)];
        members.extend(label.iter().map(|label| ("cls", label.as_bytes())));
        writer.add(&format!("{number:08}"), &members)?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    if let Classes::Named(names) = &classes {
        write_classes(&args.out, names)?;
    }
    let n_samples = writer.n_samples();
    let paths = writer.finish()?;
    let n_classes = entries.iter().filter_map(|e| e.class.as_ref()).collect::<BTreeSet<_>>().len();
    println!("{n_samples} samples of {n_classes} class(es) in {} shard(s):", paths.len());
    println!("{}", shard_list(&args.out, &args.prefix, paths.len()));
    if args.json {
        println!("{}", json!({ "samples": n_samples, "classes": n_classes, "shards": paths.len() }));
    }
    Ok(ExitCode::SUCCESS)
}

fn entries(input: &Path) -> anyhow::Result<Vec<Entry>> {
    if input.is_dir() {
        return folder(input);
    }
    if !input.exists() {
        bail!("{} does not exist", input.display());
    }
    if !list::is_list(input) {
        bail!("{} is neither a folder nor a .txt, .csv, .tsv or .jsonl list", input.display());
    }
    let rows = list::read(input, "path")?.into_iter();
    rows.map(|row| Ok(Entry { path: beside(input, &row.target)?, class: row.label })).collect()
}

/// Images below `root`, in the order of their paths. An image in a sub-folder has the name of the
/// first folder below `root` as its class.
fn folder(root: &Path) -> anyhow::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for file in walkdir::WalkDir::new(root).follow_links(true).sort_by_file_name() {
        let path = file.with_context(|| format!("cannot read folder {}", root.display()))?.into_path();
        if !path.is_file() || !is_image(&path) {
            continue;
        }
        let below = path.strip_prefix(root)?;
        let in_folder = below.components().count() > 1;
        let class = below.components().next().filter(|_| in_folder);
        let class = class.map(|part| part.as_os_str().to_string_lossy().into_owned());
        entries.push(Entry { path, class });
    }
    Ok(entries)
}

/// A path of a list, relative to the list's folder; it must be an image.
fn beside(list: &Path, path: &str) -> anyhow::Result<PathBuf> {
    let path = list.parent().unwrap_or(Path::new("")).join(path);
    if !is_image(&path) {
        bail!("{}: {} is not a {} file", list.display(), path.display(), IMAGE_EXTENSIONS.join(", "));
    }
    Ok(path)
}

fn is_image(path: &Path) -> bool {
    extension(path).is_some_and(|extension| IMAGE_EXTENSIONS.contains(&extension.as_str()))
}

fn extension(path: &Path) -> Option<String> {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase())
}
