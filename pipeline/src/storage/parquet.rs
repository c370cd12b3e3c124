//! Conversion of Parquet files of images, such as datasets of Hugging Face, into tars.
//!
//! A column holds images if its values are groups with a field `bytes`, or bytes that begin with
//! the signature of an image format, or lists of either. The first such column, or the one that the
//! user names, is the sample's image; others are members under the column's name. `label`, or the
//! column that the user names, is the class, or a list of classes, by their names if the file states
//! these; a row in which that column states no class has none, whatever its other columns are
//! called. All other columns are the sample's `.json`.
//!
//! Code that reads samples therefore sees tars only.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use parquet::file::metadata::KeyValue;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::{Map, Value, json};

use super::config::ColumnNames;
use crate::PipelineError;
use crate::magic::{FileKind, START_BYTES, recognize};
use crate::remote::Sink;
use crate::shard::classes::{CLASS_COLUMNS, ClassColumn, UNKNOWN_CLASS, states_classes};

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

/// Number of rows that are read to find the columns of images.
const N_PROBED_ROWS: usize = 100;

/// Columns of a file with images and classes.
struct Layout<'c> {
    /// Columns of images; the column of the sample's image comes first.
    images: Vec<String>,
    label: Option<&'c str>,
    /// Names of classes, by index; empty if there are none.
    class_names: Vec<String>,
}

impl Layout<'_> {
    /// Returns the position of `column` among the columns of images, if it is one.
    fn image_position(&self, column: &str) -> Option<usize> {
        self.images.iter().position(|image| image == column)
    }

    /// Returns the text of the class member of a row with `classes`: their names, one a line.
    fn class_member(&self, classes: &[String]) -> String {
        let mut lines = Vec::with_capacity(classes.len());
        for class in classes {
            let index = class.parse::<usize>().ok();
            let name = index.and_then(|index| self.class_names.get(index));
            lines.push(name.unwrap_or(class).as_str());
        }
        lines.join("\n")
    }
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
    // The library panics on types that it does not know and on dates out of range.
    let result = catch_unwind(AssertUnwindSafe(|| write_rows(name, file, columns, sink)));
    result.unwrap_or_else(|_| Err(not_parquet(name, "it has values that cannot be read".into())))
}

/// Creates the error for the Parquet file `name`.
fn not_parquet(name: &str, reason: String) -> io::Error {
    io::Error::other(PipelineError::NotParquet { path: name.into(), reason })
}

fn write_rows(name: &str, file: File, columns: &ColumnNames, sink: &mut dyn Sink) -> io::Result<()> {
    let mut start = [0; START_BYTES];
    let n = file.read_at(&mut start, 0)?;
    if let Some(format) = recognize(&start[..n])
        && format.kind != FileKind::Parquet
    {
        return Err(not_parquet(name, format!("it is {}", format.name)));
    }
    let reader = SerializedFileReader::new(file).map_err(|error| not_parquet(name, error.to_string()))?;
    let layout = find_layout(name, &reader, columns).map_err(|reason| not_parquet(name, reason))?;
    sink.restart(None)?;
    let mut tar = tar::Builder::new(sink);
    let mut classes = ClassColumn::default();
    let rows = reader.get_row_iter(None).map_err(|error| not_parquet(name, error.to_string()))?;
    for (index, row) in rows.enumerate() {
        let row = row.map_err(|error| not_parquet(name, error.to_string()))?;
        append_row(&mut tar, index, &row, &layout, &mut classes)?;
    }
    classes.report(name);
    tar.finish()
}

/// Finds the columns of images and of the class.
///
/// # Errors
/// Returns the reason as text.
fn find_layout<'c>(
    name: &str,
    reader: &SerializedFileReader<File>,
    columns: &'c ColumnNames,
) -> Result<Layout<'c>, String> {
    let metadata = reader.metadata().file_metadata();
    let column_names: Vec<String> =
        metadata.schema().get_fields().iter().map(|field| field.name().to_string()).collect();
    for named in columns.image.iter().chain(&columns.label) {
        if !column_names.contains(named) {
            return Err(format!("it has no column {named}; it has {}", column_names.join(", ")));
        }
    }
    let mut images: Vec<String> = Vec::new();
    for column in metadata.schema().get_fields() {
        if column.is_group()
            && column.get_fields().iter().any(|field| field.name() == "bytes" && field.is_primitive())
        {
            images.push(column.name().to_string());
        }
    }
    // In other columns all values that are read must be images: a few bytes may look like the
    // beginning of one by chance.
    let mut has_images: BTreeMap<String, bool> = BTreeMap::new();
    for row in reader.get_row_iter(None).map_err(|error| error.to_string())?.take(N_PROBED_ROWS) {
        let row = row.map_err(|error| error.to_string())?;
        for (column, field) in row.get_column_iter() {
            if !matches!(field, Field::Null) && !images.contains(column) {
                *has_images.entry(column.clone()).or_insert(true) &= !images_of(field).is_empty();
            }
        }
    }
    images.extend(column_names.iter().filter(|column| has_images.get(*column) == Some(&true)).cloned());
    if let Some(named) = &columns.image {
        images.retain(|column| column != named);
        images.insert(0, named.clone());
    }
    if images.is_empty() && metadata.num_rows() > 0 {
        return Err(format!(
            "none of its columns {} holds images (image bytes, or a group with a field `bytes`) in the first \
             {N_PROBED_ROWS} rows; name one with --image-column",
            column_names.join(", ")
        ));
    }
    let label = match &columns.label {
        Some(named) => Some(named.as_str()),
        None => CLASS_COLUMNS.into_iter().find(|usual| column_names.iter().any(|column| column == usual)),
    };
    let label_columns: Vec<&str> =
        column_names.iter().filter(|column| column.contains("label")).map(String::as_str).collect();
    if label.is_none() && !label_columns.is_empty() {
        tracing::warn!(
            "{name}: images have no class; choose a column with --label-column: {}",
            label_columns.join(", ")
        );
    }
    let class_names = match label {
        Some(label) => class_names(metadata.key_value_metadata(), label),
        None => Vec::new(),
    };
    Ok(Layout { images, label, class_names })
}

