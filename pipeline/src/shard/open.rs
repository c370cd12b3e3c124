//! Opening of shards on a local disk.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use crate::PipelineError;

/// Opens the shard at `path`.
///
/// # Errors
/// [`PipelineError::MissingShard`], [`PipelineError::NotATar`] if it is not a regular file,
/// [`PipelineError::Io`].
pub(super) fn open_shard(path: &Path) -> Result<File, PipelineError> {
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => PipelineError::MissingShard { path: path.to_path_buf() },
        _ => PipelineError::io("open", path, error),
    };
    // Opening a pipe would wait for a writer.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(PipelineError::NotATar {
            path: path.to_path_buf(),
            reason: "it is no regular file".into(),
        });
    }
    File::open(path).map_err(failed)
}
