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

use crate::backbone::ValueFlags;
use crate::console::say;
use crate::parts::{PartFlags, PartResults, Work, folder, identities, open_folders};
use crate::progress::bar;
use prep::open::split_folders;

/// Flags of `shards verify`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards verify data/\n  ocelli shards verify data/ --part 3/16 --out parts/\n  ocelli shards verify data/ --join 16 --out parts/"
)]
pub(crate) struct Args {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
    #[command(flatten)]
    values: ValueFlags,
    #[command(flatten)]
    parts: PartFlags,
    /// Folder that receives the results of parts.
    #[arg(long, value_name = "FOLDER", help_heading = "In parts")]
    out: Option<PathBuf>,
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Result of the checks of some shards.
#[derive(Serialize, Deserialize)]
struct Found {
    n_bad_shards: u64,
    n_samples: u64,
    bytes: u64,
    /// Bad shards and samples in words, in their order.
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
    let parts = results.of(work, sources.len(), |range| found(&sources[range], folders, storage, &rules))?;
    let Some(parts) = parts else { return Ok(ExitCode::SUCCESS) };
    if let Work::Join(_) = work {
        parts.iter().flat_map(|part| &part.flaws).for_each(|flaw| say(format!("bad: {flaw}")));
    }
    let sum = |of: &dyn Fn(&Found) -> u64| parts.iter().map(of).sum::<u64>();
    let n_bad_shards = sum(&|part| part.n_bad_shards);
    let n_samples = sum(&|part| part.n_samples);
    let bytes = sum(&|part| part.bytes);
    let n_flaws = sum(&|part| part.flaws.len() as u64);
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
fn found(
    sources: &[Source],
    folders: Vec<Shard>,
    storage: &Storage,
    rules: &DecodeRules,
) -> anyhow::Result<Found> {
    let (mut readable, bad_shards) = checked(sources, storage)?;
    readable.extend(folders);
    let n_samples: u64 = readable.iter().map(|shard| shard.len() as u64).sum();
    let progress = bar(n_samples, "verify");
    let dataset = match Dataset::new(readable) {
        // The whole job finds out whether no part has an image.
        Err(PipelineError::Empty { .. }) => None,
        dataset => Some(dataset?),
    };
    let bytes = AtomicU64::new(0);
    let check = |dataset: &Dataset, id: u64| -> anyhow::Result<Option<String>> {
        let id = SampleId(id);
        let flaw = match dataset.read(id) {
            Ok(sample) => {
                bytes.fetch_add(sample.image.len() as u64, Ordering::Relaxed);
                let decoded = Image::decode_any(&sample.image.files(), rules);
                let flaw = match decoded {
                    Err(error) => Some(error.to_string()),
                    Ok(_) if leads_out_of_folder(&sample.key) => Some(
                        "its name leads out of a folder; --renumber of reshard gives it another".to_string(),
                    ),
                    Ok(_) => None,
                };
                flaw.map(|flaw| {
                    let (shard, key, _) = dataset.describe(id);
                    format!("shard {shard}, sample {key}: {flaw}")
                })
            }
            // It names the shard and the sample itself.
            Err(error) if error.is_sample_error() => Some(error.to_string()),
            Err(error) => return Err(error.into()),
        };
        progress.inc(1);
        if let Some(flaw) = &flaw {
            progress.suspend(|| say(format!("bad: {flaw}")));
        }
        Ok(flaw)
    };
    let flaws: Vec<Option<String>> = match &dataset {
        Some(dataset) => {
            let ids = (0..dataset.n_samples()).into_par_iter();
            ids.map(|id| check(dataset, id)).collect::<anyhow::Result<_>>()?
        }
        None => Vec::new(),
    };
    progress.finish_and_clear();
    Ok(Found {
        n_bad_shards: bad_shards.len() as u64,
        n_samples,
        bytes: bytes.into_inner(),
        flaws: bad_shards.into_iter().chain(flaws.into_iter().flatten()).collect(),
    })
}

/// Opens and checks shards one by one; returns the shards whose samples can be read, and what is
/// wrong with bad ones.
fn checked(sources: &[Source], storage: &Storage) -> anyhow::Result<(Vec<Shard>, Vec<String>)> {
    let mut bad_shards = Vec::new();
    let mut bad = |error: PipelineError| -> anyhow::Result<()> {
        if !error.is_shard_error() {
            return Err(error.into());
        }
        say(format!("bad: {error}"));
        bad_shards.push(error.to_string());
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
                // The samples of a local file that have changed are reported later. A remote shard
                // is not kept.
                let has_changed = matches!(error, PipelineError::ShardMismatch { .. });
                bad(error)?;
                if has_changed && source.is_read_in_place() {
                    readable.push(shard);
                }
            }
        }
    }
    Ok((readable, bad_shards))
}
