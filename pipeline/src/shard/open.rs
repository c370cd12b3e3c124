//! Opening of shards on a local disk.

use std::fs;
use std::fs::File;
use std::io;
use std::path::Path;

use crate::PipelineError;

/// Opens the shard at `path`.
///
/// # Errors
/// [`PipelineError::MissingShard`], [`PipelineError::NotATar`] if it is not a regular file,
/// [`PipelineError::Io`].
pub(super) fn open_shard(path: &Path) -> Result<File, PipelineError> {
    let metadata = fs::metadata(path).map_err(|error| open_error(path, error))?;
    // Opening a pipe would wait for a writer.
    if !metadata.is_file() {
        let reason = "it is not a regular file".into();
        return Err(PipelineError::NotATar { path: path.to_path_buf(), reason });
    }
    File::open(path).map_err(|error| open_error(path, error))
}

fn open_error(path: &Path, error: io::Error) -> PipelineError {
    match error.kind() {
        io::ErrorKind::NotFound => PipelineError::MissingShard { path: path.to_path_buf() },
        _ => PipelineError::io("open", path, error),
    }
}
