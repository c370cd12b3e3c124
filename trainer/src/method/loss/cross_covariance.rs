//! Losses that depend on a cross-covariance of the global batch, such as those of Barlow Twins
//! (Zbontar et al. 2021) and VICReg (Bardes, Ponce and LeCun 2022).
//!
//! ```text
//! P = Σ_n x_n y_nᵀ               x_n, y_n [D] two vectors of image n of the global batch, P [D, D]
//! G = ∂loss/∂P
//! ∂loss = ∂ Σ_n x_nᵀ G y_n       G held constant: a sum over images
//! ```
//!
//! Every rank has P, and with it G, so that the gradient at the vectors of an image needs no
//! further communication.

use burn_tensor::Tensor;
use kernels::ops::{add_term, matmul, total};
use ranks::EngineError;
use ranks::peers::Peers;

use crate::method::Collective;

/// Returns the collective of [`products`] for vectors of `d` channels.
pub(crate) fn collective(d: usize) -> Collective {
    Collective::Sum(d * d)
}

/// Returns P `[D, D]`, given the vectors `x` and `y` of this rank, `[b, D]` by micro-batch, without
/// a graph.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn products(x: &[Tensor<2>], y: &[Tensor<2>], peers: Peers<'_>) -> Result<Tensor<2>, EngineError> {
    let [_, d] = x[0].dims();
    let sum = peers.sum_computed("covariance", &mut |index| {
        matmul(x[index].clone().transpose(), y[index].clone()).reshape([d * d])
    })?;
    Ok(sum.reshape([d, d]))
}

/// A square matrix in two parts.
pub(crate) struct Parts {
    /// Elements of the diagonal, `[D]`.
    pub(crate) diagonal: Tensor<1>,
    /// The matrix with zeros on its diagonal, `[D, D]`.
    pub(crate) rest: Tensor<2>,
}

impl Parts {
    /// Splits the matrix `[D, D]`.
    pub(crate) fn new(matrix: Tensor<2>) -> Self {
        let [d, _] = matrix.dims();
        let identity = Tensor::<2>::eye(d, &matrix.device());
        let diagonal = matrix.clone() * identity;
        let rest = matrix - diagonal.clone();
        Self { diagonal: diagonal.sum_dim(1).reshape([d]), rest }
    }

    /// Joins both parts, `[D, D]`.
    pub(crate) fn join(self) -> Tensor<2> {
        let [d] = self.diagonal.dims();
        let identity = Tensor::<2>::eye(d, &self.rest.device());
        self.rest + identity * self.diagonal.reshape([1, d])
    }
}

/// Returns the sum of the squares of all elements, `[1]`.
pub(crate) fn squares<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    total(x.clone() * x)
}

/// Loss of the global batch that is a function of one P or of several.
pub(crate) struct CovarianceLoss {
    /// Gradient G of the loss with respect to each P, `[D, D]`.
    gradients: Vec<Tensor<2>>,
    /// Value of the loss, `[1]`.
    value: Tensor<1>,
    n_micro_batches: usize,
}

impl CovarianceLoss {
    /// Creates the loss of this `value`, `[1]`, with a gradient G `[D, D]` for each P.
    pub(crate) fn new(value: Tensor<1>, gradients: Vec<Tensor<2>>, peers: Peers<'_>) -> Self {
        Self { gradients, value, n_micro_batches: peers.n_micro_batches() }
    }

    /// Returns the loss, `[1]`, given the vectors `x` and `y` of a micro-batch, `[b, D]` for each
    /// P, with a graph. The value is the value of the global batch. The gradient is the gradient of
    /// the global batch times the number of micro-batches, over which losses are averaged.
    pub(crate) fn loss(&self, x: &[Tensor<2>], y: &[Tensor<2>]) -> Tensor<1> {
        let mut terms: Option<Tensor<1>> = None;
        for (index, gradient) in self.gradients.iter().enumerate() {
            let term = total(matmul(x[index].clone(), gradient.clone().autodiff()) * y[index].clone());
            terms = Some(add_term(terms, term));
        }
        // A function of the vectors with the gradient, shifted to the value. Every loss has a P.
        let surrogate = terms.expect("a gradient") * self.n_micro_batches as f64;
        let surrogate_value = surrogate.clone().inner();
        surrogate + (self.value.clone() - surrogate_value).autodiff()
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Distribution};

