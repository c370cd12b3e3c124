//! Mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019): the images of a batch are mixed in
//! pairs, and so are their labels.
//!
//! ```text
//! mixup    x ← λ · x + (1 - λ) · x'
//! cutmix   x ← x' in a box, x elsewhere;   λ ← 1 - area of the box / area of the view
//! labels   y ← λ · y + (1 - λ) · y'
//! ```
//!
//! λ ~ Beta(α, α) and the box are drawn once for a batch. Bytes are those of timm's
//! `FastCollateMixup`: sums in f32, rounded to the nearest number, halves to the even one.

use multiversion::multiversion;

use crate::crop::CropBox;
use crate::format::Depth;
use crate::{SoftLabel, ViewRng, Views};

/// Domain that separates the draws of mixtures from all other random streams.
const DOMAIN: u64 = 0x6d69_7869_6e67_0000;

/// Settings of mixup and cutmix, of which at least one is on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mixing {
    /// Parameter α of the Beta distribution of mixup; 0 if there is no mixup.
    pub mixup: f64,
    /// Parameter α of the Beta distribution of cutmix; 0 if there is no cutmix.
    pub cutmix: f64,
    /// Probability that a batch is mixed.
    pub probability: f64,
    /// Probability that a batch which is mixed is mixed by cutmix, if both are on.
    pub cutmix_probability: f64,
}

/// The way in which the images of a batch are mixed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mixed {
    /// Mixup.
    Blend {
        /// Share λ of an image that it keeps.
        share: f64,
    },
    /// Cutmix.
    Cut {
        /// Box whose pixels the two images of a pair swap.
        cut: CropBox,
        /// Side of the views, in pixels.
        size_px: u32,
    },
}

impl Mixing {
    /// Draws how the global batch `batch` of a run with `seed`, with views of `size_px`, is mixed;
    /// `None` if it is not.
    pub fn draw(&self, seed: u64, batch: u64, size_px: u32) -> Option<Mixed> {
        let mut rng = ViewRng::from_words([seed, DOMAIN, batch, 0]);
        if rng.between(0.0, 1.0) >= self.probability {
            return None;
        }
        let is_cut = if self.mixup > 0.0 && self.cutmix > 0.0 {
            rng.between(0.0, 1.0) < self.cutmix_probability
        } else {
            self.cutmix > 0.0
        };
        if is_cut {
            let share = beta(&mut rng, self.cutmix);
            let x = rng.below(size_px);
            let y = rng.below(size_px);
            return Mixed::cut(share, [x, y], size_px);
        }
        let share = beta(&mut rng, self.mixup);
        (share < 1.0).then_some(Mixed::Blend { share })
    }
}

impl Mixed {
    /// Creates the cut of a box that is a share of `1 - share` of a view of `size_px`, around the
    /// pixel `center`, `[x, y]`. What lies outside of the view is cut off: `None` for an empty box.
    pub fn cut(share: f64, center: [u32; 2], size_px: u32) -> Option<Self> {
        let side = (f64::from(size_px) * (1.0 - share).sqrt()) as u32;
        let [left_px, top_px] = center.map(|center| center.saturating_sub(side / 2));
        let [right_px, bottom_px] = center.map(|center| (center + side.div_ceil(2)).min(size_px));
        let cut = CropBox { left_px, top_px, width_px: right_px - left_px, height_px: bottom_px - top_px };
        cut.is_inside([size_px; 2]).then_some(Self::Cut { cut, size_px })
    }

    /// Returns the share λ of its pixels and of its label that an image keeps.
    pub fn share(&self) -> f64 {
        match self {
            Self::Blend { share } => *share,
            Self::Cut { cut, size_px } => {
                let area = f64::from(cut.width_px) * f64::from(cut.height_px);
                1.0 - area / (f64::from(*size_px) * f64::from(*size_px))
            }
        }
    }

    /// Mixes the views of two images, whose values have `depth`, with each other.
    ///
    /// # Panics
    /// Cutmix panics if the views are smaller than those that the box was drawn for.
    pub fn mix_views(&self, first: &mut Views, second: &mut Views, depth: Depth) {
        for (first, second) in first.groups.iter_mut().zip(&mut second.groups) {
            match self {
                Self::Blend { share } => blend(first, second, *share as f32, (1.0 - share) as f32, depth),
                Self::Cut { cut, size_px } => swap(first, second, *cut, *size_px, depth),
            }
        }
    }

    /// Mixes the labels of two images with each other.
    pub fn mix_labels(&self, first: &mut SoftLabel, second: &mut SoftLabel) {
        let mixed = self.mixed_label(first, second);
        *second = self.mixed_label(second, first);
        *first = mixed;
    }

