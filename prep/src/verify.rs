//! Checks of a data set: every byte, every member, every image.

use std::sync::atomic::{AtomicU64, Ordering};

use augment::{DecodeRules, Image};
use pipeline::shard::{IMAGE_EXTENSIONS, leads_out_of_folder};
use pipeline::{Dataset, PipelineError, Progress, SampleId, Shard, Source, Storage};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::error::PrepError;
use crate::open::split_folders;
use crate::parts::{PartResults, ReadJob, Share, Work, identities, open_folders, result_folder};

/// Receiver of the description of a flaw, which is called on any thread.
type Report<'a> = &'a (dyn Fn(&str) + Sync);

/// Result of the checks of a data set.
pub struct Verified {
    /// Number of shards.
    pub n_shards: usize,
    /// Number of bad shards.
    pub n_bad_shards: u64,
    /// Number of samples.
    pub n_samples: u64,
    /// Number of bad samples.
    pub n_bad: u64,
    /// Bytes of the images that could be read.
    pub bytes: u64,
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

impl Verified {
    /// Returns whether no shard and no sample is bad.
    pub fn is_good(&self) -> bool {
        self.n_bad_shards == 0 && self.n_bad == 0
    }

    /// Returns an error if there is nothing bad in the shards `specs` because they have no image.
    ///
    /// # Errors
    /// [`PipelineError::Empty`].
    pub fn check_images(&self, specs: &[String]) -> Result<(), PipelineError> {
        if !self.is_good() || self.bytes > 0 {
            return Ok(());
        }
        let first = specs.first().cloned().unwrap_or_default();
        Err(PipelineError::Empty { n_shards: self.n_shards, wanted: IMAGE_EXTENSIONS.join(", "), first })
    }
}

/// Checks the shards and the images of `job`. Passes a description of each flaw to `report` as it
/// is found; a join, those that its parts have found.
///
/// # Errors
/// [`PrepError`] when a check is impossible, or when the results of parts are missing or of another
/// job.
pub fn verify(
    job: &ReadJob<'_>,
    storage: &Storage,
    progress: &dyn Progress,
    report: Report<'_>,
) -> Result<Share<Verified>, PrepError> {
    let given = split_folders(job.specs)?;
    let sources = given.sources(storage)?;
    let folders = open_folders(&given, job.work)?;
    let n_shards = sources.len() + folders.len();
    let identity = json!({
        "shards": identities(&sources, job.work),
        "bits_used": job.rules.bits_used,
        "no_data": job.rules.no_data.and_then(|no_data| no_data.value),
    });
    let results = PartResults::new(result_folder(job.out, job.work)?, "verify", identity);
    let share = results.compute(job.work, sources.len(), |range| {
        let (mut readable, bad_shards) = check_shards(&sources[range], storage, report)?;
        readable.extend(folders);
        check_samples(readable, bad_shards, job.rules, progress, report)
    })?;
    share.try_map(|parts| {
        let mut verified = Verified { n_shards, n_bad_shards: 0, n_samples: 0, n_bad: 0, bytes: 0 };
        for part in &parts {
            if matches!(job.work, Work::Join(_)) {
                for flaw in &part.flaws {
                    report(flaw);
                }
            }
            verified.n_bad_shards += part.n_bad_shards;
            verified.n_samples += part.n_samples;
            verified.n_bad += part.flaws.len() as u64 - part.n_bad_shards;
            verified.bytes += part.bytes;
        }
        Ok(verified)
    })
}

/// Checks the samples of `shards`, and returns the result together with the errors of bad shards.
fn check_samples(
    shards: Vec<Shard>,
    bad_shards: Vec<String>,
    rules: &DecodeRules,
    progress: &dyn Progress,
    report: Report<'_>,
) -> Result<Checked, PrepError> {
    let n_samples: u64 = shards.iter().map(|shard| shard.len() as u64).sum();
    progress.begin("verify", n_samples);
    let dataset = match Dataset::new(shards) {
        // One part may have no image; the whole job checks that some part has one.
        Err(PipelineError::Empty { .. }) => None,
        dataset => Some(dataset?),
    };
    let bytes = AtomicU64::new(0);
    let flaws: Vec<Option<String>> = match &dataset {
        Some(dataset) => (0..dataset.n_samples())
            .into_par_iter()
            .map(|id| -> Result<Option<String>, PrepError> {
                let flaw = sample_flaw(dataset, SampleId(id), rules, &bytes)?;
                progress.advance(1);
                if let Some(flaw) = &flaw {
                    report(flaw);
                }
                Ok(flaw)
            })
            .collect::<Result<_, PrepError>>()?,
        None => Vec::new(),
    };
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
) -> Result<Option<String>, PrepError> {
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
fn check_shards(
    sources: &[Source],
    storage: &Storage,
    report: Report<'_>,
) -> Result<(Vec<Shard>, Vec<String>), PrepError> {
    let mut bad_shards = Vec::new();
    let mut readable = Vec::new();
    for source in sources {
        let shard = match storage.open(source) {
            Ok(shard) => shard,
            Err(error) => {
                bad_shards.push(shard_flaw(error, report)?);
                continue;
            }
        };
        match storage.verify(source, &shard) {
            Ok(()) => readable.push(shard),
            Err(error) => {
                // The samples of a local file that has changed are checked all the same. A remote
                // shard is not kept.
                let has_changed = matches!(error, PipelineError::ShardMismatch { .. });
                bad_shards.push(shard_flaw(error, report)?);
                if has_changed && source.is_read_in_place() {
                    readable.push(shard);
                }
            }
        }
    }
    Ok((readable, bad_shards))
}

/// Reports and returns the text of `error` if a bad shard is its cause.
///
/// # Errors
/// Any other error.
fn shard_flaw(error: PipelineError, report: Report<'_>) -> Result<String, PrepError> {
    if !error.is_shard_error() {
        return Err(error.into());
    }
    let flaw = error.to_string();
    report(&flaw);
    Ok(flaw)
}
