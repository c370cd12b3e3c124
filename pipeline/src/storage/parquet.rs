//! Parquet files of images, as the datasets of Hugging Face have them, turned into tars.
//!
//! A column holds images if its values are groups with a field `bytes`, or bytes that begin as an
//! image does, or lists of either: the first of them, or the one that the user names, is the
//! sample's image, others are members under the column's name. `label`, or the column that the user
//! names, is the class, by its name if the file states the names of classes. All other columns are
//! the sample's `.json`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::{Map, Value};

use super::config::ColumnNames;
use crate::PipelineError;
use crate::remote::Sink;

/// Names of the column of classes.
const CLASS_COLUMNS: [&str; 2] = ["label", "labels"];

/// First bytes of the formats of images, and their extensions.
const FORMATS: [(&[u8], &str); 13] = [
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG", "png"),
    (b"RIFF", "webp"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"II+\0", "tif"),
    (b"MM\0+", "tif"),
    (b"P4", "pbm"),
    (b"P5", "pgm"),
    (b"P6", "ppm"),
    (b"\x93NUMPY", "npy"),
];

/// Number of rows that are looked at to find the columns of images.
const N_LOOKED_AT: usize = 100;

/// Columns of a file with images and classes.
struct Layout<'c> {
    /// Columns of images, that of the sample's image first.
    images: Vec<String>,
    label: Option<&'c str>,
    /// Names of classes, by number; empty if there are none.
    class_names: Vec<String>,
}

/// Writes the rows of the Parquet file `file`, called `name`, to `sink` as a tar. The same file
/// gives the same bytes.
///
/// # Errors
/// [`PipelineError::NotParquet`] within the error for a file that is damaged or has no column of
/// images or not those that `columns` name, and errors of the sink.
pub(super) fn write_tar(
    name: &str,
    file: File,
    columns: &ColumnNames,
    sink: &mut dyn Sink,
) -> io::Result<()> {
    let bad = |reason: String| io::Error::other(PipelineError::NotParquet { path: name.into(), reason });
    // The library panics on types that it does not know and on dates out of range.
    let written = catch_unwind(AssertUnwindSafe(|| write_rows(name, file, columns, sink, &bad)));
    written.unwrap_or_else(|_| Err(bad("it has values that cannot be read".into())))
}

fn write_rows(
    name: &str,
    file: File,
    columns: &ColumnNames,
    sink: &mut dyn Sink,
    bad: &dyn Fn(String) -> io::Error,
) -> io::Result<()> {
    let not_read = |error: ParquetError| bad(error.to_string());
    let reader = SerializedFileReader::new(file).map_err(not_read)?;
    let layout = layout_of(name, &reader, columns).map_err(bad)?;
    sink.restart(None)?;
    let mut tar = tar::Builder::new(sink);
    for (number, row) in reader.get_row_iter(None).map_err(not_read)?.enumerate() {
        append(&mut tar, number, &row.map_err(not_read)?, &layout)?;
    }
    tar.finish()
}

/// Finds the columns of images and of the class.
///
/// # Errors
/// The reason as text.
fn layout_of<'c>(
    name: &str,
    reader: &SerializedFileReader<File>,
    columns: &'c ColumnNames,
) -> Result<Layout<'c>, String> {
    let metadata = reader.metadata().file_metadata();
    let there: Vec<String> =
        metadata.schema().get_fields().iter().map(|field| field.name().to_string()).collect();
    for named in columns.image.iter().chain(&columns.label) {
        if !there.contains(named) {
            return Err(format!("it has no column {named}; it has {}", there.join(", ")));
        }
    }
    let groups = metadata.schema().get_fields().iter().filter(|column| {
        column.is_group()
            && column.get_fields().iter().any(|field| field.name() == "bytes" && field.is_primitive())
    });
    let mut images: Vec<String> = groups.map(|column| column.name().to_string()).collect();
    // Of other columns all values that are looked at must be images: a few bytes may look like the
    // beginning of one by chance.
    let mut has_images: BTreeMap<String, bool> = BTreeMap::new();
    for row in reader.get_row_iter(None).map_err(|error| error.to_string())?.take(N_LOOKED_AT) {
        let row = row.map_err(|error| error.to_string())?;
        for (column, field) in row.get_column_iter() {
            if !matches!(field, Field::Null) && !images.contains(column) {
                *has_images.entry(column.clone()).or_insert(true) &= !images_of(field).is_empty();
            }
        }
    }
    images.extend(there.iter().filter(|column| has_images.get(*column) == Some(&true)).cloned());
    if let Some(named) = &columns.image {
        images.retain(|column| column != named);
        images.insert(0, named.clone());
    }
    if images.is_empty() && metadata.num_rows() > 0 {
        return Err(format!(
            "none of its columns {} holds images in the first {N_LOOKED_AT} rows: bytes of an image, or a group with a field `bytes`; \
             --image-column names one",
            there.join(", ")
        ));
    }
    let label = match &columns.label {
        Some(named) => Some(named.as_str()),
        None => CLASS_COLUMNS.into_iter().find(|usual| there.iter().any(|column| column == usual)),
    };
    let others: Vec<&str> =
        there.iter().filter(|column| column.contains("label")).map(String::as_str).collect();
    if label.is_none() && !others.is_empty() {
        tracing::warn!("{name}: images have no class; --label-column takes one of {}", others.join(", "));
    }
    let class_names = label.map_or(Vec::new(), |label| class_names(metadata.key_value_metadata(), label));
    Ok(Layout { images, label, class_names })
}

