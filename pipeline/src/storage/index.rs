//! The index of a shard without reading the shard, where one is kept or stands beside it.

use std::path::{Path, PathBuf};

use super::fetcher::Fetcher;
use super::receive::failed;
use crate::PipelineError;
use crate::remote::body::Failure;
use crate::shard::index::ShardIndex;
use crate::shard::sidecar;
use crate::source::Source;

/// The index of a tar on a disk: its sidecar, or one that an earlier start has kept, or a new one.
pub(super) fn local_index(
    fetcher: &Fetcher,
    source: &Source,
    path: &Path,
) -> Result<ShardIndex, PipelineError> {
    if sidecar::path_of(path).exists() {
        return sidecar::open(path);
    }
    let kept = fetcher.cache().path(&fetcher.cache_name(source)?);
    if let Ok(Some(index)) = sidecar::load(&kept) {
        return Ok(index);
    }
    let index = sidecar::build(path)?;
    // Where nothing can be kept, the next start builds it again.
    let _ = fetcher.cache().create().and_then(|()| sidecar::save(&index, &kept));
    Ok(index)
}

/// The index of a shard that is read from the cache: the one that is kept there, the one beside the
/// shard, or a new one, for which the shard is fetched.
pub(super) fn cached_index(
    fetcher: &Fetcher,
    source: &Source,
    name: &str,
) -> Result<ShardIndex, PipelineError> {
    let path = fetcher.cache().path(name);
    if let Ok(Some(index)) = sidecar::load(&path) {
        return Ok(index);
    }
    let index = match index_beside(fetcher, source)? {
        Some(index) => index,
        None => index_of_whole(fetcher, source, name)?,
    };
    // Where nothing can be kept, the next start asks again.
    let _ = fetcher.cache().create().and_then(|()| sidecar::save(&index, &path));
    Ok(index)
}

/// The index that stands beside a shard, if one does.
fn index_beside(fetcher: &Fetcher, source: &Source) -> Result<Option<ShardIndex>, PipelineError> {
    let Some(beside) = source.url.with_suffix(".idx.json") else { return Ok(None) };
    let reason = match fetcher.read_text(&beside) {
        Ok(text) => match sidecar::parse(&text) {
            Ok(index) => return Ok(Some(index)),
            // Some servers answer every name with a page.
            Err(reason) => reason,
        },
        // A store that does not show its list denies a name that it does not have.
        Err(Failure::NotFound | Failure::Denied(_)) => return Ok(None),
        Err(Failure::Answered(reason)) => reason,
        Err(failure) => return Err(failed(&source.url, failure)),
    };
    tracing::warn!("{beside} is no index ({reason}): the shard is read for one");
    Ok(None)
}

/// The index of a shard that has none: the shard is fetched, and kept only if it is a whole tar.
fn index_of_whole(fetcher: &Fetcher, source: &Source, name: &str) -> Result<ShardIndex, PipelineError> {
    tracing::info!("{} has no index beside it: it is read once as a whole", source.url);
    let file = fetcher.file(source, name, None)?;
    let index = sidecar::of_file(&file, &PathBuf::from(source.url.to_string()));
    if index.is_err() {
        fetcher.forget(source)?;
    }
    index
}
