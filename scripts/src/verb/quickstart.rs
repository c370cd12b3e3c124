//! `ocelli quickstart`: all stages on generated data.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::bail;
use augment::Transform;
use eval::probe::Scores;
use eval::scores::rows;
use eval::{FeatureKind, ImageSet, Protocol, Source, Split};
use kernels::device::Device;
use pipeline::{Dataset, Storage};
use prep::synth::{SynthSet, synthesize};
use ranks::launch::Launch;
use report::picture::sheets::{self, ImageFeatures};
use report::picture::workdir::add_to_events;
use serde_json::json;
use session::{Backbone, EvaluatedNetwork, ExportSettings, Initial, NetworkSettings, Session};
use trainer::run::Outcome;
use weights::{Format, Hints};

use super::export::model_card;
use super::probe::print_table;
use super::report::write_beside;
use crate::cluster::compute;
use crate::console::say;
use crate::exit::PREEMPTED;
use crate::progress::{Activity, StageBar, format_duration};
use crate::recipes;
use crate::training::{Probes, Trained, train_session};

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
    /// Number of training images.
    #[arg(long, default_value_t = 8000)]
    train_images: u64,
    /// Number of test images.
    #[arg(long, default_value_t = 2000)]
    test_images: u64,
    #[command(flatten)]
    compute: compute::ComputeFlags,
    /// Override a recipe value. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Print a line of JSON at the end: seconds, knn, linear, random_knn, random_linear, pixel_knn.
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
    let size_px = recipe.model.image_px() as u32;
    let rules = recipe.data.rules();
    let data = args.workdir.join("data");
    // Train and test come from different seeds.
    let train_shards = ensure_synth(&data, "train", args.train_images, 2 * seed, size_px)?;
    let test_shards = ensure_synth(&data, "test", args.test_images, 2 * seed + 1, size_px)?;
    let train = Arc::new(Dataset::open(&train_shards, storage)?);
    let test = Arc::new(Dataset::open(&test_shards, storage)?);
    recipe.data.shards = train_shards;

    let session = Session {
        recipe,
        workdir: args.workdir.clone(),
        device: args.compute.open(&Launch::ALONE)?,
        engine: args.compute.engine,
        launch: Launch::ALONE,
        initial: Initial::default(),
        fault: None,
        stop: Arc::default(),
        started: start,
    };
    let Trained { outcome, .. } = train_session(session, storage, |_| Ok(Probes::default()))?;
    if outcome == Outcome::Stopped {
        say("stopped by a signal: run the same command to resume");
        return Ok(ExitCode::from(PREEMPTED));
    }

    let device = args.compute.device.open(0)?.device;
    say("probing the network, a random network and raw pixels");
    let transform = Transform::new(size_px);
    let train_images = ImageSet::open(Source::Shards(train), transform, rules, "train")?;
    let test_images = ImageSet::open(Source::Shards(test), transform, rules, "test")?;
    let split = Split::new(train_images, test_images)?;
    let table = score(args, &split, &device)?;
    print_table(&table);
    let page = write_beside(&args.workdir, false, storage, &device)?;
    let seconds = start.elapsed().as_secs_f64();
    out!("{}; report: {}", format_duration(seconds), page.display());
    if args.json {
        out!("{}", to_json(&table, seconds));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the line of JSON: scores of the run's network, a random one and raw pixels.
fn to_json(table: &[(String, Scores)], seconds: f64) -> serde_json::Value {
    let trained = &table[0].1;
    let random = &table[1].1;
    let pixels = &table[2].1;
    json!({
        "seconds": seconds,
        "knn": trained.accuracy("knn_20"),
        "linear": trained.accuracy("linear_honest"),
        "random_knn": random.accuracy("knn_20"),
        "random_linear": random.accuracy("linear_honest"),
        "pixel_knn": pixels.accuracy("knn_20"),
    })
}

/// Returns the paths of the shards of `count` images in the folder `prefix` of `data`, which are
/// created if they do not exist.
fn ensure_synth(
    data: &Path,
    prefix: &str,
    count: u64,
    seed: u64,
    size_px: u32,
) -> anyhow::Result<Vec<String>> {
    let set = SynthSet { out: data.join(prefix), count, seed, size_px, prefix: prefix.into() };
    let done_file = data.join(format!("{prefix}.done"));
    let description = format!("{count} images of {size_px} px, seed {seed}");
    if !done_file.exists() {
        // Only unfinished shards of an earlier start of this verb are removed.
        let begun_file = data.join(format!("{prefix}.begun"));
        if set.out.exists() {
            if !begun_file.exists() {
                bail!(
                    "{} exists, and quickstart did not write it; choose another --workdir",
                    set.out.display()
                );
            }
            std::fs::remove_dir_all(&set.out)?;
        }
        std::fs::create_dir_all(data)?;
        std::fs::write(&begun_file, &description)?;
        synthesize(&set, &StageBar::new())?;
        std::fs::write(&done_file, &description)?;
        std::fs::remove_file(&begun_file)?;
    } else {
        let existing = std::fs::read_to_string(&done_file)?;
        if existing != description {
            bail!("{} holds {existing}, not {description}; choose another --workdir", set.out.display());
        }
    }
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&set.out)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "tar"))
        .collect();
    paths.sort();
    Ok(paths.iter().map(|path| path.display().to_string()).collect())
}

/// Scores the run's network, a random one and raw pixels. The first scores are recorded in the run,
/// with a picture of nearest neighbors and the exported backbone.
fn score(args: &Args, split: &Split, device: &Device) -> anyhow::Result<Vec<(String, Scores)>> {
    let open = EvaluatedNetwork::open(&args.workdir, &NetworkSettings::default(), device)?;
    let names = ["knn", "linear-honest"];
    let protocols: Result<Vec<_>, String> = names.into_iter().map(Protocol::named).collect();
    let protocols = protocols.map_err(anyhow::Error::msg)?;
    let scores = split.score(&open.network, &protocols, None, &StageBar::new())?;
    open.record(&args.workdir, &rows(&scores, split, &open.info(&args.workdir)?))?;
    let backbone = Backbone::open(&args.workdir, &Hints::default())?;
    let card = model_card(&args.workdir, &backbone)?;
    let file = args.workdir.join("backbone.safetensors");
    let exporting = Activity::new("exporting the backbone …");
    // A quickstart that is started again replaces the file.
    backbone.export(&file, &ExportSettings::replacing(Format::Safetensors), &card)?;
    drop(exporting);
    let (train, test) =
        split.features(&open.network, FeatureKind::LAST_LEVEL, None, &StageBar::named("neighbors"))?;
    let picture = args.workdir.join("neighbors.png");
    let candidates = ImageFeatures { images: &split.train, features: &train };
    let queries = ImageFeatures { images: &split.test, features: &test };
    sheets::neighbor_sheet(&picture, candidates, Some(queries))?;
    add_to_events(&args.workdir, "neighbors", open.step().unwrap_or_default());
    let mut table = vec![(open.network_name.clone(), scores)];
    table.extend(split.score_baselines(&open.network, &protocols, device, &StageBar::new())?);
    Ok(table)
}
