//! Tensors in safetensors files.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

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

/// Sorts the header of the file at `path`, so that equal tensors make equal bytes there, too.
///
/// # Errors
/// Fails if the header cannot be read or written.
pub fn sort_header(path: &Path) -> std::io::Result<()> {
    let mut file = File::options().read(true).write(true).open(path)?;
    let mut len = [0; 8];
    file.read_exact(&mut len)?;
    let mut header = vec![0; usize::try_from(u64::from_le_bytes(len)).map_err(std::io::Error::other)?];
    file.read_exact(&mut header)?;
    let mut sorted = sorted(&header)?;
    // The same members in another order: they are as long.
    sorted.resize(header.len(), b' ');
    file.seek(SeekFrom::Start(8))?;
    file.write_all(&sorted)
}

/// Sorts the metadata, which the library writes in the changing order of a hash map: equal weights
/// must make equal bytes.
fn with_sorted_header(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let invalid = || std::io::Error::other("the header cannot be read again");
    let (len, rest) = bytes.split_first_chunk::<8>().ok_or_else(invalid)?;
    let (header, data) = rest.split_at_checked(u64::from_le_bytes(*len) as usize).ok_or_else(invalid)?;
    let mut header = sorted(header)?;
    // Data starts at a multiple of eight, after spaces, as the format recommends.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header, data].concat())
}

/// Returns `header` with its members in the order of their names.
fn sorted(header: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header)?;
    if let Some(metadata) = header.get_mut("__metadata__") {
        metadata.sort_all_objects();
    }
    Ok(serde_json::to_vec(&header)?)
}
