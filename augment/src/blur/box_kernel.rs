//! Box kernel, several passes of which approximate a Gaussian.

/// Number of box blurs per direction.
pub(super) const N_PASSES: usize = 3;

/// A box of fractional length.
#[derive(Debug, Clone, Copy)]
pub(super) struct BoxKernel {
    /// Number l of whole pixels on either side of the center.
    whole: usize,
    /// Weight w of the 2l + 1 pixels in the middle.
    pub(super) weight: u32,
    /// Weight f of the two pixels at the ends.
    pub(super) end_weight: u32,
}

impl BoxKernel {
    /// Returns the box whose three passes approximate a Gaussian of deviation `radius`, rounded as
    /// Pillow's C types do.
    pub(super) fn of_gaussian(radius: f32) -> Self {
        let variance = radius * radius / N_PASSES as f32;
        let length = (12.0 * f64::from(variance) + 1.0).sqrt() as f32;
        let whole = ((f64::from(length) - 1.0) / 2.0).floor() as f32;
        let fraction = (2.0 * whole + 1.0) * (whole * (whole + 1.0) - 3.0 * variance);
        let fraction = fraction / (6.0 * (variance - (whole + 1.0) * (whole + 1.0)));
        let box_radius = whole + fraction;
        let whole = box_radius as usize;
        let weight = ((1 << 24) as f32 / (box_radius * 2.0 + 1.0)) as u32;
        Self { whole, weight, end_weight: ((1 << 24) - (2 * whole as u32 + 1) * weight) / 2 }
    }

    /// Returns the number of pixels on either side that a pass reads.
    pub(super) fn reach(self) -> usize {
        self.whole + 1
    }

    /// Returns the number of pixels that a pass reads for each pixel that it writes.
    pub(super) fn n_taps(self) -> usize {
        2 * self.reach() + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_of_known_gaussians() {
        let kernel = |radius: f32| {
            let kernel = BoxKernel::of_gaussian(radius);
            let length = f64::from(1 << 24) / f64::from(kernel.weight);
            (kernel.whole, (length * 100.0).round() / 100.0)
        };
        // Three boxes of length d have the variance (d² - 1) / 4: 2 for a length of 3, and 6 for 5.
        assert_eq!(kernel(2f32.sqrt()), (1, 3.0));
        assert_eq!(kernel(0.1).0, 0);
        assert_eq!(kernel(2.0).0, 1);
        assert_eq!(kernel(6f32.sqrt()), (2, 5.0));
    }
}
