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

use crate::progress::bar;
use crate::shards::classes::{copy_classes, names_beside};
use crate::shards::hold::hold;
use crate::shards::names::shard_list;
use crate::shards::rewrite::{claim, inputs_of};
use crate::shards::samples::{KeyList, LimitFlags, check_keys, write_samples};

/// Flags that the three verbs have in common.
#[derive(clap::Args)]
pub(crate) struct Common {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
    /// Folder that receives the shards. A job that was stopped continues there.
    #[arg(long)]
    out: PathBuf,
    #[command(flatten)]
    limits: LimitFlags,
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Flags of `shards reshard`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards reshard data/ --samples-per-shard 10000 --shuffle 0 --out shuffled/"
)]
pub(crate) struct ReshardArgs {
    #[command(flatten)]
    common: Common,
    /// Prefix of the shards' names.
    #[arg(long, default_value = "train")]
    prefix: String,
    /// Shuffle all samples by this seed; without a seed they keep their order.
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
    /// Name and share of a part, such as train=0.9; shares are relative. Where samples have labels,
    /// every class is divided by these shares.
    #[arg(long = "part", required = true, num_args = 1..)]
    parts: Vec<String>,
    /// Seed of the parts.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Choose a sample's part by its key and the seed alone, whatever its label, so that samples
    /// keep their parts when a set grows.
    #[arg(long)]
    by_key: bool,
}

/// Flags of `shards subset`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards subset data/ --count 1000 --out few/\n  ocelli shards subset data/ --classes cat,dog --out pets/"
)]
pub(crate) struct SubsetArgs {
    #[command(flatten)]
    common: Common,
    /// Prefix of the shards' names.
    #[arg(long, default_value = "train")]
    prefix: String,
    /// Number of samples, drawn by the seed.
    #[arg(long)]
    count: Option<usize>,
    /// Seed of the draw.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Select only the samples listed in this file: a line is a key, or shard, tab and key, as in
    /// the keep.txt of `dedup`.
    #[arg(long)]
    keys: Option<PathBuf>,
    /// Select only the samples of these classes: numbers, or names in the classes.txt beside the
    /// shards; with commas.
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
    let (sources, shards) = open(&args.common, storage)?;
    let mut places = all(&shards);
    if let Some(seed) = args.shuffle {
        shuffle(&mut places, seed);
    }
    let settings = json!({ "prefix": args.prefix, "shuffle": args.shuffle });
    write(&args.common, "reshard", settings, &sources, &shards, &[(args.prefix.clone(), places)])
}

pub(crate) fn split(args: &SplitArgs, storage: &Storage) -> anyhow::Result<ExitCode> {
    let (sources, shards) = open(&args.common, storage)?;
    let shares: anyhow::Result<Vec<(String, f64)>> = args.parts.iter().map(|part| share(part)).collect();
    let shares = shares?;
    let mut names = HashSet::new();
    if let Some((name, _)) = shares.iter().find(|(name, _)| !names.insert(name)) {
        bail!("--part {name} is given twice");
    }
    let sum: f64 = shares.iter().map(|(_, share)| share).sum();
    let hash_of = |place: &SamplePosition| {
        xxh3_64_with_seed(shards[place.shard].key(place.number).as_bytes(), args.seed)
    };
    let part_of = |place: &SamplePosition| {
        let mut at = hash_of(place) as f64 / 2f64.powi(64) * sum;
        shares
            .iter()
            .position(|(_, share)| {
                at -= share;
                at < 0.0
            })
            .unwrap_or(shares.len() - 1)
    };
    let mut parts: Vec<(String, Vec<SamplePosition>)> =
        shares.iter().map(|(name, _)| (name.clone(), Vec::new())).collect();
    let places = all(&shards);
    let by_class = if args.by_key { None } else { by_class(&shards, &places)? };
    match &by_class {
        Some(classes) => {
            for (place, part) in stratified(classes, |place: &usize| hash_of(&places[*place]), &shares) {
                parts[part].1.push(places[place]);
            }
            // Samples stay in the order of the shards.
            parts.iter_mut().for_each(|(_, places)| places.sort_by_key(|place| (place.shard, place.number)));
        }
        None => places.into_iter().for_each(|place| parts[part_of(&place)].1.push(place)),
    }
    // As older releases recorded them, which knew no labels.
    let settings = match by_class {
        Some(_) => json!({ "parts": args.parts, "seed": args.seed, "stratified": true }),
        None => json!({ "parts": args.parts, "seed": args.seed }),
    };
    write(&args.common, "split", settings, &sources, &shards, &parts)
}

/// Returns the numbers of the samples of each class, and of samples without one, in `places`;
/// `None` if none has a class.
fn by_class(
    shards: &[Shard],
    places: &[SamplePosition],
) -> anyhow::Result<Option<BTreeMap<Vec<String>, Vec<usize>>>> {
    let mut classes: BTreeMap<Vec<String>, Vec<usize>> = BTreeMap::new();
    for (number, place) in places.iter().enumerate() {
        classes.entry(shards[place.shard].classes(place.number)?).or_default().push(number);
    }
    Ok(classes.keys().any(|class| !class.is_empty()).then_some(classes))
}

