//! `ocelli shards`: make, check and list shards.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use augment::decode::decode;
use augment::{DecodeRules, Rgb8};
use clap::Subcommand;
use pipeline::index::ShardIndex;
use pipeline::write::{ShardLimits, ShardWriter};
use pipeline::{Dataset, SampleId};
use rayon::prelude::*;
use serde_json::json;

use super::prep::resize::jpeg;
use super::{pack, prep};
use crate::progress::bar;
use crate::synth;

/// Quality of procedural images.
const JPEG_QUALITY: u8 = 92;

/// Flags of `shards`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// A folder of images, or a list of them, into shards.
    Pack(pack::Args),
    /// A procedural, labelled image set as shards.
    Synth(SynthArgs),
    /// Read every sample, decode every image, compare the index with the tar.
    Verify(VerifyArgs),
    /// List the samples of shards.
    Ls(LsArgs),
    /// Write index sidecars for shards that other tools made.
    Index(prep::index::Args),
    /// What the images are: sizes, formats, colors, duplicates, speed.
    Stats(prep::stats::Args),
    /// Images on one picture, as they are or as a recipe's augmented views.
    ContactSheet(prep::sheet::Args),
    /// Large images to a short side, progressive JPEGs to baseline.
    Resize(prep::resize::Args),
    /// Leave out what is corrupt, too small, too long or blank.
    Filter(prep::filter::Args),
    /// Find exact and near copies, within a set and against a test set.
    Dedup(prep::dedup::Args),
    /// The same samples in shards of another size or order.
    Reshard(prep::regroup::ReshardArgs),
    /// The samples in parts, by their keys.
    Split(prep::regroup::SplitArgs),
    /// Some of the samples: a number, a list of keys, classes.
    Subset(prep::regroup::SubsetArgs),
    /// Members back into files.
    Extract(prep::extract::Args),
}

/// Flags of `shards synth`.
#[derive(clap::Args)]
pub(crate) struct SynthArgs {
    /// Folder for the shards.
    #[arg(long)]
    pub(crate) out: PathBuf,
    /// Images.
    #[arg(long, default_value_t = 2000)]
    pub(crate) count: u64,
    /// Seed of the set.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Side of the images.
    #[arg(long, default_value_t = 48)]
    pub(crate) size_px: u32,
    /// Name of the shards.
    #[arg(long, default_value = "train")]
    pub(crate) prefix: String,
}

