//! Crop, then resize, bit for bit as Pillow 12 and earlier resize the cropped image. Published
//! models were trained on the output of these versions.
//!
//! ```text
//! output x reads inputs first_x .. first_x + n_x with weights w = filter((i + 0.5 - center_x) / f)
//!     center_x = (x + 0.5) · in / out,  f = max(in / out, 1),  Σ w = 1, in 22-bit fixed point
//! rows first, rounded to 8 bits; then columns
//! ```
//!
//! Pillow 13 resizes columns first where that is less work: if an image shrinks more in height than
//! in width, as tall and narrow images do. The filter clamps at the edges of the crop, as it does
//! in torchvision, which crops first.
//!
//! `fast_image_resize` is not used: it rounds weights to 16 bits and resizes columns first, so that
//! a fifth of the bytes differ from those that published models were trained on.

use multiversion::{multiversion, target::match_target};

use crate::coefficients::{Coefficients, FRACTION_BITS, Interpolation};
use crate::crop::CropBox;
use crate::pairs::{self, BLOCK, LANES};
use crate::{AugmentError, Planes, Rgb8};

/// Number of blocks of [`LANES`] output columns that the second pass sums at a time, in registers.
const BLOCKS: usize = 2;

/// Resizes boxes of images, with scratch memory that is reused between calls.
#[derive(Debug, Default)]
pub struct BoxResizer {
    horizontal: Coefficients,
    vertical: Coefficients,
    /// Band of [`LANES`] rows, transposed so that the bytes of a column are adjacent: `[3·W,
    /// LANES]`.
    band: Vec<u8>,
    /// Band with adjacent pixels interleaved in pairs: `[W/2, 3, LANES, 2]`.
    paired: Vec<u8>,
    /// Planes of the crop at its new width, with rows in pairs: `[crop height / 2, new width in
    /// whole blocks, 2]`.
    narrowed: [Vec<u8>; 3],
}

impl BoxResizer {
    /// Resizes `crop` of `image` into `out`, which becomes `width_px` x `height_px`.
    ///
    /// # Errors
    /// [`AugmentError::Resize`] when the box is not inside the image.
    pub fn resize(
        &mut self,
        image: &Rgb8,
        crop: CropBox,
        size_px: [u32; 2],
        interpolation: Interpolation,
        out: &mut Planes,
    ) -> Result<(), AugmentError> {
        self.resize_part(image, crop, size_px, CropBox::from_size(size_px), interpolation, out)
    }

    /// Resizes as [`BoxResizer::resize`] does, but computes only the box `part` of the output.
    ///
    /// # Errors
    /// [`AugmentError::Resize`] when a box is not inside its image.
    pub fn resize_part(
        &mut self,
        image: &Rgb8,
        crop: CropBox,
        size_px: [u32; 2],
        part: CropBox,
        interpolation: Interpolation,
        out: &mut Planes,
    ) -> Result<(), AugmentError> {
        let source_px = [image.width_px, image.height_px];
        if !crop.is_inside(source_px) || !part.is_inside(size_px) {
            return Err(AugmentError::outside(crop, source_px, size_px));
        }
        let [width_px, height_px] = size_px.map(|side| side as usize);
        let out_columns = part.left_px as usize..(part.left_px + part.width_px) as usize;
        let out_rows = part.top_px as usize..(part.top_px + part.height_px) as usize;
        let columns = self.horizontal.set(crop.width_px as usize, width_px, out_columns, interpolation);
        let rows = self.vertical.set(crop.height_px as usize, height_px, out_rows, interpolation);
        let read = CropBox {
            left_px: crop.left_px + columns.start as u32,
            top_px: crop.top_px + rows.start as u32,
            width_px: columns.len() as u32,
            height_px: rows.len() as u32,
        };
        out.set_size(part.width_px, part.height_px);
        self.resize_rows(image, read, part.width_px as usize);
        self.resize_columns(part.width_px as usize, out);
        Ok(())
    }

    /// Runs the pass along rows, which also separates the pixels into planes.
    fn resize_rows(&mut self, image: &Rgb8, crop: CropBox, width: usize) {
        let height = crop.height_px as usize;
        let n_bytes = 3 * crop.width_px as usize;
        let row_len = row_pair_len(width);
        for plane in &mut self.narrowed {
            plane.resize(row_len * height.div_ceil(2), 0);
        }
        // An odd width is padded by one column, whose weight is zero.
        self.band.resize(n_bytes.next_multiple_of(6) * LANES, 0);
        self.paired.resize(self.band.len(), 0);
        for top in (0..height).step_by(LANES) {
            let n_rows = LANES.min(height - top);
            let rows: [&[u8]; LANES] = std::array::from_fn(|lane| {
                // The last band repeats its last row in the unused lanes.
                let y = crop.top_px as usize + top + lane.min(n_rows - 1);
                let start = 3 * (y * image.width_px as usize + crop.left_px as usize);
                &image.data[start..start + n_bytes]
            });
            transpose(&rows, &mut self.band[..n_bytes * LANES]);
            interleave_pixels(&self.band, &mut self.paired);
            let row_pairs = top / 2 * row_len..(top + n_rows).div_ceil(2) * row_len;
            let planes = self.narrowed.each_mut().map(|plane| &mut plane[row_pairs.clone()]);
            narrow_band(&self.paired, &self.horizontal, planes, width, row_len);
        }
    }