/// Appends the members of a row, whose key is its index and whose classes `classes` reads. A row
/// without an image becomes a bad sample, without an image in the tar.
fn append_row(
    tar: &mut tar::Builder<&mut dyn Sink>,
    index: usize,
    row: &Row,
    layout: &Layout<'_>,
    classes: &mut ClassColumn,
) -> io::Result<()> {
    let mut class = None;
    let mut columns = Map::new();
    let mut has_image = false;
    // The sample's image comes first: its extension is its format's, without a column name.
    let mut fields: Vec<(&String, &Field)> = row.get_column_iter().collect();
    fields.sort_by_key(|(name, _)| layout.image_position(name).unwrap_or(usize::MAX));
    for (name, field) in fields {
        if Some(name.as_str()) == layout.label {
            class = classes.read(&class_value(field)).map(|classes| layout.class_member(&classes));
            if class.is_none() {
                columns.insert(name.clone(), field.to_json_value());
            }
            continue;
        }
        let Some(position) = layout.image_position(name) else {
            columns.insert(name.clone(), field.to_json_value());
            continue;
        };
        for (i, image) in images_of(field).into_iter().enumerate() {
            if let Some(path) = image.path {
                let column = if i == 0 { format!("{name}.path") } else { format!("{name}.{i}.path") };
                columns.insert(column, path.into());
            }
            let format = image_extension(image.bytes);
            let extension = match (position, i) {
                (0, 0) if !has_image => {
                    has_image = true;
                    format.to_string()
                }
                (_, 0) => format!("{name}.{format}"),
                _ => format!("{name}.{i}.{format}"),
            };
            append_member(tar, index, &extension, image.bytes)?;
        }
    }
    let has_class = class.is_some();
    if !has_class && states_classes(&columns) {
        // Another column has the name of one of classes.
        class = Some(UNKNOWN_CLASS.into());
    }
    if let Some(class) = &class {
        append_member(tar, index, "cls", class.as_bytes())?;
    }
    // Each row is a sample, even one without values.
    if !columns.is_empty() || !has_class {
        append_member(tar, index, "json", Value::Object(columns).to_string().as_bytes())?;
    }
    Ok(())
}

fn append_member(
    tar: &mut tar::Builder<&mut dyn Sink>,
    index: usize,
    extension: &str,
    bytes: &[u8],
) -> io::Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, format!("{index:08}.{extension}"), bytes)
}

/// An encoded image, and its path when the file was made.
struct ImageField<'f> {
    bytes: &'f [u8],
    path: Option<String>,
}

/// Returns the images in `field`: none, one, or those of a list.
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
    let Some(Field::Bytes(bytes)) = find_field(group, "bytes") else { return None };
    let path = match find_field(group, "path") {
        Some(Field::Str(path)) => Some(path.clone()),
        _ => None,
    };
    Some(ImageField { bytes: bytes.data(), path })
}

/// Returns the field of `group` that is called `name`.
fn find_field<'g>(group: &'g Row, name: &str) -> Option<&'g Field> {
    group.get_column_iter().find(|(column, _)| *column == name).map(|(_, field)| field)
}

/// Returns whether `bytes` begin with the signature of an image format.
fn is_image(bytes: &[u8]) -> bool {
    FORMATS.iter().any(|(signature, _)| bytes.starts_with(signature))
}

/// Returns the value of a field of the column of classes. Bytes, which JSON has as text, are an
/// object here, because they are no class.
fn class_value(field: &Field) -> Value {
    match field {
        Field::Bytes(bytes) => json!({ "bytes": bytes.len() }),
        Field::ListInternal(list) => Value::Array(list.elements().iter().map(class_value).collect()),
        other => other.to_json_value(),
    }
}

/// Returns the extension of the image in `bytes`; `jpg` for an unknown format.
fn image_extension(bytes: &[u8]) -> &'static str {
    for (signature, extension) in FORMATS {
        if bytes.starts_with(signature) {
            return extension;
        }
    }
    "jpg"
}

/// Returns the names of the classes of `column` in the metadata of Hugging Face, by index; empty if
/// there are none.
fn class_names(metadata: Option<&Vec<KeyValue>>, column: &str) -> Vec<String> {
    let text = metadata.into_iter().flatten().find(|entry| entry.key == "huggingface");
    let text = text.and_then(|entry| entry.value.as_deref()).unwrap_or_default();
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let feature = &value["info"]["features"][column];
    // A column of lists states the names of what its lists contain.
    let names = feature["names"].as_array().or_else(|| feature["feature"]["names"].as_array());
    let names = names.cloned().unwrap_or_default();
    names.iter().filter_map(Value::as_str).map(str::to_string).collect()
}
