//! `ocelli shards synth`: generates a procedural, labeled image set as shards.

use std::path::PathBuf;
use std::process::ExitCode;

use pipeline::words::counted;
use prep::synth::{SynthSet, synthesize};

use crate::progress::StageBar;

/// Flags of `shards synth`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Output folder for the shards.
    #[arg(long)]
    out: PathBuf,
    /// Number of images.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,
    /// Seed for the images.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Side of the images, in pixels.
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..))]
    size_px: u32,
    /// Prefix of the shard names.
    #[arg(long, default_value = "train")]
    prefix: String,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let set = SynthSet {
        out: args.out.clone(),
        count: args.count,
        seed: args.seed,
        size_px: args.size_px,
        prefix: args.prefix.clone(),
    };
    let paths = synthesize(&set, &StageBar::new())?;
    let shards = counted(paths.len() as u64, "shard");
    out!("{} in {shards} in {}", counted(args.count, "image"), args.out.display());
    Ok(ExitCode::SUCCESS)
}
