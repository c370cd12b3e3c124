//! safetensors: `features` `[n, width]` in f32 and `labels` `[n]` in i64, -1 for images without a
//! label.

use std::collections::HashMap;
use std::path::Path;

use networks::safetensors::sort_header;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use serde_json::{Value, json};

use super::contents::FileRows;
use crate::EvalError;
use crate::features::mapped::Mapped;
use crate::features::table::Table;
use crate::images::ImageSet;

/// Writes the rows and their labels, and `about` and the class names as metadata.
pub(super) fn write(path: &Path, table: &Table, images: &ImageSet, about: &Value) -> Result<(), EvalError> {
    let labels: Vec<i64> =
        table.images.iter().map(|image| images.label(*image as usize).map_or(-1i64, i64::from)).collect();
    let shape = vec![table.len(), table.columns.width()];
    let features = TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(table.rows()))
        .map_err(|error| EvalError::write(path, error))?;
    let labels = TensorView::new(Dtype::I64, vec![table.len()], bytemuck::cast_slice(&labels))
        .map_err(|error| EvalError::write(path, error))?;
    let tensors = [("features", features), ("labels", labels)];
    let metadata = HashMap::from([
        ("ocelli.features".to_string(), about.to_string()),
        ("ocelli.classes".to_string(), json!(images.classes()).to_string()),
    ]);
    serialize_to_file(tensors, Some(metadata), path).map_err(|error| EvalError::write(path, error))?;
    sort_header(path).map_err(|error| EvalError::io("write", path, error))
}

/// Reads the tensor `features`, `[n, width]` of f32, which is mapped, and the description of the
/// features.
pub(super) fn read(path: &Path) -> Result<(FileRows, Value), EvalError> {
    let file = Mapped::open(path).map_err(|source| EvalError::io("open", path, source))?;
    let (n_header, metadata) =
        SafeTensors::read_metadata(file.file_bytes()).map_err(|error| EvalError::read(path, error))?;
    let tensor =
        metadata.info("features").ok_or_else(|| EvalError::read(path, "it has no tensor `features`"))?;
    let (&[_, width], Dtype::F32) = (tensor.shape.as_slice(), tensor.dtype) else {
        let shape = &tensor.shape;
        let dtype = tensor.dtype;
        let reason = format!("`features` is {dtype:?} of {shape:?}, not F32 of [rows, columns]");
        return Err(EvalError::read(path, reason));
    };
    // Reading the metadata has checked that the offsets match the shape.
    let start = 8 + n_header + tensor.data_offsets.0;
    let end = 8 + n_header + tensor.data_offsets.1;
    let about = metadata.metadata().as_ref().and_then(|texts| texts.get("ocelli.features"));
    let about = about.and_then(|text| serde_json::from_str(text).ok()).unwrap_or(Value::Null);
    if !start.is_multiple_of(4) {
        return Err(EvalError::read(path, "its numbers are not aligned"));
    }
    let mapped = Mapped::open_from(path, start, Some((end - start) / 4))
        .map_err(|error| EvalError::read(path, error))?;
    Ok((FileRows::File(width, mapped), about))
}
