//! Tags of a TIFF that are changed before it is read: RGB with further bands is read as bands.
//!
//! The library drops bands beyond red, green and blue. Where the photometric interpretation is gray
//! instead, it keeps all.

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
    /// Whether offsets have 64 bits.
    is_bigtiff: bool,
}

/// Returns `bytes` with the photometric interpretation of gray in all pages of RGB that have more
/// than three samples per pixel.
pub(super) fn as_bands(bytes: &[u8]) -> Cow<'_, [u8]> {
    let mut changed = Cow::Borrowed(bytes);
    let layout = Layout {
        is_big_endian: bytes.starts_with(b"MM"),
        is_bigtiff: bytes.get(2..4).is_some_and(|version| version.contains(&43)),
    };
    let mut directory = layout.first_directory(bytes);
    for _ in 0..MAX_CHANNELS {
        let Some(at) = directory.filter(|at| *at > 0) else { break };
        let Some((entries, next)) = layout.entries(bytes, at) else { break };
        let find = |tag: u16| entries.iter().find(|(found, _)| *found == tag).map(|(_, at)| *at);
        if let (Some(photometric), Some(samples)) = (find(PHOTOMETRIC), find(SAMPLES))
            && layout.short(bytes, photometric) == Some(RGB)
            && layout.short(bytes, samples).is_some_and(|n| n > 3)
        {
            let value =
                if layout.is_big_endian { BLACK_IS_ZERO.to_be_bytes() } else { BLACK_IS_ZERO.to_le_bytes() };
            changed.to_mut()[photometric..photometric + 2].copy_from_slice(&value);
        }
        directory = next;
    }
    changed
}

impl Layout {
    /// Returns the number in the `n` bytes from `at` on.
    fn number(self, bytes: &[u8], at: usize, n: usize) -> Option<u64> {
        let found = bytes.get(at..at.checked_add(n)?)?;
        let add = |sum: u64, byte: &u8| sum << 8 | u64::from(*byte);
        Some(if self.is_big_endian { found.iter().fold(0, add) } else { found.iter().rev().fold(0, add) })
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

    /// Returns the tags of the directory at `at`, each with the place of its value, and the place
    /// of the next directory.
    #[allow(clippy::type_complexity)]
    fn entries(self, bytes: &[u8], at: usize) -> Option<(Vec<(u16, usize)>, Option<usize>)> {
        let [n_bytes, len, value] = if self.is_bigtiff { [8, 20, 12] } else { [2, 12, 8] };
        let n = usize::try_from(self.number(bytes, at, n_bytes)?).ok()?;
        let start = at.checked_add(n_bytes)?;
        let end = start.checked_add(n.checked_mul(len)?)?;
        if end > bytes.len() {
            return None;
        }
        Some((
            (0..n)
                .map_while(|number: usize| {
                    Some((self.short(bytes, start + number * len)?, start + number * len + value))
                })
                .collect(),
            self.offset(bytes, end),
        ))
    }
}
