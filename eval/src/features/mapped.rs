//! Memory-mapped files of numbers: pages that do not fit in memory are read again when they are
//! needed.
//!
//! Mapping is `unsafe` in Rust because another process may truncate the file. Files of the cache
//! are never changed, but a user's file of features may be: a program that truncates it while it is
//! read ends this one.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;

/// A file of f32 numbers in native byte order, or a part of one.
#[derive(Debug)]
pub(crate) struct Mapped {
    map: Option<Mmap>,
    bytes: Range<usize>,
}

impl Mapped {
    /// Maps `path`.
    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        Self::open_from(path, 0, None)
    }

    /// Maps `n` numbers of `path` from byte `start` on, a multiple of 4, or all that follow.
    ///
    /// # Errors
    /// Errors of the file, [`std::io::ErrorKind::UnexpectedEof`] if it holds fewer numbers.
    pub(crate) fn open_from(path: &Path, start: usize, n: Option<usize>) -> std::io::Result<Self> {
        let file = File::open(path)?;
        let len = file.metadata()?.len() as usize;
        let n_stored = len.saturating_sub(start) / 4;
        let n = n.unwrap_or(n_stored);
        if n > n_stored {
            let text = format!("{n} numbers expected after byte {start}, but there are {n_stored}");
            return Err(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, text));
        }
        if n == 0 {
            // An empty file cannot be mapped.
            return Ok(Self { map: None, bytes: 0..0 });
        }
        // SAFETY: files of the cache are written under another name, renamed and never changed
        // afterwards; a removed file stays readable until it is unmapped. A user's file of features
        // must not be changed while it is read, as the module doc says. The map is read-only, so
        // that nothing here writes through it.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map: Some(map), bytes: start..start + 4 * n })
    }

    /// Returns the numbers.
    pub(crate) fn values(&self) -> &[f32] {
        // The map starts at a page boundary and the part at a multiple of 4 bytes, so that the
        // numbers are aligned.
        self.map.as_deref().map_or(&[], |bytes| bytemuck::cast_slice(&bytes[self.bytes.clone()]))
    }

    /// Returns the bytes of the whole file.
    pub(crate) fn file_bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}
