//! Numbers of a file, mapped into memory: what does not fit is read again when it is needed.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

/// A file of f32 numbers in the order of this machine's bytes.
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
        // SAFETY: the files of the cache are written under another name, renamed and never changed afterwards; one that
        // is removed stays readable until it is unmapped. Read-only, so that nothing here writes through the map.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self(Some(map)))
    }

    /// The numbers.
    pub(crate) fn values(&self) -> &[f32] {
        // A map starts on a page, so that its floats are aligned. Bytes after the last whole one are left out.
        self.0.as_deref().map_or(&[], |bytes| bytemuck::cast_slice(&bytes[..bytes.len() / 4 * 4]))
    }
}
