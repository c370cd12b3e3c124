//! Brightness and contrast, with separate factors for each channel.
//!
//! ```text
//! brightness   x ← b_c · x
//! contrast     x ← m_c + k_c · (x - m_c),   m_c the mean of channel c
//! ```
//!
//! Whole numbers are clamped to their range after each operation.

use crate::ViewRng;
use crate::color::Jitter;
use crate::format::Depth;

/// Changes brightness and contrast of the channels of `n_pixels` values in `view`, in a random
/// order, by factors that are drawn for each channel.
pub(super) fn jitter(view: &mut [f32], n_pixels: usize, depth: Depth, jitter: &Jitter, rng: &mut ViewRng) {
    let order = rng.permutation4();
    let largest = depth.largest();
    for channel in view.chunks_exact_mut(n_pixels) {
        let brightness = draw_factor(jitter.brightness, rng);
        let contrast = draw_factor(jitter.contrast, rng);
        for operation in order {
            match operation {
                0 if jitter.brightness > 0.0 => blend(channel, 0.0, brightness, largest),
                1 if jitter.contrast > 0.0 => blend(channel, mean(channel), contrast, largest),
                _ => {}
            }
        }
    }
}

/// Draws a factor around 1 for an operation of this strength.
fn draw_factor(strength: f64, rng: &mut ViewRng) -> f32 {
    rng.between((1.0 - strength).max(0.0), 1.0 + strength) as f32
}

fn mean(channel: &[f32]) -> f32 {
    let sum: f64 = channel.iter().map(|value| f64::from(*value)).sum();
    (sum / channel.len() as f64) as f32
}

/// Scales the differences of values from `level` by `factor`.
fn blend(channel: &mut [f32], level: f32, factor: f32, largest: Option<f32>) {
    let largest = largest.unwrap_or(f32::INFINITY);
    let least = if largest.is_finite() { 0.0 } else { f32::NEG_INFINITY };
    for value in channel {
        *value = (level + factor * (*value - level)).clamp(least, largest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_have_separate_factors() {
        let strengths = Jitter { brightness: 0.5, contrast: 0.0, saturation: 0.0, hue: 0.0, p: 1.0 };
        let mut view = vec![1000.0; 8];
        jitter(&mut view, 4, Depth::Sixteen, &strengths, &mut ViewRng::from_words([1, 2, 3, 4]));
        assert!(view[0] != view[4] && view[0] == view[3], "{view:?}");
        assert!(view.iter().all(|value| (500.0..=1500.0).contains(value)));
    }

    #[test]
    fn contrast_preserves_the_mean_and_values_are_clamped() {
        let strengths = Jitter { brightness: 0.0, contrast: 0.9, saturation: 0.0, hue: 0.0, p: 1.0 };
        let mut view = vec![-3.0, -1.0, 5.0, 7.0];
        jitter(&mut view, 4, Depth::Float, &strengths, &mut ViewRng::from_words([5, 2, 3, 4]));
        assert!((mean(&view) - 2.0).abs() < 1e-5 && view[0] != -3.0, "{view:?}");
        let mut view = vec![65_000.0; 4];
        blend(&mut view, 0.0, 1.5, Depth::Sixteen.largest());
        assert_eq!(view, [65_535.0; 4]);
    }
}
