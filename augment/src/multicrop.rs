//! Specification of the views that a method takes of an image.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::coefficients::Interpolation;
use crate::color::Jitter;
use crate::crop::{CropBox, VIEW_RATIO, random_resized_crop};
use crate::erase::Erase;
use crate::format::PixelFormat;
use crate::seed::Operation;
use crate::{AugmentError, SampleKey, ViewRng};

/// Specification of `count` views that are made alike, in the form in which a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CropSpec {
    /// Number of views of this kind.
    pub count: usize,
    /// Side of the square view, in pixels.
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
    /// Range of the standard deviation of the blur, in pixels of the view; Pillow calls it the
    /// radius.
    pub blur_sigma: [f64; 2],
    /// Number of taps of the blur: odd for torchvision's kernel (9 in DINOv2), 0 for Pillow's three
    /// box blurs (DINO, SwAV, SimCLR).
    #[serde(default)]
    pub blur_taps: usize,
    /// Probability of solarizing.
    pub solarize_p: f32,
    /// Probability of a rotation by one, two or three quarters of a turn, each as likely as the
    /// others; 0 by default.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rotate_p: f32,
    /// Probability with which each channel is set to 0 (at least one always remains); 0 by default.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub channel_drop_p: f32,
    /// Random erasing; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub erase: Option<Erase>,
    /// Index of an earlier crop with the same number of views, whose boxes and flips this crop
    /// shares, at its own size and with its own colors. The `scale` and `flip_p` of the earlier
    /// crop apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub like: Option<usize>,
    /// Whether each view has its own batch statistics, not shared with other views of its size, as
    /// in MoCo v3.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own_statistics: bool,
}

/// Specification of all views of an image. Consecutive views of equal size form a group, which
/// passes through the network as one tensor, unless they have statistics of their own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct MultiCrop {
    /// Crops, in the order of the views.
    pub crops: Vec<CropSpec>,
}

/// Source of the blur probabilities of DINOv2's views.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BlurRule {
    /// The paper's probabilities: 1.0 and 0.1 for the global views, 0.5 for the local ones.
    #[default]
    Paper,
    /// Probabilities that the released DINOv2 and DINOv3 models were trained with, whose code
    /// passes `1 - p`: 0.0, 0.9 and 0.5.
    Released,
}

/// Size and number of the views of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupSpec {
    /// Side of a view, in pixels.
    pub size_px: u32,
    /// Number of views per image.
    pub n_views: usize,
}

/// A view: its crop, and the view whose box, flip and rotation it shares.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ViewSpec<'a> {
    /// Crop of the view, with its size, colors and blur.
    pub(crate) crop: &'a CropSpec,
    /// Index of the view.
    pub(crate) index: u32,
    /// Crop that determines the box, the flip and the rotation.
    pub(crate) geometry_crop: &'a CropSpec,
    /// Index of the view whose box, flip and rotation this view shares: its own index, unless its
    /// crop is like another one.
    pub(crate) geometry_view: u32,
}

/// Part of an image that a view shows, and how it is turned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Box of the image.
    pub(crate) region: CropBox,
    /// Whether the resized box is flipped.
    pub(crate) is_flipped: bool,
    /// Number of quarters by which it is rotated after that; `None` if it is not.
    pub(crate) n_quarters: Option<u32>,
}

/// Maximum number of views of one kind.
const MAX_VIEWS: usize = 1024;

fn is_zero(p: &f32) -> bool {
    *p == 0.0
}

impl CropSpec {
    /// Draws the number of quarters by which a view is rotated; `None` if it is not.
    fn n_quarters(&self, rng: &mut ViewRng) -> Option<u32> {
        (self.rotate_p > 0.0 && rng.chance(self.rotate_p)).then(|| 1 + rng.below(3))
    }

    /// Sets each channel of a view to 0 by chance, except one.
    pub(crate) fn drop_channels<'a, T: Default + Clone + 'a>(
        &self,
        rng: &mut ViewRng,
        channels: impl ExactSizeIterator<Item = &'a mut [T]>,
    ) {
        if self.channel_drop_p == 0.0 {
            return;
        }
        let kept = rng.below(channels.len() as u32) as usize;
        for (index, channel) in channels.enumerate() {
            if rng.chance(self.channel_drop_p) && index != kept {
                channel.fill(T::default());
            }
        }
    }

