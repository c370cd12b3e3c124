//! `ocelli shards verify`: checks every byte, every member, every image.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use augment::{DecodeRules, Image};
use pipeline::{Dataset, PipelineError, SampleId, Shard, Source, Storage};
use rayon::prelude::*;
use serde_json::json;

use crate::console::say;
use crate::progress::bar;

/// Flags of `shards verify`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards verify data/")]
pub(crate) struct Args {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let sources = storage.sources(&args.shards)?;
    let (readable, n_bad_shards) = checked(&sources, storage)?;
    let n_samples: u64 = readable.iter().map(|shard| shard.len() as u64).sum();
    let progress = bar(n_samples, "verify");
    let dataset = if readable.is_empty() { None } else { Some(Dataset::new(readable)?) };
    let (bytes, n_bad) = (AtomicU64::new(0), AtomicU64::new(0));
    let check = |dataset: &Dataset, id: u64| -> anyhow::Result<()> {
        let id = SampleId(id);
        let flaw = match dataset.read(id) {
            Ok(sample) => {
                bytes.fetch_add(sample.image.len() as u64, Ordering::Relaxed);
                let decoded = Image::decode_any(&sample.image.files(), &DecodeRules::default());
                decoded.err().map(|error| error.to_string())
            }
            Err(error) if error.is_sample_error() => Some(error.to_string()),
            Err(error) => return Err(error.into()),
        };
        if let Some(reason) = flaw {
            let (shard, key, _) = dataset.describe(id);
            progress.suspend(|| say(format!("bad: shard {shard}, sample {key}: {reason}")));
            n_bad.fetch_add(1, Ordering::Relaxed);
        }
        progress.inc(1);
        Ok(())
    };
    if let Some(dataset) = &dataset {
        (0..dataset.n_samples()).into_par_iter().try_for_each(|id| check(dataset, id))?;
    }
    progress.finish_and_clear();
    let (bytes, n_bad) = (bytes.into_inner(), n_bad.into_inner());
    out!(
        "{} shard(s), {n_bad_shards} bad; {n_samples} samples, {:.1} MB of images, {n_bad} bad",
        sources.len(),
        bytes as f64 / 1e6
    );
    if args.json {
        let n_shards = sources.len();
        let line = json!({ "shards": n_shards, "bad_shards": n_bad_shards, "samples": n_samples,
            "image_bytes": bytes, "bad": n_bad });
        out!("{line}");
    }
    Ok(if n_bad + n_bad_shards == 0 { ExitCode::SUCCESS } else { ExitCode::from(3) })
}

/// Opens and checks shards one by one; returns the shards whose samples can be read, and the number of bad shards.
fn checked(sources: &[Source], storage: &Storage) -> anyhow::Result<(Vec<Shard>, u64)> {
    let mut n_bad_shards = 0u64;
    let mut bad = |error: PipelineError| -> anyhow::Result<()> {
        if !error.is_shard_error() {
            return Err(error.into());
        }
        say(format!("bad: {error}"));
        n_bad_shards += 1;
        Ok(())
    };
    let mut readable = Vec::new();
    for source in sources {
        let shard = match storage.open(source) {
            Ok(shard) => shard,
            Err(error) => {
                bad(error)?;
                continue;
            }
        };
        match storage.verify(source, &shard) {
            Ok(()) => readable.push(shard),
            Err(error) => {
                // The samples of a local file that have changed are reported later. A remote shard is not kept.
                let has_changed = matches!(error, PipelineError::ShardMismatch { .. });
                bad(error)?;
                if has_changed && source.is_read_in_place() {
                    readable.push(shard);
                }
            }
        }
    }
    Ok((readable, n_bad_shards))
}
