//! `ocelli shards pack`: a folder of images, or a list of them, into shards.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use augment::ViewRng;
use pipeline::dataset::IMAGE_EXTENSIONS;
use pipeline::write::{ShardLimits, ShardWriter};
use serde_json::json;

use super::pack_urls::{self, WebFlags};
use super::shards::write_classes;
use crate::list;
use crate::progress::bar;

/// Flags of `shards pack`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A folder (plain, or one sub-folder a class), or a .csv, .tsv or .jsonl list with the columns
    /// `path` and, if there are labels, `label`, or a .txt list. Paths are relative to the list.
    pub(super) input: PathBuf,
    /// Folder for the shards.
    #[arg(long)]
    pub(super) out: PathBuf,
    /// Name of the shards.
    #[arg(long, default_value = "train")]
    pub(super) prefix: String,
    /// Samples of a shard at the most.
    #[arg(long, default_value_t = 10_000)]
    pub(super) samples_per_shard: u64,
    /// Bytes of a shard at the most. With --urls the number of samples alone counts.
    #[arg(long, default_value_t = 1 << 30)]
    pub(super) bytes_per_shard: u64,
    /// Number classes by this list, one name a line: the classes.txt of another pack. Without it,
    /// labels that are all numbers stay as they are, and names are numbered in alphabetical order.
    #[arg(long)]
    pub(super) classes: Option<PathBuf>,
    /// Seed of the order in which samples are packed.
    #[arg(long, default_value_t = 0)]
    pub(super) seed: u64,
    /// End with one line of JSON.
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) web: WebFlags,
}

/// An image to pack.
struct Entry {
    path: PathBuf,
    class: Option<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.web.urls {
        return pack_urls::run(args);
    }
    let mut entries = entries(&args.input)?;
    if entries.is_empty() {
        bail!(pipeline::PipelineError::Empty {
            n_shards: 0,
            wanted: IMAGE_EXTENSIONS.join(", "),
            first: args.input.display().to_string(),
        });
    }
    let classes = Classes::of(args, entries.iter().filter_map(|entry| entry.class.as_ref()))?;
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

/// How labels become numbers.
pub(super) enum Classes {
    /// They are numbers.
    Numbers,
    /// By the place in a list of names.
    Named(Vec<String>),
}

impl Classes {
    pub(super) fn of<'a>(args: &Args, labels: impl Iterator<Item = &'a String>) -> anyhow::Result<Self> {
        let found: BTreeSet<&String> = labels.collect();
        let path = args.out.join("classes.txt");
        let read = |path: &Path| -> anyhow::Result<Vec<String>> {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read the classes in {}", path.display()))?;
            Ok(text.lines().map(str::to_string).collect())
        };
        let names = match &args.classes {
            Some(list) => read(list)?,
            None if found.iter().all(|class| class.parse::<u32>().is_ok()) => return Ok(Self::Numbers),
            None => found.into_iter().cloned().collect(),
        };
        if path.exists() && !args.web.overwrite && read(&path)? != names {
            bail!(
                "{} holds other classes; give --classes {} to number by it, or another --out",
                path.display(),
                path.display()
            );
        }
        Ok(Self::Named(names))
    }

    /// Names in the order of their numbers, where classes have names.
    pub(super) fn names(&self) -> Option<&Vec<String>> {
        match self {
            Self::Numbers => None,
            Self::Named(names) => Some(names),
        }
    }

    pub(super) fn number(&self, class: &str) -> anyhow::Result<usize> {
        match self {
            Self::Numbers => Ok(class.parse()?),
            Self::Named(names) => names.iter().position(|name| name == class).with_context(|| {
                format!("class {class:?} does not stand in the list of classes ({} names)", names.len())
            }),
        }
    }
}

/// The shards as one list that other verbs understand.
pub(crate) fn shard_list(folder: &Path, prefix: &str, n_shards: usize) -> String {
    let range = match n_shards {
        0 | 1 => "000000".to_string(),
        n => format!("{{000000..{:06}}}", n - 1),
    };
    format!("{}/{prefix}-{range}.tar", folder.display())
}

pub(super) fn shuffle<T>(entries: &mut [T], seed: u64) {
    /// Keeps this stream apart from all others.
    const DOMAIN: u64 = 0x7061_636b_0000_0000;
    ViewRng::from_words([seed, DOMAIN, 0, 0]).shuffle(entries);
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
