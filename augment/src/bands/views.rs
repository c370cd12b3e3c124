//! Generation of views of an image of any number of channels.
//!
//! ```text
//! view = erase(p) ∘ drop(p) ∘ blur(p, σ) ∘ brightness and contrast(p) ∘ rotation(p) ∘ flip(p) ∘ resize ∘ random box
//! ```
//!
//! Boxes and flips equal those of 8-bit RGB for the same key.

use super::blur::BandBlur;
use super::color::jitter;
use super::image::Bands;
use super::resize::PlaneResizer;
use super::store::store;
use crate::crop::CropBox;
use crate::multicrop::{Geometry, ViewSpec};
use crate::seed::Operation;
use crate::stats::{Clock, Stage};
use crate::{AugmentError, SampleKey};

/// Maker of views, with the scratch memory of one thread.
#[derive(Debug, Default)]
pub(crate) struct BandViewMaker {
    resizer: PlaneResizer,
    blur: BandBlur,
    /// Scratch memory of [`rotate`].
    rotated: Vec<f32>,
}

impl BandViewMaker {
    /// Makes the view `spec` of `image`, and appends its bytes to `out`.
    pub(crate) fn augment(
        &mut self,
        image: &Bands,
        spec: ViewSpec<'_>,
        key: SampleKey,
        out: &mut Vec<u8>,
        clock: &mut Clock<'_>,
    ) -> Result<(), AugmentError> {
        let crop = spec.crop;
        let Geometry { region, is_flipped, n_quarters } =
            spec.geometry(key, [image.width_px, image.height_px]);
        clock.lap(Stage::Other);
        let size_px = [crop.size_px; 2];
        let full = CropBox::from_size(size_px);
        let mut view = self.resizer.resize_part(image, region, size_px, full, crop.interpolation)?;
        clock.lap(Stage::Resize);
        let side = crop.size_px as usize;
        if is_flipped {
            view.chunks_exact_mut(side).for_each(<[f32]>::reverse);
        }
        if let Some(n_quarters) = n_quarters {
            for plane in view.chunks_exact_mut(side * side) {
                rotate(plane, side, n_quarters, &mut self.rotated);
            }
        }
        clock.lap(Stage::Other);
        let mut rng = spec.rng(key, Operation::Jitter);
        if rng.chance(crop.jitter.p) {
            jitter(&mut view, side * side, image.depth, &crop.jitter, &mut rng);
        }
        clock.lap(Stage::Color);
        let mut rng = spec.rng(key, Operation::Blur);
        if rng.chance(crop.blur_p) {
            let sigma = rng.between(crop.blur_sigma[0], crop.blur_sigma[1]);
            self.blur.apply(&mut view, side, crop.blur_taps, sigma as f32);
        }
        clock.lap(Stage::Blur);
        let mut rng = spec.rng(key, Operation::ChannelDrop);
        crop.drop_channels(&mut rng, view.chunks_exact_mut(side * side));
        if let Some(erase) = &crop.erase {
            let mut rng = spec.rng(key, Operation::Erase);
            if let Some(area) = erase.draw(&mut rng, crop.size_px) {
                for plane in view.chunks_exact_mut(side * side) {
                    for value in area.rows_mut(plane, side).flatten() {
                        *value = erase.noise(&mut rng, image.depth.unit());
                    }
                }
            }
        }
        store(&view, image.depth, out);
        clock.lap(Stage::Other);
        Ok(())
    }
}

