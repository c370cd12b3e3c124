//! Reader of the bits of entropy-coded data, up to the marker that ends it.

use super::error::JpegError;

/// Reader of entropy-coded data: bits from the highest to the lowest, without the zero bytes after
/// `0xff`, up to a marker.
///
/// All bits after a marker read as zero, as in libjpeg; [`Bits::is_exhausted`] returns whether any
/// of them were read.
pub(crate) struct Bits<'a> {
    bytes: &'a [u8],
    /// Position of the first byte that is not in `buffer` yet.
    at: usize,
    /// Bits that have not been read, the next one highest.
    buffer: u64,
    /// Number of valid bits in `buffer`; negative once more bits were read than the data holds.
    n_bits: i32,
    /// Marker that ended the data; nothing is read after it.
    marker: Option<u8>,
    /// `true` if the bytes ended before a marker was found.
    ended: bool,
}

/// Number of bits that a refill guarantees: enough for a code of 16 bits, an invalid 17th, and 15
/// bits after it.
const REFILLED_BITS: i32 = 32;

impl<'a> Bits<'a> {
    /// Creates a reader that starts at byte `at`.
    pub(crate) fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at, buffer: 0, n_bits: 0, marker: None, ended: false }
    }

    /// Makes sure that 32 bits can be peeked at and consumed.
    #[inline(always)]
    pub(crate) fn refill(&mut self) {
        if self.n_bits >= REFILLED_BITS {
            return;
        }
        if let Some(word) = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk::<8>())
            && self.marker.is_none()
        {
            let word = u64::from_be_bytes(*word);
            // A byte of 0xff is a zero byte of the complement.
            let inverse = !word;
            let has_ff = inverse.wrapping_sub(0x0101_0101_0101_0101) & word & 0x8080_8080_8080_8080;
            if has_ff == 0 && self.n_bits >= 0 {
                // Bits of an incomplete byte are loaded again next time, over the same bits.
                self.buffer |= word >> self.n_bits;
                let n_bytes = (63 - self.n_bits) >> 3;
                self.at += n_bytes as usize;
                self.n_bits += n_bytes << 3;
                return;
            }
        }
        self.refill_bytewise();
    }

    /// Refills as [`Bits::refill`] does, where the data may contain `0xff` or end.
    #[cold]
    #[inline(never)]
    fn refill_bytewise(&mut self) {
        while (0..=56).contains(&self.n_bits) && self.marker.is_none() && !self.ended {
            let Some(byte) = self.next_byte() else { return };
            self.buffer |= u64::from(byte) << (56 - self.n_bits);
            self.n_bits += 8;
        }
    }

    /// Returns the next byte of data; `None` if a marker or the end comes first.
    fn next_byte(&mut self) -> Option<u8> {
        let first = self.take()?;
        if first != 0xff {
            return Some(first);
        }
        // Any number of 0xff may precede the code of a marker.
        loop {
            match self.take()? {
                0xff => {}
                0 => return Some(0xff),
                code => {
                    self.marker = Some(code);
                    return None;
                }
            }
        }
    }

    /// Returns the byte at the current position, and advances by one byte.
    fn take(&mut self) -> Option<u8> {
        let byte = self.bytes.get(self.at).copied();
        self.ended |= byte.is_none();
        self.at += 1;
        byte
    }

    /// Returns the next `n` bits, 1 to 17, without consuming them.
    #[inline(always)]
    pub(crate) fn peek(&self, n: u32) -> u32 {
        (self.buffer >> (64 - n)) as u32
    }

    /// Consumes `n` bits, at most 32.
    #[inline(always)]
    pub(crate) fn consume(&mut self, n: u32) {
        self.buffer <<= n;
        self.n_bits -= n as i32;
    }

    /// Consumes `size` bits, 1 to 15, as a signed number, which is negative if its first bit is 0
    /// (T.81, F.2.2.1).
    #[inline(always)]
    pub(crate) fn signed(&mut self, size: u32) -> i32 {
        let value = self.peek(size) as i32;
        self.consume(size);
        extended(value, size)
    }

    /// Consumes one bit, refilling if necessary.
    #[inline(always)]
    pub(crate) fn bit(&mut self) -> bool {
        self.refill();
        let bit = self.peek(1) == 1;
        self.consume(1);
        bit
    }

    /// Returns whether more bits were read than precede the marker. Fails if the file ended
    /// instead.
    #[inline(always)]
    pub(crate) fn is_exhausted(&mut self) -> Result<bool, JpegError> {
        if self.n_bits >= 0 && !self.ended {
            return Ok(false);
        }
        if self.ended {
            return Err(JpegError::CutOff);
        }
        self.n_bits = 0;
        self.buffer = 0;
        Ok(true)
    }

    /// Discards the bits before a restart marker, and consumes that marker, or recovers as libjpeg
    /// does if it is missing. Returns false if the next marker must stay unread, so that the
    /// interval that follows is empty.
    pub(crate) fn restart(&mut self, expected: u8) -> Result<bool, JpegError> {
        self.buffer = 0;
        self.n_bits = 0;
        loop {
            let marker = match self.marker {
                Some(marker) => marker,
                None => self.next_marker()?,
            };
            self.marker = Some(marker);
            let distance = marker.wrapping_sub(0xd0).wrapping_sub(expected) & 7;
            match marker {
                // An invalid marker, or one of the two previous restarts.
                0..0xc0 => self.marker = None,
                0xd0..=0xd7 if distance >= 6 => self.marker = None,
                0xd0..=0xd7 if matches!(distance, 1 | 2) => return Ok(false),
                0xd0..=0xd7 => {
                    self.marker = None;
                    return Ok(true);
                }
                _ => return Ok(false),
            }
        }
    }

    /// Skips past the next marker and returns it.
    fn next_marker(&mut self) -> Result<u8, JpegError> {
        let (marker, at) = next_marker(self.bytes, self.at).ok_or(JpegError::CutOff)?;
        self.at = at;
        Ok(marker)
    }

    /// Returns the marker that ended the data, if one was found, and the position after it or after
    /// the data.
    pub(crate) fn end(&self) -> (Option<u8>, usize) {
        (self.marker, self.at)
    }
}

