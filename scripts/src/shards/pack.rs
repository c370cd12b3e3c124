//! Packing of image files into shards.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Cursor;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use augment::DecodeRules;
use augment::bands::{self, MapData};
use augment::facts::facts;
use image::{DynamicImage, ImageFormat};
use pipeline::file;
use pipeline::shard::IMAGE_EXTENSIONS;
use pipeline::shard::write::{ShardLimits, ShardWriter};
use serde_json::{Value, json};

use super::bands::{BandFile, Sample, joined};
use super::classes::{Classes, write_classes};
use super::files::{
    CONVERTED, FoundFiles, SIDECAR_EXTENSIONS, SampleFile, entries, extension, extensions, print_skipped,
};
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
    /// `true` if files such as `tile.b02.tif` are bands of one image.
    pub(crate) joins_bands: bool,
}

/// Finds the samples of `job`, and the numbers of other files by extension.
fn samples(job: &PackJob<'_>) -> anyhow::Result<(Vec<Sample>, BTreeMap<String, usize>)> {
    let FoundFiles { entries, mut skipped } = entries(job.input)?;
    if !job.joins_bands {
        return Ok((entries.into_iter().map(Sample::from).collect(), skipped));
    }
    // Those that belong to a sample of several files were found with it.
    skipped.retain(|extension, _| !SIDECAR_EXTENSIONS.contains(&extension.as_str()));
    Ok((joined(entries)?, skipped))
}