    /// Returns the label of an image with the label `own` that is mixed with one with `other`.
    fn mixed_label(&self, own: &[(u32, f32)], other: &[(u32, f32)]) -> SoftLabel {
        let kept = self.share() as f32;
        let taken = (1.0 - self.share()) as f32;
        let mut label = Vec::with_capacity(own.len() + other.len());
        label.extend(own.iter().map(|(class, share)| (*class, kept * share)));
        label.extend(other.iter().map(|(class, share)| (*class, taken * share)));
        label
    }
}

/// Replaces each value x of `first` and its counterpart y of `second` by `kept · x + taken · y` and
/// `kept · y + taken · x`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn blend(first: &mut [u8], second: &mut [u8], kept: f32, taken: f32, depth: Depth) {
    // `as` clamps to the range of the type.
    match depth {
        Depth::Eight => {
            for (first, second) in first.iter_mut().zip(second) {
                let x = f32::from(*first);
                let y = f32::from(*second);
                *first = (kept * x + taken * y).round_ties_even() as u8;
                *second = (kept * y + taken * x).round_ties_even() as u8;
            }
        }
        Depth::Sixteen => {
            let pairs = first.as_chunks_mut::<2>().0.iter_mut().zip(second.as_chunks_mut::<2>().0);
            for (first, second) in pairs {
                let x = f32::from(u16::from_le_bytes(*first));
                let y = f32::from(u16::from_le_bytes(*second));
                *first = ((kept * x + taken * y).round_ties_even() as u16).to_le_bytes();
                *second = ((kept * y + taken * x).round_ties_even() as u16).to_le_bytes();
            }
        }
        Depth::Float => {
            let pairs = first.as_chunks_mut::<4>().0.iter_mut().zip(second.as_chunks_mut::<4>().0);
            for (first, second) in pairs {
                let x = f32::from_le_bytes(*first);
                let y = f32::from_le_bytes(*second);
                *first = (kept * x + taken * y).to_le_bytes();
                *second = (kept * y + taken * x).to_le_bytes();
            }
        }
    }
}

/// Swaps the pixels of two images in the box `cut` of their views of `size_px`.
fn swap(first: &mut [u8], second: &mut [u8], cut: CropBox, size_px: u32, depth: Depth) {
    let row_len = size_px as usize * depth.bytes();
    let plane_len = size_px as usize * row_len;
    let start = cut.left_px as usize * depth.bytes();
    let end = start + cut.width_px as usize * depth.bytes();
    assert!(first.len() >= plane_len && first.len() == second.len(), "views of {size_px} px");
    for (first, second) in first.chunks_exact_mut(plane_len).zip(second.chunks_exact_mut(plane_len)) {
        let rows = first.chunks_exact_mut(row_len).zip(second.chunks_exact_mut(row_len));
        for (first, second) in rows.skip(cut.top_px as usize).take(cut.height_px as usize) {
            first[start..end].swap_with_slice(&mut second[start..end]);
        }
    }
}

/// Draws a number of the Beta distribution whose parameters are both `alpha`.
fn beta(rng: &mut ViewRng, alpha: f64) -> f64 {
    let first = gamma_ln(rng, alpha);
    let second = gamma_ln(rng, alpha);
    1.0 / (1.0 + (second - first).exp())
}

