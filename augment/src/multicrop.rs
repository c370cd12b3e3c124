//! Which views a method wants of an image, and how they are made.
//!
//! ```text
//! view = solarize(p) ∘ blur(p, σ) ∘ gray(p) ∘ jitter(p) ∘ flip(p) ∘ resize ∘ random box
//! ```

use serde::{Deserialize, Serialize};

use crate::blur::GaussianBlur;
use crate::color::{self, Jitter};
use crate::crop::random_resized_crop;
use crate::resize::{BoxResizer, Interpolation};
use crate::seed::Operation;
use crate::solarize::solarize;
use crate::{AugmentError, Rgb8, SampleKey, ViewRng};

/// Aspect ratios of torchvision's random-resized crop.
const RATIO: [f64; 2] = [3.0 / 4.0, 4.0 / 3.0];

/// `count` views that are made alike. This is the form in which a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CropSpec {
    /// Views of this kind.
    pub count: usize,
    /// Side of the square view.
    pub size_px: u32,
    /// Smallest and largest share of the image's area.
    pub scale: [f64; 2],
    /// Interpolation of the resize.
    #[serde(default)]
    pub interpolation: Interpolation,
    /// Probability of a horizontal flip.
    pub flip_p: f32,
    /// Color jitter.
    pub jitter: Jitter,
    /// Probability of grayscale.
    pub gray_p: f32,
    /// Probability of Gaussian blur.
    pub blur_p: f32,
    /// Range of the blur's standard deviation, in pixels of the view.
    pub blur_sigma: [f64; 2],
    /// Probability of solarizing.
    pub solarize_p: f32,
}

/// All views of an image. Views of equal size that follow one another form a group, which goes
/// through the network as one tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MultiCrop {
    /// In the order of the views.
    pub crops: Vec<CropSpec>,
}

/// Size and number of the views of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupSpec {
    /// Side of a view.
    pub size_px: u32,
    /// Views an image.
    pub n_views: usize,
}

/// The views of one image, ready for the network.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Views {
    /// One buffer a group: `[n_views, 3, size, size]` bytes, planes R, G, B.
    pub groups: Vec<Vec<u8>>,
}

/// Makes views; owns the scratch memory of one thread.
#[derive(Default)]
pub struct ViewMaker {
    resizer: BoxResizer,
    blur: GaussianBlur,
    view: Rgb8,
}

impl MultiCrop {
    /// DINO's (Caron et al. 2021, appendix): two global views and `n_local` local ones.
    pub fn dino(global_px: u32, local_px: u32, n_local: usize) -> Self {
        Self::dino_family([0.4, 1.0], [0.05, 0.4], global_px, local_px, n_local)
    }

    /// DINOv2's (Oquab et al. 2023, table 16): as DINO's, with other scales.
    pub fn dinov2(global_px: u32, local_px: u32, n_local: usize) -> Self {
        Self::dino_family([0.32, 1.0], [0.05, 0.32], global_px, local_px, n_local)
    }

    fn dino_family(global: [f64; 2], local: [f64; 2], global_px: u32, local_px: u32, n_local: usize) -> Self {
        let base = CropSpec {
            count: 1,
            size_px: global_px,
            scale: global,
            interpolation: Interpolation::Bicubic,
            flip_p: 0.5,
            jitter: Jitter { brightness: 0.4, contrast: 0.4, saturation: 0.2, hue: 0.1, p: 0.8 },
            gray_p: 0.2,
            blur_p: 1.0,
            blur_sigma: [0.1, 2.0],
            solarize_p: 0.0,
        };
        let second = CropSpec { blur_p: 0.1, solarize_p: 0.2, ..base.clone() };
        let local = CropSpec { count: n_local, size_px: local_px, scale: local, blur_p: 0.5, ..base.clone() };
        let mut crops = vec![base, second];
        if n_local > 0 {
            crops.push(local);
        }
        Self { crops }
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`AugmentError::Recipe`] that names the value.
    pub fn validate(&self) -> Result<(), AugmentError> {
        let bad = |i: usize, field: &str, reason: &str| {
            Err(AugmentError::Recipe { field: format!("crops[{i}].{field}"), reason: reason.into() })
        };
        if self.crops.is_empty() {
            return Err(AugmentError::Recipe {
                field: "crops".into(),
                reason: "at least one is needed".into(),
            });
        }
        for (i, crop) in self.crops.iter().enumerate() {
            if crop.count == 0 {
                return bad(i, "count", "must be at least 1");
            }
            if crop.size_px == 0 || crop.size_px > 4096 {
                return bad(i, "size_px", "must lie in 1..=4096");
            }
            if !(crop.scale[0] > 0.0 && crop.scale[0] <= crop.scale[1] && crop.scale[1] <= 1.0) {
                return bad(i, "scale", "must be [low, high] with 0 < low <= high <= 1");
            }
            if !(crop.blur_sigma[0] > 0.0 && crop.blur_sigma[0] <= crop.blur_sigma[1]) {
                return bad(i, "blur_sigma", "must be [low, high] with 0 < low <= high");
            }
            let strengths = [crop.jitter.brightness, crop.jitter.contrast, crop.jitter.saturation];
            if !(strengths.iter().all(|x| *x >= 0.0) && (0.0..=0.5).contains(&crop.jitter.hue)) {
                return bad(i, "jitter", "strengths must not be negative, hue at most 0.5");
            }
            let chances = [crop.flip_p, crop.gray_p, crop.blur_p, crop.solarize_p, crop.jitter.p];
            if !chances.iter().all(|p| (0.0..=1.0).contains(p)) {
                return bad(i, "*_p", "probabilities lie in 0..=1");
            }
        }
        Ok(())
    }

