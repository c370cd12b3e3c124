//! Generation of the views of an image.
//!
//! ```text
//! view = erase(p) ∘ drop(p) ∘ solarize(p) ∘ blur(p, σ) ∘ gray(p) ∘ jitter(p) ∘ rotation(p) ∘ flip(p) ∘ resize
//!        ∘ random box
//! ```
//!
//! This is 8-bit RGB; other formats are in [`crate::bands`].

use crate::bands::{BandViewMaker, rotate};
use crate::blur::Blur;
use crate::color;
use crate::multicrop::{Geometry, ViewSpec};
use crate::resize::BoxResizer;
use crate::seed::Operation;
use crate::solarize::solarize;
use crate::stats::{Clock, Stage, StageTimes};
use crate::{AugmentError, Image, MultiCrop, Planes, Rgb8, SampleKey};

/// Classes of the pixels of an image's views, one buffer per group: `[n_views, size, size]`, with
/// [`IGNORED_CLASS`](crate::IGNORED_CLASS) for pixels that do not count.
pub type ViewMasks = Vec<Vec<u8>>;

/// The views of one image, ready for the network.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Views {
    /// One buffer per group: `[n_views, C, size, size]`, as bytes or as values of several bytes,
    /// the lowest first.
    pub groups: Vec<Vec<u8>>,
    /// Classes of the pixels of the views; empty unless they are made for a method that learns from
    /// masks.
    pub masks: ViewMasks,
}

/// Maker of views, with the scratch memory of one thread.
#[derive(Default)]
pub struct ViewMaker {
    resizer: BoxResizer,
    blur: Blur,
    view: Planes,
    /// Scratch memory of [`rotate`].
    rotated: Vec<u8>,
    bands: BandViewMaker,
}

impl ViewMaker {
    /// Makes all views of `image` for `key`.
    ///
    /// # Errors
    /// [`AugmentError::Empty`] for an image without pixels.
    pub fn make(
        &mut self,
        image: &Image,
        multicrop: &MultiCrop,
        key: SampleKey,
    ) -> Result<Views, AugmentError> {
        let mut views = Views::default();
        self.make_into(image, multicrop, key, &mut views, &mut StageTimes::default())?;
        Ok(views)
    }

    /// Makes views like [`ViewMaker::make`], into existing memory, and adds to `times`.
    ///
    /// # Errors
    /// As [`ViewMaker::make`].
    pub fn make_into(
        &mut self,
        image: &Image,
        multicrop: &MultiCrop,
        key: SampleKey,
        views: &mut Views,
        times: &mut StageTimes,
    ) -> Result<(), AugmentError> {
        if image.size_px().contains(&0) {
            return Err(AugmentError::Empty);
        }
        views.groups.resize_with(multicrop.groups().len(), Vec::new);
        views.groups.iter_mut().for_each(Vec::clear);
        let mut specs = multicrop.views();
        for (buffer, group) in views.groups.iter_mut().zip(multicrop.groups()) {
            for spec in specs.by_ref().take(group.n_views) {
                let mut clock = Clock::start(times);
                match image {
                    Image::Rgb(image) => {
                        self.augment(image, spec, key, &mut clock)?;
                        buffer.extend_from_slice(&self.view.data);
                    }
                    Image::Bands(image) => self.bands.augment(image, spec, key, buffer, &mut clock)?,
                }
                clock.lap(Stage::Other);
            }
        }
        Ok(())
    }

