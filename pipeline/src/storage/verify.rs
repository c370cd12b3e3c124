//! Verification of a whole shard against its index and its list.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::shard::Shard;
use crate::shard::index::ShardIndex;
use crate::shard::sidecar;
use crate::source::Source;
use crate::{PipelineError, hash};

/// Checks the members of `index`, the file at `index_path`, against the headers of the tar `file`,
/// and its bytes against the checksums that the index and the list state. `file` and `shard` are
/// `source`, opened.
///
/// # Errors
/// [`PipelineError::BadIndex`] when the members differ, [`PipelineError::ShardMismatch`] when the
/// bytes differ.
pub(super) fn verify(
    source: &Source,
    shard: &Shard,
    index: &ShardIndex,
    file: &File,
    index_path: &Path,
) -> Result<(), PipelineError> {
    let name = PathBuf::from(shard.name());
    if !sidecar::walk(file, &name, false)?.has_same_members_as(index) {
        let reason = "it does not match the contents of the tar".into();
        return Err(PipelineError::BadIndex { path: index_path.to_path_buf(), reason });
    }
    // The MD5 covers the stored bytes, which are kept only if they are a tar.
    let xxh3 = match source.md5.as_ref().filter(|_| source.url.is_plain_tar()) {
        Some(stated) => {
            let hashes =
                hash::hashes_of_file(file).map_err(|error| PipelineError::io("read", &name, error))?;
            check_md5(shard.name(), stated, &hashes.md5)?;
            hashes.xxh3
        }
        None => hash::xxh3_of_file(file).map_err(|error| PipelineError::io("read", &name, error))?,
    };
    if index.checksum.is_some_and(|checksum| checksum != xxh3) {
        let reason = "its checksum differs".into();
        return Err(PipelineError::ShardMismatch { shard: shard.name(), reason });
    }
    Ok(())
}

/// Checks the MD5 of the stored bytes of `shard` against the one that its list states.
///
/// # Errors
/// [`PipelineError::ShardMismatch`].
pub(super) fn check_md5(shard: String, stated: &str, md5: &str) -> Result<(), PipelineError> {
    if md5.eq_ignore_ascii_case(stated) {
        return Ok(());
    }
    let reason = format!("its list says MD5 {stated}, but it has {md5}");
    Err(PipelineError::ShardMismatch { shard, reason })
}
