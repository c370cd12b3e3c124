//! Pillow's hue shift, bit for bit, without branches and in 32-bit lanes.
//!
//! Pillow converts to 8-bit HSV and back, and mixes f32 and f64 as C promotes them. Here the steps
//! are the same for every pixel:
//!
//! ```text
//! max, mid, min of (r, g, b);  range = max - min;  a = (max - mid) / range          f32
//! sector = one of 1 - a, a - 1, 1 + a, 3 - a, 3 + a, 5 - a, by which is max and which is min
//! h = ⌊255 · frac(sector / 6)⌋     s = ⌊255 · range / max⌋     v = max              0..=255
//! h ← (h + shift) mod 256;  i = ⌊2h / 85⌋;  m = 2h mod 85                           i in 0..=6
//! p = round(v · (255 - s) / 255)
//! x = round(v · (21675 - s · m') / 21675)     m' = m for odd i, 85 - m for even i
//! (r, g, b) = an arrangement of v, p, x by i
//! ```
//!
//! Pillow's `q` is `x` of the odd sectors, and its `t` is `x` of the even ones. Equality with
//! Pillow is not proven but tested against a transcription of Pillow's arithmetic: the conversion
//! from HSV for all of its inputs, and the complete shift for all 2^24 colors.

use multiversion::multiversion;

use crate::Planes;

