//! Coefficients of blocks, read scan by scan.
//!
//! A block is 8 × 8 coefficients in row order. An MCU (minimum coded unit) is `h · v` blocks of
//! each component of a scan, or one block if the scan has a single component.

use super::bits::Bits;
use super::error::JpegError;
use super::huffman::Table;
use super::segments::{Frame, Scan, Segments, ZIGZAG};

/// A block of 8 × 8 coefficients in row order.
pub(crate) type Block = [i16; 64];

/// Blocks of one component, in rows.
#[derive(Debug, Default)]
pub(crate) struct BlockRows {
    pub(crate) blocks: Vec<Block>,
    /// Number of blocks per row, including the padding of the last MCU.
    pub(crate) width: usize,
}

impl BlockRows {
    /// Returns the size of the blocks in memory, in bytes.
    pub(crate) fn n_bytes(&self) -> usize {
        size_of_val(self.blocks.as_slice())
    }

    /// Resets to `height` rows of `width` blocks of zeros.
    pub(crate) fn clear(&mut self, width: usize, height: usize) {
        self.width = width;
        self.blocks.clear();
        self.blocks.resize(width * height, [0; 64]);
    }

    /// Returns the blocks of `n` rows from row `first` on.
    pub(crate) fn rows(&self, first: usize, n: usize) -> impl Iterator<Item = &[Block]> {
        self.blocks[first * self.width..(first + n) * self.width].chunks_exact(self.width)
    }
}

/// Coding of the coefficients of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Coding {
    /// All 64 coefficients of a block.
    Sequential,
    /// The highest bits of the DC coefficient, or all of them.
    FirstDc,
    /// One further bit of the DC coefficient.
    RefineDc,
    /// The highest bits of the coefficients of a band, or all of them.
    FirstAc,
    /// One further bit of each coefficient of a band.
    RefineAc,
}

/// A component in a scan.
struct Part {
    /// Index of the component in the frame.
    index: usize,
    /// Numbers of blocks of an MCU across and down.
    h: usize,
    v: usize,
    /// Huffman tables, if the coding needs them.
    dc: Option<Box<Table>>,
    ac: Option<Box<Table>>,
    /// The previous DC coefficient.
    prediction: i32,
}

/// Reads the data of a scan, one row of MCUs after another.
pub(crate) struct ScanReader<'a> {
    bits: Bits<'a>,
    parts: Vec<Part>,
    coding: Coding,
    /// First and last coefficient in zigzag order.
    band: [usize; 2],
    /// The lowest bit that this scan codes.
    low: u8,
    /// Number of blocks that follow without further coefficients in this band.
    end_of_band_run: u32,
    /// Number of MCUs between restarts, 0 without any.
    restart_interval: usize,
    /// Number of MCUs until the next restart.
    until_restart: usize,
    /// Number of the next restart marker, 0 to 7.
    next_restart: u8,
    /// `true` if a marker was found too early: up to the next restart all coefficients are left
    /// unchanged.
    is_exhausted: bool,
    /// Number of MCUs per row, and number of rows of MCUs.
    pub(crate) n_mcus: [usize; 2],
}

impl<'a> ScanReader<'a> {
    /// Creates a reader at the start of the scan's data.
    pub(crate) fn new(bytes: &'a [u8], segments: &Segments<'_>, scan: &Scan) -> Result<Self, JpegError> {
        let frame = segments.frame()?;
        let coding = coding(frame, scan)?;
        let interleaved = scan.components.len() > 1;
        let mut parts = Vec::with_capacity(scan.components.len());
        for component in &scan.components {
            let dc = match coding {
                Coding::Sequential | Coding::FirstDc => {
                    Some(Table::new(segments.dc(component.dc_slot)?, true).map(Box::new)?)
                }
                _ => None,
            };
            let ac = match coding {
                Coding::Sequential | Coding::FirstAc | Coding::RefineAc => {
                    Some(Table::new(segments.ac(component.ac_slot)?, false).map(Box::new)?)
                }
                _ => None,
            };
            let frame_component = &frame.components[component.index];
            let [h, v] = if interleaved { [frame_component.h, frame_component.v] } else { [1, 1] };
            parts.push(Part { index: component.index, h, v, dc, ac, prediction: 0 });
        }
        if interleaved && parts.iter().map(|part| part.h * part.v).sum::<usize>() > 10 {
            return Err(JpegError::Damaged("a scan header"));
        }
        let n_mcus = match parts.as_slice() {
            [part] => n_blocks(frame, part.index),
            _ => n_mcus(frame),
        };
        Ok(Self {
            bits: Bits::new(bytes, scan.data),
            parts,
            coding,
            band: scan.band,
            low: scan.low,
            end_of_band_run: 0,
            restart_interval: segments.restart_interval,
            until_restart: segments.restart_interval,
            next_restart: 0,
            is_exhausted: false,
            n_mcus,
        })
    }

