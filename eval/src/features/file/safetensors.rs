//! safetensors: `features` `[n, width]` in f32 and `labels` `[n]` in i64, -1 for images without a label.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

use crate::EvalError;
use crate::features::table::Table;
use crate::images::ImageSet;

/// Writes the rows and their labels, and `about` and the class names as metadata.
pub(super) fn write(path: &Path, table: &Table, images: &ImageSet, about: &Value) -> Result<(), EvalError> {
    let label = |image: &u32| images.label(*image as usize).map_or(-1i64, i64::from);
    let labels: Vec<i64> = table.images.iter().map(label).collect();
    let shape = vec![table.len(), table.columns.width()];
    let view = |dtype, shape, bytes| {
        TensorView::new(dtype, shape, bytes).map_err(|error| EvalError::write(path, error))
    };
    let tensors = [
        ("features", view(Dtype::F32, shape, bytemuck::cast_slice(table.rows()))?),
        ("labels", view(Dtype::I64, vec![table.len()], bytemuck::cast_slice(&labels))?),
    ];
    let metadata = HashMap::from([
        ("ocelli.features".to_string(), about.to_string()),
        ("ocelli.classes".to_string(), json!(images.classes()).to_string()),
    ]);
    serialize_to_file(tensors, Some(metadata), path).map_err(|error| EvalError::write(path, error))
}
