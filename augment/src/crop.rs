//! Random-resized crops by torchvision's rule (`RandomResizedCrop.get_params`).

use crate::ViewRng;

/// A box in an image, in pixels from its top left corner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CropBox {
    /// First column.
    pub left_px: u32,
    /// First row.
    pub top_px: u32,
    /// Number of columns, at least one.
    pub width_px: u32,
    /// Number of rows, at least one.
    pub height_px: u32,
}

impl CropBox {
    /// Creates the box that covers an image of this width and height.
    pub fn from_size([width_px, height_px]: [u32; 2]) -> Self {
        Self { left_px: 0, top_px: 0, width_px, height_px }
    }

    /// Returns whether the box is not empty and lies inside an image of this width and height.
    pub fn is_inside(&self, [width_px, height_px]: [u32; 2]) -> bool {
        let is_empty = self.width_px == 0 || self.height_px == 0;
        let right = u64::from(self.left_px) + u64::from(self.width_px);
        let bottom = u64::from(self.top_px) + u64::from(self.height_px);
        !is_empty && right <= u64::from(width_px) && bottom <= u64::from(height_px)
    }

    /// Returns the rows of the box in `plane`, whose rows have `side` values.
    pub(crate) fn rows_mut<T>(self, plane: &mut [T], side: usize) -> impl Iterator<Item = &mut [T]> {
        let start = self.left_px as usize;
        let end = start + self.width_px as usize;
        let rows = plane.chunks_exact_mut(side).skip(self.top_px as usize).take(self.height_px as usize);
        rows.map(move |row| &mut row[start..end])
    }
}

/// Aspect ratios of torchvision's random-resized crop.
pub(crate) const VIEW_RATIO: [f64; 2] = [3.0 / 4.0, 4.0 / 3.0];

/// Number of tries before the centered fallback.
const MAX_TRIES: usize = 10;

/// Draws a box: its area is uniform in `scale` of the image's area, its aspect ratio log-uniform in
/// `ratio`. After ten boxes that do not fit, returns the largest centered one whose aspect ratio is
/// within `ratio`.
pub fn random_resized_crop(
    rng: &mut ViewRng,
    width_px: u32,
    height_px: u32,
    scale: [f64; 2],
    ratio: [f64; 2],
) -> CropBox {
    for _ in 0..MAX_TRIES {
        let area_uniform = unit(rng);
        let aspect_uniform = unit(rng);
        let candidate = candidate(area_uniform, aspect_uniform, width_px, height_px, scale, ratio);
        if let Some((w, h)) = candidate {
            let top_px = rng.below(height_px - h + 1);
            let left_px = rng.below(width_px - w + 1);
            return CropBox { left_px, top_px, width_px: w, height_px: h };
        }
    }
    centered_fallback(width_px, height_px, ratio)
}

/// Draws a uniform number in `[0, 1)`, with the 24 bits that torch draws for an f32.
fn unit(rng: &mut ViewRng) -> f32 {
    const STEPS: f64 = (1 << 24) as f64;
    ((rng.between(0.0, 1.0) * STEPS).floor() / STEPS) as f32
}

/// Returns the width and height of the box for two uniform numbers in `[0, 1)`, if it fits into the
/// image. As in torch, these numbers are scaled and logarithms and exponentials are computed in
/// f32, the rest in f64.
pub fn candidate(
    area_uniform: f32,
    aspect_uniform: f32,
    width_px: u32,
    height_px: u32,
    scale: [f64; 2],
    ratio: [f64; 2],
) -> Option<(u32, u32)> {
    let [min_share, max_share] = scale.map(|s| s as f32);
    let share = area_uniform * (max_share - min_share) + min_share;
    let [min_log_aspect, max_log_aspect] = ratio.map(|r| (r as f32).ln());
    let aspect = (aspect_uniform * (max_log_aspect - min_log_aspect) + min_log_aspect).exp();
    let area = f64::from(width_px) * f64::from(height_px);
    let (w, h) = box_size(area * f64::from(share), f64::from(aspect));
    (w > 0 && h > 0 && w <= width_px && h <= height_px).then_some((w, h))
}

