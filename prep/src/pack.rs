//! Packing of image files into shards.
//!
//! The list of images alone determines which of them a shard holds ([`plan_shards`]): parts of a
//! job write the shards that one job would write, and a job that was stopped continues with the
//! shards that are missing. An image that cannot be packed is left out of its shard.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use augment::DecodeRules;
use augment::bands::{self, MapData};
use augment::facts::facts;
use pipeline::shard::write::{ShardFile, ShardLimits, plan_shards, sample_bytes};
use pipeline::words::counted;
use pipeline::{PipelineError, Progress, Shard, file};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use crate::bands::{Sample, join_bands};
use crate::bits::{BitsUsed, N_INSPECTED};
use crate::classes::{Classes, warn_of_parts, write_classes};
use crate::error::PrepError;
use crate::files::{
    FoundFiles, SIDECAR_EXTENSIONS, SampleFile, extension, extensions, find_images, report_skipped,
};
use crate::folder_lock::lock_for;
use crate::image_file::{read_files, read_mask};
use crate::keys::Keys;
use crate::lazy_shard::LazyShard;
use crate::order::shuffle;
pub use crate::pack_job::PackJob;
use crate::pack_job::{Contents, claim, failures_path, is_done, job_path, shard_path};
use crate::parts::Work;

/// Number of images that are read, on all cores, before they are written.
const CHUNK: usize = 64;

/// Result of a pack.
pub struct Packed {
    /// Number of samples in the shards of this command's share.
    pub n_samples: u64,
    /// Number of classes of these samples.
    pub n_classes: usize,
    /// Number of shards of the whole job, with those that are left out.
    pub n_shards: usize,
    /// Indices of the shards of this command's share.
    pub shards: Range<usize>,
    /// Number of them that are left out, because none of their images can be packed.
    pub n_empty: usize,
    /// Number of them that existed before.
    pub n_existing: usize,
    /// File that lists the images that could not be packed, and their number. A part has a list for
    /// each shard.
    pub failures: Option<(PathBuf, usize)>,
    /// First line of the lists of failures, a JSON object with path and reason.
    pub first_failure: Option<String>,
    /// Numbers of skipped files, by extension.
    pub skipped: BTreeMap<String, usize>,
    /// Observations on the images that were packed now.
    pub noticed: Noticed,
}

/// Observations on images while they are packed.
#[derive(Default)]
pub struct Noticed {
    /// Number of images that EXIF turns.
    n_turned: usize,
    /// Bits that images of 16 bits use, among the first.
    bits: BitsUsed,
}

impl Packed {
    /// Reports which files were left out, and observations on the images.
    pub fn report(&self) {
        report_skipped(&self.skipped);
        if let Some((list, n)) = &self.failures {
            tracing::warn!("{} could not be packed: see {}", counted(*n as u64, "image"), list.display());
        }
        let Noticed { n_turned, bits } = &self.noticed;
        if *n_turned > 0 {
            tracing::info!(
                "{} {} turned by EXIF data: packed as stored, and not turned in training, as in published \
                 recipes; to turn them there, add --set data.apply_exif=true",
                counted(*n_turned as u64, "image"),
                if *n_turned == 1 { "is" } else { "are" }
            );
        }
        bits.report(&DecodeRules::default(), "scale them with data.bits_used in a recipe");
    }

    /// Returns the counts as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "samples": self.n_samples,
            "classes": self.n_classes,
            "shards": self.shards.len() - self.n_empty,
            "shards_there": self.n_existing,
            "failed": self.failures.as_ref().map_or(0, |(_, n)| *n),
            "skipped": self.skipped,
        })
    }
}