    /// Views of an image.
    pub fn n_views(&self) -> usize {
        self.crops.iter().map(|crop| crop.count).sum()
    }

    /// The groups, in the order of [`Views::groups`].
    pub fn groups(&self) -> Vec<GroupSpec> {
        let mut groups: Vec<GroupSpec> = Vec::new();
        for crop in &self.crops {
            match groups.last_mut() {
                Some(group) if group.size_px == crop.size_px => group.n_views += crop.count,
                _ => groups.push(GroupSpec { size_px: crop.size_px, n_views: crop.count }),
            }
        }
        groups
    }
}

impl ViewMaker {
    /// All views of `image` under `key`.
    ///
    /// # Errors
    /// [`AugmentError::Empty`] for an image without pixels.
    pub fn make(
        &mut self,
        image: &Rgb8,
        multicrop: &MultiCrop,
        key: SampleKey,
    ) -> Result<Views, AugmentError> {
        if image.data.is_empty() {
            return Err(AugmentError::Empty);
        }
        let mut views = Views::default();
        let mut size_px = 0;
        let mut number = 0;
        for crop in &multicrop.crops {
            if crop.size_px != size_px || views.groups.is_empty() {
                views.groups.push(Vec::new());
                size_px = crop.size_px;
            }
            for _ in 0..crop.count {
                self.augment(image, crop, key, number)?;
                if let Some(group) = views.groups.last_mut() {
                    append_planes(&self.view, group);
                }
                number += 1;
            }
        }
        Ok(views)
    }

    /// View `number` of `image`, into `self.view`.
    fn augment(
        &mut self,
        image: &Rgb8,
        crop: &CropSpec,
        key: SampleKey,
        number: u32,
    ) -> Result<(), AugmentError> {
        let rng = |operation| ViewRng::new(key, number, operation);
        let region = random_resized_crop(
            &mut rng(Operation::Crop),
            image.width_px,
            image.height_px,
            crop.scale,
            RATIO,
        );
        let size = [crop.size_px; 2];
        self.resizer.resize(image, region, size, crop.interpolation, &mut self.view)?;
        if rng(Operation::Flip).chance(crop.flip_p) {
            flip(&mut self.view);
        }
        let mut draws = rng(Operation::Jitter);
        if draws.chance(crop.jitter.p) {
            color::jitter(&mut self.view, &crop.jitter.draw(&mut draws));
        }
        if rng(Operation::Gray).chance(crop.gray_p) {
            color::grayscale(&mut self.view);
        }
        let mut draws = rng(Operation::Blur);
        if draws.chance(crop.blur_p) {
            let sigma = draws.between(crop.blur_sigma[0], crop.blur_sigma[1]);
            self.blur.apply(&mut self.view, sigma as f32);
        }
        if rng(Operation::Solarize).chance(crop.solarize_p) {
            solarize(&mut self.view);
        }
        Ok(())
    }
}

/// Mirrors each row.
pub fn flip(image: &mut Rgb8) {
    let width = image.width_px as usize;
    for row in image.data.chunks_exact_mut(3 * width) {
        for x in 0..width / 2 {
            let (left, right) = row.split_at_mut(3 * (width - 1 - x));
            left[3 * x..3 * x + 3].swap_with_slice(&mut right[..3]);
        }
    }
}

/// Appends the R, G and B planes of `image`.
pub fn append_planes(image: &Rgb8, out: &mut Vec<u8>) {
    for channel in 0..3 {
        out.extend(image.data.chunks_exact(3).map(|pixel| pixel[channel]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn noise(width_px: u32, height_px: u32) -> Rgb8 {
        let data =
            (0..3 * width_px * height_px).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        Rgb8::new(width_px, height_px, data)
    }

    proptest! {
        #[test]
        fn views_are_a_pure_function_of_the_key(sample: u64, epoch in 0u64..9, w in 1u32..60, h in 1u32..60) {
            let (image, multicrop) = (noise(w, h), MultiCrop::dino(16, 8, 3));
            let key = SampleKey { seed: 5, epoch, sample, attempt: 0 };
            let fresh = ViewMaker::default().make(&image, &multicrop, key).expect("views");
            let mut used = ViewMaker::default();
            used.make(&noise(31, 17), &multicrop, SampleKey { sample: sample ^ 1, ..key }).expect("views");
            prop_assert_eq!(&used.make(&image, &multicrop, key).expect("views"), &fresh);
            let lengths: Vec<usize> = fresh.groups.iter().map(Vec::len).collect();
            prop_assert_eq!(lengths, vec![2 * 3 * 256, 3 * 3 * 64]);
        }
    }

    #[test]
    fn views_of_an_image_differ_from_one_another() {
        let multicrop = MultiCrop::dino(16, 8, 2);
        let key = SampleKey { seed: 5, epoch: 0, sample: 0, attempt: 0 };
        let views = ViewMaker::default().make(&noise(50, 40), &multicrop, key).expect("views");
        let (first, second) = views.groups[0].split_at(3 * 256);
        assert_ne!(first, second);
    }

    #[test]
    fn a_flip_twice_is_the_image() {
        let image = noise(7, 3);
        let mut flipped = image.clone();
        flip(&mut flipped);
        assert_eq!(flipped.data[..3], image.data[18..21]);
        flip(&mut flipped);
        assert_eq!(flipped, image);
    }

    #[test]
    fn a_value_out_of_range_is_named() {
        let mut multicrop = MultiCrop::dino(16, 8, 2);
        multicrop.crops[2].scale = [0.5, 1.5];
        let error = multicrop.validate().expect_err("scale").to_string();
        assert!(error.contains("crops[2].scale"), "{error}");
    }
}
