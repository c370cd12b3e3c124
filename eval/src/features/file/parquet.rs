//! Parquet: one row per image, with its shard, key, label, class and features.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::column::reader::get_typed_column_reader;
use parquet::data_type::{ByteArray, ByteArrayType, FloatType, Int32Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::record::Field;
use parquet::schema::parser::parse_message_type;
use serde_json::Value;

use super::contents::{FileRows, ImageName};
use crate::EvalError;
use crate::features::table::Table;
use crate::images::ImageSet;

/// Columns of the file.
const SCHEMA: &str = "message features {
    optional binary shard (UTF8);
    required binary key (UTF8);
    optional int32 label;
    optional binary class (UTF8);
    required group features (LIST) { repeated group list { required float element; } }
}";

/// Bytes of features per row group; their definition and repetition levels take as many again.
const GROUP_BYTES: usize = 64 << 20;

/// Maximum number of rows per row group.
const MAX_ROWS: usize = 4096;

/// Writes the rows with their images, and `about` as metadata.
pub(super) fn write(path: &Path, table: &Table, images: &ImageSet, about: &Value) -> Result<(), EvalError> {
    let file = File::create(path).map_err(|source| EvalError::io("create", path, source))?;
    write_groups(file, table, images, about).map_err(|error| EvalError::write(path, error))
}

fn write_groups(file: File, table: &Table, images: &ImageSet, about: &Value) -> Result<(), ParquetError> {
    let schema = Arc::new(parse_message_type(SCHEMA)?);
    let about = KeyValue::new("ocelli.features".to_string(), about.to_string());
    let properties = WriterProperties::builder().set_key_value_metadata(Some(vec![about])).build();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties))?;
    let n_rows = (GROUP_BYTES / (4 * table.columns.width().max(1))).clamp(1, MAX_ROWS);
    for start in (0..table.len()).step_by(n_rows) {
        let group = writer.next_row_group()?;
        write_group(group, table, images, start..table.len().min(start + n_rows))?;
    }
    writer.close().map(drop)
}

fn write_group(
    mut group: SerializedRowGroupWriter<'_, File>,
    table: &Table,
    images: &ImageSet,
    rows: std::ops::Range<usize>,
) -> Result<(), ParquetError> {
    let mut shards: Vec<Option<String>> = Vec::with_capacity(rows.len());
    let mut keys: Vec<ByteArray> = Vec::with_capacity(rows.len());
    let mut labels: Vec<Option<u32>> = Vec::with_capacity(rows.len());
    let mut classes: Vec<Option<&str>> = Vec::with_capacity(rows.len());
    for image in &table.images[rows.clone()] {
        let (shard, key) = images.describe(*image as usize);
        let label = images.label(*image as usize);
        shards.push(shard);
        keys.push(key.as_str().into());
        labels.push(label);
        classes.push(label.map(|label| images.classes()[label as usize].as_str()));
    }

    write_text(&mut group, shards.iter().map(Option::as_deref))?;
    let mut column = group.next_column()?.ok_or_else(missing_column)?;
    column.typed::<ByteArrayType>().write_batch(&keys, None, None)?;
    column.close()?;
    let mut column = group.next_column()?.ok_or_else(missing_column)?;
    let values: Vec<i32> = labels.iter().flatten().map(|label| *label as i32).collect();
    let levels = definition_levels(labels.iter().map(Option::is_some));
    column.typed::<Int32Type>().write_batch(&values, Some(&levels), None)?;
    column.close()?;
    write_text(&mut group, classes.iter().copied())?;
    let mut column = group.next_column()?.ok_or_else(missing_column)?;
    let width = table.columns.width();
    let values = &table.rows()[rows.start * width..rows.end * width];
    // A repetition level of 0 starts a list.
    let repetitions: Vec<i16> = (0..values.len()).map(|i| i16::from(i % width != 0)).collect();
    column.typed::<FloatType>().write_batch(values, Some(&vec![1; values.len()]), Some(&repetitions))?;
    column.close()?;
    group.close().map(drop)
}

/// Writes the next column: optional strings.
fn write_text<'a>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    texts: impl Iterator<Item = Option<&'a str>> + Clone,
) -> Result<(), ParquetError> {
    let mut column = group.next_column()?.ok_or_else(missing_column)?;
    let values: Vec<ByteArray> = texts.clone().flatten().map(Into::into).collect();
    let levels = definition_levels(texts.map(|text| text.is_some()));
    column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None)?;
    column.close()
}

