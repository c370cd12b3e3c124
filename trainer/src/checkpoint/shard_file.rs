//! One file of a checkpoint: the shards of a rank, in blocks with a checksum each.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ::safetensors::tensor::{Dtype, Metadata};
use xxhash_rust::xxh3::xxh3_64;

use super::FileEntry;

/// A file of a checkpoint. Every block is verified before it is used.
pub(super) struct ShardFile {
    path: PathBuf,
    file: File,
    entry: FileEntry,
    /// Bytes of tensors within the file, by name.
    tensors: HashMap<String, Range<u64>>,
    /// The block that was read last: consecutive tensors often share one.
    last_block: RefCell<Option<(usize, Vec<u8>)>>,
}

impl ShardFile {
    /// Opens the file that `entry` describes in `folder`, and reads its header.
    pub(super) fn open(folder: &Path, entry: FileEntry) -> Result<Self, String> {
        let path = folder.join(&entry.name);
        let is_file = path.metadata().map_err(|error| format!("{}: {error}", entry.name))?.is_file();
        if !is_file {
            return Err(format!("{} is not a regular file", entry.name));
        }
        let file = File::open(&path).map_err(|error| format!("{}: {error}", entry.name))?;
        let len = file.metadata().map_err(|error| format!("{}: {error}", entry.name))?.len();
        if len != entry.bytes {
            return Err(format!("{} has {len} bytes, but the manifest says {}", entry.name, entry.bytes));
        }
        if entry.block_bytes == 0 || entry.xxh3.len() as u64 != entry.bytes.div_ceil(entry.block_bytes) {
            return Err(format!("the manifest does not have one checksum per block of {}", entry.name));
        }
        let mut opened = Self { path, file, entry, tensors: HashMap::new(), last_block: RefCell::new(None) };
        let n = opened.bytes(0..8)?;
        // bytes() returns as many as requested.
        let n = u64::from_le_bytes(n.try_into().expect("eight bytes"));
        let header_end = n.checked_add(8).filter(|end| *end <= opened.entry.bytes);
        let header_end = header_end.ok_or_else(|| opened.error("its header is longer than the file"))?;
        let header = opened.bytes(0..header_end)?;
        let metadata: Metadata =
            serde_json::from_slice(&header[8..]).map_err(|error| opened.error(&error.to_string()))?;
        if header_end + metadata.data_len() as u64 != opened.entry.bytes {
            return Err(opened.error("its tensors do not cover the whole file"));
        }
        for (name, info) in metadata.tensors() {
            if info.dtype == Dtype::F32 {
                let (start, end) = info.data_offsets;
                opened.tensors.insert(name, header_end + start as u64..header_end + end as u64);
            }
        }
        Ok(opened)
    }

    /// Verifies every block.
    pub(super) fn check(&self) -> Result<(), String> {
        for index in 0..self.entry.xxh3.len() {
            self.read_block(index)?;
        }
        Ok(())
    }

    fn error(&self, reason: &str) -> String {
        format!("{}: {reason}", self.entry.name)
    }

    /// Reads the elements `range` of the tensor `key`, which has `len` elements.
    pub(super) fn tensor(&self, key: &str, len: usize, range: Range<usize>) -> Result<Vec<u8>, String> {
        let bytes = self.tensors.get(key).ok_or_else(|| self.error(&format!("it has no {key}")))?;
        if bytes.end - bytes.start != 4 * len as u64 || bytes.end > self.entry.bytes {
            let n = (bytes.end - bytes.start) / 4;
            return Err(self.error(&format!("{key} has {n} elements, not {len}")));
        }
        self.bytes(bytes.start + 4 * range.start as u64..bytes.start + 4 * range.end as u64)
    }

    /// Reads the bytes `range` of the file, from blocks that match their checksums.
    fn bytes(&self, range: Range<u64>) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
        let block_bytes = self.entry.block_bytes;
        let mut offset = range.start;
        while offset < range.end {
            let index = offset / block_bytes;
            let start = index * block_bytes;
            let end = range.end.min(start + block_bytes);
            self.read_block(index as usize)?;
            let block = self.last_block.borrow();
            let part_range = (offset - start) as usize..(end - start) as usize;
            let part = block.as_ref().and_then(|(_, block)| block.get(part_range));
            bytes.extend_from_slice(part.ok_or_else(|| self.error("it ends too early"))?);
            offset = end;
        }
        Ok(bytes)
    }

    /// Reads and verifies block `index`, unless it is the one that was read last.
    fn read_block(&self, index: usize) -> Result<(), String> {
        if self.last_block.borrow().as_ref().is_some_and(|(last, _)| *last == index) {
            return Ok(());
        }
        let start = index as u64 * self.entry.block_bytes;
        let len = self.entry.block_bytes.min(self.entry.bytes.saturating_sub(start));
        let mut block = vec![0; len as usize];
        let read = self.file.read_exact_at(&mut block, start);
        read.map_err(|error| format!("{}: {error}", self.path.display()))?;
        if self.entry.xxh3.get(index) != Some(&xxh3_64(&block)) {
            return Err(format!("the checksum of {} is wrong at byte {start}", self.entry.name));
        }
        *self.last_block.borrow_mut() = Some((index, block));
        Ok(())
    }
}
