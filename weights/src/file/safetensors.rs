//! Safetensors files.

use std::collections::HashMap;
use std::path::Path;

use ::safetensors::tensor::{Dtype, SafeTensors, TensorView};
use half::{bf16, f16};
use networks::safetensors::encode_file;

use super::{Array, Arrays, Element};
use crate::error::WeightsError;
use crate::precision::Precision;

/// Reads the floating-point tensors in `path` and its metadata. Other tensors, such as batch
/// counters, are skipped.
///
/// # Errors
/// [`WeightsError::Io`], [`WeightsError::Malformed`].
pub(crate) fn read(path: &Path) -> Result<(Arrays, HashMap<String, String>), WeightsError> {
    let bytes = std::fs::read(path).map_err(|error| WeightsError::io("read", path, error))?;
    let (_, header) = SafeTensors::read_metadata(&bytes)
        .map_err(|error| WeightsError::malformed(path, error.to_string()))?;
    let tensors =
        SafeTensors::deserialize(&bytes).map_err(|error| WeightsError::malformed(path, error.to_string()))?;
    let mut arrays = Arrays::new();
    for (name, view) in tensors.iter() {
        let element = match view.dtype() {
            Dtype::F64 => Element::F64,
            Dtype::F32 => Element::F32,
            Dtype::F16 => Element::F16,
            Dtype::BF16 => Element::Bf16,
            _ => continue,
        };
        let array = Array { shape: view.shape().to_vec(), values: element.values(view.data()) };
        arrays.insert(name.to_string(), array);
    }
    Ok((arrays, header.metadata().clone().unwrap_or_default()))
}

/// Encodes `arrays` as a safetensors file.
///
/// # Errors
/// When the header cannot be written.
pub(crate) fn encode(
    arrays: &Arrays,
    precision: Precision,
    metadata: HashMap<String, String>,
) -> std::io::Result<Vec<u8>> {
    let dtype = match precision {
        Precision::F32 | Precision::Int8 => Dtype::F32,
        Precision::F16 => Dtype::F16,
        Precision::Bf16 => Dtype::BF16,
    };
    let data: Vec<Vec<u8>> = arrays.values().map(|array| to_bytes(&array.values, precision)).collect();
    let mut views = Vec::with_capacity(arrays.len());
    for ((name, array), bytes) in arrays.iter().zip(&data) {
        let view = TensorView::new(dtype, array.shape.clone(), bytes)
            .map_err(|error| std::io::Error::other(error.to_string()))?;
        views.push((name.clone(), view));
    }
    encode_file(views, metadata)
}

/// Returns the little-endian bytes of `values` in `precision`; f32 for [`Precision::Int8`], which
/// files of tensors do not have.
pub(crate) fn to_bytes(values: &[f32], precision: Precision) -> Vec<u8> {
    match precision {
        Precision::F32 | Precision::Int8 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        Precision::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        Precision::Bf16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
    }
}