/// Returns the first marker at or after `at`, and the position after it. Bytes before it are
/// skipped.
pub(crate) fn next_marker(bytes: &[u8], mut at: usize) -> Option<(u8, usize)> {
    loop {
        at += bytes.get(at..)?.iter().position(|byte| *byte == 0xff)?;
        at += bytes[at..].iter().position(|byte| *byte != 0xff)?;
        let code = bytes[at];
        at += 1;
        if code != 0 {
            return Some((code, at));
        }
    }
}

/// Extends a number of `size` bits to a signed number (T.81, table F.1).
pub(crate) fn extended(value: i32, size: u32) -> i32 {
    if value < 1 << (size - 1) { value + 1 - (1 << size) } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bits: &mut Bits<'_>, n: u32) -> u32 {
        bits.refill();
        let value = bits.peek(n);
        bits.consume(n);
        value
    }

    #[test]
    fn stuffed_bytes_are_data_and_zeros_follow_a_marker() {
        let bytes = [0x12, 0xff, 0x00, 0x34, 0xff, 0xff, 0xd9, 0x55];
        let mut bits = Bits::new(&bytes, 0);
        assert_eq!([8, 8, 8].map(|n| read(&mut bits, n)), [0x12, 0xff, 0x34]);
        assert!(!bits.is_exhausted().expect("data"));
        assert_eq!(read(&mut bits, 16), 0);
        assert!(bits.is_exhausted().expect("data"));
        assert_eq!(bits.end(), (Some(0xd9), 7));
    }

    #[test]
    fn buffered_reads_equal_reads_bit_by_bit() {
        let bytes: Vec<u8> = (0..300u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 25) as u8).collect();
        let mut data = bytes.clone();
        data.extend([0xff, 0xd9]);
        let mut bits = Bits::new(&data, 0);
        let mut at = 0;
        for n in (1..=17).cycle().take(250) {
            let mut expected = 0;
            for bit in at..at + n {
                expected = expected << 1 | u32::from(bytes[bit / 8] >> (7 - bit % 8) & 1);
            }
            assert_eq!(read(&mut bits, n as u32), expected, "{n} bits at {at}");
            at += n;
        }
        assert!(!bits.is_exhausted().expect("data"));
    }

    #[test]
    fn data_without_a_marker_is_cut_off() {
        let mut bits = Bits::new(&[0x12], 0);
        read(&mut bits, 9);
        assert!(matches!(bits.is_exhausted(), Err(JpegError::CutOff)));
    }

    fn restart(bytes: &[u8], expected: u8) -> (bool, (Option<u8>, usize)) {
        let mut bits = Bits::new(bytes, 0);
        let is_consumed = bits.restart(expected).expect("a marker");
        (is_consumed, bits.end())
    }

    #[test]
    fn recovery_of_restart_markers_equals_libjpegs() {
        // The expected marker, with garbage before it.
        assert_eq!(restart(&[1, 2, 0xff, 0xd3, 7], 3), (true, (None, 4)));
        // One of the two previous restarts: it is skipped.
        assert_eq!(restart(&[0xff, 0xd2, 0xff, 0xd3], 3), (true, (None, 4)));
        // One of the two following restarts, or another marker: it stays unread.
        assert_eq!(restart(&[0xff, 0xd4], 3), (false, (Some(0xd4), 2)));
        assert_eq!(restart(&[0xff, 0xd9], 3), (false, (Some(0xd9), 2)));
        // A distant restart: it is treated as the expected one.
        assert_eq!(restart(&[0xff, 0xd7], 3), (true, (None, 2)));
    }

    #[test]
    fn signed_numbers_equal_those_of_the_standard() {
        assert_eq!([0, 1].map(|v| extended(v, 1)), [-1, 1]);
        assert_eq!([0, 1, 2, 3].map(|v| extended(v, 2)), [-3, -2, 2, 3]);
        assert_eq!(extended(0, 15), -32767);
    }
}
