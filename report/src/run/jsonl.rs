//! Files with one JSON value per line.

use std::path::Path;

use serde::de::{DeserializeOwned, IgnoredAny};

use crate::ReportError;

/// Reads the rows of `path` that parse as `T`: none if there is no such file. The last line may be
/// half written.
///
/// # Errors
/// [`ReportError::Read`], also for a pipe or a device, which might never end.
pub(crate) fn rows<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, ReportError> {
    match read_regular_file(path) {
        Ok(bytes) => {
            let lines: Vec<&[u8]> = bytes.split(|byte| *byte == b'\n').collect();
            warn_of_damage(path, &lines);
            Ok(lines.into_iter().filter_map(|line| serde_json::from_slice(line).ok()).collect())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(ReportError::Read { path: path.to_path_buf(), source }),
    }
}

fn read_regular_file(path: &Path) -> std::io::Result<Vec<u8>> {
    if std::fs::metadata(path)?.is_file() {
        std::fs::read(path)
    } else {
        Err(std::io::Error::other("it is not a regular file"))
    }
}

/// Warns of lines that are not JSON, except the last, which may be half written. Rows of another
/// kind are not damaged.
fn warn_of_damage(path: &Path, lines: &[&[u8]]) {
    let Some((_, complete)) = lines.split_last() else { return };
    let n = complete
        .iter()
        .filter(|line| !line.is_empty() && serde_json::from_slice::<IgnoredAny>(line).is_err())
        .count();
    if n > 0 {
        tracing::warn!("{}: skipping {n} lines that cannot be read", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_errors_and_missing_files_have_no_rows() {
        let folder = tempfile::tempdir().unwrap();
        assert!(rows::<u32>(&folder.path().join("none")).unwrap().is_empty());
        assert!(rows::<u32>(Path::new("/dev/zero")).is_err());
        let path = folder.path().join("some");
        std::fs::write(&path, "1\n{half\n2\n3").unwrap();
        assert_eq!(rows::<u32>(&path).unwrap(), [1, 2, 3]);
    }
}
