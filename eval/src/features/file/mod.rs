//! Features as files for other programs: NumPy, Parquet, safetensors.

mod npy;
mod parquet;
mod safetensors;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::table::Table;
use crate::EvalError;
use crate::images::ImageSet;

/// A file format, by its extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `[n, width]` as NumPy reads it.
    Npy,
    /// A row an image, with everything in it.
    Parquet,
    /// `features` and `labels`.
    Safetensors,
}

/// Extensions of the formats.
const EXTENSIONS: [(&str, Format); 3] =
    [("npy", Format::Npy), ("parquet", Format::Parquet), ("safetensors", Format::Safetensors)];

impl Format {
    /// Returns the format that the name of `path` stands for.
    ///
    /// # Errors
    /// In words, when it is none of them.
    pub fn of(path: &Path) -> Result<Self, String> {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        let found = EXTENSIONS.iter().find(|(name, _)| *name == extension);
        found.map(|(_, format)| *format).ok_or_else(|| {
            let [a, b, c] = EXTENSIONS.map(|(name, _)| name);
            format!("{} must end in .{a}, .{b} or .{c}", path.display())
        })
    }
}

/// Files that features in `path` consist of, `path` first.
pub fn files_of(path: &Path, format: Format) -> Vec<PathBuf> {
    match format {
        Format::Npy => vec![path.to_path_buf(), rows_of(path), about_of(path)],
        Format::Parquet => vec![path.to_path_buf()],
        Format::Safetensors => vec![path.to_path_buf(), rows_of(path)],
    }
}

/// `x.npy.rows.jsonl`: the images of the rows.
fn rows_of(path: &Path) -> PathBuf {
    beside(path, "rows.jsonl")
}

/// `x.npy.about.json`: how the rows were made.
fn about_of(path: &Path) -> PathBuf {
    beside(path, "about.json")
}

fn beside(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(format!(".{extension}"));
    name.into()
}

/// Writes `table`, the rows of `images`, to `path`; `about` says how they were made.
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
    // Each file appears whole: it is renamed when it is done.
    let half = pipeline::file::temporary(path);
    let written = match format {
        Format::Npy => npy::write(&half, table),
        Format::Parquet => parquet::write(&half, table, images, about),
        Format::Safetensors => safetensors::write(&half, table, images, about),
    };
    written.inspect_err(|_| {
        // The error that led here is the one to report.
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

/// The image of each row, one line each.
fn write_rows(path: &Path, table: &Table, images: &ImageSet) -> Result<(), EvalError> {
    let mut text = String::new();
    for image in &table.images {
        text.push_str(&row(images, *image as usize).to_string());
        text.push('\n');
    }
    pipeline::file::replace(path, text.as_bytes()).map_err(|source| EvalError::io("write", path, source))
}

/// What is known of image `i`.
fn row(images: &ImageSet, i: usize) -> Value {
    let (shard, key) = images.describe(i);
    let label = images.label(i);
    let class = label.map(|label| &images.classes()[label as usize]);
    match shard {
        Some(shard) => json!({ "shard": shard, "key": key, "label": label, "class": class }),
        None => json!({ "name": key, "label": label, "class": class }),
    }
}
