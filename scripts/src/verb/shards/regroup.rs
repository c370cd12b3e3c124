//! `ocelli shards reshard`, `split` and `subset`: write all samples in other shards, in parts, or
//! some of them.

use pipeline::secrets::redact_list;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use augment::ViewRng;
use pipeline::{Shard, Source, Storage};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::progress::StageBar;
use crate::shards::limits::LimitFlags;
use pipeline::Progress;
use prep::classes::{class_name, copy_classes, read_class_names};
use prep::folder_lock::lock_folder;
use prep::names::shard_list;
use prep::rewrite::{claim, input_identities};
use prep::samples::{KeyList, check_keys, write_samples};

/// Flags that the three verbs have in common.
#[derive(clap::Args)]
pub(crate) struct Common {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
    /// Output folder for the shards. Rerun a stopped job with the same folder to continue it.
    #[arg(long)]
    out: PathBuf,
    #[command(flatten)]
    limits: LimitFlags,
    /// Print a line of JSON at the end.
    #[arg(long)]
    json: bool,
}

/// Flags of `shards reshard`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards reshard data/ --samples-per-shard 10000 --shuffle 0 --out \
        shuffled/"
)]
pub(crate) struct ReshardArgs {
    #[command(flatten)]
    common: Common,
    /// Prefix of the shard names.
    #[arg(long, default_value = "train")]
    prefix: String,
    /// Shuffle all samples with this seed; without it, they keep their order.
    #[arg(long)]
    shuffle: Option<u64>,
}

/// Flags of `shards split`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards split data/ --part train=0.8 --part test=0.2 --out parts/"
)]
pub(crate) struct SplitArgs {
    #[command(flatten)]
    common: Common,
    /// Name and share of a part, such as train=0.9; shares are relative. If samples have labels,
    /// the split is stratified by class.
    #[arg(long = "part", required = true, num_args = 1..)]
    parts: Vec<String>,
    /// Seed for the split.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Assign each sample to a part by its key and the seed only, ignoring labels, so that samples
    /// stay in their part when the set grows.
    #[arg(long)]
    by_key: bool,
}

/// Flags of `shards subset`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards subset data/ --count 1000 --out few/\n  ocelli shards subset \
        data/ --classes cat,dog --out pets/"
)]
pub(crate) struct SubsetArgs {
    #[command(flatten)]
    common: Common,
    /// Prefix of the shard names.
    #[arg(long, default_value = "train")]
    prefix: String,
    /// Number of samples to draw at random.
    #[arg(long)]
    count: Option<usize>,
    /// Seed for the random draw.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Select only samples listed in this file. Each line is a key, or a shard, a tab and a key, as
    /// in the keep.txt of `dedup`.
    #[arg(long)]
    keys: Option<PathBuf>,
    /// Select only samples of these classes, comma-separated: numbers, or names in the classes.txt
    /// next to the shards.
    #[arg(long, value_delimiter = ',', value_name = "CLASS")]
    classes: Vec<String>,
}

/// Position of a sample.
#[derive(Clone, Copy)]
struct SamplePosition {
    shard: usize,
    number: usize,
}

/// Distinguishes the random streams of this file from all others.
const DOMAIN: u64 = 0x7265_6772_6f75_7000;

pub(crate) fn reshard(args: &ReshardArgs, storage: &Storage) -> anyhow::Result<ExitCode> {
    let (sources, shards) = open_shards(&args.common, storage)?;
    let mut positions = all_positions(&shards);
    if let Some(seed) = args.shuffle {
        shuffle(&mut positions, seed);
    }
    let settings = json!({ "prefix": args.prefix, "shuffle": args.shuffle });
    write(&args.common, "reshard", settings, &sources, &shards, &[(args.prefix.clone(), positions)])
}

