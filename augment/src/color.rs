//! Brightness, contrast, saturation, hue and grayscale, bit for bit as Pillow computes them.
//!
//! Pillow blends an image with a degenerate one in f32 and truncates; factors outside `[0, 1]`
//! clamp first. Hue goes through 8-bit HSV, with the mix of f32 and f64 that C's promotions give.

use crate::{Rgb8, ViewRng};

/// Strengths of the color jitter: factors come from `[1 - x, 1 + x]`, the hue shift from `[-x, x]`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
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

/// Drawn jitter: the four operations in their order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JitterDraw {
    /// 0 brightness, 1 contrast, 2 saturation, 3 hue.
    pub order: [u8; 4],
    /// Factors of the first three and the shift of the fourth, by operation number.
    pub factors: [f64; 4],
}

impl Jitter {
    /// Draws in torchvision's order: the permutation first, then the four factors.
    pub fn draw(&self, rng: &mut ViewRng) -> JitterDraw {
        let order = rng.permutation4();
        let mut around_one = |x: f64| rng.between((1.0 - x).max(0.0), 1.0 + x);
        let scaled = [self.brightness, self.contrast, self.saturation].map(&mut around_one);
        let hue = rng.between(-self.hue, self.hue);
        JitterDraw { order, factors: [scaled[0], scaled[1], scaled[2], hue] }
    }
}

/// Applies a drawn jitter.
pub fn jitter(image: &mut Rgb8, draw: &JitterDraw) {
    for operation in draw.order {
        let factor = draw.factors[operation as usize];
        match operation {
            0 => brightness(image, factor as f32),
            1 => contrast(image, factor as f32),
            2 => saturation(image, factor as f32),
            _ => hue(image, factor),
        }
    }
}

/// Pillow's `ImageEnhance.Brightness`: blends with black.
pub fn brightness(image: &mut Rgb8, factor: f32) {
    let table: [u8; 256] = std::array::from_fn(|v| blend(0, v as u8, factor));
    apply_table(image, &table);
}

/// Pillow's `ImageEnhance.Contrast`: blends with the rounded mean of the luma.
pub fn contrast(image: &mut Rgb8, factor: f32) {
    let sum: u64 = image.data.chunks_exact(3).map(|p| u64::from(luma(p[0], p[1], p[2]))).sum();
    let mean = (sum as f64 / (image.data.len() / 3) as f64 + 0.5) as u8;
    let table: [u8; 256] = std::array::from_fn(|v| blend(mean, v as u8, factor));
    apply_table(image, &table);
}

/// Pillow's `ImageEnhance.Color`: blends with the luma.
pub fn saturation(image: &mut Rgb8, factor: f32) {
    for pixel in image.data.chunks_exact_mut(3) {
        let gray = luma(pixel[0], pixel[1], pixel[2]);
        for channel in pixel {
            *channel = blend(gray, *channel, factor);
        }
    }
}

/// torchvision's `adjust_hue` on a Pillow image: shifts the 8-bit hue by `shift · 255`.
pub fn hue(image: &mut Rgb8, shift: f64) {
    let shift = (shift * 255.0) as i32 as u8;
    for pixel in image.data.chunks_exact_mut(3) {
        let [h, s, v] = rgb_to_hsv([pixel[0], pixel[1], pixel[2]]);
        pixel.copy_from_slice(&hsv_to_rgb([h.wrapping_add(shift), s, v]));
    }
}

/// Pillow's `convert("L")` copied into three channels.
pub fn grayscale(image: &mut Rgb8) {
    for pixel in image.data.chunks_exact_mut(3) {
        pixel.fill(luma(pixel[0], pixel[1], pixel[2]));
    }
}

/// ITU-R 601 luma in 16.16 fixed point.
fn luma(r: u8, g: u8, b: u8) -> u8 {
    ((u32::from(r) * 19595 + u32::from(g) * 38470 + u32::from(b) * 7471 + 0x8000) >> 16) as u8
}

/// `degenerate + factor · (value - degenerate)` in f32, truncated. `as u8` clamps what lies
/// outside, which for factors in `[0, 1]` is nothing.
fn blend(degenerate: u8, value: u8, factor: f32) -> u8 {
    let difference = f32::from(i16::from(value) - i16::from(degenerate));
    (f32::from(degenerate) + factor * difference) as u8
}

fn apply_table(image: &mut Rgb8, table: &[u8; 256]) {
    for value in &mut image.data {
        *value = table[*value as usize];
    }
}

/// Pillow's `rgb2hsv_row`.
fn rgb_to_hsv([r, g, b]: [u8; 3]) -> [u8; 3] {
    let (max, min) = (r.max(g).max(b), r.min(g).min(b));
    if max == min {
        return [0, 0, max];
    }
    let range = f32::from(max - min);
    let s = range / f32::from(max);
    let away = |channel: u8| f32::from(max - channel) / range;
    let (rc, gc, bc) = (away(r), away(g), away(b));
    let sector = if r == max {
        bc - gc
    } else if g == max {
        (2.0 + f64::from(rc) - f64::from(bc)) as f32
    } else {
        (4.0 + f64::from(gc) - f64::from(rc)) as f32
    };
    let h = ((f64::from(sector) / 6.0 + 1.0) % 1.0) as f32;
    [(f64::from(h) * 255.0) as u8, (f64::from(s) * 255.0) as u8, max]
}

/// Pillow's `hsv2rgb`.
fn hsv_to_rgb([h, s, v]: [u8; 3]) -> [u8; 3] {
    if s == 0 {
        return [v; 3];
    }
    let scaled = f64::from(h) * 6.0 / 255.0;
    let sector = scaled.floor();
    let f = (scaled - sector) as f32;
    let fs = (f64::from(s) / 255.0) as f32;
    let value = f64::from(v);
    let p = (value * (1.0 - f64::from(fs))).round() as u8;
    let q = (value * (1.0 - f64::from(fs * f))).round() as u8;
    let t = (value * (1.0 - f64::from(fs) * (1.0 - f64::from(f)))).round() as u8;
    match sector as u32 % 6 {
        0 => [v, t, p],
        1 => [q, v, p],
        2 => [p, v, t],
        3 => [p, q, v],
        4 => [t, p, v],
        _ => [v, p, q],
    }
}
