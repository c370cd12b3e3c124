//! Lookup of the index of a shard, which is read as a whole only if there is neither a cached index
//! nor a sidecar.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::fetcher::Fetcher;
use super::receive::fetch_error;
use crate::PipelineError;
use crate::remote::body::Failure;
use crate::shard::Shard;
use crate::shard::index::ShardIndex;
use crate::shard::sidecar;
use crate::shard::store::LocalStore;
use crate::source::Source;

/// Opens a tar on a local disk with its index: its sidecar, unless that may describe another file,
/// the cached index of an earlier run, or a new one.
pub(super) fn open_local(fetcher: &Fetcher, source: &Source, path: &Path) -> Result<Shard, PipelineError> {
    let store = Arc::new(LocalStore::open(path)?);
    if let Some(index) = sidecar::load_current(path, store.stamp())? {
        return Ok(Shard::with_current_index(store, index));
    }
    // The name contains the state of the file: the index was made for this state.
    let cached_path = fetcher.cache().path(&fetcher.cache_name(source)?);
    if let Ok(Some(index)) = sidecar::load(&cached_path) {
        return match index.checksum {
            Some(_) => Ok(Shard::with_current_index(store, index)),
            None => Ok(Shard::with_cached_index(store, index, cached_path)),
        };
    }
    let mut index = sidecar::open(path)?;
    if !store.stamp().is_settled() {
        return Ok(Shard::new(store, index));
    }
    // The checksum of a sidecar may be that of another state of the file.
    index.checksum = None;
    // If the index cannot be cached, the next run builds it again.
    let _ = fetcher.cache().create().and_then(|()| sidecar::save(&index, &cached_path));
    Ok(Shard::with_cached_index(store, index, cached_path))
}

/// Returns the index of a shard that is read from the cache: the cached index, the sidecar beside
/// the shard, or a new one, for which the shard is fetched.
pub(super) fn cached_index(
    fetcher: &Fetcher,
    source: &Source,
    name: &str,
) -> Result<ShardIndex, PipelineError> {
    let path = fetcher.cache().path(name);
    if let Ok(Some(index)) = sidecar::load(&path) {
        return Ok(index);
    }
    let index = match fetch_sidecar(fetcher, source)? {
        Some(index) => index,
        None => index_by_reading_shard(fetcher, source, name)?,
    };
    // If the index cannot be cached, the next run fetches it again.
    let _ = fetcher.cache().create().and_then(|()| sidecar::save(&index, &path));
    Ok(index)
}

/// Fetches the sidecar beside a shard, if there is one.
fn fetch_sidecar(fetcher: &Fetcher, source: &Source) -> Result<Option<ShardIndex>, PipelineError> {
    let Some(sidecar_url) = source.url.with_suffix(".idx.json") else { return Ok(None) };
    let reason = match fetcher.read_text(&sidecar_url) {
        Ok(text) => match sidecar::parse(&text) {
            Ok(index) => return Ok(Some(index)),
            // Some servers return a web page for every name.
            Err(reason) => reason,
        },
        // A store that does not permit listing denies access to objects that do not exist.
        Err(Failure::NotFound | Failure::Denied(_)) => return Ok(None),
        Err(Failure::Answered(reason)) => reason,
        Err(failure) => return Err(fetch_error(&source.url, failure)),
    };
    tracing::warn!("{sidecar_url} is not an index ({reason}): reading the shard to build one");
    Ok(None)
}

/// Builds the index of a shard without one: the shard is fetched, and kept only if it is a complete
/// tar.
fn index_by_reading_shard(
    fetcher: &Fetcher,
    source: &Source,
    name: &str,
) -> Result<ShardIndex, PipelineError> {
    tracing::info!("{} has no index: reading the whole shard once to build one", source.url);
    let file = fetcher.file(source, name, None)?;
    let index = sidecar::build_checked_from(&file, &PathBuf::from(source.url.to_string()));
    if index.is_err() {
        fetcher.forget(source)?;
    }
    index
}