pub(crate) fn split(args: &SplitArgs, storage: &Storage) -> anyhow::Result<ExitCode> {
    let (sources, shards) = open_shards(&args.common, storage)?;
    let mut shares: Vec<(String, f64)> = Vec::new();
    for part in &args.parts {
        let (name, share) = parse_share(part)?;
        if shares.iter().any(|(other, _)| *other == name) {
            bail!("--part {name} is given twice");
        }
        shares.push((name, share));
    }
    let mut parts: Vec<(String, Vec<SamplePosition>)> =
        shares.iter().map(|(name, _)| (name.clone(), Vec::new())).collect();
    let positions = all_positions(&shards);
    let classes = if args.by_key { None } else { group_by_class(&shards, &positions)? };
    if let Some(classes) = &classes {
        let hashes: Vec<u64> =
            positions.iter().map(|position| key_hash(&shards, *position, args.seed)).collect();
        for (sample, part) in stratify(classes, &hashes, &shares) {
            parts[part].1.push(positions[sample]);
        }
        // Samples stay in the order of the shards.
        for (_, positions) in &mut parts {
            positions.sort_by_key(|position| (position.shard, position.number));
        }
    } else {
        for position in positions {
            let part = part_by_hash(key_hash(&shards, position, args.seed), &shares);
            parts[part].1.push(position);
        }
    }
    // Without classes, the settings are those that older releases recorded.
    let mut settings = json!({ "parts": args.parts, "seed": args.seed });
    if classes.is_some() {
        settings["stratified"] = json!(true);
    }
    write(&args.common, "split", settings, &sources, &shards, &parts)
}

/// Hashes the key of a sample.
fn key_hash(shards: &[Shard], position: SamplePosition, seed: u64) -> u64 {
    xxh3_64_with_seed(shards[position.shard].key(position.number).as_bytes(), seed)
}

/// Returns the number of the part that a sample belongs to by the hash of its key: parts divide the
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
) -> anyhow::Result<Option<BTreeMap<Vec<String>, Vec<usize>>>> {
    let mut classes: BTreeMap<Vec<String>, Vec<usize>> = BTreeMap::new();
    for (number, position) in positions.iter().enumerate() {
        classes.entry(shards[position.shard].classes(position.number)?).or_default().push(number);
    }
    Ok(classes.keys().any(|class| !class.is_empty()).then_some(classes))
}

/// Divides each class by `shares`, in the order of the samples' `hashes`: each sample goes to the
/// part that lacks most samples of its share. Returns the samples with the numbers of their parts.
fn stratify(
    classes: &BTreeMap<Vec<String>, Vec<usize>>,
    hashes: &[u64],
    shares: &[(String, f64)],
) -> Vec<(usize, usize)> {
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

pub(crate) fn subset(args: &SubsetArgs, storage: &Storage) -> anyhow::Result<ExitCode> {
    let (sources, shards) = open_shards(&args.common, storage)?;
    let mut positions = all_positions(&shards);
    if let Some(path) = &args.keys {
        let list = KeyList::read(path)?;
        positions.retain(|position| {
            let shard = &shards[position.shard];
            list.names(Some(&shard.name()), shard.key(position.number))
        });
    }
    if !args.classes.is_empty() {
        positions = select_classes(&args.classes, &sources, &shards, positions)?;
    }
    if let Some(count) = args.count {
        let mut indices: Vec<usize> = (0..positions.len()).collect();
        shuffle(&mut indices, args.seed);
        indices.truncate(count);
        indices.sort_unstable();
        positions = indices.into_iter().map(|i| positions[i]).collect();
    }
    let settings = json!({
        "prefix": args.prefix, "count": args.count, "seed": args.seed, "keys": args.keys,
        "classes": args.classes,
    });
    write(&args.common, "subset", settings, &sources, &shards, &[(args.prefix.clone(), positions)])
}

/// Returns those of `positions` whose class is among `wanted`, by the samples' own labels, or by
/// name in the list beside the shards.
fn select_classes(
    wanted: &[String],
    sources: &[Source],
    shards: &[Shard],
    positions: Vec<SamplePosition>,
) -> anyhow::Result<Vec<SamplePosition>> {
    let names = read_class_names(sources);
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
        let sample_classes = shards[position.shard].classes(position.number)?;
        if sample_classes.iter().any(|class| classes.contains(class)) {
            kept.push(position);
        }
        seen.extend(sample_classes);
    }
    let is_missing = classes.iter().any(|class| !seen.contains(class));
    if kept.is_empty() || is_missing {
        let seen: Vec<&str> = seen.iter().take(20).map(|class| class_name(&names, class)).collect();
        bail!(
            "some of the classes {} have no samples; the shards have {}",
            wanted.join(", "),
            seen.join(", ")
        );
    }
    Ok(kept)
}

