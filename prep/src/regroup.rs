//! Regrouping of samples: all in other shards, divided into parts, or some of them.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

use augment::ViewRng;
use pipeline::secrets::redact_list;
use pipeline::{Progress, Shard, Source, Storage};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::classes::{ClassNames, class_name};
use crate::error::PrepError;
use crate::folder_lock::lock_folder;
use crate::rewrite::{claim, input_identities};
use crate::samples::{KeyList, SampleOptions, check_keys, write_samples};

/// Distinguishes the random streams of this file from all others.
const DOMAIN: u64 = 0x7265_6772_6f75_7000;

/// Shards whose samples are regrouped, and where to.
pub struct RegroupJob<'a> {
    /// The shards: paths, patterns, folders, or URLs.
    pub shards: &'a [String],
    /// Folder of the outputs. A job that was stopped continues with the same folder.
    pub out: &'a Path,
    /// Form of the new shards.
    pub options: SampleOptions,
}

/// Samples to select.
pub struct Selection<'a> {
    /// Number of samples to draw at random.
    pub count: Option<usize>,
    /// Seed of the random draw.
    pub seed: u64,
    /// List of samples to select from ([`KeyList`]).
    pub keys: Option<&'a Path>,
    /// Classes to select from, numbers or names; all if there are none.
    pub classes: &'a [String],
}

/// Counts of the samples that were written with one prefix.
pub struct Regrouped {
    /// Number of samples.
    pub n_samples: usize,
    /// Number of their shards.
    pub n_shards: usize,
}

/// Indices of the samples of each class; a sample may have several, or none.
type SamplesByClass = BTreeMap<Vec<String>, Vec<usize>>;

/// Position of a sample.
#[derive(Clone, Copy)]
struct SamplePosition {
    shard: usize,
    index: usize,
}

/// Writes all samples of `job`, shuffled by the seed `shuffled` or in their order, to shards that
/// are named `prefix`. Returns the counts by prefix.
///
/// # Errors
/// [`PrepError`] when two samples have the same key, when the folder belongs to another job, or
/// when shards cannot be read or written.
pub fn reshard(
    job: &RegroupJob<'_>,
    prefix: &str,
    shuffled: Option<u64>,
    storage: &Storage,
    progress: &dyn Progress,
) -> Result<BTreeMap<String, Regrouped>, PrepError> {
    let opened = Opened::open(job, storage)?;
    let mut positions = all_positions(&opened.shards);
    if let Some(seed) = shuffled {
        shuffle(&mut positions, seed);
    }
    let settings = json!({ "prefix": prefix, "shuffle": shuffled });
    let parts = [(prefix.to_string(), positions)];
    write(job, "reshard", settings, &opened, &parts, progress)
}

/// Divides the samples of `job` among `parts`, each a name and a relative share: `train=0.9`. If
/// samples have classes, each class is divided by the shares, unless `by_key` is set: then the part
/// of a sample depends on its key and `seed` alone. Returns the counts by name.
///
/// # Errors
/// [`PrepError`] when a part is invalid, when two samples have the same key, when the folder
/// belongs to another job, or when shards cannot be read or written.
pub fn split(
    job: &RegroupJob<'_>,
    parts: &[String],
    seed: u64,
    by_key: bool,
    storage: &Storage,
    progress: &dyn Progress,
) -> Result<BTreeMap<String, Regrouped>, PrepError> {
    let opened = Opened::open(job, storage)?;
    let mut shares: Vec<(String, f64)> = Vec::new();
    for part in parts {
        let (name, share) = parse_share(part)?;
        if shares.iter().any(|(other, _)| *other == name) {
            return Err(PrepError::RepeatedShare { name });
        }
        shares.push((name, share));
    }
    report_sum(&shares);
    let mut divided: Vec<(String, Vec<SamplePosition>)> =
        shares.iter().map(|(name, _)| (name.clone(), Vec::new())).collect();
    let positions = all_positions(&opened.shards);
    let classes = if by_key { None } else { group_by_class(&opened.shards, &positions)? };
    if let Some(classes) = &classes {
        let hashes: Vec<u64> =
            positions.iter().map(|position| key_hash(&opened.shards, *position, seed)).collect();
        for (sample, part) in stratify(classes, &hashes, &shares) {
            divided[part].1.push(positions[sample]);
        }
        // Samples stay in the order of the shards.
        for (_, positions) in &mut divided {
            positions.sort_by_key(|position| (position.shard, position.index));
        }
    } else {
        for position in positions {
            let part = part_by_hash(key_hash(&opened.shards, position, seed), &shares);
            divided[part].1.push(position);
        }
    }
    // Without classes, the settings are what earlier versions recorded.
    let mut settings = json!({ "parts": parts, "seed": seed });
    if classes.is_some() {
        settings["stratified"] = json!(true);
    }
    write(job, "split", settings, &opened, &divided, progress)
}

