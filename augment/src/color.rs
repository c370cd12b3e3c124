//! Brightness, contrast, saturation, hue and grayscale, bit for bit as Pillow computes them.
//!
//! Pillow blends an image with a degenerate one in f32 and truncates; results for factors outside
//! `[0, 1]` are clamped first. Hue is in [`crate::hue`].

use multiversion::multiversion;

use crate::hue::{floor, hue};
use crate::{Planes, ViewRng};

/// Strengths of the color jitter: factors come from `[1 - x, 1 + x]`, the hue shift from `[-x, x]`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Jitter {
    /// Brightness.
    pub brightness: f64,
    /// Contrast.
    pub contrast: f64,
    /// Saturation.
    pub saturation: f64,
    /// Hue, at most one half.
    pub hue: f64,
    /// Probability that the jitter is applied at all.
    pub p: f32,
}

/// A drawn jitter: the four operations in their order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JitterDraw {
    /// Order of the operations: 0 brightness, 1 contrast, 2 saturation, 3 hue.
    pub order: [u8; 4],
    /// Factors of the first three and the shift of the fourth, by operation index. `None` omits an
    /// operation, as torchvision does if its strength is zero: a shift of zero would still round
    /// every pixel to 8-bit hue.
    pub factors: [Option<f64>; 4],
}

impl Jitter {
    /// Draws a jitter in torchvision's order: the permutation first, then the four factors.
    pub fn draw(&self, rng: &mut ViewRng) -> JitterDraw {
        let order = rng.permutation4();
        let brightness = draw_factor(self.brightness, rng);
        let contrast = draw_factor(self.contrast, rng);
        let saturation = draw_factor(self.saturation, rng);
        let shift = rng.between(-self.hue, self.hue);
        let hue = (self.hue > 0.0).then_some(shift);
        JitterDraw { order, factors: [brightness, contrast, saturation, hue] }
    }
}

/// Draws a factor around 1 for an operation of this strength; `None` if the strength is zero. A
/// number is drawn in either case.
fn draw_factor(strength: f64, rng: &mut ViewRng) -> Option<f64> {
    let factor = rng.between((1.0 - strength).max(0.0), 1.0 + strength);
    (strength > 0.0).then_some(factor)
}

/// Applies a drawn jitter.
pub fn jitter(image: &mut Planes, draw: &JitterDraw) {
    for operation in draw.order {
        let Some(factor) = draw.factors[operation as usize] else { continue };
        match operation {
            0 => brightness(image, factor as f32),
            1 => contrast(image, factor as f32),
            2 => saturation(image, factor as f32),
            _ => hue(image, factor),
        }
    }
}

/// Blends with black, as Pillow's `ImageEnhance.Brightness`.
pub fn brightness(image: &mut Planes, factor: f32) {
    blend_with_level(&mut image.data, 0, factor);
}

/// Blends with the rounded mean of the luma, as Pillow's `ImageEnhance.Contrast`.
pub fn contrast(image: &mut Planes, factor: f32) {
    let [r, g, b] = image.channels();
    let mean = (luma_sum(r, g, b) as f64 / r.len() as f64 + 0.5) as u8;
    blend_with_level(&mut image.data, mean, factor);
}

/// Blends with the luma, as Pillow's `ImageEnhance.Color`.
pub fn saturation(image: &mut Planes, factor: f32) {
    let [r, g, b] = image.channels_mut();
    blend_with_luma(r, g, b, factor);
}

/// Copies the luma into all three channels, as Pillow's `convert("L")`.
pub fn grayscale(image: &mut Planes) {
    let [r, g, b] = image.channels_mut();
    write_luma(r, g, b);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn blend_with_level(data: &mut [u8], level: u8, factor: f32) {
    for value in data {
        *value = blend(level, *value, factor);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn blend_with_luma(r: &mut [u8], g: &mut [u8], b: &mut [u8], factor: f32) {
    for ((r, g), b) in r.iter_mut().zip(g).zip(b) {
        let gray = luma(*r, *g, *b);
        *r = blend(gray, *r, factor);
        *g = blend(gray, *g, factor);
        *b = blend(gray, *b, factor);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn write_luma(r: &mut [u8], g: &mut [u8], b: &mut [u8]) {
    for ((r, g), b) in r.iter_mut().zip(g).zip(b) {
        let gray = luma(*r, *g, *b);
        *r = gray;
        *g = gray;
        *b = gray;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn luma_sum(r: &[u8], g: &[u8], b: &[u8]) -> u64 {
    // Sums of 2^16 bytes fit into 32 bits, and a vector has twice as many lanes of 32 bits as of
    // 64.
    const CHUNK: usize = 1 << 16;
    let mut total = 0;
    for ((r, g), b) in r.chunks(CHUNK).zip(g.chunks(CHUNK)).zip(b.chunks(CHUNK)) {
        let lumas = r.iter().zip(g).zip(b).map(|((r, g), b)| u32::from(luma(*r, *g, *b)));
        total += u64::from(lumas.sum::<u32>());
    }
    total
}

/// Returns the ITU-R 601 luma, computed in 16.16 fixed point.
#[inline(always)]
fn luma(r: u8, g: u8, b: u8) -> u8 {
    ((u32::from(r) * 19595 + u32::from(g) * 38470 + u32::from(b) * 7471 + 0x8000) >> 16) as u8
}

/// Returns `degenerate + factor · (value - degenerate)` in f32, clamped to a byte and truncated.
/// The clamp has no effect for factors in `[0, 1]`.
#[inline(always)]
fn blend(degenerate: u8, value: u8, factor: f32) -> u8 {
    let difference = (i32::from(value) - i32::from(degenerate)) as f32;
    let blended = f32::from(degenerate) + factor * difference;
    floor(blended.clamp(0.0, 255.0)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_of_zero_strength_are_omitted() {
        let none = Jitter { brightness: 0.0, contrast: 0.0, saturation: 0.0, hue: 0.0, p: 1.0 };
        let draw = none.draw(&mut ViewRng::from_words([1, 2, 3, 4]));
        assert_eq!(draw.factors, [None; 4]);
        let some = Jitter { hue: 0.1, ..none }.draw(&mut ViewRng::from_words([1, 2, 3, 4]));
        assert!(some.factors[3].is_some_and(|shift| shift.abs() <= 0.1));
    }

    /// The sum of a chunk fits into 32 bits.
    #[test]
    fn luma_sum_of_a_large_white_image_does_not_wrap() {
        let white = vec![255u8; 200_000];
        assert_eq!(luma_sum(&white, &white, &white), 255 * 200_000);
    }
}
