//! Memory-mapped files of numbers: pages that do not fit in memory are read again when they are needed.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

/// A file of f32 numbers in native byte order.
#[derive(Debug)]
pub(crate) struct Mapped(Option<Mmap>);

impl Mapped {
    /// Maps `path`.
    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            // An empty file cannot be mapped.
            return Ok(Self(None));
        }
        // SAFETY: the files of the cache are written under another name, renamed and never changed afterwards; a
        // removed file stays readable until it is unmapped. The map is read-only, so that nothing here writes through
        // it.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self(Some(map)))
    }

    /// Returns the numbers.
    pub(crate) fn values(&self) -> &[f32] {
        // A map starts at a page boundary, so that its floats are aligned. Bytes after the last whole float are left
        // out.
        self.0.as_deref().map_or(&[], |bytes| bytemuck::cast_slice(&bytes[..bytes.len() / 4 * 4]))
    }
}
