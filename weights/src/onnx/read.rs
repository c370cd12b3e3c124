//! Reading the parameters of a graph that `ocelli export` has written.

use std::collections::HashMap;
use std::path::Path;

use prost::Message;

use super::graph::{TRANSPOSED, transpose};
use super::message::{BFLOAT16, FLOAT, FLOAT16, INT8, Model, TensorMessage};
use crate::error::WeightsError;
use crate::file::{Array, Arrays, Element};
use crate::metadata::MODEL;

/// Reads the constants of the graph in `path` and its metadata. All parameters are among the
/// constants.
///
/// # Errors
/// [`WeightsError::Io`], [`WeightsError::Malformed`], and [`WeightsError::Unknown`] for a graph of
/// another program.
pub(crate) fn read(path: &Path) -> Result<(Arrays, HashMap<String, String>), WeightsError> {
    let bytes = std::fs::read(path).map_err(|error| WeightsError::io("read", path, error))?;
    let model =
        Model::decode(bytes.as_slice()).map_err(|error| WeightsError::malformed(path, error.to_string()))?;
    let metadata: HashMap<String, String> =
        model.metadata_props.into_iter().map(|entry| (entry.key, entry.value)).collect();
    if !metadata.contains_key(MODEL) {
        let reason = "it is a graph from another program: only those of `ocelli export` can be read. Use \
                      the weights that it was exported from";
        return Err(WeightsError::unknown(path, reason));
    }
    let tensors = model.graph.map(|graph| graph.initializer).unwrap_or_default();
    let mut arrays = Arrays::new();
    for tensor in &tensors {
        let array = decode(tensor).map_err(|reason| malformed_tensor(path, tensor, &reason))?;
        if let Some(array) = array {
            arrays.insert(tensor.name.clone(), array);
        }
    }
    for tensor in tensors.iter().filter(|tensor| tensor.data_type == INT8) {
        let scales = arrays.remove(&format!("{}.scale", tensor.name));
        if let Some(array) = arrays.get_mut(&tensor.name) {
            apply_scales(array, scales).map_err(|reason| malformed_tensor(path, tensor, &reason))?;
        }
    }
    Ok((arrays, metadata))
}

fn malformed_tensor(path: &Path, tensor: &TensorMessage, reason: &str) -> WeightsError {
    WeightsError::malformed(path, format!("its tensor {}: {reason}", tensor.name))
}

/// Decodes a tensor of floating-point numbers or 8-bit codes; `None` for other types.
fn decode(tensor: &TensorMessage) -> Result<Option<Array>, String> {
    let shape: Result<Vec<usize>, _> = tensor.dims.iter().map(|n| usize::try_from(*n)).collect();
    let mut shape = shape.map_err(|_| format!("its dimensions are {:?}", tensor.dims))?;
    let bytes = tensor.raw_data.as_deref().unwrap_or_default();
    let (element, element_bytes) = match tensor.data_type {
        FLOAT => (Some(Element::F32), 4),
        FLOAT16 => (Some(Element::F16), 2),
        BFLOAT16 => (Some(Element::Bf16), 2),
        INT8 => (None, 1),
        _ => return Ok(None),
    };
    if shape.contains(&0) {
        return Err(format!("its shape {shape:?} is empty"));
    }
    let n_bytes = shape.iter().try_fold(element_bytes, |n: usize, dim| n.checked_mul(*dim));
    if n_bytes != Some(bytes.len()) {
        return Err(format!("{} bytes do not fit shape {shape:?}", bytes.len()));
    }
    let mut values = match element {
        Some(element) => element.values(bytes),
        None => bytes.iter().map(|byte| f32::from(*byte as i8)).collect(),
    };
    if let ([n_in, n_out], TRANSPOSED) = (shape.as_slice(), tensor.doc_string.as_str()) {
        values = transpose(&values, *n_in, *n_out);
        shape.reverse();
    }
    Ok(Some(Array { shape, values }))
}

/// Multiplies the codes of each output channel by its scale.
fn apply_scales(array: &mut Array, scales: Option<Array>) -> Result<(), String> {
    let scales = scales.map(|scales| scales.values).unwrap_or_default();
    let n_out = array.shape.first().copied().unwrap_or(0);
    if scales.len() != n_out || n_out == 0 {
        return Err(format!("{n_out} output channels have {} scales", scales.len()));
    }
    let row_len = (array.values.len() / n_out).max(1);
    for (row, scale) in array.values.chunks_mut(row_len).zip(scales) {
        for value in row {
            *value *= scale;
        }
    }
    Ok(())
}
