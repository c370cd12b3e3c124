//! Indexing of shards that other tools wrote.

use std::path::Path;

use pipeline::shard::sidecar;
use pipeline::url::ShardUrl;
use pipeline::{PipelineError, Progress, Source, Storage};
use rayon::prelude::*;

/// Counts of indexed shards.
pub struct Indexed {
    /// Number of shards.
    pub n_shards: usize,
    /// Number of indices that were written.
    pub n_written: u64,
    /// Number of samples of all shards.
    pub n_samples: u64,
}

/// Writes the indices that `shards` lack: the index of a local shard beside it, indices of other
/// shards into the cache. With `checksums`, local shards are read completely, for checksums; with
/// `overwrite`, existing indices are built again.
///
/// # Errors
/// [`PipelineError`] when a shard cannot be read, or an index cannot be written.
pub fn index_shards(
    shards: &[String],
    checksums: bool,
    overwrite: bool,
    storage: &Storage,
    progress: &dyn Progress,
) -> Result<Indexed, PipelineError> {
    let sources = storage.sources(shards)?;
    progress.begin("index", sources.len() as u64);
    let counts: Result<Vec<(u64, u64)>, PipelineError> = sources
        .par_iter()
        .map(|source| -> Result<(u64, u64), PipelineError> {
            let counts = match &source.url {
                ShardUrl::File(path) if source.is_read_in_place() => index_local(path, checksums, overwrite)?,
                _ => index_remote(source, overwrite, storage)?,
            };
            progress.advance(1);
            Ok(counts)
        })
        .collect();
    let mut indexed = Indexed { n_shards: sources.len(), n_written: 0, n_samples: 0 };
    for (n_samples, n_written) in counts? {
        indexed.n_samples += n_samples;
        indexed.n_written += n_written;
    }
    Ok(indexed)
}

/// Writes the index of the shard at `path`, if needed; returns its number of samples, and 1 if it
/// was written.
fn index_local(path: &Path, checksums: bool, overwrite: bool) -> Result<(u64, u64), PipelineError> {
    let known = if overwrite { None } else { sidecar::load(path).ok().flatten() };
    if let Some(known) = &known {
        let has_checksums = known.checksum.is_some();
        let is_current = sidecar::current_checksum(path).is_some();
        if is_current || (!has_checksums && !checksums) {
            let index = sidecar::open(path)?;
            if index == *known {
                // The index was compared with the shard: later commands need not compare again.
                sidecar::touch(path);
                return Ok((index.len() as u64, 0));
            }
        }
    }
    // An index with checksums, which may belong to another file, is replaced by one with checksums.
    let wants_checksums = checksums || known.is_some_and(|known| known.checksum.is_some());
    let index = if wants_checksums { sidecar::build_checked(path)? } else { sidecar::build(path)? };
    sidecar::save(&index, path)?;
    Ok((index.len() as u64, 1))
}

/// Writes the index of a shard into the cache, if needed; returns its number of samples, and 1 if
/// it was written.
fn index_remote(source: &Source, overwrite: bool, storage: &Storage) -> Result<(u64, u64), PipelineError> {
    if overwrite {
        storage.forget(source)?;
    }
    let existed = storage.has_index(source)?;
    Ok((storage.open(source)?.len() as u64, u64::from(!existed)))
}
