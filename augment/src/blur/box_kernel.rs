//! The box whose passes are nearly a Gaussian.

/// Box blurs of a direction.
pub(super) const N_PASSES: usize = 3;

/// A box of fractional length.
#[derive(Debug, Clone, Copy)]
pub(super) struct BoxKernel {
    /// l: whole pixels to either side of the center.
    whole: usize,
    /// w, of the 2l + 1 pixels in the middle.
    pub(super) weight: u32,
    /// f, of the two pixels at the ends.
    pub(super) end_weight: u32,
}

impl BoxKernel {
    /// The box whose three passes are a Gaussian of deviation `radius`. Types are those of Pillow's C, so that it rounds alike.
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

    /// Pixels to either side that a pass reads.
    pub(super) fn reach(self) -> usize {
        self.whole + 1
    }

    /// Pixels that a pass reads for one that it writes.
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
        // Three boxes of length d have the variance (d² - 1) / 4: of 2 that of 0.75.
        assert_eq!(kernel(2f32.sqrt()), (1, 3.0));
        assert_eq!(kernel(0.1).0, 0);
        assert_eq!(kernel(2.0).0, 1);
        assert_eq!(kernel(6f32.sqrt()), (2, 5.0));
    }
}
