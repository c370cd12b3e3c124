//! Files of images into shards.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Cursor;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use augment::facts::facts;
use image::{DynamicImage, ImageFormat};
use pipeline::file;
use pipeline::shard::IMAGE_EXTENSIONS;
use pipeline::shard::write::{ShardLimits, ShardWriter};
use serde_json::{Value, json};

use super::classes::{Classes, write_classes};
use super::files::{CONVERTED, Entry, entries, extension, tell_skipped};
use super::hold::hold;
use super::keys::Keys;
use super::order::shuffle;
use crate::console::say;
use crate::progress::bar;

/// What was packed.
pub(crate) struct Packed {
    pub(crate) n_samples: u64,
    pub(crate) n_classes: usize,
    pub(crate) paths: Vec<PathBuf>,
    /// The list of what could not be packed, and how many there are.
    pub(crate) failures: Option<(PathBuf, usize)>,
    /// Files of other kinds, by extension.
    pub(crate) skipped: BTreeMap<String, usize>,
}

impl Packed {
    /// Says what was left out.
    pub(crate) fn tell(&self) {
        tell_skipped(&self.skipped);
        if let Some((list, n)) = &self.failures {
            say(format!("warning: {n} images could not be packed: see {}", list.display()));
        }
    }
}

/// What is packed, and how.
pub(crate) struct PackJob<'a> {
    /// A folder or a list.
    pub(crate) input: &'a Path,
    /// Folder of the shards.
    pub(crate) out: &'a Path,
    /// Beginning of their names.
    pub(crate) prefix: &'a str,
    pub(crate) limits: ShardLimits,
    /// A list of classes to number by.
    pub(crate) classes: Option<&'a Path>,
    /// Whether the folder may hold other classes.
    pub(crate) overwrite: bool,
    /// Seed of the order in which samples are packed.
    pub(crate) seed: u64,
}

/// Packs what `job` names.
pub(crate) fn pack(job: &PackJob<'_>) -> anyhow::Result<Packed> {
    let found = entries(job.input)?;
    let _held = hold(job.out)?;
    let mut entries = found.entries;
    let nothing = || pipeline::PipelineError::NoImages {
        path: job.input.to_path_buf(),
        wanted: IMAGE_EXTENSIONS.iter().chain(&CONVERTED).copied().collect::<Vec<_>>().join(", "),
    };
    if entries.is_empty() {
        bail!(nothing());
    }
    let labels = entries.iter().filter_map(|entry| entry.class.as_ref());
    let classes = Classes::of(job.classes, job.out, job.overwrite, labels)?;
    // Keys in the order of the list, whatever the seed.
    let mut keys = Keys::default();
    let mut named: Vec<(String, Entry)> =
        entries.drain(..).map(|entry| (keys.of(&entry.name), entry)).collect();
    shuffle(&mut named, job.seed);
    let mut writer = ShardWriter::new(job.out, job.prefix, job.limits)?;
    let progress = bar(named.len() as u64, "pack");
    let (mut failures, mut found_classes) = (Vec::new(), BTreeSet::new());
    for (key, entry) in &named {
        progress.inc(1);
        let label = entry.class.as_ref().map(|class| classes.number(class)).transpose()?;
        match image_of(&entry.path) {
            Ok((extension, image)) => {
                add(&mut writer, key, entry, (&extension, &image), label)?;
                found_classes.extend(&entry.class);
            }
            Err(error) => {
                let row = json!({ "path": entry.name, "reason": crate::console::chain(&error) });
                failures.push(format!("{row}\n"));
            }
        }
    }
    progress.finish_and_clear();
    let n_samples = writer.n_samples();
    if n_samples == 0 {
        say(format!("the first of {} images: {}", named.len(), failures[0].trim_end()));
        bail!(nothing());
    }
    if let Classes::Named(names) = &classes {
        write_classes(job.out, names)?;
    }
    let failed = (!failures.is_empty()).then(|| job.out.join(format!("{}.failures.jsonl", job.prefix)));
    if let Some(list) = &failed {
        file::replace(list, failures.concat().as_bytes())
            .with_context(|| format!("cannot write {}", list.display()))?;
    }
    Ok(Packed {
        n_samples,
        n_classes: found_classes.len(),
        paths: writer.finish()?,
        failures: failed.map(|list| (list, failures.len())),
        skipped: found.skipped,
    })
}

/// Adds a sample: its image, its class, and, where there are more columns or its key does not say its name, all of these.
fn add(
    writer: &mut ShardWriter,
    key: &str,
    entry: &Entry,
    (extension, image): (&str, &[u8]),
    label: Option<usize>,
) -> anyhow::Result<()> {
    let label = label.map(|label| label.to_string());
    let mut columns = entry.columns.clone();
    if Path::new(&entry.name).with_extension("") != Path::new(key) {
        columns.entry("name").or_insert(Value::String(entry.name.clone()));
    }
    let columns = (!columns.is_empty()).then(|| Value::Object(columns).to_string());
    let mut members: Vec<(&str, &[u8])> = vec![(extension, image)];
    members.extend(label.iter().map(|label| ("cls", label.as_bytes())));
    members.extend(columns.iter().map(|columns| ("json", columns.as_bytes())));
    Ok(writer.add(key, &members)?)
}

/// The image at `path`: its extension in the shard, and its bytes. What the loader does not read becomes a PNG, which loses
/// nothing but further pages and what exceeds 8 bits a color.
fn image_of(path: &Path) -> anyhow::Result<(String, Vec<u8>)> {
    let extension = extension(path).unwrap_or_default();
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if !CONVERTED.contains(&extension.as_str()) {
        if !IMAGE_EXTENSIONS.contains(&extension.as_str()) {
            bail!("{} is no image by its name", path.display());
        }
        // A name says little: links lead anywhere, and files are renamed.
        facts(&bytes).with_context(|| format!("{} is no image by its content", path.display()))?;
        return Ok((extension, bytes));
    }
    let image =
        image::load_from_memory(&bytes).with_context(|| format!("cannot decode {}", path.display()))?;
    let image = match image {
        image @ (DynamicImage::ImageLuma8(_)
        | DynamicImage::ImageLumaA8(_)
        | DynamicImage::ImageRgb8(_)
        | DynamicImage::ImageRgba8(_)) => image,
        image => DynamicImage::ImageRgb8(image.to_rgb8()),
    };
    let mut png = Cursor::new(Vec::new());
    image
        .write_to(&mut png, ImageFormat::Png)
        .with_context(|| format!("cannot encode {}", path.display()))?;
    Ok(("png".into(), png.into_inner()))
}
