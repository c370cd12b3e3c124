//! Generation of the views of an image of any number of channels.
//!
//! ```text
//! view = drop(p) ∘ blur(p, σ) ∘ brightness and contrast(p) ∘ rotation(p) ∘ flip(p) ∘ resize ∘ random box
//! ```
//!
//! Boxes and flips are those that 8-bit RGB has for the same key.

use super::blur::BandBlur;
use super::color::jitter;
use super::image::Bands;
use super::resize::PlaneResizer;
use super::store::store;
use crate::crop::{CropBox, VIEW_RATIO, random_resized_crop};
use crate::seed::Operation;
use crate::stats::{Clock, Stage};
use crate::{AugmentError, CropSpec, SampleKey, ViewRng};

/// Maker of views, with the memory of one thread.
#[derive(Debug, Default)]
pub(crate) struct BandViewMaker {
    resizer: PlaneResizer,
    blur: BandBlur,
    turned: Vec<f32>,
}

impl BandViewMaker {
    /// Makes view `number` of `image` by `crop`, and appends its bytes to `out`, with the box, the
    /// flip and the rotation of view `place`, whose crop is `placed`.
    pub(crate) fn augment(
        &mut self,
        image: &Bands,
        [crop, placed]: [&CropSpec; 2],
        key: SampleKey,
        [number, place]: [u32; 2],
        (out, clock): (&mut Vec<u8>, &mut Clock<'_>),
    ) -> Result<(), AugmentError> {
        let rng = |operation| ViewRng::new(key, number, operation);
        let placed_rng = |operation| ViewRng::new(key, place, operation);
        let region = random_resized_crop(
            &mut placed_rng(Operation::Crop),
            image.width_px,
            image.height_px,
            placed.scale,
            VIEW_RATIO,
        );
        clock.lap(Stage::Other);
        let size_px = [crop.size_px; 2];
        let whole = CropBox::whole(size_px);
        let mut view = self.resizer.resize_part(image, region, size_px, whole, crop.interpolation)?;
        clock.lap(Stage::Resize);
        let side = crop.size_px as usize;
        if placed_rng(Operation::Flip).chance(placed.flip_p) {
            view.chunks_exact_mut(side).for_each(<[f32]>::reverse);
        }
        if let Some(n_quarters) = placed.n_quarters(&mut placed_rng(Operation::Rotate)) {
            view.chunks_exact_mut(side * side)
                .for_each(|plane| rotate(plane, side, n_quarters, &mut self.turned));
        }
        clock.lap(Stage::Other);
        let mut draws = rng(Operation::Jitter);
        if draws.chance(crop.jitter.p) {
            jitter(&mut view, side * side, image.depth, &crop.jitter, &mut draws);
        }
        clock.lap(Stage::Color);
        let mut draws = rng(Operation::Blur);
        if draws.chance(crop.blur_p) {
            let sigma = draws.between(crop.blur_sigma[0], crop.blur_sigma[1]);
            self.blur.apply(&mut view, side, crop.blur_taps, sigma as f32);
        }
        clock.lap(Stage::Blur);
        crop.drop_channels(&mut rng(Operation::ChannelDrop), view.chunks_exact_mut(side * side));
        store(&view, image.depth, out);
        clock.lap(Stage::Other);
        Ok(())
    }
}

/// Rotates a square plane counterclockwise by quarters of a turn; `turned` is scratch memory.
pub(crate) fn rotate<T: Copy + Default>(plane: &mut [T], side: usize, n_quarters: u32, turned: &mut Vec<T>) {
    turned.clear();
    turned.extend_from_slice(plane);
    for (y, row) in plane.chunks_exact_mut(side).enumerate() {
        for (x, value) in row.iter_mut().enumerate() {
            let [from_y, from_x] = match n_quarters {
                1 => [x, side - 1 - y],
                2 => [side - 1 - y, side - 1 - x],
                _ => [side - 1 - x, y],
            };
            *value = turned[from_y * side + from_x];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Depth;
    use crate::{MultiCrop, ViewMaker};

    fn noise(n_channels: usize, depth: Depth) -> Bands {
        let width_px = 50;
        let height_px = 40;
        let n = n_channels * (width_px * height_px) as usize;
        let values = (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32).collect();
        Bands { width_px, height_px, depth, values }
    }

    fn key(sample: u64) -> SampleKey {
        SampleKey { seed: 5, epoch: 0, sample, attempt: 0 }
    }

    /// The quarters of `numpy.rot90(x, k)`.
    #[test]
    fn quarters_turn_counterclockwise() {
        let turned = |n| {
            let mut plane = vec![1, 2, 3, 4];
            rotate(&mut plane, 2, n, &mut Vec::new());
            plane
        };
        assert_eq!([turned(1), turned(2), turned(3)], [[2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2]]);
    }

    #[test]
    fn views_are_a_function_of_the_key_and_keep_sixteen_bits() {
        let image = noise(5, Depth::Sixteen).into();
        let multicrop = MultiCrop::dino(16, 8, 2).of_channels(0.5, 0.2);
        let mut maker = ViewMaker::default();
        let first = maker.make(&image, &multicrop, key(1)).expect("views");
        let lengths: Vec<usize> = first.groups.iter().map(Vec::len).collect();
        assert_eq!(lengths, [2 * 5 * 256 * 2, 2 * 5 * 64 * 2]);
        assert_ne!(maker.make(&image, &multicrop, key(2)).expect("views"), first);
        assert_eq!(ViewMaker::default().make(&image, &multicrop, key(1)).expect("views"), first);
        let low_bytes: std::collections::BTreeSet<u8> = first.groups[0].iter().step_by(2).copied().collect();
        assert!(low_bytes.len() > 200, "{} values of the lower byte", low_bytes.len());
    }

    /// The box and the flip of a view do not depend on the format, so that RGB as three bands has
    /// nearly the same views.
    #[test]
    fn bands_of_rgb_have_the_views_of_rgb() {
        // Far from the ends: RGB is clamped between the passes of a resize.
        let bytes: Vec<u8> =
            (0..3 * 50 * 40).map(|i: u32| 64 + (i.wrapping_mul(2_654_435_761) >> 25) as u8).collect();
        let rgb = crate::Rgb8::new(50, 40, bytes);
        let planes = crate::Planes::from(&rgb);
        let bands = Bands::of_bytes(&planes.data, crate::PixelFormat::RGB8, 50);
        let multicrop = MultiCrop::single(24);
        let mut maker = ViewMaker::default();
        for sample in 0..10 {
            let a = maker.make(&rgb.clone().into(), &multicrop, key(sample)).expect("views");
            let b = maker.make(&bands.clone().into(), &multicrop, key(sample)).expect("views");
            assert!(a.groups[0].iter().zip(&b.groups[0]).all(|(a, b)| a.abs_diff(*b) <= 2));
        }
    }

    #[test]
    fn dropped_channels_are_zero_and_one_remains() {
        let image: crate::Image = noise(4, Depth::Float).into();
        let mut multicrop = MultiCrop::single(8).of_channels(0.0, 1.0);
        let n_kept = |multicrop: &MultiCrop, sample| {
            let views = ViewMaker::default().make(&image, multicrop, key(sample)).expect("views");
            views.groups[0]
                .chunks_exact(4 * 64)
                .filter(|channel| channel.iter().any(|byte| *byte != 0))
                .count()
        };
        assert!((0..20).all(|sample| n_kept(&multicrop, sample) == 1));
        multicrop.crops[0].channel_drop_p = 0.5;
        let kept: Vec<usize> = (0..200).map(|sample| n_kept(&multicrop, sample)).collect();
        let mean = kept.iter().sum::<usize>() as f64 / 200.0;
        assert!((mean - 2.5).abs() < 0.25 && kept.contains(&4), "{mean}");
    }
}