/// Appends the members of a row, whose key is its number. A row without an image has none in the
/// tar: it is a bad sample.
fn append(
    tar: &mut tar::Builder<&mut dyn Sink>,
    number: usize,
    row: &Row,
    layout: &Layout<'_>,
) -> io::Result<()> {
    let mut class = None;
    let mut columns = Map::new();
    let mut has_image = false;
    // The sample's image comes first, so that it is the one whose member has a format alone.
    let place = |name: &String| layout.images.iter().position(|image| image == name);
    let mut fields: Vec<(&String, &Field)> = row.get_column_iter().collect();
    fields.sort_by_key(|(name, _)| place(name).unwrap_or(usize::MAX));
    for (name, field) in fields {
        if Some(name.as_str()) == layout.label {
            class = class_of(field);
            if class.is_none() {
                columns.insert(name.clone(), field.to_json_value());
            }
            continue;
        }
        let Some(place) = place(name) else {
            columns.insert(name.clone(), field.to_json_value());
            continue;
        };
        for (i, image) in images_of(field).into_iter().enumerate() {
            if let Some(path) = image.path {
                let column = if i == 0 { format!("{name}.path") } else { format!("{name}.{i}.path") };
                columns.insert(column, path.into());
            }
            let extension = extension(image.bytes);
            let extension = match (place, i) {
                (0, 0) if !has_image => {
                    has_image = true;
                    extension.to_string()
                }
                (_, 0) => format!("{name}.{extension}"),
                _ => format!("{name}.{i}.{extension}"),
            };
            member(tar, number, &extension, image.bytes)?;
        }
    }
    if let Some(class) = &class {
        let name = class.parse().ok().and_then(|number: usize| layout.class_names.get(number));
        member(tar, number, "cls", name.unwrap_or(class).as_bytes())?;
    }
    // Each row is a sample, even one that holds nothing.
    if !columns.is_empty() || class.is_none() {
        member(tar, number, "json", Value::Object(columns).to_string().as_bytes())?;
    }
    Ok(())
}

fn member(
    tar: &mut tar::Builder<&mut dyn Sink>,
    number: usize,
    extension: &str,
    bytes: &[u8],
) -> io::Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, format!("{number:08}.{extension}"), bytes)
}

/// An encoded image, and the path that it had.
struct ImageField<'f> {
    bytes: &'f [u8],
    path: Option<String>,
}

/// Returns the images in `field`: one, those of a list, or none.
fn images_of(field: &Field) -> Vec<ImageField<'_>> {
    match field {
        Field::Bytes(bytes) if is_image(bytes.data()) => vec![ImageField { bytes: bytes.data(), path: None }],
        Field::Group(group) => image_of_group(group).into_iter().collect(),
        Field::ListInternal(list) => list.elements().iter().flat_map(images_of).collect(),
        _ => Vec::new(),
    }
}

/// Returns the image in the fields `bytes` and `path` of a group.
fn image_of_group(group: &Row) -> Option<ImageField<'_>> {
    let part = |wanted: &str| group.get_column_iter().find(|(name, _)| *name == wanted).map(|(_, part)| part);
    let Some(Field::Bytes(bytes)) = part("bytes") else { return None };
    let path = match part("path") {
        Some(Field::Str(path)) => Some(path.clone()),
        _ => None,
    };
    Some(ImageField { bytes: bytes.data(), path })
}

/// Returns whether `bytes` begin as an image does.
fn is_image(bytes: &[u8]) -> bool {
    FORMATS.iter().any(|(beginning, _)| bytes.starts_with(beginning))
}

/// Text of a class, if `field` may be one.
fn class_of(field: &Field) -> Option<String> {
    match field {
        Field::Str(text) => Some(text.clone()),
        Field::Byte(_)
        | Field::Short(_)
        | Field::Int(_)
        | Field::Long(_)
        | Field::UByte(_)
        | Field::UShort(_)
        | Field::UInt(_)
        | Field::ULong(_) => Some(field.to_string()),
        _ => None,
    }
}

/// Extension of the image in `bytes`.
fn extension(bytes: &[u8]) -> &'static str {
    let known = FORMATS.iter().find(|(beginning, _)| bytes.starts_with(beginning));
    known.map_or("jpg", |(_, extension)| extension)
}

/// Names of the classes of `column` in the metadata of Hugging Face, by number; empty if there are
/// none.
fn class_names(metadata: Option<&Vec<KeyValue>>, column: &str) -> Vec<String> {
    let text = metadata.into_iter().flatten().find(|entry| entry.key == "huggingface");
    let text = text.and_then(|entry| entry.value.as_deref()).unwrap_or_default();
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let names = value["info"]["features"][column]["names"].as_array().cloned().unwrap_or_default();
    names.iter().filter_map(Value::as_str).map(str::to_string).collect()
}
