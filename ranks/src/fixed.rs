//! Sums that do not depend on their order, for the few numbers that ranks agree on in a step.
//!
//! A number is an integer multiple of 2⁻⁶⁴ in 128 bits, from 5·10⁻²⁰ to 9·10¹⁸, so that sums are
//! exact. Squared gradient norms and losses that matter lie well within this range. A number out of
//! range is counted and makes the sum NaN, as a NaN does.

/// Number of fractional bits.
const FRACTION_BITS: i32 = 64;

/// Bits of a limb, few enough that f64 sums of limbs over two million ranks are exact.
const LIMB_BITS: u32 = 32;

/// Number of f64 values that a [`FixedPoint`] is sent as.
pub const N_LIMBS: usize = 5;

/// A fixed-point number with exact sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FixedPoint {
    value: i128,
    /// Number of values out of range.
    n_out_of_range: u32,
}

impl FixedPoint {
    /// Converts `value`, rounded toward zero.
    pub fn new(value: f64) -> Self {
        let scaled = value * 2f64.powi(FRACTION_BITS);
        // Half of the range is left for sums.
        if scaled.is_finite() && scaled.abs() < 2f64.powi(126) {
            return Self { value: scaled as i128, n_out_of_range: 0 };
        }
        Self { value: 0, n_out_of_range: 1 }
    }

    /// Adds `value`.
    pub fn add(&mut self, value: f64) {
        *self = self.plus(Self::new(value));
    }

    /// Returns the sum of both.
    pub fn plus(self, other: Self) -> Self {
        let sum = self.value.checked_add(other.value);
        let n_out_of_range = self.n_out_of_range + other.n_out_of_range;
        match sum {
            Some(value) => Self { value, n_out_of_range },
            None => Self { value: self.value, n_out_of_range: n_out_of_range + 1 },
        }
    }

    /// Returns zero with this number's count of values out of range.
    pub fn zero_with_range_errors(self) -> Self {
        Self { value: 0, n_out_of_range: self.n_out_of_range }
    }

    /// Returns the values to send: their sums over ranks are the limbs of the sum.
    pub fn limbs(self) -> [f64; N_LIMBS] {
        // The highest limb is signed.
        let high = (self.value >> (3 * LIMB_BITS)) as f64;
        [self.limb(0), self.limb(1), self.limb(2), high, f64::from(self.n_out_of_range)]
    }

    /// Returns limb `i`, without a sign.
    fn limb(self, i: u32) -> f64 {
        ((self.value >> (i * LIMB_BITS)) & i128::from(u32::MAX)) as f64
    }

    /// Returns the number with these limbs; NaN if one of its addends was out of range.
    pub fn from_limbs(limbs: &[f64]) -> f64 {
        let (limbs, n_out_of_range) = limbs.split_at(N_LIMBS - 1);
        let mut value = 0i128;
        for (i, limb) in limbs.iter().enumerate() {
            let Some(part) = (*limb as i128).checked_mul(1 << (i as u32 * LIMB_BITS)) else {
                return f64::NAN;
            };
            let Some(sum) = value.checked_add(part) else { return f64::NAN };
            value = sum;
        }
        match n_out_of_range {
            [0.0] => value as f64 / 2f64.powi(FRACTION_BITS),
            _ => f64::NAN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sum_over_ranks(ranks: &[Vec<f64>]) -> f64 {
        let mut total = [0.0; N_LIMBS];
        for values in ranks {
            let mut sum = FixedPoint::default();
            values.iter().for_each(|value| sum.add(*value));
            total.iter_mut().zip(sum.limbs()).for_each(|(total, limb)| *total += limb);
        }
        FixedPoint::from_limbs(&total)
    }

    proptest! {
        #[test]
        fn order_and_grouping_do_not_matter(
            values in proptest::collection::vec(-1e6f64..1e6, 1..40),
            cut in 0usize..40,
        ) {
            let expected = sum_over_ranks(std::slice::from_ref(&values));
            let exact: f64 = values.iter().sum();
            prop_assert!((expected - exact).abs() <= 1e-9 * (1.0 + exact.abs()));
            let (a, b) = values.split_at(cut.min(values.len()));
            let reversed: Vec<f64> = a.iter().rev().copied().collect();
            prop_assert_eq!(sum_over_ranks(&[b.to_vec(), reversed]).to_bits(), expected.to_bits());
        }
    }

    #[test]
    fn values_out_of_range_give_nan_and_small_values_count() {
        assert!(sum_over_ranks(&[vec![1.0, f64::NAN], vec![2.0]]).is_nan());
        assert!(sum_over_ranks(&[vec![1.0], vec![f64::INFINITY]]).is_nan());
        assert!(sum_over_ranks(&[vec![1e30]]).is_nan());
        assert_eq!(sum_over_ranks(&[vec![1e-12], vec![-1e-12]]), 0.0);
        assert!((sum_over_ranks(&[vec![1e-12]]) - 1e-12).abs() < 1e-19);
        assert_eq!(sum_over_ranks(&[vec![1e15], vec![0.5]]), 1e15 + 0.5);
    }
}
