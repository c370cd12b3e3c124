//! `ocelli shards synth`: generates a procedural, labeled image set as shards.

use std::path::PathBuf;
use std::process::ExitCode;

use augment::Rgb8;
use pipeline::shard::write::{ShardLimits, ShardWriter};
use rayon::prelude::*;

use crate::progress::bar;
use crate::shards::classes::write_classes;
use crate::shards::encode::jpeg;
use crate::shards::folder_lock::lock_folder;
use crate::shards::synth;

/// JPEG quality of procedural images.
const JPEG_QUALITY: u8 = 92;

/// Flags of `shards synth`.
#[derive(clap::Args)]
pub(crate) struct SynthArgs {
    /// Folder that receives the shards.
    #[arg(long)]
    pub(crate) out: PathBuf,
    /// Number of images.
    #[arg(long, default_value_t = 2000)]
    pub(crate) count: u64,
    /// Seed of the set.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Side of the images, in pixels.
    #[arg(long, default_value_t = 48)]
    pub(crate) size_px: u32,
    /// Prefix of the shards' names.
    #[arg(long, default_value = "train")]
    pub(crate) prefix: String,
}

pub(crate) fn run(args: &SynthArgs) -> anyhow::Result<ExitCode> {
    let paths = synthesize(args)?;
    out!("{} images in {} shard(s) in {}", args.count, paths.len(), args.out.display());
    Ok(ExitCode::SUCCESS)
}

/// Writes a procedural set; images are drawn on all cores and written in order.
pub(crate) fn synthesize(args: &SynthArgs) -> anyhow::Result<Vec<PathBuf>> {
    const CHUNK: u64 = 256;
    let limits = ShardLimits { max_samples: 1000, max_bytes: u64::MAX };
    let _lock = lock_folder(&args.out)?;
    let mut writer = ShardWriter::new(&args.out, &args.prefix, limits)?;
    let progress = bar(args.count, "synth");
    for start in (0..args.count).step_by(CHUNK as usize) {
        let made: anyhow::Result<Vec<_>> = (start..args.count.min(start + CHUNK))
            .into_par_iter()
            .map(|number| {
                let (class, pixels) = synth::image(args.seed, number, args.size_px);
                let image = Rgb8::new(args.size_px, args.size_px, pixels);
                Ok((number, class, jpeg(&image, JPEG_QUALITY, false)?))
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