/// Reports shares that do not add up to 1: one of them may be a mistake.
fn report_sum(shares: &[(String, f64)]) {
    let sum: f64 = shares.iter().map(|(_, share)| share).sum();
    if (sum - 1.0).abs() < 1e-6 {
        return;
    }
    let mut parts = Vec::new();
    for (name, share) in shares {
        parts.push(format!("{name} gets {:.1} %", 100.0 * share / sum));
    }
    // Without the digits that come from adding.
    let sum = (sum * 1e6).round() / 1e6;
    tracing::info!("the shares of --part add up to {sum}, not 1, and are scaled: {}", parts.join(", "));
}

/// Hashes the key of a sample.
fn key_hash(shards: &[Shard], position: SamplePosition, seed: u64) -> u64 {
    xxh3_64_with_seed(shards[position.shard].key(position.index).as_bytes(), seed)
}

/// Returns the index of the part that a sample belongs to by the hash of its key: parts divide the
/// range of hashes by `shares`.
fn part_by_hash(hash: u64, shares: &[(String, f64)]) -> usize {
    let sum: f64 = shares.iter().map(|(_, share)| share).sum();
    let mut remaining = hash as f64 / 2f64.powi(64) * sum;
    for (part, (_, share)) in shares.iter().enumerate() {
        remaining -= share;
        if remaining < 0.0 {
            return part;
        }
    }
    shares.len() - 1
}

/// Returns the indices into `positions` of the samples of each class, and of those without one;
/// `None` if no sample has a class.
fn group_by_class(
    shards: &[Shard],
    positions: &[SamplePosition],
) -> Result<Option<SamplesByClass>, PrepError> {
    let mut classes = SamplesByClass::new();
    for (index, position) in positions.iter().enumerate() {
        classes.entry(shards[position.shard].classes(position.index)?).or_default().push(index);
    }
    Ok(classes.keys().any(|class| !class.is_empty()).then_some(classes))
}

/// Divides each class by `shares`, in the order of the samples' `hashes`: each sample goes to the
/// part that lacks most samples of its share. Returns the samples with the indices of their parts.
fn stratify(classes: &SamplesByClass, hashes: &[u64], shares: &[(String, f64)]) -> Vec<(usize, usize)> {
    let sum: f64 = shares.iter().map(|(_, share)| share).sum();
    let mut counts = vec![0.0; shares.len()];
    let mut assigned = Vec::new();
    for samples in classes.values() {
        let mut samples = samples.clone();
        samples.sort_by_key(|sample| (hashes[*sample], *sample));
        for sample in samples {
            let n = assigned.len() as f64 + 1.0;
            // The first of several parts that lack as many.
            let mut part = 0;
            let mut most_lacking = f64::NEG_INFINITY;
            for (candidate, (_, share)) in shares.iter().enumerate() {
                let n_lacking = share / sum * n - counts[candidate];
                if n_lacking > most_lacking {
                    part = candidate;
                    most_lacking = n_lacking;
                }
            }
            counts[part] += 1.0;
            assigned.push((sample, part));
        }
    }
    assigned
}

/// Writes the samples of `job` that `selection` names to shards that are named `prefix`. Returns
/// the counts by prefix.
///
/// # Errors
/// [`PrepError`] when some classes have no samples, when no samples are selected, when two of them
/// have the same key, when the folder belongs to another job, or when shards cannot be read or
/// written.
pub fn subset(
    job: &RegroupJob<'_>,
    prefix: &str,
    selection: &Selection<'_>,
    storage: &Storage,
    progress: &dyn Progress,
) -> Result<BTreeMap<String, Regrouped>, PrepError> {
    let opened = Opened::open(job, storage)?;
    let mut positions = all_positions(&opened.shards);
    let mut keys = Value::Null;
    if let Some(path) = selection.keys {
        let list = KeyList::read(path)?;
        positions = select_keys(&list, path, &opened.shards, positions);
        // Another list in the same file is another job.
        keys = json!([path, list.hash()]);
    }
    if !selection.classes.is_empty() {
        positions = select_classes(selection.classes, &opened, positions)?;
    }
    if let Some(count) = selection.count {
        let mut indices: Vec<usize> = (0..positions.len()).collect();
        shuffle(&mut indices, selection.seed);
        indices.truncate(count);
        indices.sort_unstable();
        positions = indices.into_iter().map(|i| positions[i]).collect();
    }
    let settings = json!({
        "prefix": prefix, "count": selection.count, "seed": selection.seed, "keys": keys,
        "classes": selection.classes,
    });
    let parts = [(prefix.to_string(), positions)];
    write(job, "subset", settings, &opened, &parts, progress)
}

