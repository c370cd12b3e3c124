//! Random erasing (Zhong et al. 2020): a random box of a view becomes noise.
//!
//! ```text
//! area = share · S²,   share ~ U(area),   ln ratio ~ U(ln 0.3, ln 1/0.3)
//! height = round(√(area · ratio)),   width = round(√(area / ratio))
//! ```
//!
//! Boxes are those of timm's `RandomErasing` with `mode="pixel"`, whose noise is standard normal
//! after normalization and not limited to values that pixels can have.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ViewRng;
use crate::crop::CropBox;

/// Random erasing, in the form in which a recipe writes it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Erase {
    /// Probability with which a box of a view becomes noise.
    pub p: f32,
    /// Smallest and largest share of the view's area that the box has; 0.02 and a third by default.
    #[serde(default = "default_area")]
    pub area: [f64; 2],
    /// Mean of the noise in all channels, as a share of the largest value of a pixel (1 for
    /// floating point); 0.45 by default, about that of photographs.
    #[serde(default = "default_noise_mean")]
    pub noise_mean: f32,
    /// Standard deviation of the noise, as a share like the mean; 0.225 by default, about that of
    /// photographs.
    #[serde(default = "default_noise_std")]
    pub noise_std: f32,
}

fn default_area() -> [f64; 2] {
    [0.02, 1.0 / 3.0]
}

fn default_noise_mean() -> f32 {
    0.45
}

fn default_noise_std() -> f32 {
    0.225
}

/// Smallest ratio of height to width; the largest is its inverse.
const MIN_RATIO: f64 = 0.3;

/// Number of boxes that are drawn until one fits.
const MAX_TRIES: usize = 10;

/// Largest mean and standard deviation, of floating-point values.
const MAX_VALUE: f32 = 1e6;

impl Erase {
    /// Checks every value.
    ///
    /// # Errors
    /// The field and the reason.
    pub(crate) fn check(&self) -> Result<(), (&'static str, &'static str)> {
        if !(0.0..=1.0).contains(&self.p) {
            return Err(("erase.p", "must lie in 0..=1"));
        }
        let [low, high] = self.area;
        if !(low > 0.0 && low <= high && high <= 1.0) {
            return Err(("erase.area", "must be [low, high] with 0 < low <= high <= 1"));
        }
        if !(-MAX_VALUE..=MAX_VALUE).contains(&self.noise_mean) {
            return Err(("erase.noise_mean", "must lie in -1e6..=1e6"));
        }
        if !(0.0..=MAX_VALUE).contains(&self.noise_std) {
            return Err(("erase.noise_std", "must lie in 0..=1e6"));
        }
        Ok(())
    }

    /// Draws the box of a view of `size_px` that becomes noise, if any.
    pub(crate) fn draw(&self, rng: &mut ViewRng, size_px: u32) -> Option<CropBox> {
        if !rng.chance(self.p) {
            return None;
        }
        for _ in 0..MAX_TRIES {
            let share = rng.between(self.area[0], self.area[1]);
            let ln_ratio = rng.between(MIN_RATIO.ln(), (1.0 / MIN_RATIO).ln());
            if let Some([height_px, width_px]) = Self::sides(share, ln_ratio, size_px) {
                let top_px = rng.below(size_px - height_px + 1);
                let left_px = rng.below(size_px - width_px + 1);
                let area = CropBox { left_px, top_px, width_px, height_px };
                return area.is_inside([size_px; 2]).then_some(area);
            }
        }
        None
    }

    /// Returns height and width of a box with this share of the area of a view of `size_px`, and
    /// this logarithm of height over width; `None` if it is not smaller than the view.
    pub fn sides(share: f64, ln_ratio: f64, size_px: u32) -> Option<[u32; 2]> {
        let area = share * f64::from(size_px * size_px);
        let ratio = ln_ratio.exp();
        let height_px = (area * ratio).sqrt().round_ties_even() as u32;
        let width_px = (area / ratio).sqrt().round_ties_even() as u32;
        (height_px < size_px && width_px < size_px).then_some([height_px, width_px])
    }

    /// Draws a value of the noise, where `unit` is the largest value of a pixel.
    pub(crate) fn noise(&self, rng: &mut ViewRng, unit: f32) -> f32 {
        (self.noise_mean + self.noise_std * rng.normal()) * unit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ERASE: Erase = Erase { p: 1.0, area: [0.02, 1.0 / 3.0], noise_mean: 0.45, noise_std: 0.225 };

    #[test]
    fn defaults_are_those_of_published_recipes() {
        let erase: Erase = serde_json::from_str("{\"p\": 1.0}").expect("parsed");
        assert_eq!(erase, ERASE);
    }

    /// A view of one pixel has no box that is smaller.
    #[test]
    fn boxes_lie_inside_of_the_view() {
        let mut rng = ViewRng::from_words([1, 2, 3, 4]);
        for size_px in [1, 2, 7, 32, 224] {
            let boxes: Vec<CropBox> = (0..200).filter_map(|_| ERASE.draw(&mut rng, size_px)).collect();
            assert!(boxes.iter().all(|area| area.is_inside([size_px; 2])), "{size_px}");
            assert_eq!(boxes.is_empty(), size_px == 1, "{size_px}");
        }
    }

    #[test]
    fn noise_has_its_mean_and_deviation() {
        let mut rng = ViewRng::from_words([1, 2, 3, 4]);
        let n = 20_000;
        let values: Vec<f64> = (0..n).map(|_| f64::from(ERASE.noise(&mut rng, 100.0))).collect();
        let mean = values.iter().sum::<f64>() / f64::from(n);
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!((mean - 45.0).abs() < 0.7 && (variance.sqrt() - 22.5).abs() < 0.5, "{mean} {variance}");
    }

    #[test]
    fn errors_name_the_value_out_of_range() {
        for (erase, field) in [
            (Erase { p: 1.5, ..ERASE }, "erase.p"),
            (Erase { area: [0.0, 0.1], ..ERASE }, "erase.area"),
            (Erase { noise_mean: f32::NAN, ..ERASE }, "erase.noise_mean"),
            (Erase { noise_std: -1.0, ..ERASE }, "erase.noise_std"),
        ] {
            assert_eq!(erase.check().expect_err("out of range").0, field);
        }
        assert_eq!(ERASE.check(), Ok(()));
    }
}
