//! `ocelli shards verify`: checks every byte, every member, every image.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use augment::{DecodeRules, Fill, Image};
use pipeline::shard::{IMAGE_EXTENSIONS, leads_out_of_folder};
use pipeline::{Dataset, PipelineError, SampleId, Shard, Source, Storage};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::console::say;
use crate::network_flags::ValueFlags;
use crate::parts::{PartFlags, compute_share, folder};
use crate::progress::bar;
use prep::open::split_folders;
use prep::parts::{PartResults, Work, identities, open_folders};

/// Flags of `shards verify`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards verify data/\n  ocelli shards verify data/ --part 3/16 --out \
        parts/\n  ocelli shards verify data/ --join 16 --out parts/"
)]
pub(crate) struct Args {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
    #[command(flatten)]
    values: ValueFlags,
    #[command(flatten)]
    parts: PartFlags,
    /// Output folder for the results of parts.
    #[arg(long, value_name = "FOLDER", help_heading = "In parts")]
    out: Option<PathBuf>,
    /// Print a line of JSON at the end.
    #[arg(long)]
    json: bool,
}

/// Result of the checks of some shards.
#[derive(Serialize, Deserialize)]
struct Checked {
    n_bad_shards: u64,
    n_samples: u64,
    bytes: u64,
    /// Descriptions of bad shards, then of bad samples, in their order.
    flaws: Vec<String>,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let given = split_folders(&args.shards)?;
    let sources = given.sources(storage)?;
    let work = args.parts.work();
    let folders = open_folders(&given, work)?;
    let n_folder_shards = folders.len();
    let results = PartResults::new(
        folder(args.out.as_deref(), work)?,
        "verify",
        json!({
            "shards": identities(&sources, work),
            "bits_used": args.values.bits_used,
            "no_data": args.values.no_data,
        }),
    );
    let rules = DecodeRules {
        bits_used: args.values.bits_used,
        no_data: args.values.no_data(Fill::default()),
        ..DecodeRules::default()
    };
    let parts = compute_share(&results, work, sources.len(), |range| {
        check_samples(&sources[range], folders, storage, &rules)
    })?;
    let Some(parts) = parts else { return Ok(ExitCode::SUCCESS) };
    if let Work::Join(_) = work {
        for flaw in parts.iter().flat_map(|part| &part.flaws) {
            say(format!("bad: {flaw}"));
        }
    }
    let n_bad_shards: u64 = parts.iter().map(|part| part.n_bad_shards).sum();
    let n_samples: u64 = parts.iter().map(|part| part.n_samples).sum();
    let bytes: u64 = parts.iter().map(|part| part.bytes).sum();
    let n_flaws: u64 = parts.iter().map(|part| part.flaws.len() as u64).sum();
    let n_bad = n_flaws - n_bad_shards;
    let n_shards = sources.len() + n_folder_shards;
    out!(
        "{} shard(s), {n_bad_shards} bad; {n_samples} samples, {:.1} MB of images, {n_bad} bad",
        n_shards,
        bytes as f64 / 1e6
    );
    if args.json {
        let line = json!({ "shards": n_shards, "bad_shards": n_bad_shards, "samples": n_samples,
            "image_bytes": bytes, "bad": n_bad });
        out!("{line}");
    }
    if n_flaws == 0 && bytes == 0 {
        let first = args.shards.first().cloned().unwrap_or_default();
        return Err(PipelineError::Empty { n_shards, wanted: IMAGE_EXTENSIONS.join(", "), first }.into());
    }
    Ok(if n_flaws == 0 { ExitCode::SUCCESS } else { ExitCode::from(3) })
}

/// Checks `sources` and their samples, and the images of `folders`; prints what is bad.
fn check_samples(
    sources: &[Source],
    folders: Vec<Shard>,
    storage: &Storage,
    rules: &DecodeRules,
) -> anyhow::Result<Checked> {
    let (mut readable, bad_shards) = check_shards(sources, storage)?;
    readable.extend(folders);
    let n_samples: u64 = readable.iter().map(|shard| shard.len() as u64).sum();
    let progress = bar(n_samples, "verify");
    let dataset = match Dataset::new(readable) {
        // One part may have no image; the whole job checks that some part has one.
        Err(PipelineError::Empty { .. }) => None,
        dataset => Some(dataset?),
    };
    let bytes = AtomicU64::new(0);
    let flaws: Vec<Option<String>> = match &dataset {
        Some(dataset) => (0..dataset.n_samples())
            .into_par_iter()
            .map(|id| -> anyhow::Result<Option<String>> {
                let flaw = sample_flaw(dataset, SampleId(id), rules, &bytes)?;
                progress.inc(1);
                if let Some(flaw) = &flaw {
                    progress.suspend(|| say(format!("bad: {flaw}")));
                }
                Ok(flaw)
            })
            .collect::<anyhow::Result<_>>()?,
        None => Vec::new(),
    };
    progress.finish_and_clear();
    Ok(Checked {
        n_bad_shards: bad_shards.len() as u64,
        n_samples,
        bytes: bytes.into_inner(),
        flaws: bad_shards.into_iter().chain(flaws.into_iter().flatten()).collect(),
    })
}

/// Reads and decodes a sample; returns a description of its flaw, if it has one. Adds the length of
/// its image to `bytes`.
fn sample_flaw(
    dataset: &Dataset,
    id: SampleId,
    rules: &DecodeRules,
    bytes: &AtomicU64,
) -> anyhow::Result<Option<String>> {
    let sample = match dataset.read(id) {
        Ok(sample) => sample,
        // The error names the shard and the sample.
        Err(error) if error.is_sample_error() => return Ok(Some(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    bytes.fetch_add(sample.image.len() as u64, Ordering::Relaxed);
    let flaw = match Image::decode_any(&sample.image.files(), rules) {
        Err(error) => error.to_string(),
        Ok(_) if leads_out_of_folder(&sample.key) => {
            "its name points outside the folder; rename it with `ocelli shards reshard --renumber`"
                .to_string()
        }
        Ok(_) => return Ok(None),
    };
    let (shard, key, _) = dataset.describe(id);
    Ok(Some(format!("shard {shard}, sample {key}: {flaw}")))
}

/// Opens and checks shards one by one; returns the shards whose samples can be read, and the errors
/// of bad ones.
fn check_shards(sources: &[Source], storage: &Storage) -> anyhow::Result<(Vec<Shard>, Vec<String>)> {
    let mut bad_shards = Vec::new();
    let mut readable = Vec::new();
    for source in sources {
        let shard = match storage.open(source) {
            Ok(shard) => shard,
            Err(error) => {
                bad_shards.push(shard_flaw(error)?);
                continue;
            }
        };
        match storage.verify(source, &shard) {
            Ok(()) => readable.push(shard),
            Err(error) => {
                // The samples of a local file that has changed are checked all the same. A remote
                // shard is not kept.
                let has_changed = matches!(error, PipelineError::ShardMismatch { .. });
                bad_shards.push(shard_flaw(error)?);
                if has_changed && source.is_read_in_place() {
                    readable.push(shard);
                }
            }
        }
    }
    Ok((readable, bad_shards))
}

/// Prints and returns the text of `error` if it is that of a bad shard.
///
/// # Errors
/// Any other error.
fn shard_flaw(error: PipelineError) -> anyhow::Result<String> {
    if !error.is_shard_error() {
        return Err(error.into());
    }
    say(format!("bad: {error}"));
    Ok(error.to_string())
}