/// Shifts the 8-bit hue by `shift · 255`, truncated, as torchvision's `adjust_hue` on a Pillow
/// image.
pub fn hue(image: &mut Planes, shift: f64) {
    let shift = i32::from((shift * 255.0) as i32 as u8);
    let [r, g, b] = image.channels_mut();
    shift_planes(r, g, b, shift);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn shift_planes(r: &mut [u8], g: &mut [u8], b: &mut [u8], shift: i32) {
    for ((r, g), b) in r.iter_mut().zip(g).zip(b) {
        let [h, s, v] = rgb_to_hsv([i32::from(*r), i32::from(*g), i32::from(*b)]);
        let [red, green, blue] = hsv_to_rgb([(h + shift) & 255, s, v]);
        *r = red as u8;
        *g = green as u8;
        *b = blue as u8;
    }
}

/// Converts RGB to HSV. Selections are sums of products with 0 and 1: a branch would keep the loop
/// scalar.
#[inline(always)]
fn rgb_to_hsv([r, g, b]: [i32; 3]) -> [i32; 3] {
    let max = r.max(g).max(b);
    let min = r.min(g).min(b);
    let mid = r + g + b - max - min;
    let range = max - min;
    // For gray the range is zero, and for black also the maximum: the divisor is then one, and h
    // has no effect because s is zero.
    let a = (max - mid) as f32 / range.max(1) as f32;
    let r_is_max = i32::from(r == max);
    let g_is_max = i32::from(g == max) & (1 - r_is_max);
    let b_is_max = 1 - r_is_max - g_is_max;
    let r_is_min = i32::from(r == min);
    let b_is_min = i32::from(b == min);
    // 1 - a or a - 1;  1 + a or 3 - a;  3 + a or 5 - a.
    let offset =
        r_is_max * (2 * b_is_min - 1) + g_is_max * (3 - 2 * b_is_min) + b_is_max * (5 - 2 * r_is_min);
    let sign = r_is_max * (1 - 2 * b_is_min) + g_is_max * (2 * b_is_min - 1) + b_is_max * (2 * r_is_min - 1);
    let turn = (offset as f32 + sign as f32 * a) / 6.0;
    let h = turn + i32::from(turn < 0.0) as f32;
    [floor_255(h), floor_255(range as f32 / max.max(1) as f32), max]
}

/// Converts HSV to RGB, with selections as in [`rgb_to_hsv`].
#[inline(always)]
fn hsv_to_rgb([h, s, v]: [i32; 3]) -> [i32; 3] {
    // ⌊2h / 85⌋ for 2h <= 510.
    let i = (2 * h * 772) >> 16;
    let m = 2 * h - 85 * i;
    let p = v * (255 - s) + 128;
    let p = (p + (p >> 8)) >> 8;
    let odd = i & 1;
    let m = odd * m + (1 - odd) * (85 - m);
    // The product is below 2^23 and thus exact in f32.
    let x = floor((v * (21_675 - s * m)) as f32 * (1.0 / 21_675.0) + 0.5);
    let is_0 = i32::from(i == 0);
    let is_1 = i32::from(i == 1);
    let is_2 = i32::from(i == 2);
    let is_3 = i32::from(i == 3);
    let is_4 = i32::from(i == 4);
    let is_5 = i32::from(i == 5);
    let is_6 = i32::from(i == 6);
    [
        p + (is_0 + is_5 + is_6) * (v - p) + (is_1 + is_4) * (x - p),
        p + (is_1 + is_2) * (v - p) + (is_0 + is_3 + is_6) * (x - p),
        p + (is_3 + is_4) * (v - p) + (is_2 + is_5) * (x - p),
    ]
}

/// Returns ⌊255 · q⌋ of the exact product, for `q` in `[0, 1]`. The product in f32 would round up
/// to an integer where the exact product is less than an ulp below it.
#[inline(always)]
fn floor_255(q: f32) -> i32 {
    // Adding 1.5 · 2^23 rounds to the nearest integer, which the low bits of the sum then hold.
    const MAGIC: f32 = 12_582_912.0;
    let sum = q * 255.0 + MAGIC;
    let nearest = sum - MAGIC;
    // The product of 255 and the upper 12 bits of q is exact, and so is 255 times the remaining
    // bits.
    let high = f32::from_bits(q.to_bits() & 0xffff_f000);
    let excess = (high * 255.0 - nearest) + (q - high) * 255.0;
    (sum.to_bits() as i32 - MAGIC.to_bits() as i32) - i32::from(excess < 0.0)
}

/// Returns ⌊x⌋ for `x` in `0..2^22`, by additions and a comparison only. Casts from f32 saturate,
/// and compilers turn loops of them into scalar code.
#[inline(always)]
pub(crate) fn floor(x: f32) -> i32 {
    // Adding 2^23 rounds to the nearest integer, which the low bits of the sum then hold.
    const MAGIC: f32 = 8_388_608.0;
    let sum = x + MAGIC;
    let nearest = sum.to_bits() as i32 - MAGIC.to_bits() as i32;
    nearest - i32::from(sum - MAGIC > x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Transcription of Pillow's `rgb2hsv_row`, with C's promotions.
    fn pillow_rgb_to_hsv([r, g, b]: [u8; 3]) -> [u8; 3] {
        let max = r.max(g).max(b);
        let min = r.min(g).min(b);
        if max == min {
            return [0, 0, max];
        }
        let range = f32::from(max - min);
        let s = range / f32::from(max);
        let rc = f32::from(max - r) / range;
        let gc = f32::from(max - g) / range;
        let bc = f32::from(max - b) / range;
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

    /// Transcription of Pillow's `hsv2rgb`, with C's promotions.
    fn pillow_hsv_to_rgb([h, s, v]: [u8; 3]) -> [u8; 3] {
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

    #[test]
    fn hsv_to_rgb_equals_pillow_for_every_hsv() {
        for s in 0..=255u8 {
            for v in 0..=255u8 {
                for h in 0..=255u8 {
                    let ours = hsv_to_rgb([i32::from(h), i32::from(s), i32::from(v)]);
                    assert_eq!(ours, pillow_hsv_to_rgb([h, s, v]).map(i32::from), "{h} {s} {v}");
                }
            }
        }
    }

    /// All 2^24 colors through the vector code. The conversion to HSV does not depend on the shift,
    /// and the conversion back is tested above, so that one shift is sufficient.
    #[test]
    fn hue_shift_equals_pillow_for_every_color() {
        let ramp: Vec<u8> = (0..=255).collect();
        for r in 0..=255u8 {
            let data = [vec![r; 1 << 16], ramp.iter().flat_map(|g| [*g; 256]).collect(), ramp.repeat(256)];
            let mut image = Planes { width_px: 256, height_px: 256, data: data.concat() };
            hue(&mut image, 0.1);
            let [red, green, blue] = image.channels();
            for i in 0..1 << 16 {
                let g = (i >> 8) as u8;
                let b = i as u8;
                let [h, s, v] = pillow_rgb_to_hsv([r, g, b]);
                let theirs = pillow_hsv_to_rgb([h.wrapping_add(25), s, v]);
                assert_eq!([red[i], green[i], blue[i]], theirs, "{r} {g} {b}");
            }
        }
    }
}