/// Returns definition levels: 1 for present values.
fn definition_levels(are_present: impl Iterator<Item = bool>) -> Vec<i16> {
    are_present.map(i16::from).collect()
}

fn missing_column() -> ParquetError {
    ParquetError::General("the schema has fewer columns than are written".into())
}

/// Reads the column `features`, lists of equal length, with the columns that name images, and the
/// description of the features.
pub(super) fn read(path: &Path) -> Result<(FileRows, Vec<ImageName>, Value), EvalError> {
    let file = File::open(path).map_err(|source| EvalError::io("open", path, source))?;
    let reader = SerializedFileReader::new(file).map_err(|error| EvalError::read(path, error))?;
    let (width, values) = read_features(&reader).map_err(|error| EvalError::read(path, error))?;
    let images = read_images(&reader).map_err(|error| EvalError::read(path, error))?;
    let metadata = reader.metadata().file_metadata().key_value_metadata();
    let about = metadata.into_iter().flatten().find(|entry| entry.key == "ocelli.features");
    let about = about.and_then(|entry| serde_json::from_str(entry.value.as_deref()?).ok());
    Ok((FileRows::Memory(width, values), images, about.unwrap_or(Value::Null)))
}

/// Reads the lists of floats, `[n, width]`.
fn read_features(reader: &SerializedFileReader<File>) -> Result<(usize, Vec<f32>), ParquetError> {
    let schema = reader.metadata().file_metadata().schema_descr();
    let column = (0..schema.num_columns())
        .find(|column| schema.column(*column).path().parts().first().is_some_and(|p| p == "features"));
    let column = column.ok_or_else(|| ParquetError::General("it has no column `features`".into()))?;
    if schema.column(column).physical_type() != parquet::basic::Type::FLOAT {
        return Err(ParquetError::General("the column `features` does not hold lists of floats".into()));
    }
    let mut values = Vec::new();
    let mut width = 0;
    for group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(group)?;
        let n = group.metadata().num_rows() as usize;
        if n == 0 {
            continue;
        }
        let mut column = get_typed_column_reader::<FloatType>(group.get_column_reader(column)?);
        let mut definitions = Vec::new();
        let mut repetitions = Vec::new();
        let mut n_read = 0;
        let n_before = values.len();
        while n_read < n {
            let (records, ..) = column.read_records(
                n - n_read,
                Some(&mut definitions),
                Some(&mut repetitions),
                &mut values,
            )?;
            if records == 0 {
                return Err(ParquetError::General("a row group ends early".into()));
            }
            n_read += records;
        }
        let group_width = repetitions.len() / n;
        if width == 0 {
            width = group_width;
        }
        // A repetition level of 0 starts a list: lists are equally long if every `width`-th level
        // is 0 and no other is. Nulls are not among the values.
        let has_equal_lengths = width > 0
            && group_width == width
            && values.len() - n_before == n * width
            && repetitions.iter().enumerate().all(|(i, level)| (*level == 0) == i.is_multiple_of(width));
        if !has_equal_lengths {
            return Err(ParquetError::General("the lists of `features` have different lengths".into()));
        }
    }
    if width == 0 { Err(ParquetError::General("it has no rows".into())) } else { Ok((width, values)) }
}

/// Reads the names and classes of the images.
fn read_images(reader: &SerializedFileReader<File>) -> Result<Vec<ImageName>, ParquetError> {
    let schema = reader.metadata().file_metadata().schema();
    let fields: Vec<_> =
        schema.get_fields().iter().filter(|field| field.name() != "features").cloned().collect();
    let projection =
        parquet::schema::types::Type::group_type_builder(schema.name()).with_fields(fields).build()?;
    let mut images = Vec::new();
    for row in reader.get_row_iter(Some(projection))? {
        let row = row?;
        let key = images.len().to_string();
        let mut image = ImageName { shard: None, key, label: None, class: None };
        for (name, field) in row.get_column_iter() {
            match (name.as_str(), field) {
                ("shard", Field::Str(text)) => image.shard = Some(text.clone()),
                ("key", Field::Str(text)) => image.key.clone_from(text),
                ("class", Field::Str(text)) => image.class = Some(text.clone()),
                ("label", Field::Int(label)) => image.label = u32::try_from(*label).ok(),
                ("label", Field::Long(label)) => image.label = u32::try_from(*label).ok(),
                _ => {}
            }
        }
        images.push(image);
    }
    Ok(images)
}
