//! `ocelli bench loader`: measures the speed of the data path alone, and names its bottleneck.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use augment::{BlurRule, DecodeRules, MultiCrop, ViewMix};
use pipeline::Storage;
use prep::open::open_dataset;
use serde_json::json;
use trainer::bench::loader::{Bottleneck, LoaderBench, LoaderSettings, measure_reading, measure_views};

use super::compare::{CompareFlag, print_figures};
use crate::recipes;

/// Flags of `bench loader`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Shards to read.
    #[arg(required = true)]
    shards: Vec<String>,
    /// Views per image: dino or dinov2 (2 views of 224 px and 8 of 96), single (one of 224,
    /// randomly flipped), read (none), or a recipe name or file.
    #[arg(long, default_value = "dinov2")]
    recipe: String,
    /// Number of decoding and augmenting threads; 0 for one per core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Seconds to measure, after a warm-up of a fifth of that.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Images per batch.
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Override a recipe value. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    compare: CompareFlag,
    /// Print a line of JSON at the end: images_per_s, mb_per_s, stages.
    #[arg(long)]
    json: bool,
}

/// Views that have a name of their own.
#[derive(Debug, Clone, Copy)]
enum Preset {
    Dino,
    Dinov2,
    Single,
    /// No views: images are only read.
    Read,
}

impl Preset {
    /// Returns the preset called `name`; `None` if it is the name of a recipe.
    fn named(name: &str) -> Option<Self> {
        match name {
            "dino" => Some(Self::Dino),
            "dinov2" => Some(Self::Dinov2),
            "single" => Some(Self::Single),
            "read" => Some(Self::Read),
            _ => None,
        }
    }
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let preset = Preset::named(&args.recipe);
    if preset.is_some() && !args.overrides.is_empty() {
        bail!("--set needs a recipe; {} is a preset of views", args.recipe);
    }
    let before = args.compare.read()?;
    let dataset = Arc::new(open_dataset(&args.shards, storage)?);
    let ledger = std::env::temp_dir().join(format!("ocelli-bench-{}.jsonl", std::process::id()));
    let settings = LoaderSettings {
        n_threads: args.threads,
        batch_size: args.batch,
        seconds: args.seconds,
        ledger: &ledger,
    };
    let measured = match views(args, preset)? {
        Some((views, rules)) => measure_views(dataset, views, rules, &settings)?,
        None => measure_reading(dataset, &settings)?,
    };
    let limit = describe(&measured);
    print(args, &measured);
    out!("{limit}");
    let mut figures = measured.to_json();
    figures["recipe"] = json!(args.recipe);
    figures["batch_size"] = json!(args.batch);
    figures["limit"] = json!(limit);
    print_figures(before.as_ref(), &figures, args.json);
    Ok(ExitCode::SUCCESS)
}

/// Returns the views that the flags name, and the rules for decoding; `None` to read only.
fn views(args: &Args, preset: Option<Preset>) -> anyhow::Result<Option<(ViewMix, DecodeRules)>> {
    let multicrop = match preset {
        Some(Preset::Read) => return Ok(None),
        Some(Preset::Dino) => MultiCrop::dino(224, 96, 8),
        Some(Preset::Dinov2) => MultiCrop::dinov2(224, 96, 8, BlurRule::Paper),
        Some(Preset::Single) => MultiCrop::single(224),
        None => {
            let recipe = recipes::load(&args.recipe, &args.overrides)?;
            return Ok(Some((recipe.views.view_mix().map_err(anyhow::Error::msg)?, recipe.data.rules())));
        }
    };
    Ok(Some((multicrop.into(), DecodeRules::default())))
}

fn print(args: &Args, measured: &LoaderBench) {
    let [slowest, fastest] = measured.range_per_s();
    out!(
        "{}, {} threads, {:.1} s: {:.1} images/s, {slowest:.1} to {fastest:.1} by fifths; {:.1} MB/s",
        args.recipe,
        measured.n_threads,
        measured.wall.as_secs_f64(),
        measured.images_per_s(),
        measured.mb_per_s()
    );
    out!("{:<16} {:>9} {:>9} {:>8}", "per image", "p50 ms", "p99 ms", "share");
    for stage in measured.stages() {
        let share = 100.0 * stage.share;
        out!("{:<16} {:9.3} {:9.3} {share:6.1} %", stage.name, stage.p50_ms, stage.p99_ms);
    }
    let queues = measured.queues;
    out!(
        "queues: {:.1} images read, {:.1} finished, {:.1} % of the byte limit",
        queues.read,
        queues.finished,
        100.0 * queues.bytes_share
    );
}

/// Returns a sentence that names the bottleneck.
fn describe(measured: &LoaderBench) -> String {
    match measured.bottleneck() {
        Bottleneck::Consumer { reading } => format!(
            "{} threads spend {:.0} % of their time reading and the rest waiting for the consumer.",
            measured.n_readers,
            100.0 * reading
        ),
        Bottleneck::Reading { waiting } => format!(
            "Reading is the bottleneck: threads wait for bytes {:.0} % of the time; use a faster disk \
             or more readers.",
            100.0 * waiting
        ),
        Bottleneck::Cpu { waiting, stage, share } => format!(
            "The CPU is the bottleneck: {} threads wait for bytes {:.0} % of the time; {stage} takes the \
             most time, {:.0} %.",
            measured.n_threads,
            100.0 * waiting,
            100.0 * share
        ),
    }
}