fn open_shards(common: &Common, storage: &Storage) -> anyhow::Result<(Vec<Source>, Vec<Shard>)> {
    let sources = storage.sources(&common.shards)?;
    let shards = storage.open_all(&sources)?;
    Ok((sources, shards))
}

/// Returns the positions of all samples.
fn all_positions(shards: &[Shard]) -> Vec<SamplePosition> {
    let mut positions = Vec::new();
    for (shard, samples) in shards.iter().enumerate() {
        positions.extend((0..samples.len()).map(|number| SamplePosition { shard, number }));
    }
    positions
}

fn shuffle<T>(items: &mut [T], seed: u64) {
    ViewRng::from_words([seed, DOMAIN, 0, 0]).shuffle(items);
}

/// Parses a part such as `train=0.9`.
fn parse_share(part: &str) -> anyhow::Result<(String, f64)> {
    if let Some((name, share)) = part.split_once('=')
        && let Ok(share) = share.parse::<f64>()
        && share > 0.0
        && share.is_finite()
        && is_file_name(name)
    {
        return Ok((name.to_string(), share));
    }
    bail!("--part {part}: expected a name and a share above 0, such as train=0.9")
}

fn is_file_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\\'])
}

/// Writes the samples of each part to shards whose prefix is the part's name.
fn write(
    common: &Common,
    verb: &'static str,
    mut settings: Value,
    sources: &[Source],
    shards: &[Shard],
    parts: &[(String, Vec<SamplePosition>)],
) -> anyhow::Result<ExitCode> {
    settings["shards"] = json!(common.shards.iter().map(|spec| redact_list(spec)).collect::<Vec<_>>());
    settings["limits"] = common.limits.identity();
    let n_samples: usize = parts.iter().map(|(_, positions)| positions.len()).sum();
    if n_samples == 0 {
        bail!("no samples were selected");
    }
    if let Some((name, _)) = parts.iter().find(|(name, _)| !is_file_name(name)) {
        bail!("{name:?} is not a valid shard name");
    }
    if !common.limits.renumber {
        for (_, positions) in parts {
            check_keys(positions.iter().map(|position| (&shards[position.shard], position.number)))?;
        }
    }
    let _lock = lock_folder(&common.out)?;
    claim(input_identities(sources, shards, &common.out)?, &common.out, verb, &settings, false)?;
    copy_classes(sources, &common.out, false)?;
    let progress = StageBar::new();
    progress.begin(verb, n_samples as u64);
    let mut report = BTreeMap::new();
    for (prefix, positions) in parts {
        let samples: Vec<(&Shard, usize)> =
            positions.iter().map(|position| (&shards[position.shard], position.number)).collect();
        let n_shards = write_samples(&common.out, prefix, &common.limits.options(), &samples, &progress)?;
        report.insert(prefix.clone(), json!({ "samples": positions.len(), "shards": n_shards }));
    }
    drop(progress);
    for (prefix, counts) in &report {
        let n_shards = counts["shards"].as_u64().unwrap_or_default() as usize;
        let list = shard_list(&common.out, prefix, n_shards);
        out!("{} samples: {list}", counts["samples"]);
    }
    if common.json {
        out!("{}", json!(report));
    }
    Ok(ExitCode::SUCCESS)
}
