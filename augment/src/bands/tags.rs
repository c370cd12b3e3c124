//! Changes of the tags of a TIFF before it is read, so that RGB with further bands is read as
//! bands.
//!
//! The library drops bands after red, green and blue. It keeps all bands if the photometric
//! interpretation is gray.

use std::borrow::Cow;

use crate::format::MAX_CHANNELS;

/// Tag of the photometric interpretation.
const PHOTOMETRIC: u16 = 262;

/// Tag of the number of samples per pixel.
const SAMPLES: u16 = 277;

/// Photometric interpretation of gray in which zero is black.
const BLACK_IS_ZERO: u16 = 1;

/// Photometric interpretation of RGB.
const RGB: u16 = 2;

/// Byte order and sizes of a TIFF.
#[derive(Clone, Copy)]
struct Layout {
    is_big_endian: bool,
    /// `true` if offsets have 64 bits.
    is_bigtiff: bool,
}

/// Directory of a page.
struct Directory {
    entries: Vec<Entry>,
    /// Position of the next directory.
    next: Option<usize>,
}

/// A tag of a directory.
struct Entry {
    tag: u16,
    /// Position of the value.
    value: usize,
}

impl Directory {
    /// Returns the position of the value of a tag.
    fn value(&self, tag: u16) -> Option<usize> {
        self.entries.iter().find(|entry| entry.tag == tag).map(|entry| entry.value)
    }
}

/// Returns `bytes` with the photometric interpretation changed to gray in all pages of RGB that
/// have more than three samples per pixel.
pub(super) fn as_bands(bytes: &[u8]) -> Cow<'_, [u8]> {
    let mut changed = Cow::Borrowed(bytes);
    let layout = Layout {
        is_big_endian: bytes.starts_with(b"MM"),
        is_bigtiff: bytes.get(2..4).is_some_and(|version| version.contains(&43)),
    };
    let mut position = layout.first_directory(bytes);
    for _ in 0..MAX_CHANNELS {
        let Some(at) = position.filter(|at| *at > 0) else { break };
        let Some(directory) = layout.directory(bytes, at) else { break };
        if let Some(photometric) = directory.value(PHOTOMETRIC)
            && let Some(samples) = directory.value(SAMPLES)
            && layout.short(bytes, photometric) == Some(RGB)
            && layout.short(bytes, samples).is_some_and(|n| n > 3)
        {
            let value =
                if layout.is_big_endian { BLACK_IS_ZERO.to_be_bytes() } else { BLACK_IS_ZERO.to_le_bytes() };
            changed.to_mut()[photometric..photometric + 2].copy_from_slice(&value);
        }
        position = directory.next;
    }
    changed
}

impl Layout {
    /// Returns the number in the `n` bytes from `at` on.
    fn number(self, bytes: &[u8], at: usize, n: usize) -> Option<u64> {
        let bytes = bytes.get(at..at.checked_add(n)?)?.iter();
        Some(if self.is_big_endian { from_bytes(bytes) } else { from_bytes(bytes.rev()) })
    }

    fn short(self, bytes: &[u8], at: usize) -> Option<u16> {
        self.number(bytes, at, 2).map(|number| number as u16)
    }

    fn offset(self, bytes: &[u8], at: usize) -> Option<usize> {
        usize::try_from(self.number(bytes, at, if self.is_bigtiff { 8 } else { 4 })?).ok()
    }

    fn first_directory(self, bytes: &[u8]) -> Option<usize> {
        self.offset(bytes, if self.is_bigtiff { 8 } else { 4 })
    }

    /// Reads the directory at `at`.
    fn directory(self, bytes: &[u8], at: usize) -> Option<Directory> {
        // Length of the number of entries, length of an entry, and offset of the value in an entry.
        let [n_bytes, len, value] = if self.is_bigtiff { [8, 20, 12] } else { [2, 12, 8] };
        let n = usize::try_from(self.number(bytes, at, n_bytes)?).ok()?;
        let start = at.checked_add(n_bytes)?;
        let end = start.checked_add(n.checked_mul(len)?)?;
        if end > bytes.len() {
            return None;
        }
        let mut entries = Vec::with_capacity(n);
        for entry in (start..end).step_by(len) {
            entries.push(Entry { tag: self.short(bytes, entry)?, value: entry + value });
        }
        Some(Directory { entries, next: self.offset(bytes, end) })
    }
}

/// Returns the number whose bytes are given from the highest to the lowest.
fn from_bytes<'a>(bytes: impl Iterator<Item = &'a u8>) -> u64 {
    bytes.fold(0, |number, byte| number << 8 | u64::from(*byte))
}
