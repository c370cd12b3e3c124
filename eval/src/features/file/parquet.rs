//! Parquet: one row per image, with its shard, key, label, class and features.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, FloatType, Int32Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use serde_json::Value;

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
    let written = || -> Result<(), ParquetError> {
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
    };
    written().map_err(|error| EvalError::write(path, error))
}

fn write_group(
    mut group: SerializedRowGroupWriter<'_, File>,
    table: &Table,
    images: &ImageSet,
    rows: std::ops::Range<usize>,
) -> Result<(), ParquetError> {
    let numbers = || table.images[rows.clone()].iter().map(|image| *image as usize);
    let about: Vec<(Option<String>, String)> = numbers().map(|i| images.describe(i)).collect();
    let labels: Vec<Option<u32>> = numbers().map(|i| images.label(i)).collect();
    let class = |label: &Option<u32>| label.map(|label| images.classes()[label as usize].as_str());

    write_text(&mut group, about.iter().map(|(shard, _)| shard.as_deref()))?;
    let mut column = group.next_column()?.ok_or_else(missing)?;
    let keys: Vec<ByteArray> = about.iter().map(|(_, key)| key.as_str().into()).collect();
    column.typed::<ByteArrayType>().write_batch(&keys, None, None)?;
    column.close()?;
    let mut column = group.next_column()?.ok_or_else(missing)?;
    let values: Vec<i32> = labels.iter().flatten().map(|label| *label as i32).collect();
    column.typed::<Int32Type>().write_batch(
        &values,
        Some(&levels(labels.iter().map(Option::is_some))),
        None,
    )?;
    column.close()?;
    write_text(&mut group, labels.iter().map(class))?;
    let mut column = group.next_column()?.ok_or_else(missing)?;
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
    let mut column = group.next_column()?.ok_or_else(missing)?;
    let values: Vec<ByteArray> = texts.clone().flatten().map(Into::into).collect();
    column.typed::<ByteArrayType>().write_batch(
        &values,
        Some(&levels(texts.map(|text| text.is_some()))),
        None,
    )?;
    column.close()
}

/// Returns definition levels: 1 for present values.
fn levels(there: impl Iterator<Item = bool>) -> Vec<i16> {
    there.map(i16::from).collect()
}

fn missing() -> ParquetError {
    ParquetError::General("the schema has fewer columns than are written".into())
}
