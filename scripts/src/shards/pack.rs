//! Packing of image files into shards.

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
use super::files::{CONVERTED, SampleFile, entries, extension, extensions, print_skipped};
use super::hold::hold;
use super::keys::Keys;
use super::order::shuffle;
use crate::console::say;
use crate::progress::bar;

/// Result of a pack.
pub(crate) struct Packed {
    pub(crate) n_samples: u64,
    pub(crate) n_classes: usize,
    pub(crate) paths: Vec<PathBuf>,
    /// File that lists the images that could not be packed, and their number.
    pub(crate) failures: Option<(PathBuf, usize)>,
    /// Numbers of skipped files, by extension.
    pub(crate) skipped: BTreeMap<String, usize>,
    /// Number of images that EXIF turns.
    pub(crate) n_turned: usize,
}

impl Packed {
    /// Prints what was left out.
    pub(crate) fn tell(&self) {
        print_skipped(&self.skipped);
        if let Some((list, n)) = &self.failures {
            say(format!("warning: {n} images could not be packed: see {}", list.display()));
        }
        if self.n_turned > 0 {
            say(format!(
                "note: EXIF turns {} images, which are packed as they are and trained on without it, as in published recipes; \
                 data.apply_exif=true applies it",
                self.n_turned
            ));
        }
    }
}

/// Images to pack, and the settings.
pub(crate) struct PackJob<'a> {
    /// Folder or list of images.
    pub(crate) input: &'a Path,
    /// Folder of the shards.
    pub(crate) out: &'a Path,
    /// Prefix of the shards' names.
    pub(crate) prefix: &'a str,
    pub(crate) limits: ShardLimits,
    /// List of classes that determines their numbers.
    pub(crate) classes: Option<&'a Path>,
    /// `true` if the classes of an earlier pack in the folder may be replaced.
    pub(crate) overwrite: bool,
    /// Seed of the order in which samples are packed.
    pub(crate) seed: u64,
}

/// Packs the images of `job`.
pub(crate) fn pack(job: &PackJob<'_>) -> anyhow::Result<Packed> {
    let found = entries(job.input)?;
    let _held = hold(job.out)?;
    let mut entries = found.entries;
    let nothing = || pipeline::PipelineError::NoImages {
        path: job.input.to_path_buf(),
        wanted: extensions().collect::<Vec<_>>().join(", "),
    };
    if entries.is_empty() {
        bail!(nothing());
    }
    let labels = entries.iter().filter_map(|entry| entry.class.as_ref());
    let classes = Classes::of(job.classes, job.out, job.overwrite, labels)?;
    // Keys in the order of the list, for any seed.
    let mut keys = Keys::default();
    let mut named: Vec<(String, SampleFile)> =
        entries.drain(..).map(|entry| (keys.of(&entry.name), entry)).collect();
    shuffle(&mut named, job.seed);
    let mut writer = ShardWriter::new(job.out, job.prefix, job.limits)?;
    let progress = bar(named.len() as u64, "pack");
    let (mut failures, mut found_classes, mut n_turned) = (Vec::new(), BTreeSet::new(), 0);
    for (key, entry) in &named {
        progress.inc(1);
        let label = entry.class.as_ref().map(|class| classes.number(class)).transpose()?;
        match image_of(&entry.path) {
            Ok((extension, image)) => {
                n_turned += usize::from(facts(&image).is_ok_and(|facts| facts.turned));
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
        n_turned,
    })
}

/// Adds a sample: its image, its class, and its columns, with its name if the key differs from it.
fn add(
    writer: &mut ShardWriter,
    key: &str,
    entry: &SampleFile,
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

/// Reads the image at `path`: its extension in the shard, and its bytes. A format that the loader does not read is converted
/// to PNG, which loses nothing but further pages and precision beyond 8 bits per color.
fn image_of(path: &Path) -> anyhow::Result<(String, Vec<u8>)> {
    let extension = extension(path).unwrap_or_default();
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if !CONVERTED.contains(&extension.as_str()) {
        if !IMAGE_EXTENSIONS.contains(&extension.as_str()) {
            bail!("{} does not have the extension of an image", path.display());
        }
        // An extension may be wrong: files are renamed, and links may lead anywhere.
        facts(&bytes).with_context(|| format!("{} is not a readable image", path.display()))?;
        return Ok((extension, bytes));
    }
    let image = match extension.as_str() {
        // Nothing in such a file says what it is.
        "tga" => image::load_from_memory_with_format(&bytes, ImageFormat::Tga),
        _ => image::load_from_memory(&bytes),
    };
    let image = image.with_context(|| format!("cannot decode {}", path.display()))?;
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