/// Draws the logarithm of a number of the Gamma distribution of shape `alpha` (Marsaglia and Tsang
/// 2000). For small shapes, most numbers themselves are too small for f64.
fn gamma_ln(rng: &mut ViewRng, alpha: f64) -> f64 {
    // A number of shape α is one of shape α + 1, times the root of degree α of a uniform one.
    let d = alpha + 2.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = f64::from(rng.normal());
        let root = 1.0 + c * x;
        // 1 - u lies in (0, 1], where the logarithm is finite.
        let accepted = (1.0 - rng.between(0.0, 1.0)).ln();
        let uniform = 1.0 - rng.between(0.0, 1.0);
        let v = root * root * root;
        if v > 0.0 && accepted < 0.5 * x * x + d - d * v + d * v.ln() {
            return (d * v).ln() + uniform.ln() / alpha;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: Mixing = Mixing { mixup: 0.8, cutmix: 1.0, probability: 0.75, cutmix_probability: 0.5 };

    #[test]
    fn draws_have_the_moments_of_the_beta_distribution() {
        let mut rng = ViewRng::from_words([1, 2, 3, 4]);
        for alpha in [0.01, 0.2, 0.8, 1.0, 5.0] {
            let n = 20_000;
            let draws: Vec<f64> = (0..n).map(|_| beta(&mut rng, alpha)).collect();
            assert!(draws.iter().all(|draw| (0.0..=1.0).contains(draw)), "{alpha}");
            let mean = draws.iter().sum::<f64>() / f64::from(n);
            let variance = draws.iter().map(|draw| (draw - 0.5).powi(2)).sum::<f64>() / f64::from(n);
            let expected = 0.25 / (2.0 * alpha + 1.0);
            assert!((mean - 0.5).abs() < 0.015, "{alpha}: {mean}");
            assert!((variance - expected).abs() < 0.03 * expected, "{alpha}: {variance} {expected}");
        }
    }

    /// Returns how many of 4,000 batches are left as they are, blended and cut.
    fn counts(mixing: &Mixing) -> [f64; 3] {
        let mut counts = [0.0; 3];
        for batch in 0..4000 {
            let mixed = mixing.draw(7, batch, 224);
            assert_eq!(mixed, mixing.draw(7, batch, 224), "a function of seed and batch");
            let kind = match mixed {
                None => 0,
                Some(Mixed::Blend { .. }) => 1,
                Some(Mixed::Cut { .. }) => 2,
            };
            counts[kind] += 1.0;
        }
        counts
    }

    #[test]
    fn batches_are_mixed_with_their_probabilities() {
        for (mixing, expected) in [
            (BOTH, [1000.0, 1500.0, 1500.0]),
            (Mixing { cutmix: 0.0, ..BOTH }, [1000.0, 3000.0, 0.0]),
            (Mixing { mixup: 0.0, ..BOTH }, [1000.0, 0.0, 3000.0]),
            (Mixing { probability: 0.0, ..BOTH }, [4000.0, 0.0, 0.0]),
        ] {
            let counts = counts(&mixing);
            // About four standard deviations, and boxes of less than a pixel.
            assert!(counts.iter().zip(expected).all(|(n, mean)| (n - mean).abs() < 130.0), "{counts:?}");
        }
    }

    /// A box keeps to the view, and its share is that of the area that remains.
    #[test]
    fn boxes_are_cut_off_at_the_edges() {
        let mixed = Mixed::cut(0.75, [0, 9], 10).expect("a box");
        let cut = CropBox { left_px: 0, top_px: 7, width_px: 3, height_px: 3 };
        assert_eq!(mixed, Mixed::Cut { cut, size_px: 10 });
        assert!((mixed.share() - 0.91).abs() < 1e-12);
        assert_eq!(Mixed::cut(1.0, [4, 4], 10), None);
        assert_eq!(Mixed::cut(0.999, [4, 4], 10), None, "less than a pixel");
        assert_eq!(Mixed::cut(0.0, [5, 5], 10).map(|mixed| mixed.share()), Some(0.0));
    }

    fn views(values: &[u16], depth: Depth) -> Views {
        let mut bytes = Vec::new();
        for value in values {
            match depth {
                Depth::Eight => bytes.push(*value as u8),
                Depth::Sixteen => bytes.extend(value.to_le_bytes()),
                Depth::Float => bytes.extend(f32::from(*value).to_le_bytes()),
            }
        }
        Views { groups: vec![bytes], ..Views::default() }
    }

    #[test]
    fn values_of_every_depth_are_blended_and_cut() {
        for depth in [Depth::Eight, Depth::Sixteen, Depth::Float] {
            let mut first = views(&[0, 100, 7, 200], depth);
            let mut second = views(&[4, 200, 7, 0], depth);
            Mixed::Blend { share: 0.75 }.mix_views(&mut first, &mut second, depth);
            assert_eq!(first, views(&[1, 125, 7, 150], depth));
            assert_eq!(second, views(&[3, 175, 7, 50], depth));
            let cut = CropBox { left_px: 1, top_px: 0, width_px: 1, height_px: 2 };
            Mixed::Cut { cut, size_px: 2 }.mix_views(&mut first, &mut second, depth);
            assert_eq!(first, views(&[1, 175, 7, 50], depth));
            assert_eq!(second, views(&[3, 125, 7, 150], depth));
        }
        // Halves become the even number of the two.
        let mut first = views(&[1, 3], Depth::Eight);
        let mut second = views(&[2, 4], Depth::Eight);
        Mixed::Blend { share: 0.5 }.mix_views(&mut first, &mut second, Depth::Eight);
        assert_eq!(first, views(&[2, 4], Depth::Eight));
    }

    #[test]
    fn labels_are_mixed_in_the_shares_of_the_pixels() {
        let mut first: SoftLabel = vec![(3, 1.0)];
        let mut second: SoftLabel = vec![(0, 0.5), (1, 0.5)];
        Mixed::Blend { share: 0.75 }.mix_labels(&mut first, &mut second);
        assert_eq!(first, [(3, 0.75), (0, 0.125), (1, 0.125)]);
        assert_eq!(second, [(0, 0.375), (1, 0.375), (3, 0.25)]);
    }
}