#[derive(clap::Args)]
struct VerifyArgs {
    /// Shard lists.
    #[arg(required = true)]
    shards: Vec<String>,
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct LsArgs {
    /// Shard lists.
    #[arg(required = true)]
    shards: Vec<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.verb {
        Verb::Pack(args) => pack::run(args),
        Verb::Synth(args) => {
            let paths = synthesize(args)?;
            println!("{} images in {} shard(s) in {}", args.count, paths.len(), args.out.display());
            Ok(ExitCode::SUCCESS)
        }
        Verb::Verify(args) => verify(args),
        Verb::Ls(args) => list(args),
        Verb::Index(args) => prep::index::run(args),
        Verb::Stats(args) => prep::stats::run(args),
        Verb::ContactSheet(args) => prep::sheet::run(args),
        Verb::Resize(args) => prep::resize::run(args),
        Verb::Filter(args) => prep::filter::run(args),
        Verb::Dedup(args) => prep::dedup::run(args),
        Verb::Reshard(args) => prep::regroup::reshard(args),
        Verb::Split(args) => prep::regroup::split(args),
        Verb::Subset(args) => prep::regroup::subset(args),
        Verb::Extract(args) => prep::extract::run(args),
    }
}

/// Writes a procedural set; images are made on all cores and written in order.
pub(crate) fn synthesize(args: &SynthArgs) -> anyhow::Result<Vec<PathBuf>> {
    const CHUNK: u64 = 256;
    let limits = ShardLimits { max_samples: 1000, max_bytes: u64::MAX };
    let mut writer = ShardWriter::new(&args.out, &args.prefix, limits)?;
    let progress = bar(args.count, "synth");
    for start in (0..args.count).step_by(CHUNK as usize) {
        let made: anyhow::Result<Vec<_>> = (start..args.count.min(start + CHUNK))
            .into_par_iter()
            .map(|number| {
                let (class, pixels) = synth::image(args.seed, number, args.size_px);
                let image = Rgb8::new(args.size_px, args.size_px, pixels);
                Ok((number, class, jpeg(&image, JPEG_QUALITY)?))
            })
            .collect();
        for (number, class, bytes) in made? {
            writer.add(&format!("{number:08}"), &[("jpg", &bytes), ("cls", class.to_string().as_bytes())])?;
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    write_classes(&args.out, &synth::CLASSES.map(String::from))?;
    Ok(writer.finish()?)
}

/// Writes `classes.txt`, one name a line in the order of the class numbers.
pub(crate) fn write_classes(folder: &Path, names: &[String]) -> anyhow::Result<()> {
    let path = folder.join("classes.txt");
    let text: String = names.iter().flat_map(|name| [name.as_str(), "\n"]).collect();
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn verify(args: &VerifyArgs) -> anyhow::Result<ExitCode> {
    let paths = pipeline::url::expand(&args.shards)?;
    for path in &paths {
        let walked = ShardIndex::build(path)?;
        let sidecar = ShardIndex::sidecar_path(path);
        if sidecar.exists() {
            let text =
                std::fs::read(&sidecar).with_context(|| format!("cannot read {}", sidecar.display()))?;
            let reason = match ShardIndex::parse(&text) {
                Ok(index) if index == walked => continue,
                Ok(_) => "it does not describe what the tar holds".into(),
                Err(reason) => reason,
            };
            return Err(pipeline::PipelineError::BadIndex { path: sidecar, reason }.into());
        }
    }
    let dataset = Dataset::from_paths(&paths)?;
    let progress = bar(dataset.n_samples(), "verify");
    let (bytes, n_bad) = (AtomicU64::new(0), AtomicU64::new(0));
    let check = |id: u64| {
        let id = SampleId(id);
        let outcome = dataset.read(id).map_err(|error| error.to_string()).and_then(|sample| {
            bytes.fetch_add(sample.image.len() as u64, Ordering::Relaxed);
            decode(&sample.image, &DecodeRules::default()).map_err(|error| error.to_string())
        });
        if let Err(reason) = outcome {
            let (shard, key, _) = dataset.describe(id);
            progress.suspend(|| eprintln!("bad: shard {shard}, sample {key}: {reason}"));
            n_bad.fetch_add(1, Ordering::Relaxed);
        }
        progress.inc(1);
    };
    (0..dataset.n_samples()).into_par_iter().for_each(check);
    progress.finish_and_clear();
    let (bytes, n_bad) = (bytes.into_inner(), n_bad.into_inner());
    let n_samples = dataset.n_samples();
    println!(
        "{} shard(s), {n_samples} samples, {:.1} MB of images, {n_bad} bad",
        paths.len(),
        bytes as f64 / 1e6
    );
    if args.json {
        println!(
            "{}",
            json!({ "shards": paths.len(), "samples": n_samples, "image_bytes": bytes, "bad": n_bad })
        );
    }
    Ok(if n_bad == 0 { ExitCode::SUCCESS } else { ExitCode::from(3) })
}

fn list(args: &LsArgs) -> anyhow::Result<ExitCode> {
    use std::io::Write;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for path in pipeline::url::expand(&args.shards)? {
        let index = ShardIndex::open(&path)?;
        for i in 0..index.len() {
            let members: Vec<String> =
                index.members(i).map(|m| format!("{}:{}", m.extension, m.len_bytes)).collect();
            let line = writeln!(out, "{}\t{}\t{}", path.display(), index.key(i), members.join(" "));
            // A reader that closes the pipe, such as `head`, has seen enough.
            if line.is_err() {
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
