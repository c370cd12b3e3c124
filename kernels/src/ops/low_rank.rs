//! Products of low rank that are added to weights.
//!
//! ```text
//! W' = W + s · B · A       W, W' [O, D]   B [O, R]   A [R, D]   s a number
//! gA = s · Bᵀ · g          gB = s · g · Aᵀ           g the gradient of W'
//! ```
//!
//! All tensors are flat and f32. The sum is made once for all uses of W', which is then a weight as
//! any other: autodiff tracks neither A nor B, and their gradients follow from that of W'.

use std::ops::Range;

use burn_tensor::{Tensor, TensorData};

use super::gemm::{Mat, gemm};
use super::linear::matmul;
use super::part::part;
use crate::device::host::{is_host, with_slice};

/// Places of a weight in the buffer of a unit, and of its two factors in another buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowRank {
    /// Elements of W in the buffer of weights.
    pub weight: Range<usize>,
    /// Elements of A in the buffer of factors.
    pub a: Range<usize>,
    /// Elements of B in the buffer of factors.
    pub b: Range<usize>,
    /// Number of rows of A, R.
    pub rank: usize,
}

/// Gradients of the factors of a weight.
#[derive(Debug, Clone)]
pub struct LowRankGradients {
    /// Gradient of A, `[R·D]`.
    pub a: Tensor<1>,
    /// Gradient of B, `[O·R]`.
    pub b: Tensor<1>,
}

impl LowRank {
    /// Returns the number of rows of W, O.
    fn n_outputs(&self) -> usize {
        self.b.len() / self.rank
    }

    /// Returns the number of columns of W, D.
    fn n_inputs(&self) -> usize {
        self.a.len() / self.rank
    }
}

/// Returns `weights` with `scale · B · A` added to each weight of `places`. `factors` is the buffer
/// of all A and B.
pub fn add_low_rank(weights: &Tensor<1>, factors: &Tensor<1>, places: &[LowRank], scale: f32) -> Tensor<1> {
    if !(is_host(weights) && is_host(factors)) {
        return plain(weights.clone(), factors, places, scale);
    }
    let mut sums = with_slice(weights, |weights| weights.to_vec());
    with_slice(factors, |factors| {
        for place in places {
            let o = place.n_outputs();
            let d = place.n_inputs();
            let a = Mat::rows(&factors[place.a.clone()], d);
            let b = Mat::rows(&factors[place.b.clone()], place.rank);
            gemm([o, place.rank, d], scale, b, a, 1.0, &mut sums[place.weight.clone()], d);
        }
    });
    let len = sums.len();
    Tensor::from_data(TensorData::new(sums, [len]), &weights.device())
}

fn plain(weights: Tensor<1>, factors: &Tensor<1>, places: &[LowRank], scale: f32) -> Tensor<1> {
    let mut sums = weights;
    for place in places {
        let o = place.n_outputs();
        let d = place.n_inputs();
        let a = factors.clone().slice([place.a.clone()]).reshape([place.rank, d]);
        let b = factors.clone().slice([place.b.clone()]).reshape([o, place.rank]);
        let product = (matmul(b, a) * scale).reshape([o * d]);
        let sum = sums.clone().slice([place.weight.clone()]) + product;
        sums = sums.slice_assign([place.weight.clone()], sum);
    }
    sums
}

/// Returns the gradients of the factors of `place`, given `grad`, that of its weight, `[O·D]`.
pub fn low_rank_gradients(
    grad: &Tensor<1>,
    factors: &Tensor<1>,
    place: &LowRank,
    scale: f32,
) -> LowRankGradients {
    let o = place.n_outputs();
    let d = place.n_inputs();
    let rank = place.rank;
    if !(is_host(grad) && is_host(factors)) {
        let a = part(factors, place.a.clone()).reshape([rank, d]);
        let b = part(factors, place.b.clone()).reshape([o, rank]);
        let g = grad.clone().reshape([o, d]);
        let ga = matmul(b.transpose(), g.clone()) * scale;
        let gb = matmul(g, a.transpose()) * scale;
        return LowRankGradients { a: ga.reshape([rank * d]), b: gb.reshape([o * rank]) };
    }
    let mut ga = vec![0.0; rank * d];
    let mut gb = vec![0.0; o * rank];
    with_slice(grad, |grad| {
        with_slice(factors, |factors| {
            let a = Mat::rows(&factors[place.a.clone()], d);
            let b = Mat::rows(&factors[place.b.clone()], rank);
            let g = Mat::rows(grad, d);
            gemm([rank, o, d], scale, b.t(), g, 0.0, &mut ga, d);
            gemm([o, d, rank], scale, g, a.t(), 0.0, &mut gb, rank);
        });
    });
    let device = factors.device();
    LowRankGradients {
        a: Tensor::from_data(TensorData::new(ga, [rank * d]), &device),
        b: Tensor::from_data(TensorData::new(gb, [o * rank]), &device),
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;
    use crate::ops::testing::{assert_close, backward, devices, leaves};

    /// Two weights between other numbers; the factors of the second come first.
    fn places() -> Vec<LowRank> {
        let second = LowRank { weight: 220..220 + 6 * 8, a: 0..16, b: 16..28, rank: 2 };
        let first = LowRank { weight: 7..7 + 11 * 19, a: 28..28 + 3 * 19, b: 85..85 + 11 * 3, rank: 3 };
        vec![first, second]
    }

    const N_WEIGHTS: usize = 300;
    const N_FACTORS: usize = 128;

    /// Returns random weights and factors.
    fn inputs(device: &Device) -> Vec<Tensor<1>> {
        let random = leaves(device, &[[N_WEIGHTS], [N_FACTORS]], 1);
        random.into_iter().map(|leaf| leaf.inner()).collect()
    }

    #[test]
    fn sums_and_gradients_are_those_of_autodiff() {
        for device in devices() {
            let inputs = inputs(&device);
            let weights = &inputs[0];
            let factors = &inputs[1];
            let tracked = factors.clone().autodiff().require_grad();
            let expected = plain(weights.clone().autodiff(), &tracked, &places(), 0.5);
            let sums = add_low_rank(weights, factors, &places(), 0.5);
            assert_close("sum", sums.clone(), expected.clone().inner(), 1e-6);
            // The gradient of a sum is the sum.
            let expected = tracked.grad(&backward(expected)).expect("a leaf");
            for place in places() {
                let grad = sums.clone().slice([place.weight.clone()]);
                let actual = low_rank_gradients(&grad, factors, &place, 0.5);
                assert_close("A", actual.a, expected.clone().slice([place.a.clone()]), 1e-5);
                assert_close("B", actual.b, expected.clone().slice([place.b.clone()]), 1e-5);
            }
        }
    }

    /// An adapter begins with zeros in B.
    #[test]
    fn zeros_change_no_weight() {
        for device in devices() {
            let inputs = inputs(&device);
            let mut factors = inputs[1].clone();
            for place in places() {
                factors = factors.slice_assign([place.b.clone()], Tensor::zeros([place.b.len()], &device));
            }
            let sums = add_low_rank(&inputs[0], &factors, &places(), 2.0);
            sums.into_data().assert_eq(&inputs[0].to_data(), true);
        }
    }
}
