//! `ocelli shards`: make, check and list shards.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use augment::Rgb8;
use clap::Subcommand;
use pipeline::Storage;
use pipeline::write::{ShardLimits, ShardWriter};
use rayon::prelude::*;

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
    /// Read every byte, decode every image, compare index and checksums with the tar.
    Verify(prep::verify::Args),
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
struct LsArgs {
    /// Shard lists.
    #[arg(required = true)]
    shards: Vec<String>,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    match &args.verb {
        Verb::Pack(args) => pack::run(args),
        Verb::Synth(args) => {
            let paths = synthesize(args)?;
            println!("{} images in {} shard(s) in {}", args.count, paths.len(), args.out.display());
            Ok(ExitCode::SUCCESS)
        }
        Verb::Verify(args) => prep::verify::run(args, storage),
        Verb::Ls(args) => list(args, storage),
        Verb::Index(args) => prep::index::run(args, storage),
        Verb::Stats(args) => prep::stats::run(args, storage),
        Verb::ContactSheet(args) => prep::sheet::run(args, storage),
        Verb::Resize(args) => prep::resize::run(args, storage),
        Verb::Filter(args) => prep::filter::run(args, storage),
        Verb::Dedup(args) => prep::dedup::run(args, storage),
        Verb::Reshard(args) => prep::regroup::reshard(args, storage),
        Verb::Split(args) => prep::regroup::split(args, storage),
        Verb::Subset(args) => prep::regroup::subset(args, storage),
        Verb::Extract(args) => prep::extract::run(args, storage),
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

fn list(args: &LsArgs, storage: &Storage) -> anyhow::Result<ExitCode> {
    use std::io::Write;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for shard in storage.open_all(&storage.sources(&args.shards)?)? {
        let (name, index) = (shard.name(), shard.index());
        for i in 0..index.len() {
            let members: Vec<String> =
                index.members(i).map(|m| format!("{}:{}", m.extension, m.len_bytes)).collect();
            let line = writeln!(out, "{name}\t{}\t{}", index.key(i), members.join(" "));
            // A reader that closes the pipe, such as `head`, has seen enough.
            if line.is_err() {
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