    /// Returns the name of the first operation of the crop that exists for 8-bit RGB only; `None`
    /// if it has none.
    fn color_operation(&self) -> Option<&'static str> {
        let jitter = &self.jitter;
        if jitter.p > 0.0 && jitter.saturation > 0.0 {
            Some("jitter.saturation")
        } else if jitter.p > 0.0 && jitter.hue > 0.0 {
            Some("jitter.hue")
        } else if self.gray_p > 0.0 {
            Some("gray_p")
        } else if self.solarize_p > 0.0 {
            Some("solarize_p")
        } else {
            None
        }
    }

    /// Returns the crop without changes of color, blur and random erasing.
    fn undistorted(&self) -> Self {
        let jitter = Jitter { brightness: 0.0, contrast: 0.0, saturation: 0.0, hue: 0.0, p: 0.0 };
        Self {
            jitter,
            gray_p: 0.0,
            blur_p: 0.0,
            solarize_p: 0.0,
            channel_drop_p: 0.0,
            erase: None,
            ..self.clone()
        }
    }
}

impl ViewSpec<'_> {
    /// Creates the stream of an operation that only this view has.
    pub(crate) fn rng(&self, key: SampleKey, operation: Operation) -> ViewRng {
        ViewRng::new(key, self.index, operation)
    }

    /// Creates the stream of the box, the flip or the rotation.
    fn geometry_rng(&self, key: SampleKey, operation: Operation) -> ViewRng {
        ViewRng::new(key, self.geometry_view, operation)
    }

    /// Draws the part that the view shows of an image of this width and height, and how it is
    /// turned.
    pub(crate) fn geometry(&self, key: SampleKey, [width_px, height_px]: [u32; 2]) -> Geometry {
        let crop = self.geometry_crop;
        let mut rng = self.geometry_rng(key, Operation::Crop);
        Geometry {
            region: random_resized_crop(&mut rng, width_px, height_px, crop.scale, VIEW_RATIO),
            is_flipped: self.geometry_rng(key, Operation::Flip).chance(crop.flip_p),
            n_quarters: crop.n_quarters(&mut self.geometry_rng(key, Operation::Rotate)),
        }
    }
}

impl MultiCrop {
    /// Creates DINO's multi-crop (Caron et al. 2021, appendix): two global views and `n_local`
    /// local ones.
    pub fn dino(global_px: u32, local_px: u32, n_local: usize) -> Self {
        Self::dino_family([0.4, 1.0], [0.05, 0.4], global_px, local_px, n_local)
    }

    /// Creates DINOv2's multi-crop (Oquab et al. 2023, table 16): DINO's with other scales and
    /// torchvision's blur.
    pub fn dinov2(global_px: u32, local_px: u32, n_local: usize, blur: BlurRule) -> Self {
        let mut multicrop = Self::dino_family([0.32, 1.0], [0.05, 0.32], global_px, local_px, n_local);
        for crop in &mut multicrop.crops {
            crop.blur_taps = 9;
            if blur == BlurRule::Released {
                crop.blur_p = 1.0 - crop.blur_p;
            }
        }
        multicrop
    }

    /// Creates one random-resized crop with a flip, as in supervised training.
    pub fn single(size_px: u32) -> Self {
        let multicrop = Self::dino_family([0.08, 1.0], [0.05, 0.4], size_px, size_px, 0);
        Self { crops: vec![multicrop.crops[0].undistorted()] }
    }

    /// Adds repeats of the views of the crops numbered `crops`, in size `size_px` and without
    /// changes of color and blur.
    pub fn with_undistorted(mut self, crops: impl IntoIterator<Item = usize>, size_px: u32) -> Self {
        for crop in crops {
            let repeat = CropSpec { size_px, like: Some(crop), ..self.crops[crop].undistorted() };
            self.crops.push(repeat);
        }
        self
    }

    /// Changes the views to those of images of any number of channels: removes the operations that
    /// exist for 8-bit RGB only, and sets the probabilities of rotations and of dropped channels
    /// where a crop has none. A crop that is like another one drops no channels.
    pub fn into_multichannel(mut self, rotate_p: f32, channel_drop_p: f32) -> Self {
        for crop in &mut self.crops {
            crop.jitter.saturation = 0.0;
            crop.jitter.hue = 0.0;
            crop.gray_p = 0.0;
            crop.solarize_p = 0.0;
            if crop.rotate_p == 0.0 {
                crop.rotate_p = rotate_p;
            }
            if crop.channel_drop_p == 0.0 && crop.like.is_none() {
                crop.channel_drop_p = channel_drop_p;
            }
        }
        self
    }

