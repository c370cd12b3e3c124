//! Export of features for other programs: NumPy, Parquet, safetensors.

mod npy;
mod parquet;
mod safetensors;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::table::Table;
use crate::EvalError;
use crate::images::ImageSet;

/// A file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// NumPy array `[n, width]`, with the images in `.rows.jsonl` and the origin in `.about.json`.
    Npy,
    /// One row per image, with its shard, key, label, class and features.
    Parquet,
    /// Tensors `features` and `labels`, with the images in `.rows.jsonl`.
    Safetensors,
}

/// Extensions of the formats.
const EXTENSIONS: [(&str, Format); 3] =
    [("npy", Format::Npy), ("parquet", Format::Parquet), ("safetensors", Format::Safetensors)];

impl Format {
    /// Returns the format for the extension of `path`.
    ///
    /// # Errors
    /// A message if the extension is unknown.
    pub fn of(path: &Path) -> Result<Self, String> {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        let found = EXTENSIONS.iter().find(|(name, _)| *name == extension);
        found.map(|(_, format)| *format).ok_or_else(|| {
            let [a, b, c] = EXTENSIONS.map(|(name, _)| name);
            format!("{} must end in .{a}, .{b} or .{c}", path.display())
        })
    }
}

/// Returns the files that an export to `path` consists of, `path` first.
pub fn files_of(path: &Path, format: Format) -> Vec<PathBuf> {
    match format {
        Format::Npy => vec![path.to_path_buf(), rows_of(path), about_of(path)],
        Format::Parquet => vec![path.to_path_buf()],
        Format::Safetensors => vec![path.to_path_buf(), rows_of(path)],
    }
}

/// Returns the path of the images of the rows: `x.npy.rows.jsonl`.
fn rows_of(path: &Path) -> PathBuf {
    beside(path, "rows.jsonl")
}

/// Returns the path of the description of the rows: `x.npy.about.json`.
fn about_of(path: &Path) -> PathBuf {
    beside(path, "about.json")
}

fn beside(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(format!(".{extension}"));
    name.into()
}

/// Writes `table`, the rows of `images`, to `path`; `about` describes how they were computed.
///
/// # Errors
/// [`EvalError::Io`] and [`EvalError::Write`].
pub fn write(
    path: &Path,
    format: Format,
    table: &Table,
    images: &ImageSet,
    about: &Value,
) -> Result<(), EvalError> {
    // Each file appears complete: it is renamed once it is written.
    let half = pipeline::file::temporary(path);
    let written = match format {
        Format::Npy => npy::write(&half, table),
        Format::Parquet => parquet::write(&half, table, images, about),
        Format::Safetensors => safetensors::write(&half, table, images, about),
    };
    written.inspect_err(|_| {
        // A failed removal must not hide the first error.
        let _ = std::fs::remove_file(&half);
    })?;
    if format != Format::Parquet {
        write_rows(&rows_of(path), table, images)?;
    }
    if format == Format::Npy {
        let about_path = about_of(path);
        let text = format!("{about:#}\n");
        pipeline::file::replace(&about_path, text.as_bytes())
            .map_err(|source| EvalError::io("write", &about_path, source))?;
    }
    std::fs::rename(&half, path).map_err(|source| EvalError::io("rename", &half, source))
}

/// Writes the image of each row, one line each.
fn write_rows(path: &Path, table: &Table, images: &ImageSet) -> Result<(), EvalError> {
    let mut text = String::new();
    for image in &table.images {
        text.push_str(&row(images, *image as usize).to_string());
        text.push('\n');
    }
    pipeline::file::replace(path, text.as_bytes()).map_err(|source| EvalError::io("write", path, source))
}

/// Returns the shard, key, label and class of image `i`.
fn row(images: &ImageSet, i: usize) -> Value {
    let (shard, key) = images.describe(i);
    let label = images.label(i);
    let class = label.map(|label| &images.classes()[label as usize]);
    match shard {
        Some(shard) => json!({ "shard": shard, "key": key, "label": label, "class": class }),
        None => json!({ "name": key, "label": label, "class": class }),
    }
}
