//! Verification of a whole shard against its index and its list.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::shard::Shard;
use crate::shard::index::ShardIndex;
use crate::shard::sidecar;
use crate::source::Source;
use crate::{PipelineError, hash};

/// Checks the members of `index`, at `index_path`, against the headers of the tar `file`, which is
/// `source` and open as `shard`, and its bytes against the checksums that the index and its list
/// state.
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
        let reason = "it does not describe what the tar holds".into();
        return Err(PipelineError::BadIndex { path: index_path.to_path_buf(), reason });
    }
    let other = |reason| PipelineError::ShardMismatch { shard: shard.name(), reason };
    // The MD5 is that of the stored bytes, which are kept only if they are a tar.
    let md5 = source.md5.as_ref().filter(|_| source.url.is_plain_tar());
    let (xxh3, found) =
        hash::of_file(file, md5.is_some()).map_err(|e| PipelineError::io("read", &name, e))?;
    match (md5, found) {
        (Some(says), Some(found)) if !found.eq_ignore_ascii_case(says) => {
            return Err(other(format!("its list gives MD5 {says}, it has {found}")));
        }
        _ => {}
    }
    if index.checksum.is_some_and(|checksum| checksum != xxh3) {
        return Err(other("its checksum differs".into()));
    }
    Ok(())
}