    /// Checks that all operations of the views exist for images of `format`.
    ///
    /// # Errors
    /// [`AugmentError::Recipe`], which names the first operation that exists for 8-bit RGB only.
    pub fn check_format(&self, format: PixelFormat) -> Result<(), AugmentError> {
        if format.is_rgb8() {
            return Ok(());
        }
        for (i, crop) in self.crops.iter().enumerate() {
            if let Some(name) = crop.color_operation() {
                return Err(AugmentError::Recipe {
                    field: format!("crops[{i}].{name}"),
                    reason: format!("is only supported for 8-bit RGB, not for {format}"),
                });
            }
        }
        Ok(())
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
            blur_taps: 0,
            solarize_p: 0.0,
            rotate_p: 0.0,
            channel_drop_p: 0.0,
            erase: None,
            like: None,
            own_statistics: false,
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
    /// [`AugmentError::Recipe`], which names the value.
    pub fn validate(&self) -> Result<(), AugmentError> {
        if self.crops.is_empty() {
            return Err(AugmentError::Recipe {
                field: "crops".into(),
                reason: "at least one is needed".into(),
            });
        }
        for (i, crop) in self.crops.iter().enumerate() {
            if !(1..=MAX_VIEWS).contains(&crop.count) {
                return Err(invalid(i, "count", "must lie in 1..=1024"));
            }
            if crop.size_px == 0 || crop.size_px > 4096 {
                return Err(invalid(i, "size_px", "must lie in 1..=4096"));
            }
            if !(crop.scale[0] > 0.0 && crop.scale[0] <= crop.scale[1] && crop.scale[1] <= 1.0) {
                return Err(invalid(i, "scale", "must be [low, high] with 0 < low <= high <= 1"));
            }
            let [low, high] = crop.blur_sigma;
            if !(low > 0.0 && low <= high && high <= 100.0) {
                return Err(invalid(i, "blur_sigma", "must be [low, high] with 0 < low <= high <= 100"));
            }
            if crop.blur_taps > 0 && crop.blur_taps.is_multiple_of(2) || crop.blur_taps > 99 {
                let reason = "must be 0 for Pillow's blur, or an odd number up to 99";
                return Err(invalid(i, "blur_taps", reason));
            }
            let strengths = [crop.jitter.brightness, crop.jitter.contrast, crop.jitter.saturation];
            let strengths_are_valid = strengths.iter().all(|strength| (0.0..=100.0).contains(strength));
            if !strengths_are_valid || !(0.0..=0.5).contains(&crop.jitter.hue) {
                return Err(invalid(i, "jitter", "strengths must lie in 0..=100, and hue in 0..=0.5"));
            }
            if let Some(like) = crop.like {
                let is_valid =
                    like < i && self.crops[like].count == crop.count && self.crops[like].like.is_none();
                if !is_valid {
                    let reason =
                        "must be the index of an earlier crop with the same count and without `like`";
                    return Err(invalid(i, "like", reason));
                }
            }
            let CropSpec { flip_p, gray_p, blur_p, solarize_p, rotate_p, channel_drop_p, .. } = *crop;
            let chances = [flip_p, gray_p, blur_p, solarize_p, rotate_p, channel_drop_p, crop.jitter.p];
            if !chances.iter().all(|p| (0.0..=1.0).contains(p)) {
                return Err(invalid(i, "*_p", "probabilities must lie in 0..=1"));
            }
            if let Some(erase) = &crop.erase {
                erase.check().map_err(|(field, reason)| invalid(i, field, reason))?;
            }
        }
        Ok(())
    }

    /// Creates MoCo v3's views (Chen, Xie and He 2021): two of `size_px`, areas in `scale`,
    /// separate batch statistics.
    pub fn moco_v3(size_px: u32, scale: [f64; 2]) -> Self {
        let mut multicrop = Self::dino_family(scale, scale, size_px, size_px, 0);
        for crop in &mut multicrop.crops {
            crop.interpolation = Interpolation::Bilinear;
            crop.own_statistics = true;
        }
        multicrop
    }

    /// Returns all views in order.
    pub(crate) fn views(&self) -> impl Iterator<Item = ViewSpec<'_>> {
        self.crops.iter().enumerate().flat_map(move |(index, crop)| {
            let geometry_index = crop.like.unwrap_or(index);
            let first = self.first_view(index);
            let geometry_first = self.first_view(geometry_index);
            (0..crop.count as u32).map(move |i| ViewSpec {
                crop,
                index: first + i,
                geometry_crop: &self.crops[geometry_index],
                geometry_view: geometry_first + i,
            })
        })
    }