/// Packs the images of `job`. A whole job none of whose images can be packed leaves no shards.
///
/// # Errors
/// [`PrepError`] when there are no images, when the folder belongs to another job, or when images
/// cannot be listed or shards cannot be written. An image that cannot be packed is no error.
pub fn pack(job: &PackJob<'_>, progress: &dyn Progress) -> Result<Packed, PrepError> {
    let (samples, skipped) = find_samples(job)?;
    if samples.is_empty() {
        return Err(no_images(job));
    }
    let _lock = lock_for(job.work, job.out, job.prefix)?;
    let contents = plan_contents(job, samples, skipped)?;
    claim(job, &contents)?;
    if let Some(names) = contents.classes.names()
        && !matches!(job.work, Work::Join(_))
    {
        warn_of_parts(names, &job.input.display().to_string());
        write_classes(job.out, names)?;
    }
    let shards = job.work.range(contents.shards.len());
    let n_existing = shards.clone().filter(|shard| shard_path(job, *shard).exists()).count();
    let mut missing: Vec<usize> = Vec::new();
    for shard in shards.clone() {
        if !is_done(job, shard, contents.shards[shard].len()) {
            missing.push(shard);
        }
    }
    job.work.check_done(contents.shards.len(), &missing)?;
    progress.begin("pack", missing.iter().map(|shard| contents.shards[*shard].len() as u64).sum());
    let mut noticed = Noticed::default();
    for shard in &missing {
        write_shard(job, &contents, *shard, &mut noticed, progress)?;
    }
    let packed = totals(job, &contents, shards, n_existing, noticed)?;
    if packed.n_samples == 0 && job.work == Work::Whole {
        remove_shards(job, &contents)?;
    }
    Ok(packed)
}

/// Creates the error for a job without an image that can be packed.
pub fn no_images(job: &PackJob<'_>) -> PrepError {
    let wanted = extensions().collect::<Vec<_>>().join(", ");
    PipelineError::NoImages { path: job.input.to_path_buf(), wanted }.into()
}

/// Finds the samples of `job`, and the numbers of other files by extension.
fn find_samples(job: &PackJob<'_>) -> Result<(Vec<Sample>, BTreeMap<String, usize>), PrepError> {
    let FoundFiles { entries, mut skipped } = find_images(job.input, job.columns)?;
    if !job.joins_bands {
        return Ok((entries.into_iter().map(Sample::from).collect(), skipped));
    }
    // Sidecars of a sample of several files belong to the sample.
    skipped.retain(|extension, _| !SIDECAR_EXTENSIONS.contains(&extension.as_str()));
    Ok((join_bands(entries, job.input)?, skipped))
}

/// Divides `samples` into shards, without reading images. `skipped` are the numbers of skipped
/// files.
fn plan_contents(
    job: &PackJob<'_>,
    samples: Vec<Sample>,
    skipped: BTreeMap<String, usize>,
) -> Result<Contents, PrepError> {
    let stated = samples.iter().flat_map(|sample| sample.entry.classes.iter().flatten());
    let classes = Classes::new(job.classes, job.out, job.overwrite, stated)?;
    // Keys are numbered in the order of the list, for any seed.
    let mut keys = Keys::default();
    let mut samples: Vec<(String, Sample)> =
        samples.into_iter().map(|sample| (keys.unique(&sample.entry.name), sample)).collect();
    shuffle(&mut samples, job.seed);
    let sizes_bytes: Vec<u64> = samples
        .par_iter()
        .map(|(key, sample)| size_bytes(key, sample, &classes, job.limits))
        .collect::<Result<_, PrepError>>()?;
    let shards = plan_shards(&sizes_bytes, job.limits);
    Ok(Contents { samples, sizes_bytes, classes, shards, skipped })
}

/// Returns the bytes that a sample takes in a shard, by the lengths of its files; 0 if the size of
/// shards is not limited.
fn size_bytes(key: &str, sample: &Sample, classes: &Classes, limits: ShardLimits) -> Result<u64, PrepError> {
    if limits.max_bytes.is_none() {
        return Ok(0);
    }
    let entry = &sample.entry;
    let class = classes.member_text(entry.classes.as_deref(), key, &entry.columns)?;
    let class = class.map(|text| ("cls", text.len() as u64));
    let columns = columns_text(&sample_columns(key, entry)).map(|text| ("json", text.len() as u64));
    let mut files: Vec<(String, u64)> = Vec::new();
    for file in &sample.files {
        let extension = file.extension.clone().or(extension(&file.path)).unwrap_or_default();
        // A file that cannot be read is not packed.
        files.push((extension, fs::metadata(&file.path).map_or(0, |metadata| metadata.len())));
    }
    if let Some(mask) = &entry.mask {
        let len_bytes = fs::metadata(&mask.path).map_or(0, |metadata| metadata.len());
        files.push((mask.extension.to_string(), len_bytes));
    }
    let files = files.iter().map(|(extension, len)| (extension.as_str(), *len));
    Ok(sample_bytes(key, files.chain(class).chain(columns)))
}

