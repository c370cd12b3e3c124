//! Huffman tables (T.81, C and F.2.2.3).

use super::bits::{Bits, extended};
use super::error::JpegError;

/// Maximum length of a code that is found in one step, in bits.
const LOOKUP_BITS: u32 = 10;

/// Definition of a table, as it is stored in a file.
#[derive(Clone)]
pub(crate) struct Definition {
    /// Number of codes of each length, 1 to 16 bits.
    pub(crate) counts: [u8; 16],
    /// Symbols in the order of codes, followed by zeros.
    pub(crate) symbols: [u8; 256],
}

/// A table prepared for decoding.
pub(crate) struct Table {
    /// Entries by the next [`LOOKUP_BITS`] bits.
    lookup: [CodeEntry; 1 << LOOKUP_BITS],
    /// Largest code of each length, or -1 if there is none. The last entry ends every search.
    max_code: [i32; 18],
    /// Offset from a code of each length to the index of its symbol.
    symbol_offset: [i32; 17],
    symbols: [u8; 256],
}

/// Decoded code: its length, its symbol and, if it fits into the lookup, the signed number after
/// it.
#[derive(Clone, Copy, Default)]
pub(crate) struct CodeEntry {
    /// Number of bits of the code, 0 if it is longer than the lookup.
    pub(crate) code_len: u8,
    /// The symbol: a run of zeros in the upper four bits, the size of the number in the lower four.
    pub(crate) symbol: u8,
    /// Number of bits of code and number together; 0 if they exceed the lookup or there is no
    /// number.
    pub(crate) total_len: u8,
    /// The signed number.
    pub(crate) value: i16,
}

impl Table {
    /// Prepares a table. In a table of DC differences (`is_dc`), no symbol may exceed 15.
    pub(crate) fn new(definition: &Definition, is_dc: bool) -> Result<Self, JpegError> {
        let mut table = Self {
            lookup: [CodeEntry::default(); 1 << LOOKUP_BITS],
            max_code: [-1; 18],
            symbol_offset: [0; 17],
            symbols: definition.symbols,
        };
        let mut code = 0u32;
        let mut index = 0usize;
        for (len, count) in (1..=16u32).zip(definition.counts) {
            let first = code;
            let count = u32::from(count);
            code += count;
            // No code may be all ones.
            if index + count as usize > 256 || count > 0 && code >= 1 << len {
                return Err(JpegError::Damaged("a Huffman table"));
            }
            if count > 0 {
                table.symbol_offset[len as usize] = index as i32 - first as i32;
                table.max_code[len as usize] = code as i32 - 1;
            }
            for code in first..code {
                table.enter(code, len, definition.symbols[index]);
                index += 1;
            }
            code <<= 1;
        }
        table.max_code[17] = i32::MAX;
        if is_dc && definition.symbols[..index].iter().any(|symbol| *symbol > 15) {
            return Err(JpegError::Damaged("a Huffman table"));
        }
        Ok(table)
    }

    /// Enters a code of `len` bits at every index of the lookup that begins with it.
    fn enter(&mut self, code: u32, len: u32, symbol: u8) {
        if len > LOOKUP_BITS {
            return;
        }
        let n_suffix_bits = LOOKUP_BITS - len;
        let size = u32::from(symbol & 15);
        let entries = &mut self.lookup[(code as usize) << n_suffix_bits..][..1 << n_suffix_bits];
        for (suffix, entry) in entries.iter_mut().enumerate() {
            *entry = CodeEntry { code_len: len as u8, symbol, ..CodeEntry::default() };
            if size > 0 && size <= n_suffix_bits {
                entry.total_len = (len + size) as u8;
                entry.value = extended((suffix >> (n_suffix_bits - size)) as i32, size) as i16;
            }
        }
    }

    /// Looks up the next bits without consuming them; the code may be longer than the lookup.
    #[inline(always)]
    pub(crate) fn look_up(&self, bits: &Bits<'_>) -> CodeEntry {
        self.lookup[bits.peek(LOOKUP_BITS) as usize]
    }