    /// Returns the index of the first view of crop `index`.
    fn first_view(&self, index: usize) -> u32 {
        self.crops[..index].iter().map(|crop| crop.count as u32).sum()
    }

    /// Returns the number of views of an image.
    pub fn n_views(&self) -> usize {
        self.crops.iter().map(|crop| crop.count).sum()
    }

    /// Returns the groups, in the order of [`crate::Views::groups`].
    pub fn groups(&self) -> Vec<GroupSpec> {
        self.grouped().0
    }

    /// Returns the same views in other sizes, one for each group.
    pub(crate) fn resized(&self, sizes_px: &[u32]) -> Self {
        let (_, first_groups) = self.grouped();
        let mut resized = self.clone();
        for (crop, group) in resized.crops.iter_mut().zip(first_groups) {
            crop.size_px = sizes_px[group];
        }
        resized
    }

    /// Returns the groups, and for each crop the index of the group that its first view belongs to.
    fn grouped(&self) -> (Vec<GroupSpec>, Vec<usize>) {
        let mut groups = Vec::<GroupSpec>::new();
        let mut first_groups = Vec::new();
        // The last group accepts no further views if its views have their own statistics.
        let mut is_open = false;
        for crop in &self.crops {
            let n_groups = groups.len();
            match groups.last_mut() {
                _ if crop.own_statistics => {
                    let view = GroupSpec { size_px: crop.size_px, n_views: 1 };
                    groups.extend(std::iter::repeat_n(view, crop.count));
                    first_groups.push(n_groups);
                }
                Some(group) if is_open && group.size_px == crop.size_px => {
                    group.n_views += crop.count;
                    first_groups.push(n_groups - 1);
                }
                _ => {
                    groups.push(GroupSpec { size_px: crop.size_px, n_views: crop.count });
                    first_groups.push(n_groups);
                }
            }
            is_open = !crop.own_statistics;
        }
        (groups, first_groups)
    }
}

/// Returns the error for an invalid value of crop `index`.
fn invalid(index: usize, field: &str, reason: &str) -> AugmentError {
    AugmentError::Recipe { field: format!("crops[{index}].{field}"), reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blur_probabilities(rule: BlurRule) -> Vec<f32> {
        MultiCrop::dinov2(224, 98, 8, rule).crops.iter().map(|crop| crop.blur_p).collect()
    }

    /// The code of the released models passes on `1 - p` for every view.
    #[test]
    fn released_blur_probabilities_are_one_minus_those_of_the_paper() {
        assert_eq!(blur_probabilities(BlurRule::Paper), [1.0, 0.1, 0.5]);
        assert_eq!(blur_probabilities(BlurRule::Released), [0.0, 0.9, 0.5]);
    }

    fn n_views(crops: &MultiCrop) -> Vec<usize> {
        crops.groups().iter().map(|group| group.n_views).collect()
    }

    #[test]
    fn consecutive_views_of_equal_size_form_a_group_unless_they_have_own_statistics() {
        let mut crops = MultiCrop::dino(16, 8, 3);
        assert_eq!(n_views(&crops), [2, 3]);
        crops.crops[2].own_statistics = true;
        assert_eq!(n_views(&crops), [2, 1, 1, 1]);
        crops.crops[0].own_statistics = true;
        assert_eq!(n_views(&crops), [1, 1, 1, 1, 1]);
        assert_eq!(n_views(&MultiCrop::moco_v3(16, [0.2, 1.0])), [1, 1]);
    }

    #[test]
    fn error_names_the_value_out_of_range() {
        let mut multicrop = MultiCrop::dino(16, 8, 2);
        multicrop.crops[2].scale = [0.5, 1.5];
        let error = multicrop.validate().expect_err("scale");
        assert!(matches!(&error, AugmentError::Recipe { field, .. } if field == "crops[2].scale"), "{error}");
        let mut multicrop = MultiCrop::single(16);
        multicrop.crops[0].erase =
            Some(Erase { p: 0.25, area: [0.5, 0.1], noise_mean: 0.45, noise_std: 0.225 });
        let error = multicrop.validate().expect_err("area");
        let named = matches!(&error, AugmentError::Recipe { field, .. } if field == "crops[0].erase.area");
        assert!(named, "{error}");
    }
}
