//! Tensors in safetensors files.

use std::collections::{BTreeMap, HashMap};

use ::safetensors::SafeTensorError;
use ::safetensors::tensor::{TensorView, serialize};

/// Encodes tensors as one safetensors file. Equal tensors make equal bytes.
///
/// # Errors
/// Fails if the header cannot be written.
pub fn file_of(
    views: Vec<(String, TensorView<'_>)>,
    metadata: HashMap<String, String>,
) -> std::io::Result<Vec<u8>> {
    with_sorted_header(&serialize(views, Some(metadata)).map_err(invalid)?)
}

fn invalid(error: SafeTensorError) -> std::io::Error {
    std::io::Error::other(error.to_string())
}

/// Sorts the metadata, which the library writes in the changing order of a hash map: equal weights must make
/// equal bytes.
fn with_sorted_header(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let invalid = || std::io::Error::other("the header cannot be read again");
    let (len, rest) = bytes.split_first_chunk::<8>().ok_or_else(invalid)?;
    let (header, data) = rest.split_at_checked(u64::from_le_bytes(*len) as usize).ok_or_else(invalid)?;
    let mut header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header)?;
    if let Some(metadata) = header.get_mut("__metadata__") {
        metadata.sort_all_objects();
    }
    let mut header = serde_json::to_vec(&header)?;
    // Data starts at a multiple of eight, after spaces, as the format recommends.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header, data].concat())
}
