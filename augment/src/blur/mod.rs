//! Blur, as Pillow or as torchvision does it.

mod box_kernel;
mod box_pass;
mod gaussian;
mod pillow;

use crate::Planes;

/// Blurs images, with memory that is used again.
#[derive(Debug, Default)]
pub struct Blur {
    pillow: pillow::BoxBlur,
    gaussian: gaussian::GaussianBlur,
}

impl Blur {
    /// Blurs as Pillow's `GaussianBlur(radius)` does, bit for bit: three box blurs along rows, three along columns. This is the
    /// blur of DINO, SwAV, SimCLR and MoCo.
    pub fn pillow(&mut self, image: &mut Planes, radius: f32) {
        self.pillow.apply(image, radius);
    }

    /// Blurs as torchvision's `gaussian_blur` with `n_taps` taps a side does: the blur of DINOv2 and LeJEPA. A byte differs by
    /// one level where the sums of f32 lie so near a half that their order decides.
    ///
    /// # Panics
    /// If `n_taps` is even.
    pub fn torchvision(&mut self, image: &mut Planes, n_taps: usize, sigma: f32) {
        self.gaussian.apply(image, n_taps, sigma);
    }
}