    /// Runs the pass along columns.
    fn resize_columns(&self, width: usize, out: &mut Planes) {
        for (plane, out) in self.narrowed.iter().zip(out.channels_mut()) {
            shorten_plane(plane, row_pair_len(width), &self.vertical, out, width);
        }
    }
}

/// Returns the number of bytes of two rows of [`BoxResizer`]'s narrowed planes.
fn row_pair_len(width: usize) -> usize {
    2 * width.next_multiple_of(BLOCKS * LANES)
}

/// Transposes a band: byte `j` of row `lane` moves to `[j, lane]`. Wider vectors take twice as
/// long.
#[multiversion(targets("x86_64+avx2"))]
fn transpose(rows: &[&[u8]; LANES], band: &mut [u8]) {
    let (tiles, rest) = band.as_chunks_mut::<{ LANES * LANES }>();
    for (index, out) in tiles.iter_mut().enumerate() {
        let mut tile = [[0; LANES]; LANES];
        for (tile, row) in tile.iter_mut().zip(rows) {
            tile.copy_from_slice(&row[index * LANES..(index + 1) * LANES]);
        }
        // A shuffle rotates the eight address bits (row, column) of each byte by one: four of them
        // swap row and column.
        for _ in 0..4 {
            tile = interleave_halves(&tile);
        }
        out.copy_from_slice(tile.as_flattened());
    }
    for (lane, row) in rows.iter().enumerate() {
        for (out, byte) in rest.chunks_exact_mut(LANES).zip(&row[tiles.len() * LANES..]) {
            out[lane] = *byte;
        }
    }
}

/// Interleaves the upper and the lower half of a tile byte by byte, as in a riffle shuffle.
#[inline(always)]
fn interleave_halves(tile: &[[u8; LANES]; LANES]) -> [[u8; LANES]; LANES] {
    let mut out = [[0; LANES]; LANES];
    for i in 0..LANES / 2 {
        let upper = &tile[i];
        let lower = &tile[i + LANES / 2];
        for j in 0..LANES / 2 {
            out[2 * i][2 * j] = upper[j];
            out[2 * i][2 * j + 1] = lower[j];
            let k = j + LANES / 2;
            out[2 * i + 1][2 * j] = upper[k];
            out[2 * i + 1][2 * j + 1] = lower[k];
        }
    }
    out
}

/// Interleaves the bytes of adjacent pixels: `[2, 3, LANES]` becomes `[3, LANES, 2]`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn interleave_pixels(band: &[u8], paired: &mut [u8]) {
    const PIXEL: usize = 3 * LANES;
    let pairs = band.as_chunks::<{ 2 * PIXEL }>().0;
    for (pixels, out) in pairs.iter().zip(paired.as_chunks_mut::<{ 2 * PIXEL }>().0) {
        for i in 0..PIXEL {
            out[2 * i] = pixels[i];
            out[2 * i + 1] = pixels[PIXEL + i];
        }
    }
}

/// Resizes a band to its new width. `planes` are `[row pairs, row_len]`, to which each lane writes
/// its byte.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn narrow_band(
    paired: &[u8],
    table: &Coefficients,
    mut planes: [&mut [u8]; 3],
    width: usize,
    row_len: usize,
) {
    const STRIDE: usize = 3 * BLOCK;
    for x in 0..width {
        let (first, weights) = table.taps(x);
        let bytes = &paired[first * STRIDE..];
        let sums: [[i32; LANES]; 3] = match_target! {
            "x86_64+avx512bw" => pairs::x86::sums_avx512(bytes, STRIDE, weights),
            "x86_64+avx2" => pairs::x86::sums_avx2(bytes, STRIDE, weights),
            _ => pairs::sums(bytes, STRIDE, weights),
        };
        for (plane, sums) in planes.iter_mut().zip(&sums) {
            let mut values = [0; LANES];
            for (value, sum) in values.iter_mut().zip(sums) {
                *value = to_byte(*sum);
            }
            for (rows, values) in plane.chunks_exact_mut(row_len).zip(values.as_chunks::<2>().0) {
                rows[2 * x..2 * x + 2].copy_from_slice(values);
            }
        }
    }
}