/// Returns the width and the height of a box, rounded half to even as Python does.
pub fn box_size(area: f64, aspect: f64) -> (u32, u32) {
    let width = (area * aspect).sqrt().round_ties_even() as u32;
    let height = (area / aspect).sqrt().round_ties_even() as u32;
    (width, height)
}

/// Returns the box of an image in which no drawn box fits: the largest centered one with an aspect
/// ratio within `ratio`.
pub fn centered_fallback(width_px: u32, height_px: u32, ratio: [f64; 2]) -> CropBox {
    let w = f64::from(width_px);
    let h = f64::from(height_px);
    let in_ratio = w / h;
    let (crop_w, crop_h) = if in_ratio < ratio[0] {
        (width_px, (w / ratio[0]).round_ties_even() as u32)
    } else if in_ratio > ratio[1] {
        ((h * ratio[1]).round_ties_even() as u32, height_px)
    } else {
        (width_px, height_px)
    };
    let crop_w = crop_w.clamp(1, width_px);
    let crop_h = crop_h.clamp(1, height_px);
    CropBox {
        left_px: (width_px - crop_w) / 2,
        top_px: (height_px - crop_h) / 2,
        width_px: crop_w,
        height_px: crop_h,
    }
}

/// Returns the largest centered square, for evaluation.
pub fn center_square(width_px: u32, height_px: u32) -> CropBox {
    let side = width_px.min(height_px);
    CropBox {
        left_px: (width_px - side) / 2,
        top_px: (height_px - side) / 2,
        width_px: side,
        height_px: side,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SampleKey;
    use crate::seed::Operation;
    use proptest::prelude::*;

    fn rng(sample: u64) -> ViewRng {
        ViewRng::new(SampleKey { seed: 3, epoch: 0, sample, attempt: 0 }, 0, Operation::Crop)
    }

    const RATIO: [f64; 2] = VIEW_RATIO;

    proptest! {
        #[test]
        fn boxes_lie_inside(sample: u64, w in 1u32..900, h in 1u32..900, low in 0.01f64..1.0) {
            let b = random_resized_crop(&mut rng(sample), w, h, [low, 1.0], RATIO);
            prop_assert!(b.width_px >= 1 && b.height_px >= 1);
            prop_assert!(b.left_px + b.width_px <= w && b.top_px + b.height_px <= h);
        }
    }

    /// In a large square image every box of a small scale fits, so that the area is uniform: ten
    /// bins, chi-square with nine degrees of freedom below its 99.9 % point.
    #[test]
    fn areas_are_uniform_and_log_aspects_symmetric() {
        let n = 20_000;
        let mut bins = [0.0f64; 10];
        let mut log_aspect_sum = 0.0;
        for sample in 0..n {
            let b = random_resized_crop(&mut rng(sample), 2000, 2000, [0.1, 0.5], RATIO);
            let share = f64::from(b.width_px) * f64::from(b.height_px) / 4e6;
            bins[(((share - 0.1) / 0.4 * 10.0) as usize).min(9)] += 1.0;
            log_aspect_sum += (f64::from(b.width_px) / f64::from(b.height_px)).ln();
        }
        let expected = n as f64 / 10.0;
        let chi_square: f64 = bins.iter().map(|c| (c - expected).powi(2) / expected).sum();
        assert!(chi_square < 27.9, "chi-square {chi_square}: {bins:?}");
        assert!((log_aspect_sum / n as f64).abs() < 0.005);
    }

    #[test]
    fn a_narrow_image_falls_back_to_the_centered_box() {
        let b = random_resized_crop(&mut rng(0), 1000, 10, [0.9, 1.0], RATIO);
        assert_eq!((b.width_px, b.height_px, b.left_px), (13, 10, 493));
    }

    #[test]
    fn sides_round_half_to_even() {
        assert_eq!(box_size(6.25, 1.0), (2, 2));
        assert_eq!(box_size(12.25, 1.0), (4, 4));
    }
}
