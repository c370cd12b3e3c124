//! Lookup of the index of a shard, which is read as a whole only if there is no index in the cache
//! or beside it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::fetcher::Fetcher;
use super::receive::failed;
use crate::PipelineError;
use crate::remote::body::Failure;
use crate::shard::Shard;
use crate::shard::index::ShardIndex;
use crate::shard::sidecar;
use crate::shard::store::LocalStore;
use crate::source::Source;

/// Opens a tar on a local disk with its index: its sidecar, unless that may be of another file, the
/// cached index of an earlier run, or a new one.
pub(super) fn open_local(fetcher: &Fetcher, source: &Source, path: &Path) -> Result<Shard, PipelineError> {
    let store = Arc::new(LocalStore::open(path)?);
    if let Some(index) = sidecar::current(path, store.stamp())? {
        return Ok(Shard::with_current_index(store, index));
    }
    // The name holds the state of the file: the index was made for this state.
    let kept = fetcher.cache().path(&fetcher.cache_name(source)?);
    if let Ok(Some(index)) = sidecar::load(&kept) {
        return match index.checksum {
            Some(_) => Ok(Shard::with_current_index(store, index)),
            None => Ok(Shard::with_kept_index(store, index, kept)),
        };
    }
    let mut index = sidecar::open(path)?;
    if !store.stamp().is_settled() {
        return Ok(Shard::new(store, index));
    }
    // The checksum of a sidecar may be that of another state of the file.
    index.checksum = None;
    // If the index cannot be cached, the next run builds it again.
    let _ = fetcher.cache().create().and_then(|()| sidecar::save(&index, &kept));
    Ok(Shard::with_kept_index(store, index, kept))
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
    let Some(beside) = source.url.with_suffix(".idx.json") else { return Ok(None) };
    let reason = match fetcher.read_text(&beside) {
        Ok(text) => match sidecar::parse(&text) {
            Ok(index) => return Ok(Some(index)),
            // Some servers return a web page for every name.
            Err(reason) => reason,
        },
        // A store that does not permit listing denies access to objects that do not exist.
        Err(Failure::NotFound | Failure::Denied(_)) => return Ok(None),
        Err(Failure::Answered(reason)) => reason,
        Err(failure) => return Err(failed(&source.url, failure)),
    };
    tracing::warn!("{beside} is no index ({reason}): the shard is read for one");
    Ok(None)
}

/// Builds the index of a shard that has none: the shard is fetched, and kept only if it is a
/// complete tar.
fn index_by_reading_shard(
    fetcher: &Fetcher,
    source: &Source,
    name: &str,
) -> Result<ShardIndex, PipelineError> {
    tracing::info!("{} has no index beside it: it is read once as a whole", source.url);
    let file = fetcher.file(source, name, None)?;
    let index = sidecar::of_file(&file, &PathBuf::from(source.url.to_string()));
    if index.is_err() {
        fetcher.forget(source)?;
    }
    index
}