    /// Makes the view `spec` of `image` in `self.view`.
    fn augment(
        &mut self,
        image: &Rgb8,
        spec: ViewSpec<'_>,
        key: SampleKey,
        clock: &mut Clock<'_>,
    ) -> Result<(), AugmentError> {
        let crop = spec.crop;
        let Geometry { region, is_flipped, n_quarters } =
            spec.geometry(key, [image.width_px, image.height_px]);
        clock.lap(Stage::Other);
        self.resizer.resize(image, region, [crop.size_px; 2], crop.interpolation, &mut self.view)?;
        clock.lap(Stage::Resize);
        if is_flipped {
            self.view.flip();
        }
        if let Some(n_quarters) = n_quarters {
            for plane in self.view.channels_mut() {
                rotate(plane, crop.size_px as usize, n_quarters, &mut self.rotated);
            }
        }
        clock.lap(Stage::Other);
        let mut rng = spec.rng(key, Operation::Jitter);
        if rng.chance(crop.jitter.p) {
            color::jitter(&mut self.view, &crop.jitter.draw(&mut rng));
        }
        if spec.rng(key, Operation::Gray).chance(crop.gray_p) {
            color::grayscale(&mut self.view);
        }
        clock.lap(Stage::Color);
        let mut rng = spec.rng(key, Operation::Blur);
        if rng.chance(crop.blur_p) {
            let sigma = rng.between(crop.blur_sigma[0], crop.blur_sigma[1]);
            match crop.blur_taps {
                0 => self.blur.pillow(&mut self.view, sigma as f32),
                n_taps => self.blur.torchvision(&mut self.view, n_taps, sigma as f32),
            }
        }
        clock.lap(Stage::Blur);
        if spec.rng(key, Operation::Solarize).chance(crop.solarize_p) {
            solarize(&mut self.view);
        }
        let mut rng = spec.rng(key, Operation::ChannelDrop);
        crop.drop_channels(&mut rng, self.view.channels_mut().into_iter());
        if let Some(erase) = &crop.erase {
            let mut rng = spec.rng(key, Operation::Erase);
            if let Some(area) = erase.draw(&mut rng, crop.size_px) {
                for plane in self.view.channels_mut() {
                    for value in area.rows_mut(plane, crop.size_px as usize).flatten() {
                        // `as` clamps to the range of the type.
                        *value = erase.noise(&mut rng, 255.0).round_ties_even() as u8;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlurRule, Erase};
    use proptest::prelude::*;

    fn noise(width_px: u32, height_px: u32) -> Image {
        let data =
            (0..3 * width_px * height_px).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        Rgb8::new(width_px, height_px, data).into()
    }

    proptest! {
        #[test]
        fn views_are_a_pure_function_of_the_key(sample: u64, epoch in 0u64..9, w in 1u32..60, h in 1u32..60) {
            let image = noise(w, h);
            let multicrop = MultiCrop::dino(16, 8, 3);
            let key = SampleKey { seed: 5, epoch, sample, attempt: 0 };
            let fresh = ViewMaker::default().make(&image, &multicrop, key).expect("views");
            let mut used = ViewMaker::default();
            used.make(&noise(31, 17), &multicrop, SampleKey { sample: sample ^ 1, ..key }).expect("views");
            prop_assert_eq!(&used.make(&image, &multicrop, key).expect("views"), &fresh);
            let lengths: Vec<usize> = fresh.groups.iter().map(Vec::len).collect();
            prop_assert_eq!(lengths, vec![2 * 3 * 256, 3 * 3 * 64]);
        }
    }

    /// A change of these bytes, which are the same with SSE2, AVX2 and AVX-512, changes every run.
    /// The image has noise and flat parts, and the views use every operation.
    #[test]
    fn the_bytes_of_views_are_pinned() {
        let Image::Rgb(mut image) = noise(300, 200) else { panic!("8-bit RGB") };
        image.data[..3 * 300 * 60].fill(77);
        let image = image.into();
        let mut multicrop = MultiCrop::dinov2(112, 48, 8, BlurRule::Paper);
        multicrop.crops[1].solarize_p = 1.0;
        let mut maker = ViewMaker::default();
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for sample in 0..8 {
            let key = SampleKey { seed: 11, epoch: 1, sample, attempt: 0 };
            let views = maker.make(&image, &multicrop, key).expect("views");
            for byte in views.groups.concat() {
                // FNV-1a
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
        assert_eq!(hash, PINNED, "{hash:#x}");
    }

    const PINNED: u64 = 0xb0c1_91cc_410a_792a;

    #[test]
    fn views_of_an_image_differ_from_one_another() {
        let multicrop = MultiCrop::dino(16, 8, 2);
        let key = SampleKey { seed: 5, epoch: 0, sample: 0, attempt: 0 };
        let views = ViewMaker::default().make(&noise(50, 40), &multicrop, key).expect("views");
        let (first, second) = views.groups[0].split_at(3 * 256);
        assert_ne!(first, second);
    }

    fn groups(multicrop: &MultiCrop, sample: u64) -> Vec<Vec<u8>> {
        let key = SampleKey { seed: 5, epoch: 0, sample, attempt: 0 };
        ViewMaker::default().make(&noise(90, 70), multicrop, key).expect("views").groups
    }

    fn mean(bytes: &[u8]) -> f64 {
        bytes.iter().map(|byte| f64::from(*byte)).sum::<f64>() / bytes.len() as f64
    }

    /// One box of a view becomes noise, in all channels, and the rest of the view stays as it is.
    #[test]
    fn a_box_of_a_view_is_erased() {
        let plain = MultiCrop::single(32);
        let mut erasing = plain.clone();
        erasing.crops[0].erase = Some(Erase { p: 0.5, area: [0.1, 0.3], noise_mean: 0.45, noise_std: 0.225 });
        let mut n_erased = 0;
        for sample in 0..40 {
            let before = groups(&plain, sample).concat();
            let after = groups(&erasing, sample).concat();
            let changed: Vec<usize> = (0..3 * 1024).filter(|i| before[*i] != after[*i]).collect();
            if changed.is_empty() {
                continue;
            }
            n_erased += 1;
            let rows = changed.iter().map(|i| i % 1024 / 32);
            let columns = changed.iter().map(|i| i % 32);
            let height = rows.clone().max().expect("a row") - rows.min().expect("a row") + 1;
            let width = columns.clone().max().expect("a column") - columns.min().expect("a column") + 1;
            let area = height * width;
            assert!((85..=330).contains(&area), "{height} x {width}");
            // Noise has the value of the pixel before by chance.
            assert!(changed.len() > 3 * area * 9 / 10, "{} of {area}", changed.len());
        }
        assert!((10..=30).contains(&n_erased), "{n_erased} of 40");
    }

    /// A crop with `like` shows the same part of the image, with the same flip; without color
    /// operations and at the same size it is the same view.
    #[test]
    fn a_crop_like_another_one_has_its_box_and_flip() {
        let mut multicrop = MultiCrop::dino(32, 16, 0);
        for crop in &mut multicrop.crops {
            crop.jitter.p = 0.0;
            crop.gray_p = 0.0;
            crop.blur_p = 0.0;
            crop.solarize_p = 0.0;
        }
        multicrop.crops[1].own_statistics = true;
        multicrop.crops[1].like = Some(0);
        multicrop.validate().expect("a valid crop");
        for sample in 0..20 {
            let groups = groups(&multicrop, sample);
            assert_eq!(groups[0], groups[1]);
        }
        // Another size of the same part of the image: the means are close.
        multicrop.crops[1].size_px = 16;
        for sample in 0..20 {
            let groups = groups(&multicrop, sample);
            assert!((mean(&groups[0]) - mean(&groups[1])).abs() < 3.0);
        }
        multicrop.crops[1].like = Some(1);
        let error = multicrop.validate().expect_err("itself");
        assert!(matches!(&error, AugmentError::Recipe { field, .. } if field == "crops[1].like"), "{error}");
    }
}
