//! Box kernel, several passes of which approximate a Gaussian.

/// Number of box blurs per direction.
pub(super) const N_PASSES: usize = 3;

/// A box of fractional length.
#[derive(Debug, Clone, Copy)]
pub(super) struct BoxKernel {
    /// Number l of pixels with full weight on either side of the center.
    radius_px: usize,
    /// Weight w of the 2l + 1 pixels in the middle.
    pub(super) weight: u32,
    /// Weight f of the two pixels at the ends.
    pub(super) end_weight: u32,
}

impl BoxKernel {
    /// Returns the box whose three passes approximate a Gaussian of deviation `radius`, rounded as
    /// Pillow's C types do.
    pub(super) fn from_gaussian(radius: f32) -> Self {
        let variance = radius * radius / N_PASSES as f32;
        let length = (12.0 * f64::from(variance) + 1.0).sqrt() as f32;
        let l = ((f64::from(length) - 1.0) / 2.0).floor() as f32;
        let fraction = (2.0 * l + 1.0) * (l * (l + 1.0) - 3.0 * variance);
        let fraction = fraction / (6.0 * (variance - (l + 1.0) * (l + 1.0)));
        let box_radius = l + fraction;
        let radius_px = box_radius as usize;
        let weight = ((1 << 24) as f32 / (box_radius * 2.0 + 1.0)) as u32;
        let end_weight = ((1 << 24) - (2 * radius_px as u32 + 1) * weight) / 2;
        Self { radius_px, weight, end_weight }
    }

    /// Returns the number of pixels on either side that a pass reads.
    pub(super) fn reach(self) -> usize {
        self.radius_px + 1
    }

    /// Returns the number of pixels that a pass reads for each pixel that it writes.
    pub(super) fn n_taps(self) -> usize {
        2 * self.reach() + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the length of a box, rounded to hundredths.
    fn length(kernel: BoxKernel) -> f64 {
        let length = f64::from(1 << 24) / f64::from(kernel.weight);
        (length * 100.0).round() / 100.0
    }

    #[test]
    fn boxes_have_the_variance_of_the_gaussian() {
        // Three boxes of length d have the variance (d² - 1) / 4: 2 for a length of 3, and 6 for 5.
        let variance_2 = BoxKernel::from_gaussian(2f32.sqrt());
        assert_eq!((variance_2.radius_px, length(variance_2)), (1, 3.0));
        let variance_6 = BoxKernel::from_gaussian(6f32.sqrt());
        assert_eq!((variance_6.radius_px, length(variance_6)), (2, 5.0));
        assert_eq!(BoxKernel::from_gaussian(0.1).radius_px, 0);
        assert_eq!(BoxKernel::from_gaussian(2.0).radius_px, 1);
    }
}
