//! Parquet files of images, as the datasets of Hugging Face have them, turned into tars.
//!
//! A column with a field `bytes` holds images: the first of them is the sample's image, others are members under the column's
//! name. `label` is the class, by its name if the file states the names of classes. All other columns are the sample's `.json`.

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Value};

use crate::PipelineError;
use crate::remote::Sink;

/// Names of the column of classes.
const CLASS_COLUMNS: [&str; 2] = ["label", "labels"];

/// First bytes of the formats of images, and their extensions.
const FORMATS: [(&[u8], &str); 7] = [
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG", "png"),
    (b"RIFF", "webp"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
];

/// Writes the rows of the Parquet file `file`, called `name`, to `sink` as a tar. The same file gives the same bytes.
///
/// # Errors
/// [`PipelineError::NotParquet`] within the error for a file that is damaged or has no column of images, and errors of the sink.
pub(super) fn write_tar(name: &str, file: File, sink: &mut dyn Sink) -> io::Result<()> {
    let bad = |reason: String| io::Error::other(PipelineError::NotParquet { path: name.into(), reason });
    // The library panics on types that it does not know and on dates out of range.
    let written = catch_unwind(AssertUnwindSafe(|| write_rows(file, sink, &bad)));
    written.unwrap_or_else(|_| Err(bad("it has values that cannot be read".into())))
}

fn write_rows(file: File, sink: &mut dyn Sink, bad: &dyn Fn(String) -> io::Error) -> io::Result<()> {
    let not_read = |error: ParquetError| bad(error.to_string());
    let reader = SerializedFileReader::new(file).map_err(not_read)?;
    let metadata = reader.metadata().file_metadata();
    let names = class_names(metadata.key_value_metadata());
    let images = image_columns(metadata.schema());
    if images.is_empty() {
        return Err(bad("it has no column of images: a group with a field `bytes`".into()));
    }
    sink.restart(None)?;
    let mut tar = tar::Builder::new(sink);
    for (number, row) in reader.get_row_iter(None).map_err(not_read)?.enumerate() {
        append(&mut tar, number, &row.map_err(not_read)?, &images, &names)?;
    }
    tar.finish()
}

/// Names of the columns of images: groups with a field `bytes`.
fn image_columns(schema: &Type) -> Vec<String> {
    let is_bytes = |field: &Arc<Type>| field.name() == "bytes" && field.is_primitive();
    let columns = schema.get_fields().iter();
    let images = columns.filter(|column| column.is_group() && column.get_fields().iter().any(is_bytes));
    images.map(|column| column.name().to_string()).collect()
}

/// Appends the members of a row, whose key is its number. A row without an image has none in the tar: it is a bad sample.
fn append(
    tar: &mut tar::Builder<&mut dyn Sink>,
    number: usize,
    row: &Row,
    images: &[String],
    names: &[String],
) -> io::Result<()> {
    let (mut class, mut columns) = (None, Map::new());
    for (name, field) in row.get_column_iter() {
        let place = images.iter().position(|image| image == name);
        match (place, class_of(field)) {
            (Some(place), _) => {
                let Some((bytes, path)) = image_of(field) else { continue };
                if let Some(path) = path {
                    columns.insert(format!("{name}.path"), path.into());
                }
                let extension = extension(bytes);
                // The first column is the sample's image, which readers find by its format alone.
                match place {
                    0 => member(tar, number, extension, bytes)?,
                    _ => member(tar, number, &format!("{name}.{extension}"), bytes)?,
                }
            }
            (None, Some(value)) if CLASS_COLUMNS.contains(&name.as_str()) => class = Some(value),
            _ => drop(columns.insert(name.clone(), field.to_json_value())),
        }
    }
    if let Some(class) = &class {
        let name = class.parse().ok().and_then(|number: usize| names.get(number));
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

/// Bytes and path of an image, if `field` is one.
fn image_of(field: &Field) -> Option<(&[u8], Option<String>)> {
    let Field::Group(group) = field else { return None };
    let part = |wanted: &str| group.get_column_iter().find(|(name, _)| *name == wanted).map(|(_, part)| part);
    let Some(Field::Bytes(bytes)) = part("bytes") else { return None };
    let path = match part("path") {
        Some(Field::Str(path)) => Some(path.clone()),
        _ => None,
    };
    Some((bytes.data(), path))
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

/// Names of classes in the metadata of Hugging Face, by number; empty if there are none.
fn class_names(metadata: Option<&Vec<KeyValue>>) -> Vec<String> {
    let text = metadata.into_iter().flatten().find(|entry| entry.key == "huggingface");
    let text = text.and_then(|entry| entry.value.as_deref()).unwrap_or_default();
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let features = &value["info"]["features"];
    let of_column = |name: &str| features[name]["names"].as_array().cloned();
    let names = CLASS_COLUMNS.iter().find_map(|name| of_column(name)).unwrap_or_default();
    names.iter().filter_map(Value::as_str).map(str::to_string).collect()
}