    /// Reads a row of MCUs into the rows of blocks from row `mcu_row · v` on.
    pub(crate) fn read_row(&mut self, mcu_row: usize, components: &mut [BlockRows]) -> Result<(), JpegError> {
        for column in 0..self.n_mcus[0] {
            self.restart_if_due()?;
            if !self.is_exhausted {
                self.read_mcu(column, mcu_row, components);
                self.is_exhausted = self.bits.is_exhausted()?;
            }
            self.until_restart = self.until_restart.wrapping_sub(1);
        }
        Ok(())
    }

    /// Returns the marker that ended the data, if one was found, and the position after it or after
    /// the data.
    pub(crate) fn end(&self) -> (Option<u8>, usize) {
        self.bits.end()
    }

    /// Consumes a restart marker and resets the decoding state, if a restart interval ends here.
    fn restart_if_due(&mut self) -> Result<(), JpegError> {
        if self.restart_interval == 0 || self.until_restart > 0 {
            return Ok(());
        }
        if self.bits.restart(self.next_restart)? {
            self.is_exhausted = false;
        }
        self.next_restart = (self.next_restart + 1) & 7;
        self.until_restart = self.restart_interval;
        self.end_of_band_run = 0;
        for part in &mut self.parts {
            part.prediction = 0;
        }
        Ok(())
    }

    /// Reads the MCU in this column and row of MCUs.
    #[inline(always)]
    fn read_mcu(&mut self, column: usize, row: usize, components: &mut [BlockRows]) {
        for part in &mut self.parts {
            let rows = &mut components[part.index];
            for y in 0..part.v {
                let first = (row * part.v + y) * rows.width + column * part.h;
                for block in &mut rows.blocks[first..first + part.h] {
                    match (self.coding, part.dc.as_deref(), part.ac.as_deref()) {
                        (Coding::Sequential, Some(dc), Some(ac)) => {
                            block[0] = dc_coefficient(&mut self.bits, dc, &mut part.prediction) as i16;
                            decode_ac_coefficients(&mut self.bits, ac, block);
                        }
                        (Coding::FirstDc, Some(dc), _) => {
                            let value = dc_coefficient(&mut self.bits, dc, &mut part.prediction);
                            block[0] = (value << self.low) as i16;
                        }
                        (Coding::RefineDc, ..) if self.bits.bit() => block[0] |= 1 << self.low,
                        (Coding::FirstAc, _, Some(ac)) => {
                            first_ac(
                                &mut self.bits,
                                ac,
                                block,
                                self.band,
                                self.low,
                                &mut self.end_of_band_run,
                            );
                        }
                        (Coding::RefineAc, _, Some(ac)) => {
                            refine_ac(
                                &mut self.bits,
                                ac,
                                block,
                                self.band,
                                self.low,
                                &mut self.end_of_band_run,
                            );
                        }
                        _ => {}
                    }
                }
            }
        }
    }
}

/// Returns the coding of a scan, or an error if its header is invalid.
fn coding(frame: &Frame, scan: &Scan) -> Result<Coding, JpegError> {
    if !frame.progressive {
        return Ok(Coding::Sequential);
    }
    let [first, last] = scan.band;
    let is_dc = first == 0;
    let band_fits = if is_dc { last == 0 } else { first <= last && last < 64 && scan.components.len() == 1 };
    let bits_fit = scan.low <= 13 && (scan.high == 0 || scan.low + 1 == scan.high);
    match (is_dc, scan.high) {
        _ if !band_fits || !bits_fit => Err(JpegError::Damaged("a scan header")),
        (true, 0) => Ok(Coding::FirstDc),
        (true, _) => Ok(Coding::RefineDc),
        (false, 0) => Ok(Coding::FirstAc),
        (false, _) => Ok(Coding::RefineAc),
    }
}

/// Returns the numbers of MCUs across and down of a scan with several components.
pub(crate) fn n_mcus(frame: &Frame) -> [usize; 2] {
    let [h, v] = frame.max_sampling();
    [(frame.width_px as usize).div_ceil(8 * h), (frame.height_px as usize).div_ceil(8 * v)]
}