/// Returns those of `positions` that `list`, the file at `path`, names. Warns of its other lines.
fn select_keys(
    list: &KeyList,
    path: &Path,
    shards: &[Shard],
    positions: Vec<SamplePosition>,
) -> Vec<SamplePosition> {
    let mut kept = Vec::new();
    let mut found = HashSet::new();
    for position in positions {
        let shard = &shards[position.shard];
        let lines = list.lines_of(Some(&shard.name()), shard.key(position.index));
        if !lines.is_empty() {
            kept.push(position);
        }
        found.extend(lines);
    }
    list.report_others(path, &found);
    kept
}

/// Returns those of `positions` whose class is among `wanted`, by the samples' own labels, or by
/// name in the list beside the shards.
fn select_classes(
    wanted: &[String],
    opened: &Opened,
    positions: Vec<SamplePosition>,
) -> Result<Vec<SamplePosition>, PrepError> {
    let names = &opened.classes.names;
    let mut classes: HashSet<String> = HashSet::new();
    for class in wanted {
        match names.iter().position(|name| name == class) {
            Some(number) => classes.insert(number.to_string()),
            None => classes.insert(class.clone()),
        };
    }
    let mut kept = Vec::new();
    let mut seen = BTreeSet::new();
    for position in positions {
        let sample_classes = opened.shards[position.shard].classes(position.index)?;
        if sample_classes.iter().any(|class| classes.contains(class)) {
            kept.push(position);
        }
        seen.extend(sample_classes);
    }
    let is_missing = classes.iter().any(|class| !seen.contains(class));
    if kept.is_empty() || is_missing {
        let seen: Vec<&str> = seen.iter().take(20).map(|class| class_name(names, class)).collect();
        return Err(PrepError::MissingClasses { wanted: wanted.join(", "), seen: seen.join(", ") });
    }
    Ok(kept)
}

/// Shards of a job.
struct Opened {
    sources: Vec<Source>,
    shards: Vec<Shard>,
    classes: ClassNames,
}

impl Opened {
    /// Opens the shards of `job`. Lists of classes that differ are refused before anything is
    /// written.
    fn open(job: &RegroupJob<'_>, storage: &Storage) -> Result<Self, PrepError> {
        let sources = storage.sources(job.shards)?;
        let shards = storage.open_all(&sources)?;
        let classes = ClassNames::read(&sources)?;
        Ok(Self { sources, shards, classes })
    }
}

/// Returns the positions of all samples.
fn all_positions(shards: &[Shard]) -> Vec<SamplePosition> {
    let mut positions = Vec::new();
    for (shard, samples) in shards.iter().enumerate() {
        positions.extend((0..samples.len()).map(|index| SamplePosition { shard, index }));
    }
    positions
}

fn shuffle<T>(items: &mut [T], seed: u64) {
    ViewRng::from_words([seed, DOMAIN, 0, 0]).shuffle(items);
}

/// Parses a part such as `train=0.9`.
fn parse_share(part: &str) -> Result<(String, f64), PrepError> {
    if let Some((name, share)) = part.split_once('=')
        && let Ok(share) = share.parse::<f64>()
        && share > 0.0
        && share.is_finite()
        && is_file_name(name)
    {
        return Ok((name.to_string(), share));
    }
    Err(PrepError::BadShare { part: part.to_string() })
}

fn is_file_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\\'])
}

/// Writes the samples of each part to shards whose prefix is the part's name; returns the counts by
/// name.
fn write(
    job: &RegroupJob<'_>,
    verb: &'static str,
    mut settings: Value,
    opened: &Opened,
    parts: &[(String, Vec<SamplePosition>)],
    progress: &dyn Progress,
) -> Result<BTreeMap<String, Regrouped>, PrepError> {
    let Opened { sources, shards, classes } = opened;
    settings["shards"] = json!(job.shards.iter().map(|spec| redact_list(spec)).collect::<Vec<_>>());
    settings["limits"] = job.options.identity();
    let n_samples: usize = parts.iter().map(|(_, positions)| positions.len()).sum();
    if n_samples == 0 {
        return Err(PrepError::NoneSelected);
    }
    if let Some((name, _)) = parts.iter().find(|(name, _)| !is_file_name(name)) {
        return Err(PrepError::BadPrefix { name: name.clone() });
    }
    if !job.options.renumber {
        for (_, positions) in parts {
            check_keys(positions.iter().map(|position| (&shards[position.shard], position.index)))?;
        }
    }
    let _lock = lock_folder(job.out)?;
    claim(input_identities(sources, shards, job.out)?, job.out, verb, &settings, false)?;
    classes.copy(job.out, false)?;
    progress.begin(verb, n_samples as u64);
    let mut regrouped = BTreeMap::new();
    for (prefix, positions) in parts {
        let samples: Vec<(&Shard, usize)> =
            positions.iter().map(|position| (&shards[position.shard], position.index)).collect();
        let n_shards = write_samples(job.out, prefix, &job.options, &samples, progress)?;
        regrouped.insert(prefix.clone(), Regrouped { n_samples: positions.len(), n_shards });
    }
    Ok(regrouped)
}
