//! Lists of an output folder: all images, a line of JSON each, and the names of the kept ones.

use std::io::Write;
use std::path::{Path, PathBuf};

use eval::features::file::ImageName;
use pipeline::file::AtomicFile;
use serde_json::{Value, json};

use crate::CurateError;

/// List of all images, one line each.
pub const LIST: &str = "list.jsonl";

/// List of the kept images: shard, tab, key.
pub(super) const KEPT: &str = "keep.txt";

/// Columns of a row of the list, besides names and classes.
pub type Columns = Vec<(&'static str, Value)>;

/// Writes both lists into `folder`, with the `columns` of each row. Returns the number of kept
/// images.
pub(super) fn write_lists(
    folder: &Path,
    names: &[ImageName],
    kept: &[bool],
    columns: &dyn Fn(usize) -> Columns,
) -> Result<usize, CurateError> {
    let mut list = LineFile::create(folder.join(LIST))?;
    let mut keep = LineFile::create(folder.join(KEPT))?;
    let mut n_kept = 0;
    for (row, (name, is_kept)) in names.iter().zip(kept).enumerate() {
        let mut line = json!({ "key": name.key, "keep": is_kept });
        let fields =
            [("shard", json!(name.shard)), ("label", json!(name.label)), ("class", json!(name.class))];
        for (key, value) in fields {
            if !value.is_null() {
                line[key] = value;
            }
        }
        for (key, value) in columns(row) {
            line[key] = value;
        }
        list.push(&line.to_string())?;
        if *is_kept {
            n_kept += 1;
            match &name.shard {
                Some(shard) => keep.push(&format!("{shard}\t{}", name.key))?,
                None => keep.push(&name.key)?,
            }
        }
    }
    list.finish()?;
    keep.finish()?;
    Ok(n_kept)
}

/// Rounds a number to six significant digits, the precision of every single-precision number.
pub fn six_digits(value: f32) -> Value {
    format!("{value:.5e}").parse().map_or(Value::Null, |value: f64| json!(value))
}

/// A file of lines, which is moved into place when complete.
struct LineFile {
    path: PathBuf,
    file: AtomicFile,
}

impl LineFile {
    fn create(path: PathBuf) -> Result<Self, CurateError> {
        let file = AtomicFile::create(&path).map_err(|error| CurateError::io("write", &path, error))?;
        Ok(Self { path, file })
    }

    fn push(&mut self, line: &str) -> Result<(), CurateError> {
        writeln!(self.file, "{line}").map_err(|error| CurateError::io("write", &self.path, error))
    }

    fn finish(self) -> Result<(), CurateError> {
        self.file.finish().map_err(|error| CurateError::io("write", &self.path, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_lists_are_short() {
        assert_eq!(six_digits(0.976_881_8).to_string(), "0.976882");
        assert_eq!(six_digits(1.0).to_string(), "1.0");
        assert_eq!(six_digits(-0.000_123_456_78).to_string(), "-0.000123457");
    }
}