/// Returns the numbers of blocks of a component across and down, without the padding of the last
/// MCU.
fn n_blocks(frame: &Frame, index: usize) -> [usize; 2] {
    let [max_h, max_v] = frame.max_sampling();
    let component = &frame.components[index];
    [
        (frame.width_px as usize * component.h).div_ceil(8 * max_h),
        (frame.height_px as usize * component.v).div_ceil(8 * max_v),
    ]
}

/// Decodes a DC coefficient: the sum of the previous one and a difference (T.81, F.2.2.1).
#[inline(always)]
fn dc_coefficient(bits: &mut Bits<'_>, table: &Table, prediction: &mut i32) -> i32 {
    bits.refill();
    let size = table.symbol(bits);
    if size > 0 {
        *prediction = prediction.wrapping_add(bits.signed(u32::from(size)));
    }
    *prediction
}

/// Decodes the 63 AC coefficients into `block`, where they are still zero (T.81, F.2.2.2).
#[inline(always)]
fn decode_ac_coefficients(bits: &mut Bits<'_>, table: &Table, block: &mut Block) {
    let mut k = 1;
    while k < 64 {
        bits.refill();
        let entry = table.look_up(bits);
        if entry.total_len > 0 {
            bits.consume(u32::from(entry.total_len));
            k += usize::from(entry.symbol >> 4);
            block[position(k)] = entry.value;
            k += 1;
            continue;
        }
        let symbol = table.symbol(bits);
        let run = usize::from(symbol >> 4);
        let size = u32::from(symbol & 15);
        if size > 0 {
            k += run;
            block[position(k)] = bits.signed(size) as i16;
            k += 1;
        } else if run == 15 {
            k += 16;
        } else {
            return;
        }
    }
}

/// Decodes the highest bits of the coefficients of a band (T.81, G.1.2.2).
fn first_ac(
    bits: &mut Bits<'_>,
    table: &Table,
    block: &mut Block,
    band: [usize; 2],
    low: u8,
    run_left: &mut u32,
) {
    if *run_left > 0 {
        *run_left -= 1;
        return;
    }
    let [mut k, last] = band;
    while k <= last {
        bits.refill();
        let symbol = table.symbol(bits);
        let run = u32::from(symbol >> 4);
        let size = u32::from(symbol & 15);
        if size > 0 {
            k += run as usize;
            block[position(k)] = (bits.signed(size) << low) as i16;
            k += 1;
        } else if run == 15 {
            k += 16;
        } else {
            *run_left = end_of_band_run(bits, run) - 1;
            return;
        }
    }
}

/// Decodes one further bit of each coefficient of a band (T.81, G.1.2.3).
fn refine_ac(
    bits: &mut Bits<'_>,
    table: &Table,
    block: &mut Block,
    band: [usize; 2],
    low: u8,
    run_left: &mut u32,
) {
    let [mut k, last] = band;
    let step = 1i16 << low;
    while *run_left == 0 && k <= last {
        bits.refill();
        let symbol = table.symbol(bits);
        let mut run = u32::from(symbol >> 4);
        let size = symbol & 15;
        let mut new = 0;
        if size > 0 {
            new = if bits.bit() { step } else { -step };
        } else if run != 15 {
            *run_left = end_of_band_run(bits, run);
            break;
        }
        // Nonzero coefficients are refined as they are passed; the run counts the others.
        while k <= last {
            let value = &mut block[position(k)];
            if *value != 0 {
                refine(bits, value, step);
            } else if run == 0 {
                break;
            } else {
                run -= 1;
            }
            k += 1;
        }
        if new != 0 {
            block[position(k)] = new;
        }
        k += 1;
    }
    if *run_left > 0 {
        for k in k..=last {
            let value = &mut block[position(k)];
            if *value != 0 {
                refine(bits, value, step);
            }
        }
        *run_left -= 1;
    }
}

/// Moves a coefficient away from zero by `step` if the next bit is set and it has not been moved
/// yet.
#[inline(always)]
fn refine(bits: &mut Bits<'_>, value: &mut i16, step: i16) {
    if bits.bit() && *value & step == 0 {
        *value = value.wrapping_add(if *value >= 0 { step } else { -step });
    }
}

/// Decodes the number of blocks without further coefficients in the band, including the current
/// one: 2^size plus a number of `size` bits.
fn end_of_band_run(bits: &mut Bits<'_>, size: u32) -> u32 {
    if size == 0 {
        return 1;
    }
    let more = bits.peek(size);
    bits.consume(size);
    (1 << size) + more
}

/// Returns the position in a block of coefficient `k` of the zigzag order.
#[inline(always)]
fn position(k: usize) -> usize {
    usize::from(ZIGZAG[k & 127] & 63)
}