/// Resizes a plane, `[row pairs, row_len]`, to its new height.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn shorten_plane(plane: &[u8], row_len: usize, table: &Coefficients, out: &mut [u8], width: usize) {
    for (y, out) in out.chunks_exact_mut(width).enumerate() {
        let (first, weights) = table.taps(y);
        for (index, out) in out.chunks_mut(BLOCKS * LANES).enumerate() {
            let bytes = &plane[first * row_len + index * BLOCKS * BLOCK..];
            let sums: [[i32; LANES]; BLOCKS] = match_target! {
                "x86_64+avx512bw" => pairs::x86::sums_avx512(bytes, row_len, weights),
                "x86_64+avx2" => pairs::x86::sums_avx2(bytes, row_len, weights),
                _ => pairs::sums(bytes, row_len, weights),
            };
            let mut values = [0; BLOCKS * LANES];
            for (value, sum) in values.iter_mut().zip(sums.as_flattened()) {
                *value = to_byte(*sum);
            }
            out.copy_from_slice(&values[..out.len()]);
        }
    }
}

/// Rounds a sum of bytes in fixed point to a byte.
#[inline(always)]
fn to_byte(sum: i32) -> u8 {
    ((sum + (1 << (FRACTION_BITS - 1))) >> FRACTION_BITS).clamp(0, 255) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gradient(width_px: u32, height_px: u32) -> Rgb8 {
        let data = (0..height_px)
            .flat_map(|y| (0..width_px).flat_map(move |x| [x as u8 * 3, y as u8 * 3, 77]))
            .collect();
        Rgb8::new(width_px, height_px, data)
    }

    fn resized(image: &Rgb8, crop: CropBox, size: [u32; 2]) -> Result<Rgb8, AugmentError> {
        let mut out = Planes::default();
        BoxResizer::default().resize(image, crop, size, Interpolation::Bicubic, &mut out)?;
        Ok(Rgb8::from(&out))
    }

    #[test]
    fn a_resize_to_the_size_of_the_box_copies_it() {
        let crop = CropBox { left_px: 3, top_px: 2, width_px: 5, height_px: 4 };
        let out = resized(&gradient(20, 10), crop, [5, 4]).expect("inside");
        assert_eq!(&out.data[..3], [9, 6, 77]);
        assert_eq!(&out.data[3 * 19..], [21, 15, 77]);
    }

    /// The filter clamps at the edge of the crop.
    #[test]
    fn pixels_outside_the_box_have_no_effect() {
        let mut image = gradient(40, 40);
        let crop = CropBox { left_px: 10, top_px: 10, width_px: 12, height_px: 9 };
        let before = resized(&image, crop, [7, 7]).expect("inside");
        for y in 0..40 {
            for x in 0..40 {
                if !(10..22).contains(&x) || !(10..19).contains(&y) {
                    image.data[3 * (y * 40 + x)] = 255;
                }
            }
        }
        assert_eq!(resized(&image, crop, [7, 7]).expect("inside"), before);
    }

    /// A flat image stays flat at every size, whichever loop is used for its width.
    #[test]
    fn flat_images_stay_flat() {
        let image = Rgb8::new(50, 41, vec![201; 3 * 50 * 41]);
        let crop = CropBox { left_px: 1, top_px: 2, width_px: 47, height_px: 37 };
        for size in [[1, 1], [3, 90], [64, 16], [65, 17], [130, 5], [200, 200]] {
            let out = resized(&image, crop, size).expect("inside");
            assert!(out.data.iter().all(|v| *v == 201), "{size:?}");
        }
    }

    #[test]
    fn a_part_equals_a_crop_of_the_resized_image() {
        let image = gradient(61, 43);
        let crop = CropBox { left_px: 2, top_px: 1, width_px: 57, height_px: 40 };
        for (size, [left_px, top_px, width_px, height_px]) in
            [([30, 21], [4, 3, 20, 11]), ([150, 90], [40, 0, 64, 90]), ([57, 40], [56, 39, 1, 1])]
        {
            let complete = resized(&image, crop, size).expect("inside");
            let part = CropBox { left_px, top_px, width_px, height_px };
            let mut out = Planes::default();
            let bicubic = Interpolation::Bicubic;
            BoxResizer::default().resize_part(&image, crop, size, part, bicubic, &mut out).expect("inside");
            let mut cropped = Planes::default();
            let side = [width_px, height_px];
            BoxResizer::default().resize(&complete, part, side, bicubic, &mut cropped).expect("inside");
            assert_eq!(out, cropped, "{size:?}");
        }
    }

    #[test]
    fn a_box_outside_the_image_is_an_error() {
        let crop = CropBox { left_px: 15, top_px: 0, width_px: 10, height_px: 4 };
        assert!(resized(&gradient(20, 10), crop, [5, 5]).is_err());
        let crop = CropBox { left_px: u32::MAX, top_px: 0, width_px: 2, height_px: 4 };
        assert!(resized(&gradient(20, 10), crop, [5, 5]).is_err());
    }
}
