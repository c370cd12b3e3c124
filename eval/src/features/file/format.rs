//! Formats of files of features, and the files that belong to one.

use std::path::{Path, PathBuf};

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
    pub fn from_path(path: &Path) -> Result<Self, String> {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        for (name, format) in EXTENSIONS {
            if name == extension {
                return Ok(format);
            }
        }
        let [a, b, c] = EXTENSIONS.map(|(name, _)| name);
        Err(format!("{} must end in .{a}, .{b} or .{c}", path.display()))
    }
}

/// Returns the files that an export to `path` consists of, `path` first.
pub fn export_files(path: &Path, format: Format) -> Vec<PathBuf> {
    match format {
        Format::Npy => vec![path.to_path_buf(), rows_path(path), about_path(path)],
        Format::Parquet => vec![path.to_path_buf()],
        Format::Safetensors => vec![path.to_path_buf(), rows_path(path)],
    }
}

/// Returns the path of the list of the rows' images: `x.npy.rows.jsonl`.
pub(super) fn rows_path(path: &Path) -> PathBuf {
    append_extension(path, "rows.jsonl")
}

/// Returns the path of the description of the rows: `x.npy.about.json`.
pub(super) fn about_path(path: &Path) -> PathBuf {
    append_extension(path, "about.json")
}

fn append_extension(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(format!(".{extension}"));
    name.into()
}
