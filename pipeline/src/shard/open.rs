//! Shards on a disk, opened.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use crate::PipelineError;

/// The shard at `path`.
///
/// # Errors
/// [`PipelineError::MissingShard`], [`PipelineError::NotATar`] for what is no regular file, [`PipelineError::Io`].
pub(super) fn open_shard(path: &Path) -> Result<File, PipelineError> {
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => PipelineError::MissingShard { path: path.to_path_buf() },
        _ => PipelineError::io("open", path, error),
    };
    // To open a pipe would be to wait for whoever writes into it.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(PipelineError::NotATar {
            path: path.to_path_buf(),
            reason: "it is no regular file".into(),
        });
    }
    File::open(path).map_err(failed)
}
