//! Files with a JSON value a line.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::ReportError;

/// The rows of `path` that can be read as `T`: none if there is no such file. The last line may be half written.
pub(crate) fn rows<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, ReportError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(bytes
            .split(|byte| *byte == b'\n')
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(ReportError::Read { path: path.to_path_buf(), source }),
    }
}