    use super::*;
    use kernels::ops::testing::assert_close;
    use ranks::communicator::Communicator;

    /// Returns the images of micro-batch `index` of `n`.
    fn micro_batch(t: &Tensor<2>, index: usize, n: usize) -> Tensor<2> {
        let [b, _] = t.dims();
        Tensor::cat((index..b).step_by(n).map(|i| t.clone().slice(i..i + 1)).collect(), 0)
    }

    /// Evaluates Σ_i P_ii + Σ_{i≠j} P_ij² / 2 with one graph for the global batch.
    fn reference(x: Tensor<2>, y: Tensor<2>) -> Tensor<1> {
        let [_, d] = x.dims();
        let all = x.transpose().matmul(y);
        let identity = Tensor::<2>::eye(d, &all.device().inner()).autodiff();
        let diagonal = all.clone() * identity;
        let rest = all - diagonal.clone();
        diagonal.sum() + (rest.clone() * rest).sum() / 2.0
    }

    /// Creates the loss of [`reference`] from the vectors of all micro-batches.
    fn covariance_loss(x: &[Tensor<2>], y: &[Tensor<2>], peers: Peers<'_>) -> CovarianceLoss {
        let parts = Parts::new(products(x, y, peers).unwrap());
        let value = parts.diagonal.clone().sum() + squares(parts.rest.clone()) / 2.0;
        let gradient = Parts { diagonal: parts.diagonal.ones_like(), rest: parts.rest };
        CovarianceLoss::new(value, vec![gradient.join()], peers)
    }

    /// Creates a matrix of three rows.
    fn three_rows(values: [f32; 9]) -> Tensor<2> {
        Tensor::<1>::from_floats(values.as_slice(), &Device::flex()).reshape([3, 3])
    }

    #[test]
    fn parts_are_the_diagonal_and_the_rest() {
        let matrix = three_rows([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        let parts = Parts::new(matrix.clone());
        let diagonal = Tensor::<1>::from_floats([1.0f32, 5.0, 9.0].as_slice(), &Device::flex());
        assert_close("diagonal", parts.diagonal.clone(), diagonal, 0.0);
        let rest = three_rows([0.0, 2.0, 3.0, 4.0, 0.0, 6.0, 7.0, 8.0, 0.0]);
        assert_close("rest", parts.rest.clone(), rest, 0.0);
        assert_close("all", parts.join(), matrix, 0.0);
    }

    #[test]
    fn value_and_gradient_do_not_depend_on_the_number_of_micro_batches() {
        let device = Device::flex();
        device.seed(8);
        let b = 12;
        let d = 5;
        let x = Tensor::<2>::random([b, d], Distribution::Normal(0.2, 1.0), &device);
        let y = Tensor::<2>::random([b, d], Distribution::Normal(-0.1, 1.0), &device);
        let tracked_x = x.clone().autodiff().require_grad();
        let tracked_y = y.clone().autodiff().require_grad();
        let expected = reference(tracked_x.clone(), tracked_y.clone());
        let expected_grads = expected.clone().backward();
        let expected_x = tracked_x.grad(&expected_grads).unwrap();
        let expected_y = tracked_y.grad(&expected_grads).unwrap();
        let comm = Communicator::solo();
        for n in [1, 3, 4] {
            let x_parts: Vec<Tensor<2>> = (0..n).map(|index| micro_batch(&x, index, n)).collect();
            let y_parts: Vec<Tensor<2>> = (0..n).map(|index| micro_batch(&y, index, n)).collect();
            let loss = covariance_loss(&x_parts, &y_parts, Peers::new(&comm, n));
            for index in 0..n {
                let leaf_x = x_parts[index].clone().autodiff().require_grad();
                let leaf_y = y_parts[index].clone().autodiff().require_grad();
                let value = loss.loss(std::slice::from_ref(&leaf_x), std::slice::from_ref(&leaf_y));
                assert_close("value", value.clone().inner(), expected.clone().inner(), 2e-5);
                let grads = value.backward();
                let x_grad = leaf_x.grad(&grads).unwrap() / n as f64;
                let y_grad = leaf_y.grad(&grads).unwrap() / n as f64;
                assert_close("gradient at x", x_grad, micro_batch(&expected_x, index, n), 2e-5);
                assert_close("gradient at y", y_grad, micro_batch(&expected_y, index, n), 2e-5);
            }
        }
    }
}