/// Files of a sample, each with its extension in the shard and its bytes.
struct ReadSample {
    /// Files of the image: one, or one for each band.
    files: Vec<(String, Vec<u8>)>,
    /// Mask of the image, if it has one.
    mask: Option<(String, Vec<u8>)>,
}

/// Reads the files of a sample.
fn read_sample(sample: &Sample) -> Result<ReadSample, PrepError> {
    Ok(ReadSample { files: read_files(sample)?, mask: read_mask(sample)? })
}

/// Writes a shard, unless none of its images can be packed.
fn write_shard(
    job: &PackJob<'_>,
    contents: &Contents,
    shard: usize,
    noticed: &mut Noticed,
    progress: &dyn Progress,
) -> Result<(), PrepError> {
    let mut writer = LazyShard::new(shard_path(job, shard));
    let mut failures = String::new();
    for chunk in contents.samples[contents.shards[shard].clone()].chunks(CHUNK) {
        let read: Vec<_> = chunk.par_iter().map(|(_, sample)| read_sample(sample)).collect();
        for ((key, Sample { entry, .. }), read) in chunk.iter().zip(read) {
            progress.advance(1);
            let class = contents.classes.member_text(entry.classes.as_deref(), key, &entry.columns)?;
            match read {
                Ok(ReadSample { files, mask }) => {
                    let is_turned = files.iter().any(|(_, file)| facts(file).is_ok_and(|facts| facts.turned));
                    noticed.n_turned += usize::from(is_turned);
                    if noticed.bits.n_images < N_INSPECTED {
                        let files: Vec<&[u8]> = files.iter().map(|(_, file)| file.as_slice()).collect();
                        noticed.bits.inspect(&files, &DecodeRules::default());
                    }
                    add_sample(writer.file()?, key, entry, &files, mask, class)?;
                }
                Err(error) => {
                    let row = json!({ "path": entry.name, "reason": error.to_string() });
                    failures.push_str(&format!("{row}\n"));
                }
            }
        }
    }
    // The list is written first, so that a complete shard has its list.
    write_failures(&failures_path(job, shard), &failures)?;
    writer.finish()?;
    Ok(())
}

/// Writes the list of failures at `path`; if there are none, removes the list of an earlier
/// attempt.
fn write_failures(path: &Path, failures: &str) -> Result<(), PrepError> {
    let result = if !failures.is_empty() {
        file::replace(path, failures.as_bytes())
    } else if path.exists() {
        fs::remove_file(path)
    } else {
        Ok(())
    };
    result.map_err(|error| PrepError::io("write", path, error))
}

/// Counts the samples of `shards`, all of which are done, `n_existing` of them by an earlier start,
/// and joins the lists of failures unless this is a part. `noticed` is what was observed on the
/// images of the others.
fn totals(
    job: &PackJob<'_>,
    contents: &Contents,
    shards: Range<usize>,
    n_existing: usize,
    noticed: Noticed,
) -> Result<Packed, PrepError> {
    let mut n_samples = 0;
    let mut n_empty = 0;
    let mut lines = String::new();
    let mut classes: BTreeSet<&str> = BTreeSet::new();
    for shard in shards.clone() {
        let path = shard_path(job, shard);
        if path.exists() {
            n_samples += Shard::open(&path)?.len() as u64;
        } else {
            n_empty += 1;
        }
        let text = fs::read_to_string(failures_path(job, shard)).unwrap_or_default();
        let mut failed: HashSet<String> = HashSet::new();
        for line in text.lines() {
            let Ok(row) = serde_json::from_str::<Value>(line) else { continue };
            failed.extend(row["path"].as_str().map(str::to_string));
        }
        for (_, sample) in &contents.samples[contents.shards[shard].clone()] {
            if !failed.contains(&sample.entry.name) {
                classes.extend(sample.entry.classes.iter().flatten().map(String::as_str));
            }
        }
        lines.push_str(&text);
    }
    let list = match job.work {
        Work::Part(_) => job.out.join(format!("{}-*.failures.jsonl", job.prefix)),
        Work::Whole | Work::Join(_) => job.out.join(format!("{}.failures.jsonl", job.prefix)),
    };
    if !matches!(job.work, Work::Part(_)) && n_samples > 0 {
        write_failures(&list, &lines)?;
    }
    Ok(Packed {
        n_samples,
        n_classes: classes.len(),
        n_shards: contents.shards.len(),
        shards,
        n_empty,
        n_existing,
        failures: (!lines.is_empty()).then(|| (list, lines.lines().count())),
        first_failure: lines.lines().next().map(str::to_string),
        skipped: contents.skipped.clone(),
        noticed,
    })
}