    /// Consumes a code and returns its symbol. The bits must have been refilled before; 15 further
    /// bits can be consumed afterwards.
    #[inline(always)]
    pub(crate) fn symbol(&self, bits: &mut Bits<'_>) -> u8 {
        let entry = self.look_up(bits);
        if entry.code_len > 0 {
            bits.consume(u32::from(entry.code_len));
            return entry.symbol;
        }
        self.long_symbol(bits)
    }

    /// Consumes a code longer than the lookup, like [`Table::symbol`]. An invalid one is read as 17
    /// bits with symbol 0.
    #[inline(never)]
    fn long_symbol(&self, bits: &mut Bits<'_>) -> u8 {
        let mut len = LOOKUP_BITS + 1;
        while bits.peek(len) as i32 > self.max_code[len as usize] {
            len += 1;
        }
        let code = bits.peek(len) as i32;
        bits.consume(len);
        if len > 16 {
            return 0;
        }
        self.symbols[(code + self.symbol_offset[len as usize]) as usize & 0xff]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition(counts: &[u8], symbols: &[u8]) -> Definition {
        let mut definition = Definition { counts: [0; 16], symbols: [0; 256] };
        definition.counts[..counts.len()].copy_from_slice(counts);
        definition.symbols[..symbols.len()].copy_from_slice(symbols);
        definition
    }

    #[test]
    fn short_and_long_codes_are_decoded() {
        // 0 → 7, 10 → 0x12, then one code of each length 3 to 16.
        let mut counts = [1; 16];
        counts[0] = 1;
        let symbols: Vec<u8> = [7, 0x12].into_iter().chain(20..34).collect();
        let table = Table::new(&definition(&counts, &symbols), false).expect("a table");
        // 0, 10, 14 ones and a zero (15 bits: symbol 32), 15 ones and a zero (16 bits: symbol 33),
        // 17 ones: none.
        let code = "0".to_string() + "10" + &"1".repeat(14) + "0" + &"1".repeat(15) + "0" + &"1".repeat(17);
        let mut padded = code.clone() + "0";
        padded += &"0".repeat((8 - padded.len() % 8) % 8 + 64);
        let mut bytes = Vec::new();
        for byte in padded.as_bytes().chunks(8) {
            let byte = byte.iter().fold(0u8, |byte, bit| byte << 1 | (bit - b'0'));
            bytes.push(byte);
            if byte == 0xff {
                bytes.push(0);
            }
        }
        let mut bits = Bits::new(&bytes, 0);
        let mut decoded = Vec::new();
        for _ in 0..6 {
            bits.refill();
            decoded.push(table.symbol(&mut bits));
        }
        assert_eq!(decoded, [7, 0x12, 32, 33, 0, 7]);
    }

    #[test]
    fn a_number_within_the_lookup_is_decoded_with_its_code() {
        let table = Table::new(&definition(&[0, 1], &[0x13]), false).expect("a table");
        // Code 00, run 1, size 3, number 010 = 2 - 7 = -5.
        let bytes = [0b0001_0000, 0, 0, 0, 0, 0, 0, 0];
        let mut bits = Bits::new(&bytes, 0);
        bits.refill();
        let entry = table.look_up(&bits);
        assert_eq!((entry.total_len, entry.symbol, entry.value), (5, 0x13, -5));
    }

    #[test]
    fn invalid_tables_are_errors() {
        assert!(Table::new(&definition(&[2], &[1, 2]), false).is_err(), "all ones");
        assert!(Table::new(&definition(&[0, 5], &[1, 2, 3, 4, 5]), false).is_err(), "too many");
        assert!(Table::new(&definition(&[1], &[16]), true).is_err(), "a DC difference of 16 bits");
        assert!(Table::new(&definition(&[1], &[16]), false).is_ok());
    }
}
