//! Gaussian blurs of Pillow and of torchvision.

mod box_kernel;
mod box_pass;
pub(crate) mod gaussian;
mod pillow;

use crate::Planes;

/// Blurs images, with scratch memory that is reused.
#[derive(Debug, Default)]
pub struct Blur {
    pillow: pillow::BoxBlur,
    gaussian: gaussian::GaussianBlur,
}

impl Blur {
    /// Blurs like Pillow's `GaussianBlur(radius)`, bit for bit: three box blurs along rows, then
    /// three along columns. DINO, SwAV, SimCLR and MoCo use this blur.
    pub fn pillow(&mut self, image: &mut Planes, radius: f32) {
        self.pillow.apply(image, radius);
    }

    /// Blurs like torchvision's `gaussian_blur` with `n_taps` taps per axis, the blur of DINOv2 and
    /// LeJEPA. A byte may differ by one level where its f32 sum is so close to a half that the
    /// order of summation decides.
    ///
    /// # Panics
    /// Panics if `n_taps` is even.
    pub fn torchvision(&mut self, image: &mut Planes, n_taps: usize, sigma: f32) {
        self.gaussian.apply(image, n_taps, sigma);
    }
}