/// Rotates a square plane counterclockwise by quarters of a turn; `scratch` is scratch memory.
pub(crate) fn rotate<T: Copy + Default>(plane: &mut [T], side: usize, n_quarters: u32, scratch: &mut Vec<T>) {
    scratch.clear();
    scratch.extend_from_slice(plane);
    for (y, row) in plane.chunks_exact_mut(side).enumerate() {
        for (x, value) in row.iter_mut().enumerate() {
            let [from_y, from_x] = match n_quarters {
                1 => [x, side - 1 - y],
                2 => [side - 1 - y, side - 1 - x],
                _ => [side - 1 - x, y],
            };
            *value = scratch[from_y * side + from_x];
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

    /// Equal to `numpy.rot90(x, k)`.
    #[test]
    fn planes_are_rotated_counterclockwise() {
        for (n_quarters, expected) in [(1, [2, 4, 1, 3]), (2, [4, 3, 2, 1]), (3, [3, 1, 4, 2])] {
            let mut plane = [1, 2, 3, 4];
            rotate(&mut plane, 2, n_quarters, &mut Vec::new());
            assert_eq!(plane, expected);
        }
    }

    #[test]
    fn views_are_a_function_of_the_key_and_keep_sixteen_bits() {
        let image = noise(5, Depth::Sixteen).into();
        let multicrop = MultiCrop::dino(16, 8, 2).into_multichannel(0.5, 0.2);
        let mut maker = ViewMaker::default();
        let first = maker.make(&image, &multicrop, key(1)).expect("views");
        let lengths: Vec<usize> = first.groups.iter().map(Vec::len).collect();
        assert_eq!(lengths, [2 * 5 * 256 * 2, 2 * 5 * 64 * 2]);
        assert_ne!(maker.make(&image, &multicrop, key(2)).expect("views"), first);
        assert_eq!(ViewMaker::default().make(&image, &multicrop, key(1)).expect("views"), first);
        let low_bytes: std::collections::BTreeSet<u8> = first.groups[0].iter().step_by(2).copied().collect();
        assert!(low_bytes.len() > 200, "{} values of the lower byte", low_bytes.len());
    }

    /// The box, the flip and what is erased do not depend on the format, so that RGB as three bands
    /// has nearly the same views.
    #[test]
    fn views_of_bands_equal_those_of_rgb_up_to_rounding() {
        // Values are far from 0 and 255: RGB is clamped between the passes of a resize.
        let bytes: Vec<u8> =
            (0..3 * 50 * 40).map(|i: u32| 64 + (i.wrapping_mul(2_654_435_761) >> 25) as u8).collect();
        let rgb = crate::Rgb8::new(50, 40, bytes);
        let planes = crate::Planes::from(&rgb);
        let bands = Bands::from_bytes(&planes.data, crate::PixelFormat::RGB8, 50);
        let mut multicrop = MultiCrop::single(24);
        let erase = crate::Erase { p: 0.5, area: [0.1, 0.3], noise_mean: 0.45, noise_std: 0.1 };
        multicrop.crops[0].erase = Some(erase);
        let mut maker = ViewMaker::default();
        for sample in 0..10 {
            let a = maker.make(&rgb.clone().into(), &multicrop, key(sample)).expect("views");
            let b = maker.make(&bands.clone().into(), &multicrop, key(sample)).expect("views");
            assert!(a.groups[0].iter().zip(&b.groups[0]).all(|(a, b)| a.abs_diff(*b) <= 2));
        }
    }

    /// Returns the number of nonzero channels in a view of `image`.
    fn n_kept_channels(image: &crate::Image, multicrop: &MultiCrop, sample: u64) -> usize {
        let views = ViewMaker::default().make(image, multicrop, key(sample)).expect("views");
        let channels = views.groups[0].chunks_exact(4 * 64);
        channels.filter(|channel| channel.iter().any(|byte| *byte != 0)).count()
    }

    #[test]
    fn dropped_channels_are_zero_and_one_remains() {
        let image: crate::Image = noise(4, Depth::Float).into();
        let mut multicrop = MultiCrop::single(8).into_multichannel(0.0, 1.0);
        assert!((0..20).all(|sample| n_kept_channels(&image, &multicrop, sample) == 1));
        multicrop.crops[0].channel_drop_p = 0.5;
        let counts: Vec<usize> = (0..200).map(|sample| n_kept_channels(&image, &multicrop, sample)).collect();
        let mean = counts.iter().sum::<usize>() as f64 / 200.0;
        assert!((mean - 2.5).abs() < 0.25 && counts.contains(&4), "{mean}");
    }
}
