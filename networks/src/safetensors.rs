//! Tensors in safetensors files.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use ::safetensors::SafeTensorError;
use ::safetensors::tensor::{TensorView, serialize};

/// Encodes tensors as one safetensors file. Equal tensors give equal bytes.
///
/// # Errors
/// Fails if the header cannot be written.
pub fn encode_file(
    views: Vec<(String, TensorView<'_>)>,
    metadata: HashMap<String, String>,
) -> std::io::Result<Vec<u8>> {
    let bytes = serialize(views, Some(metadata))
        .map_err(|error: SafeTensorError| std::io::Error::other(error.to_string()))?;
    sort_header_of_bytes(&bytes)
}

/// Sorts the header of the file at `path`, so that equal tensors give equal bytes there, too.
///
/// # Errors
/// Fails if the header cannot be read or written.
pub fn sort_header(path: &Path) -> std::io::Result<()> {
    let mut file = File::options().read(true).write(true).open(path)?;
    let mut len = [0; 8];
    file.read_exact(&mut len)?;
    let mut header = vec![0; usize::try_from(u64::from_le_bytes(len)).map_err(std::io::Error::other)?];
    file.read_exact(&mut header)?;
    let mut sorted = sort_members(&header)?;
    // The same members in another order have the same length.
    sorted.resize(header.len(), b' ');
    file.seek(SeekFrom::Start(8))?;
    file.write_all(&sorted)
}

/// Sorts the metadata in the file `bytes`, which the library writes in the changing order of a hash
/// map: equal weights must give equal bytes.
fn sort_header_of_bytes(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let Some((header, data)) = split_file(bytes) else {
        return Err(std::io::Error::other("the header cannot be read again"));
    };
    let mut header = sort_members(header)?;
    // Data starts at a multiple of eight, after spaces, as the format recommends.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header, data].concat())
}

/// Splits the file `bytes` into its header and its data.
fn split_file(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<8>()?;
    rest.split_at_checked(u64::from_le_bytes(*len) as usize)
}

/// Returns `header` with its members in the order of their names.
fn sort_members(header: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header)?;
    if let Some(metadata) = header.get_mut("__metadata__") {
        metadata.sort_all_objects();
    }
    Ok(serde_json::to_vec(&header)?)
}
