//! Weights of a resize along one axis, as Pillow's `precompute_coeffs` rounds them.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pairs::Pair;

/// Interpolation of a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Interpolation {
    /// Catmull-Rom (a = -0.5), always antialiased: the DINO family.
    #[default]
    Bicubic,
    /// Triangle filter: SwAV, SimCLR, MoCo.
    Bilinear,
}

/// Number of fraction bits of a weight: 32, minus the 8 of a byte and 2 for the overshoot of the
/// filter.
pub(crate) const FRACTION_BITS: u32 = 32 - 8 - 2;

/// Inputs and fixed-point weights of each output. Inputs are grouped into pairs that start at an
/// even index; an input of a pair that is not read has a weight of zero.
#[derive(Debug, Default)]
pub(crate) struct Coefficients {
    /// Index of the first pair of inputs, and number of pairs, by output.
    bounds: Vec<(usize, usize)>,
    /// Weights, `stride` pairs per output; unused ones are zero.
    pairs: Vec<Pair>,
    stride: usize,
    window: Window,
    weights: Vec<i32>,
}

/// Inputs and weights of one output.
#[derive(Debug, Default)]
pub(crate) struct Window {
    values: Vec<f64>,
}

impl Window {
    /// Computes the weights of output `x` of a resize from `n_in` to `n_out` pixels, and returns
    /// the first input that it reads.
    pub(crate) fn set(&mut self, n_in: usize, n_out: usize, x: usize, interpolation: Interpolation) -> usize {
        let (filter, radius) = interpolation.filter();
        let scale = n_in as f64 / n_out as f64;
        let filter_scale = scale.max(1.0);
        let support = radius * filter_scale;
        let center = (x as f64 + 0.5) * scale;
        // `as usize` truncates, and maps negative numbers to zero, as Pillow does.
        let first = (center - support + 0.5) as usize;
        let last = ((center + support + 0.5) as usize).min(n_in);
        let inverse = 1.0 / filter_scale;
        self.values.clear();
        self.values.extend((first..last).map(|i| filter((i as f64 - center + 0.5) * inverse)));
        first
    }

    /// Returns the weights, whose sum is 1.
    pub(crate) fn normalized(&self) -> impl Iterator<Item = f64> {
        let sum: f64 = self.values.iter().sum();
        self.values.iter().map(move |value| if sum == 0.0 { *value } else { value / sum })
    }
}

impl Interpolation {
    /// Returns the filter, and the distance in pixels at which it ends.
    fn filter(self) -> (fn(f64) -> f64, f64) {
        match self {
            Self::Bicubic => (bicubic, 2.0),
            Self::Bilinear => (bilinear, 1.0),
        }
    }
}

impl Coefficients {
    /// Computes the table for `outputs` of a resize from `n_in` to `n_out` pixels. Returns the
    /// range of inputs that they read; indices of inputs in the table count from its start. All
    /// outputs together read all inputs.
    pub(crate) fn set(
        &mut self,
        n_in: usize,
        n_out: usize,
        outputs: Range<usize>,
        interpolation: Interpolation,
    ) -> Range<usize> {
        let (_, radius) = interpolation.filter();
        let support = radius * (n_in as f64 / n_out as f64).max(1.0);
        // Inputs per output, and one more, because they may start at an odd index.
        self.stride = (support.ceil() as usize * 2 + 2).div_ceil(2);
        self.bounds.clear();
        self.pairs.clear();
        self.pairs.resize(outputs.len() * self.stride, Pair::default());
        let mut start = None;
        let mut end = 0;
        for (x, pairs) in outputs.zip(self.pairs.chunks_exact_mut(self.stride)) {
            let first = self.window.set(n_in, n_out, x, interpolation);
            let start = *start.get_or_insert(first);
            end = first + self.window.values.len();
            self.weights.clear();
            self.weights.resize((first - start) % 2, 0);
            self.weights.extend(self.window.normalized().map(to_fixed_point));
            for (pair, weights) in pairs.iter_mut().zip(self.weights.chunks(2)) {
                *pair = Pair::new([weights[0], weights.get(1).copied().unwrap_or(0)]);
            }
            self.bounds.push(((first - start) / 2, self.weights.len().div_ceil(2)));
        }
        start.unwrap_or(0)..end
    }

    /// Returns the index of the first pair of inputs of output `x`, and the weights of its pairs.
    #[inline(always)]
    pub(crate) fn taps(&self, x: usize) -> (usize, &[Pair]) {
        let (first, n) = self.bounds[x];
        (first, &self.pairs[x * self.stride..][..n])
    }
}

/// Rounds a weight to fixed point.
fn to_fixed_point(value: f64) -> i32 {
    (value * f64::from(1 << FRACTION_BITS)).round() as i32
}

/// Evaluates Keys' cubic with a = -0.5.
fn bicubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// Evaluates the triangle filter.
fn bilinear(x: f64) -> f64 {
    (1.0 - x.abs()).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every output reads inputs that exist, and its weights sum to one up to their rounding.
        #[test]
        fn weights_sum_to_one(n_in in 1usize..700, n_out in 1usize..300, cubic: bool) {
            let interpolation = if cubic { Interpolation::Bicubic } else { Interpolation::Bilinear };
            let mut table = Coefficients::default();
            prop_assert_eq!(table.set(n_in, n_out, 0..n_out, interpolation), 0..n_in);
            for x in 0..n_out {
                let (first, pairs) = table.taps(x);
                let weights: Vec<i32> = pairs.iter().flat_map(|pair| pair.weights()).collect();
                prop_assert!(!weights.is_empty() && 2 * first + weights.len() <= n_in + 1);
                let sum: i32 = weights.iter().sum();
                prop_assert!((sum - (1 << FRACTION_BITS)).unsigned_abs() as usize <= weights.len());
            }
        }
    }
}