/// Removes the shards of a job that packed nothing.
fn remove_shards(job: &PackJob<'_>, contents: &Contents) -> Result<(), PrepError> {
    for shard in 0..contents.shards.len() {
        let tar = shard_path(job, shard);
        let index = pipeline::shard::sidecar::path_of(&tar);
        for path in [tar, index, failures_path(job, shard)] {
            if path.exists() {
                fs::remove_file(&path).map_err(|error| PrepError::io("remove", &path, error))?;
            }
        }
    }
    let mark = job_path(job);
    fs::remove_file(&mark).map_err(|error| PrepError::io("remove", &mark, error))
}

/// Returns the columns of a sample, with its name if the key differs from it.
fn sample_columns(key: &str, entry: &SampleFile) -> Map<String, Value> {
    let mut columns = entry.columns.clone();
    if Path::new(&entry.name).with_extension("") != Path::new(key) {
        columns.entry("name").or_insert(Value::String(entry.name.clone()));
    }
    columns
}

/// Returns columns as the text of a member; `None` if there are none.
fn columns_text(columns: &Map<String, Value>) -> Option<String> {
    (!columns.is_empty()).then(|| Value::Object(columns.clone()).to_string())
}

/// Adds a sample: its image, its mask, its class, and its columns, with the map data of its image.
fn add_sample(
    writer: &mut ShardFile,
    key: &str,
    entry: &SampleFile,
    files: &[(String, Vec<u8>)],
    mask: Option<(String, Vec<u8>)>,
    class: Option<String>,
) -> Result<(), PrepError> {
    let mut columns = sample_columns(key, entry);
    if let Some((_, first)) = files.first()
        && let Ok(Some(map)) = bands::map_data(first)
    {
        for (name, value) in map_columns(&map) {
            columns.entry(name).or_insert(value);
        }
    }
    let columns = columns_text(&columns);
    let mut members: Vec<(&str, &[u8])> =
        files.iter().map(|(extension, bytes)| (extension.as_str(), bytes.as_slice())).collect();
    members.extend(mask.iter().map(|(extension, bytes)| (extension.as_str(), bytes.as_slice())));
    members.extend(class.iter().map(|class| ("cls", class.as_bytes())));
    members.extend(columns.iter().map(|columns| ("json", columns.as_bytes())));
    Ok(writer.add(key, &members)?)
}

/// Returns the columns of the map data of a GeoTIFF: `map_epsg`, `map_x` and `map_y` of the upper
/// left corner, `map_pixel_width`, `map_pixel_height` and `map_no_data`.
fn map_columns(map: &MapData) -> impl Iterator<Item = (&'static str, Value)> {
    let [x, y] = map.corner.map_or([None; 2], |corner| corner.map(Some));
    let [width, height] = map.pixel_size.map_or([None; 2], |size| size.map(Some));
    let numbers = [("map_x", x), ("map_y", y), ("map_pixel_width", width), ("map_pixel_height", height)];
    let numbers = numbers.into_iter().filter_map(|(name, value)| Some((name, Value::from(value?))));
    let epsg = map.epsg.map(|code| ("map_epsg", Value::from(code)));
    let no_data = map.no_data.clone().map(|text| ("map_no_data", Value::from(text)));
    epsg.into_iter().chain(numbers).chain(no_data)
}