/// Divides each class by `shares`, in the order of `order` within it: each sample goes to the part
/// that has the fewest for its share. Returns the samples with the numbers of their parts.
fn stratified(
    classes: &BTreeMap<Vec<String>, Vec<usize>>,
    order: impl Fn(&usize) -> u64,
    shares: &[(String, f64)],
) -> Vec<(usize, usize)> {
    let sum: f64 = shares.iter().map(|(_, share)| share).sum();
    let mut counts = vec![0.0; shares.len()];
    let mut given = Vec::new();
    for samples in classes.values() {
        let mut samples = samples.clone();
        samples.sort_by_key(|sample| (order(sample), *sample));
        for sample in samples {
            let n = given.len() as f64 + 1.0;
            let lack = |part: usize| shares[part].1 / sum * n - counts[part];
            let part =
                (0..shares.len()).max_by(|a, b| lack(*a).total_cmp(&lack(*b)).then(b.cmp(a))).unwrap_or(0);
            counts[part] += 1.0;
            given.push((sample, part));
        }
    }
    given
}

pub(crate) fn subset(args: &SubsetArgs, storage: &Storage) -> anyhow::Result<ExitCode> {
    let (sources, shards) = open(&args.common, storage)?;
    let mut places = all(&shards);
    if let Some(path) = &args.keys {
        let list = KeyList::read(path)?;
        places.retain(|place| {
            let shard = &shards[place.shard];
            list.names(Some(&shard.name()), shard.key(place.number))
        });
    }
    if !args.classes.is_empty() {
        places = of_classes(&args.classes, &sources, &shards, places)?;
    }
    if let Some(count) = args.count {
        let mut drawn: Vec<usize> = (0..places.len()).collect();
        shuffle(&mut drawn, args.seed);
        drawn.truncate(count);
        drawn.sort_unstable();
        places = drawn.into_iter().map(|i| places[i]).collect();
    }
    let settings = json!({
        "prefix": args.prefix, "count": args.count, "seed": args.seed, "keys": args.keys,
        "classes": args.classes,
    });
    write(&args.common, "subset", settings, &sources, &shards, &[(args.prefix.clone(), places)])
}

/// Keeps the `places` whose class is among `wanted`, by the samples' own labels, or by name in the
/// list beside the shards.
fn of_classes(
    wanted: &[String],
    sources: &[Source],
    shards: &[Shard],
    places: Vec<SamplePosition>,
) -> anyhow::Result<Vec<SamplePosition>> {
    let names = names_beside(sources);
    let number = |class: &String| names.iter().position(|name| name == class).map(|at| at.to_string());
    let classes: HashSet<String> =
        wanted.iter().map(|class| number(class).unwrap_or_else(|| class.clone())).collect();
    let mut kept = Vec::new();
    let mut seen = BTreeSet::new();
    for place in places {
        let found = shards[place.shard].classes(place.number)?;
        if found.iter().any(|class| classes.contains(class)) {
            kept.push(place);
        }
        seen.extend(found);
    }
    let missing = classes.iter().any(|class| !seen.contains(class));
    if kept.is_empty() || missing {
        let known = |class: &String| names.get(class.parse::<usize>().ok()?).cloned();
        let seen: Vec<String> = seen.iter().take(20).map(|c| known(c).unwrap_or_else(|| c.clone())).collect();
        bail!("not all of the classes {} have samples; there are {}", wanted.join(", "), seen.join(", "));
    }
    Ok(kept)
}

fn open(common: &Common, storage: &Storage) -> anyhow::Result<(Vec<Source>, Vec<Shard>)> {
    let sources = storage.sources(&common.shards)?;
    let shards = storage.open_all(&sources)?;
    Ok((sources, shards))
}

fn all(shards: &[Shard]) -> Vec<SamplePosition> {
    shards
        .iter()
        .enumerate()
        .flat_map(|(shard, s)| (0..s.len()).map(move |number| SamplePosition { shard, number }))
        .collect()
}

fn shuffle<T>(items: &mut [T], seed: u64) {
    ViewRng::from_words([seed, DOMAIN, 0, 0]).shuffle(items);
}

/// Parses a part such as `train=0.9`.
fn share(part: &str) -> anyhow::Result<(String, f64)> {
    let parsed = part.split_once('=').and_then(|(name, share)| Some((name, share.parse::<f64>().ok()?)));
    match parsed {
        Some((name, share)) if share > 0.0 && share.is_finite() && is_file_name(name) => {
            Ok((name.to_string(), share))
        }
        _ => bail!("--part {part}: a name and a share above 0 are needed, as in train=0.9"),
    }
}

fn is_file_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\\'])
}

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
    let n_samples: usize = parts.iter().map(|(_, places)| places.len()).sum();
    if n_samples == 0 {
        bail!("no samples were selected");
    }
    if let Some((name, _)) = parts.iter().find(|(name, _)| !is_file_name(name)) {
        bail!("{name:?} cannot be the name of shards");
    }
    if !common.limits.renumber {
        for (_, places) in parts {
            check_keys(places.iter().map(|place| (&shards[place.shard], place.number)))?;
        }
    }
    let _held = hold(&common.out)?;
    claim(inputs_of(sources, shards, &common.out)?, &common.out, verb, &settings, false)?;
    copy_classes(sources, &common.out, false)?;
    let progress = bar(n_samples as u64, verb);
    let mut report = BTreeMap::new();
    for (prefix, places) in parts {
        let samples: Vec<(&Shard, usize)> =
            places.iter().map(|place| (&shards[place.shard], place.number)).collect();
        let n_shards = write_samples(&common.out, prefix, &common.limits, &samples, &progress)?;
        report.insert(prefix.clone(), json!({ "samples": places.len(), "shards": n_shards }));
    }
    progress.finish_and_clear();
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
