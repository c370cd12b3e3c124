//! Conversion of component samples to rows of RGB: upsampling, then color conversion, in libjpeg's
//! integer arithmetic.
//!
//! ```text
//! across, twice as many:   out[2i] = (3 s[i] + s[i-1] + 1) / 4,   out[2i+1] = (3 s[i] + s[i+1] + 2) / 4
//! down, twice as many:     out = (3 near + far + 1) / 4 in the upper row of two, + 2 in the lower one
//! both:                    c = 3 near + far;  out[2i] = (3 c[i] + c[i-1] + 8) / 16,  out[2i+1] = (3 c[i] + c[i+1] + 7) / 16
//! any other ratio:         every sample is repeated
//! ```
//!
//! A neighbor outside the image is replaced by the sample itself. Colors are converted as in JFIF,
//! in 16-bit fixed point.

use multiversion::multiversion;

use super::segments::ColorSpace;

/// Samples of one component: a window of two rows of MCUs that moves down the image.
#[derive(Debug, Default)]
pub(crate) struct Window {
    samples: Vec<u8>,
    /// Number of bytes of a row of samples, including the padding of the last MCU.
    pub(crate) stride: usize,
    /// Number of rows that the window holds.
    n_rows: usize,
}

impl Window {
    /// Resizes the window to `n_rows` rows of `stride` bytes.
    pub(crate) fn set_size(&mut self, stride: usize, n_rows: usize) {
        self.stride = stride;
        self.n_rows = n_rows;
        self.samples.resize(stride * n_rows, 0);
    }

    /// Returns row `y` of the component, which the window must hold.
    fn row(&self, y: usize) -> &[u8] {
        &self.samples[y % self.n_rows * self.stride..][..self.stride]
    }

    /// Returns the eight rows from row `y` on, to be written.
    pub(crate) fn rows_mut(&mut self, y: usize) -> &mut [u8] {
        &mut self.samples[y % self.n_rows * self.stride..][..8 * self.stride]
    }
}

/// Upsampling of a component to the size of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Upsampling {
    /// Numbers of samples of the component in the image, across and down.
    pub(crate) size: [usize; 2],
    /// Numbers of pixels per sample, across and down.
    pub(crate) factors: [usize; 2],
}

/// Scratch memory for the rows between samples and pixels.
#[derive(Debug, Default)]
pub(crate) struct RowScratch {
    /// Row of each component, as wide as the image.
    wide: [Vec<u8>; 4],
    /// Sums 3 · near + far of a row.
    sums: Vec<u16>,
}

impl RowScratch {
    /// Writes row `y` of the image: `out` has three bytes per pixel.
    pub(crate) fn write_row(
        &mut self,
        windows: &[Window],
        upsamplings: &[Upsampling],
        color_space: ColorSpace,
        y: usize,
        out: &mut [u8],
    ) {
        let Self { wide, sums } = self;
        let mut rows: [&[u8]; 4] = [&[]; 4];
        for (((window, upsampling), wide), row) in windows.iter().zip(upsamplings).zip(wide).zip(&mut rows) {
            *row = match upsampling.factors {
                [1, 1] => window.row(y),
                _ => {
                    // A sample at the right end may have pixels outside the image.
                    wide.resize(upsampling.size[0] * upsampling.factors[0], 0);
                    upsample(window, *upsampling, y, sums, wide);
                    wide
                }
            };
        }
        let n = out.len() / 3;
        match color_space {
            ColorSpace::Gray => gray(&rows[0][..n], out),
            ColorSpace::Rgb => interleave([0, 1, 2].map(|c| &rows[c][..n]), out),
            ColorSpace::YCbCr => ycc_to_rgb([0, 1, 2].map(|c| &rows[c][..n]), out),
            ColorSpace::Cmyk => cmyk_to_rgb([0, 1, 2].map(|c| &rows[c][..n]), &rows[3][..n], out),
            ColorSpace::Ycck => {
                // The conversion yields RGB; the inks are its complement.
                ycc_to_rgb([0, 1, 2].map(|c| &rows[c][..n]), out);
                for value in &mut *out {
                    *value = 255 - *value;
                }
                apply_black(&rows[3][..n], out);
            }
        }
    }
}

/// Upsamples one component for row `y` of the image.
fn upsample(window: &Window, upsampling: Upsampling, y: usize, sums: &mut Vec<u16>, out: &mut [u8]) {
    let Upsampling { size: [n, n_rows], factors: [across, down] } = upsampling;
    let near = y / down;
    let row = &window.row(near)[..n];
    let far = if y.is_multiple_of(2) { near.saturating_sub(1) } else { (near + 1).min(n_rows - 1) };
    match [across, down] {
        [1, 2] => average_down(row, &window.row(far)[..n], 1 + (y % 2) as u16, out),
        [2, 1] if n > 2 => double_across(row, out),
        [2, 2] if n > 2 => {
            sums.resize(n, 0);
            double_both(row, &window.row(far)[..n], sums, out);
        }
        _ => {
            for (value, out) in row.iter().zip(out.chunks_exact_mut(across)) {
                out.fill(*value);
            }
        }
    }
}

