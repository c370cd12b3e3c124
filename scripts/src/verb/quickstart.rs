//! `ocelli quickstart`: the whole job on generated data.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::bail;
use augment::Transform;
use eval::probe::wanted;
use eval::{ImageSet, NoProgress, Protocol, Source, Split};
use kernels::device::Device;
use networks::Network;
use pipeline::{Dataset, Storage};
use report::picture::sheets;
use serde_json::json;
use session::{Initial, Session};
use trainer::run::Outcome;
use weights::{Format, Precision};

use super::export;
use super::pretrain::pretrain;
use super::probe::baselines;
use super::report::write_beside;
use super::shards::synth::{SynthArgs, synthesize};
use crate::backbone::{WeightFlags, open_backbone};
use crate::cluster::compute;
use crate::console::say;
use crate::evaluation::network::NetworkFlags;
use crate::evaluation::record;
use crate::evaluation::scores::{Table, print_table, rows};
use crate::exit::PREEMPTED;
use crate::recipes;
use ranks::launch::Launch;

/// Flags of `quickstart`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli quickstart\n  ocelli quickstart --workdir runs/second --seed 1")]
pub(crate) struct Args {
    /// Work directory of the run.
    #[arg(long, default_value = "runs/quickstart")]
    workdir: PathBuf,
    /// Seed of the images and of the run.
    #[arg(long)]
    seed: Option<u64>,
    /// Number of images to train on.
    #[arg(long, default_value_t = 8000)]
    train_images: u64,
    /// Number of images to report on.
    #[arg(long, default_value_t = 2000)]
    test_images: u64,
    #[command(flatten)]
    compute: compute::ComputeFlags,
    /// Change a value of the recipe. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// End with one line of JSON: seconds, knn, linear, random_knn, random_linear, pixel_knn.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let mut recipe = recipes::load("quickstart", &args.overrides)?;
    let seed = args.seed.unwrap_or(recipe.seed);
    recipe.seed = seed;
    // An invalid recipe is reported before anything is written.
    trainer::resolve(recipe.clone(), args.train_images)?;
    let size_px = recipe.model.image_px();
    let rules = recipe.data.rules();
    let data = args.workdir.join("data");
    let set = |prefix: &str, count, stream| {
        let prefix = prefix.to_string();
        let seed = 2 * seed + stream;
        ensure_synth(
            &data,
            SynthArgs { out: data.join(&prefix), count, seed, size_px: size_px as u32, prefix },
        )
    };
    let train = set("train", args.train_images, 0)?;
    let test = set("test", args.test_images, 1)?;
    let names = |paths: &[PathBuf]| paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
    recipe.data.shards = names(&train);
    let open = |paths: &[PathBuf]| Dataset::open(&names(paths), storage).map(Arc::new);
    let train = open(&train)?;
    let test = open(&test)?;

    let session = Session {
        recipe,
        workdir: args.workdir.clone(),
        device: args.compute.open(&Launch::ALONE)?,
        engine: args.compute.engine,
        launch: Launch::ALONE,
        initial: Initial::default(),
        fault: None,
        stop: Arc::default(),
    };
    let (_, outcome) = pretrain(session, storage, |_| Ok(Vec::new()))?;
    if outcome == Outcome::Stopped {
        say("stopped by a signal; the same command continues");
        return Ok(ExitCode::from(PREEMPTED));
    }

    let device = args.compute.device.open(0)?.device;
    say("probing the network, a random network and raw pixels");
    let transform = Transform::new(size_px as u32);
    let images = |dataset, name| -> anyhow::Result<ImageSet> {
        Ok(ImageSet::open(Source::Shards(dataset), transform, rules, name)?)
    };
    let split = Split::new(images(train, "train")?, images(test, "test")?)?;
    let table = score(args, &split, &device)?;
    print_table(&table);
    let page = write_beside(&args.workdir, false, storage, &device)?;
    let seconds = start.elapsed().as_secs_f64();
    out!("{seconds:.0} s; report: {}", page.display());
    if args.json {
        out!("{}", to_json(&table, seconds));
    }
    Ok(ExitCode::SUCCESS)
}

/// Line of JSON for programs.
fn to_json(table: &Table, seconds: f64) -> serde_json::Value {
    let linear = |i: usize| table[i].1.accuracy("linear_honest");
    let knn = |i: usize| table[i].1.accuracy("knn_20");
    json!({
        "seconds": seconds,
        "knn": knn(0),
        "linear": linear(0),
        "random_knn": knn(1),
        "random_linear": linear(1),
        "pixel_knn": knn(2),
    })
}

/// Returns the shards of a split, which are created if they do not exist. Train and test come from
/// different seeds.
fn ensure_synth(data: &Path, set: SynthArgs) -> anyhow::Result<Vec<PathBuf>> {
    let done = data.join(format!("{}.done", set.prefix));
    let holds = format!("{} images of {} px, seed {}", set.count, set.size_px, set.seed);
    if !done.exists() {
        // Only unfinished shards of an earlier start of this verb are removed.
        let begun = data.join(format!("{}.begun", set.prefix));
        if set.out.exists() {
            if !begun.exists() {
                bail!("{} exists and is not quickstart's; choose another --workdir", set.out.display());
            }
            std::fs::remove_dir_all(&set.out)?;
        }
        std::fs::create_dir_all(data)?;
        std::fs::write(&begun, &holds)?;
        synthesize(&set)?;
        std::fs::write(&done, &holds)?;
        std::fs::remove_file(&begun)?;
    } else {
        let there = std::fs::read_to_string(&done)?;
        if there != holds {
            bail!("{} holds {there}, not {holds}; choose another --workdir", set.out.display());
        }
    }
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&set.out)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "tar"))
        .collect();
    paths.sort();
    Ok(paths)
}

/// Scores the run's network, a random one and raw pixels. The first scores are recorded in the run,
/// with a picture of nearest neighbors and the exported backbone.
fn score(args: &Args, split: &Split, device: &Device) -> anyhow::Result<Table> {
    let open = NetworkFlags::default().open(&args.workdir, device)?;
    let protocols = ["knn", "linear-honest"].map(Protocol::named).into_iter().collect::<Result<Vec<_>, _>>();
    let protocols = protocols.map_err(anyhow::Error::msg)?;
    let scores = split.score(&open.network, &protocols, None, &NoProgress)?;
    let rows = rows(&scores, split, &open.about(&args.workdir));
    let scalars = record::scalars(&open, &rows);
    record::add(&args.workdir, open.step().unwrap_or_default(), &rows, &scalars)?;
    let backbone = open_backbone(&args.workdir, &WeightFlags::default(), None)?;
    let card = export::card_of(&args.workdir, &backbone)?;
    let file = args.workdir.join("backbone.safetensors");
    // A quickstart that is started again scores the same run again.
    export::write(&backbone, &card, &file, Format::Safetensors, Precision::F32, true)?;
    neighbors(args, split, &open.network)?;
    crate::pictures::show(&args.workdir, "neighbors", open.step().unwrap_or_default());
    let mut table: Table = vec![(open.which.clone(), scores)];
    table.extend(baselines(&open.network, split, &protocols, device)?);
    Ok(table)
}

/// Draws held-out images with their nearest neighbors.
fn neighbors(args: &Args, split: &Split, network: &Network) -> anyhow::Result<()> {
    let (train, test) = split.features(network, wanted(&[]), None, &NoProgress)?;
    let path = args.workdir.join("neighbors.png");
    sheets::neighbor_sheet(&path, (&split.train, &train), Some((&split.test, &test)))?;
    Ok(())
}
