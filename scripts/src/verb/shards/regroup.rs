//! `ocelli shards reshard`, `split` and `subset`: write all samples in other shards, in parts, or
//! some of them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use pipeline::Storage;
use pipeline::words::counted;
use prep::names::shard_list;
use prep::regroup::{self, RegroupJob, Regrouped, Selection};
use serde_json::{Map, Value, json};

use crate::progress::StageBar;
use crate::shards::limits::LimitFlags;

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
#[command(after_help = "Examples:\n  \
        ocelli shards reshard data/ --samples-per-shard 1000 --shuffle 0 --out mixed/")]
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
    /// Name and share of a part, such as train=0.9; shares that do not add up to 1 are scaled. If
    /// samples have labels, the split is stratified by class.
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

impl Common {
    /// Returns the job that the flags describe.
    fn job(&self) -> RegroupJob<'_> {
        RegroupJob { shards: &self.shards, out: &self.out, options: self.limits.options() }
    }

    /// Prints the shards that were written, and their counts.
    fn print(&self, regrouped: &BTreeMap<String, Regrouped>) {
        let mut line = Map::new();
        for (prefix, Regrouped { n_samples, n_shards }) in regrouped {
            out!("{}: {}", counted(*n_samples as u64, "sample"), shard_list(&self.out, prefix, *n_shards));
            line.insert(prefix.clone(), json!({ "samples": n_samples, "shards": n_shards }));
        }
        if self.json {
            out!("{}", Value::Object(line));
        }
    }
}

pub(crate) fn reshard(args: &ReshardArgs, storage: &Storage) -> anyhow::Result<ExitCode> {
    let job = args.common.job();
    let regrouped = regroup::reshard(&job, &args.prefix, args.shuffle, storage, &StageBar::new())?;
    args.common.print(&regrouped);
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn split(args: &SplitArgs, storage: &Storage) -> anyhow::Result<ExitCode> {
    let job = args.common.job();
    let regrouped = regroup::split(&job, &args.parts, args.seed, args.by_key, storage, &StageBar::new())?;
    args.common.print(&regrouped);
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn subset(args: &SubsetArgs, storage: &Storage) -> anyhow::Result<ExitCode> {
    let selection =
        Selection { count: args.count, seed: args.seed, keys: args.keys.as_deref(), classes: &args.classes };
    let job = args.common.job();
    let regrouped = regroup::subset(&job, &args.prefix, &selection, storage, &StageBar::new())?;
    args.common.print(&regrouped);
    Ok(ExitCode::SUCCESS)
}