/// Upsamples by two down the columns, given the nearer and the farther row.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn average_down(near: &[u8], far: &[u8], bias: u16, out: &mut [u8]) {
    for ((near, far), out) in near.iter().zip(far).zip(out) {
        *out = ((3 * u16::from(*near) + u16::from(*far) + bias) >> 2) as u8;
    }
}

/// Upsamples by two across a row.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn double_across(row: &[u8], out: &mut [u8]) {
    let n = row.len();
    let pairs = out.as_chunks_mut::<2>().0;
    let inner = row.iter().zip(&row[1..]).zip(&row[2..]);
    for (((previous, value), next), out) in inner.zip(&mut pairs[1..]) {
        *out = pair_from_row(*previous, *value, *next);
    }
    pairs[0] = [row[0], pair_from_row(row[0], row[0], row[1])[1]];
    pairs[n - 1] = [pair_from_row(row[n - 2], row[n - 1], row[n - 1])[0], row[n - 1]];
}

/// Returns the two output samples of a sample between its neighbors in a row.
#[inline(always)]
fn pair_from_row(previous: u8, value: u8, next: u8) -> [u8; 2] {
    let three = 3 * u16::from(value);
    [((three + u16::from(previous) + 1) >> 2) as u8, ((three + u16::from(next) + 2) >> 2) as u8]
}

/// Upsamples by two across rows and down columns, given the nearer and the farther row.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn double_both(near: &[u8], far: &[u8], sums: &mut [u16], out: &mut [u8]) {
    let n = near.len();
    for ((near, far), sum) in near.iter().zip(far).zip(&mut *sums) {
        *sum = 3 * u16::from(*near) + u16::from(*far);
    }
    let pairs = out.as_chunks_mut::<2>().0;
    let inner = sums.iter().zip(&sums[1..]).zip(&sums[2..]);
    for (((previous, sum), next), out) in inner.zip(&mut pairs[1..]) {
        *out = pair_from_sums(*previous, *sum, *next);
    }
    pairs[0] = pair_from_sums(sums[0], sums[0], sums[1]);
    pairs[n - 1] = pair_from_sums(sums[n - 2], sums[n - 1], sums[n - 1]);
}

/// Returns the two output samples of a sum 3 · near + far between its neighbors.
#[inline(always)]
fn pair_from_sums(previous: u16, sum: u16, next: u16) -> [u8; 2] {
    [((3 * sum + previous + 8) >> 4) as u8, ((3 * sum + next + 7) >> 4) as u8]
}

/// Copies a row into all three channels.
fn gray(row: &[u8], out: &mut [u8]) {
    for (value, out) in row.iter().zip(out.as_chunks_mut::<3>().0) {
        *out = [*value; 3];
    }
}

/// Interleaves three rows.
fn interleave(rows: [&[u8]; 3], out: &mut [u8]) {
    for (i, out) in out.as_chunks_mut::<3>().0.iter_mut().enumerate() {
        *out = rows.map(|row| row[i]);
    }
}

/// Rounds a number to 16-bit fixed point.
const fn fixed(value: f64) -> i32 {
    (value * 65536.0 + 0.5) as i32
}

/// Converts JFIF colors: R = Y + 1.402 Cr, G = Y - 0.34414 Cb - 0.71414 Cr, B = Y + 1.772 Cb; Cb
/// and Cr around 128.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn ycc_to_rgb([y, cb, cr]: [&[u8]; 3], out: &mut [u8]) {
    const HALF: i32 = 1 << 15;
    for (((y, cb), cr), out) in y.iter().zip(cb).zip(cr).zip(out.as_chunks_mut::<3>().0) {
        let y = i32::from(*y);
        let cb = i32::from(*cb) - 128;
        let cr = i32::from(*cr) - 128;
        let red = y + ((fixed(1.402) * cr + HALF) >> 16);
        let green = y + ((-fixed(0.34414) * cb - fixed(0.71414) * cr + HALF) >> 16);
        let blue = y + ((fixed(1.772) * cb + HALF) >> 16);
        *out = [red, green, blue].map(|value| value.clamp(0, 255) as u8);
    }
}

/// Converts inks, inverted as Adobe stores them, as Pillow does: a color is the light that its ink
/// and the black ink transmit.
fn cmyk_to_rgb(inks: [&[u8]; 3], black: &[u8], out: &mut [u8]) {
    interleave(inks, out);
    apply_black(black, out);
}

/// Multiplies colors by the fraction of white that the black ink transmits.
fn apply_black(white: &[u8], out: &mut [u8]) {
    for (white, out) in white.iter().zip(out.as_chunks_mut::<3>().0) {
        *out = out.map(|value| light(value, *white));
    }
}

/// Returns the light that an ink and the black ink transmit together, given the light that each
/// transmits alone.
#[inline]
pub(crate) fn light(value: u8, white: u8) -> u8 {
    // Pillow subtracts the product of ink and white, divided by 255 with rounding, from the white.
    let product = i32::from(255 - value) * i32::from(white) + 128;
    let ink = ((product >> 8) + product) >> 8;
    (i32::from(white) - ink).clamp(0, 255) as u8
}
