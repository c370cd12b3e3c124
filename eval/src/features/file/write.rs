//! Writing of features with the images of their rows.

use std::path::Path;

use serde_json::{Value, json};

use super::contents::{CHECKSUM, ImageName, checksum};
use super::format::{Format, about_path, rows_path};
use super::{npy, parquet, safetensors};
use crate::EvalError;
use crate::features::table::Table;
use crate::images::ImageSet;

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
    let temporary = pipeline::file::temporary(path);
    let mut about = about.clone();
    if about.is_object() {
        let names: Vec<ImageName> =
            table.images.iter().map(|image| image_name(images, *image as usize)).collect();
        about[CHECKSUM] = checksum(table.rows(), table.columns.width(), &names);
    }
    let about = &about;
    let written = match format {
        Format::Npy => npy::write(&temporary, table),
        Format::Parquet => parquet::write(&temporary, table, images, about),
        Format::Safetensors => safetensors::write(&temporary, table, images, about),
    };
    written.inspect_err(|_| {
        // A failed removal must not hide the first error.
        let _ = std::fs::remove_file(&temporary);
    })?;
    if format != Format::Parquet {
        write_rows(&rows_path(path), table, images)?;
    }
    if format == Format::Npy {
        let about_path = about_path(path);
        let text = format!("{about:#}\n");
        pipeline::file::replace(&about_path, text.as_bytes())
            .map_err(|source| EvalError::io("write", &about_path, source))?;
    }
    std::fs::rename(&temporary, path).map_err(|source| EvalError::io("rename", &temporary, source))
}

/// Writes the image of each row, one line each.
fn write_rows(path: &Path, table: &Table, images: &ImageSet) -> Result<(), EvalError> {
    let mut text = String::new();
    for image in &table.images {
        text.push_str(&row_json(images, *image as usize).to_string());
        text.push('\n');
    }
    pipeline::file::replace(path, text.as_bytes()).map_err(|source| EvalError::io("write", path, source))
}

/// Returns the name and class of image `i`.
fn image_name(images: &ImageSet, i: usize) -> ImageName {
    let (shard, key) = images.describe(i);
    let label = images.label(i);
    ImageName { shard, key, label, class: label.map(|label| images.classes()[label as usize].clone()) }
}

/// Returns the shard, key, label and class of image `i` as JSON.
fn row_json(images: &ImageSet, i: usize) -> Value {
    let ImageName { shard, key, label, class } = image_name(images, i);
    match shard {
        Some(shard) => json!({ "shard": shard, "key": key, "label": label, "class": class }),
        None => json!({ "name": key, "label": label, "class": class }),
    }
}