/// Packs the images of `job`.
pub(crate) fn pack(job: &PackJob<'_>) -> anyhow::Result<Packed> {
    let (entries, skipped) = samples(job)?;
    let _held = hold(job.out)?;
    let nothing = || pipeline::PipelineError::NoImages {
        path: job.input.to_path_buf(),
        wanted: extensions().collect::<Vec<_>>().join(", "),
    };
    if entries.is_empty() {
        bail!(nothing());
    }
    let labels = entries.iter().filter_map(|sample| sample.entry.class.as_ref());
    let classes = Classes::of(job.classes, job.out, job.overwrite, labels)?;
    // Keys in the order of the list, for any seed.
    let mut keys = Keys::default();
    let mut named: Vec<(String, Sample)> =
        entries.into_iter().map(|sample| (keys.of(&sample.entry.name), sample)).collect();
    shuffle(&mut named, job.seed);
    let mut writer = ShardWriter::new(job.out, job.prefix, job.limits)?;
    let progress = bar(named.len() as u64, "pack");
    let (mut failures, mut found_classes, mut n_turned) = (Vec::new(), BTreeSet::new(), 0);
    for (key, sample @ Sample { entry, .. }) in &named {
        progress.inc(1);
        let label = entry.class.as_ref().map(|class| classes.number(class)).transpose()?;
        match files_of(sample) {
            Ok(files) => {
                n_turned +=
                    usize::from(files.iter().any(|(_, file)| facts(file).is_ok_and(|facts| facts.turned)));
                add(&mut writer, key, entry, &files, label)?;
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
    Ok(Packed {
        n_samples,
        n_classes: found_classes.len(),
        paths: writer.finish()?,
        failures: write_failures(job, &failures)?,
        skipped,
        n_turned,
    })
}

/// Writes the lines of the images that could not be packed, if there are any; returns the list and their number.
fn write_failures(job: &PackJob<'_>, lines: &[String]) -> anyhow::Result<Option<(PathBuf, usize)>> {
    if lines.is_empty() {
        return Ok(None);
    }
    let list = job.out.join(format!("{}.failures.jsonl", job.prefix));
    file::replace(&list, lines.concat().as_bytes())
        .with_context(|| format!("cannot write {}", list.display()))?;
    Ok(Some((list, lines.len())))
}

/// Reads the files of the image of `sample`: extension in the shard, and bytes.
fn files_of(sample: &Sample) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let read = |file: &BandFile| match &file.extension {
        None => image_of(&file.path),
        Some(extension) => Ok((extension.clone(), read_image(&file.path)?)),
    };
    let files: Vec<(String, Vec<u8>)> = sample.files.iter().map(read).collect::<anyhow::Result<_>>()?;
    if files.len() > 1 {
        let all: Vec<&[u8]> = files.iter().map(|(_, bytes)| bytes.as_slice()).collect();
        bands::found(&all, &DecodeRules::default())?;
    }
    Ok(files)
}

/// Adds a sample: its image, its class, and its columns, with its name if the key differs from it, and with the map data of its image.
fn add(
    writer: &mut ShardWriter,
    key: &str,
    entry: &SampleFile,
    files: &[(String, Vec<u8>)],
    label: Option<usize>,
) -> anyhow::Result<()> {
    let label = label.map(|label| label.to_string());
    let mut columns = entry.columns.clone();
    if Path::new(&entry.name).with_extension("") != Path::new(key) {
        columns.entry("name").or_insert(Value::String(entry.name.clone()));
    }
    if let Some((_, first)) = files.first()
        && let Ok(Some(map)) = bands::map_data(first)
    {
        for (name, value) in map_columns(&map) {
            columns.entry(name).or_insert(value);
        }
    }
    let columns = (!columns.is_empty()).then(|| Value::Object(columns).to_string());
    let mut members: Vec<(&str, &[u8])> =
        files.iter().map(|(extension, bytes)| (extension.as_str(), bytes.as_slice())).collect();
    members.extend(label.iter().map(|label| ("cls", label.as_bytes())));
    members.extend(columns.iter().map(|columns| ("json", columns.as_bytes())));
    Ok(writer.add(key, &members)?)
}

/// Returns the columns of the map data of a GeoTIFF: `map_epsg`, `map_x` and `map_y` of the upper left corner, `map_pixel_width`,
/// `map_pixel_height` and `map_no_data`.
fn map_columns(map: &MapData) -> impl Iterator<Item = (&'static str, Value)> {
    let [x, y] = map.corner.map_or([None; 2], |corner| corner.map(Some));
    let [width, height] = map.pixel_size.map_or([None; 2], |size| size.map(Some));
    let numbers = [("map_x", x), ("map_y", y), ("map_pixel_width", width), ("map_pixel_height", height)];
    let numbers = numbers.into_iter().filter_map(|(name, value)| Some((name, Value::from(value?))));
    let epsg = map.epsg.map(|code| ("map_epsg", Value::from(code)));
    let no_data = map.no_data.clone().map(|text| ("map_no_data", Value::from(text)));
    epsg.into_iter().chain(numbers).chain(no_data)
}

/// Reads the file of an image, whose header must be readable: an extension may be wrong, and links may lead anywhere.
fn read_image(path: &Path) -> anyhow::Result<Vec<u8>> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    facts(&bytes).with_context(|| format!("{} is not a readable image", path.display()))?;
    Ok(bytes)
}

/// Reads the image at `path`: its extension in the shard, and its bytes. A format that few other programs read in shards is converted
/// to PNG, unless it is a TIFF that a PNG cannot hold.
fn image_of(path: &Path) -> anyhow::Result<(String, Vec<u8>)> {
    let extension = extension(path).unwrap_or_default();
    if !CONVERTED.contains(&extension.as_str()) {
        if !IMAGE_EXTENSIONS.contains(&extension.as_str()) {
            bail!("{} does not have the extension of an image", path.display());
        }
        return Ok((extension, read_image(path)?));
    }
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let has_map = bands::map_data(&bytes).is_ok_and(|map| map.is_some());
    if bands::format_of(&bytes).is_some() && (has_map || bands::is_more_than_a_picture(&bytes)) {
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
        | DynamicImage::ImageRgba8(_)
        | DynamicImage::ImageLuma16(_)
        | DynamicImage::ImageLumaA16(_)
        | DynamicImage::ImageRgb16(_)
        | DynamicImage::ImageRgba16(_)) => image,
        image => DynamicImage::ImageRgb8(image.to_rgb8()),
    };
    let mut png = Cursor::new(Vec::new());
    image
        .write_to(&mut png, ImageFormat::Png)
        .with_context(|| format!("cannot encode {}", path.display()))?;
    Ok(("png".into(), png.into_inner()))
}
