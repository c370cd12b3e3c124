//! The contrast of SimCLR (Chen et al. 2020, equation 1) over the global batch.
//!
//! ```text
//! s_ij = ẑ_i · ẑ_j / τ      ẑ = z / |z|, the 2B views of the batch      p(i) the other view of i's image
//! ℓ_i  = log Σ_{j≠i} exp s_ij - s_i,p(i)          loss = mean_i ℓ_i
//! ∂(Σ ℓ)/∂ẑ_i = 1/τ · Σ_{j≠i} (e^{s_ij - L_i} + e^{s_ij - L_j}) ẑ_j - 2/τ · ẑ_p(i)      L_i the logarithm of the sum
//! ```
//!
//! Every rank has all views and all L, so that the gradient at a view from rows of other ranks
//! needs no further communication.

use burn_tensor::{Tensor, TensorData};
use kernels::ops::{matmul, total};
use ranks::EngineError;
use ranks::peers::Peers;

use crate::method::Collective;

/// Number of views of an image.
pub(crate) const N_VIEWS: usize = 2;

/// Subtracted from scores that are masked, so that their exponential is zero.
const MASKED: f32 = 1e9;

/// Contrastive loss of a batch.
pub(crate) struct Contrast {
    /// ẑ of all views, `[2B, D]`, without a graph. Views of an image are adjacent.
    all: Tensor<2>,
    /// L of all views, `[2B]`.
    logs: Tensor<1>,
    temperature: f64,
}

/// Returns the collectives of [`Contrast::new`] for views of `d` channels.
pub(crate) fn collectives(d: usize) -> Vec<Collective> {
    vec![Collective::Gather(N_VIEWS * d), Collective::Gather(N_VIEWS)]
}

impl Contrast {
    /// Gathers the views of the global batch from this rank's `views`, `[b, 2, D]` by micro-batch,
    /// of length one and without a graph.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn new(views: &[Tensor<3>], temperature: f64, peers: Peers<'_>) -> Result<Self, EngineError> {
        let [b, v, d] = views[0].dims();
        let rows: Vec<Tensor<2>> = views.iter().map(|views| views.clone().reshape([b, v * d])).collect();
        let all = peers.gather("contrast", &rows)?;
        let [n_images, _] = all.dims();
        let all = all.reshape([n_images * v, d]);
        let mut logs: Vec<Tensor<2>> = Vec::with_capacity(views.len());
        for (index, views) in views.iter().enumerate() {
            let positions: Vec<usize> = (0..b).map(|i| peers.position(index, i)).collect();
            let scores = scores(views.clone().reshape([b * v, d]), &all, temperature);
            let itself = one_hot(&all, &positions, |position, view| v * position + view);
            let scores = scores - itself * MASKED;
            let largest = scores.clone().max_dim(1);
            let sums = (scores - largest.clone()).exp().sum_dim(1);
            logs.push((sums.log() + largest).reshape([b, v]));
        }
        let logs = peers.gather("contrast", &logs)?.reshape([n_images * v]);
        Ok(Self { all, logs, temperature })
    }

    /// Returns the loss of a micro-batch, `[1]`, given the views `[b, 2, D]` of the images at
    /// `positions`, of length one, with a graph.
    ///
    /// The value is the mean over the micro-batch. The gradient is the gradient of the sum over the
    /// global batch, divided by 2b.
    pub(crate) fn loss(&self, views: Tensor<3>, positions: &[usize]) -> Tensor<1> {
        let [b, v, d] = views.dims();
        let rows = b * v;
        let n = self.all.dims()[0];
        let scores = scores(views.reshape([rows, d]), &self.all, self.temperature);
        let detached = scores.clone().inner();
        let itself = one_hot(&self.all, positions, |position, view| v * position + view);
        let partner = one_hot(&self.all, positions, |position, view| v * position + (1 - view));
        let row_logs = (itself.clone() * self.logs.clone().unsqueeze()).sum_dim(1);
        let masked = detached.clone() - itself * MASKED;
        // e^{s_ij - L_i} and e^{s_ij - L_j}.
        let row_probs = (masked.clone() - row_logs.clone()).exp();
        let column_probs = (masked - self.logs.clone().reshape([1, n])).exp();
        let weights = row_probs + column_probs - partner.clone() * 2.0;
        let value = (total(row_logs) - total(detached.clone() * partner)) / rows as f64;
        // A linear function of the scores with the gradient, shifted to the value.
        let linear = total(scores * weights.clone().autodiff()) / rows as f64;
        let linear_value = total(detached * weights) / rows as f64;
        linear + (value - linear_value).autodiff()
    }
}

/// Returns the scores s of `rows` `[R, D]` with all views, `[R, 2B]`.
fn scores(rows: Tensor<2>, all: &Tensor<2>, temperature: f64) -> Tensor<2> {
    let all = all.clone().transpose() / temperature;
    let all = if rows.is_autodiff() { all.autodiff() } else { all };
    matmul(rows, all)
}

/// Returns a matrix `[R, 2B]` with a one in each row, in the column that `column` returns for the
/// image's position and the view, and zeros elsewhere.
fn one_hot(all: &Tensor<2>, positions: &[usize], column: impl Fn(usize, usize) -> usize) -> Tensor<2> {
    let [n, _] = all.dims();
    let rows = positions.len() * N_VIEWS;
    let mut matrix = vec![0.0f32; rows * n];
    for (row, values) in matrix.chunks_exact_mut(n).enumerate() {
        values[column(positions[row / N_VIEWS], row % N_VIEWS)] = 1.0;
    }
    Tensor::from_data(TensorData::new(matrix, [rows, n]), &all.device())
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Distribution, activation};

    use super::*;
    use kernels::ops::testing::assert_close;
    use kernels::ops::unit_rows;
    use ranks::communicator::Communicator;

    fn unit(x: Tensor<3>) -> Tensor<3> {
        let [b, v, d] = x.dims();
        unit_rows(x.reshape([b * v, d]), 1e-12).reshape([b, v, d])
    }

    /// Evaluates the formula with one graph for the global batch.
    fn reference(x: Tensor<3>, temperature: f64) -> Tensor<1> {
        let [b, v, d] = x.dims();
        let z = unit(x).reshape([b * v, d]);
        let scores = z.clone().matmul(z.transpose()) / temperature;
        let itself = Tensor::<2>::eye(b * v, &scores.device().inner()) * 1e9;
        let logs = activation::log_softmax(scores - itself.autodiff(), 1);
        -(0..b * v)
            .map(|row: usize| {
                let partner = row / 2 * 2 + 1 - row % 2;
                logs.clone().slice([row..row + 1, partner..partner + 1]).sum()
            })
            .reduce(|a, b| a + b)
            .unwrap()
            / (b * v) as f64
    }

    /// Returns the images of micro-batch `index` of `n`.
    fn micro_batch(t: &Tensor<3>, index: usize, n: usize) -> Tensor<3> {
        let [b, _, _] = t.dims();
        Tensor::cat((index..b).step_by(n).map(|i| t.clone().slice(i..i + 1)).collect(), 0)
    }

    #[test]
    fn loss_and_gradient_do_not_depend_on_the_number_of_micro_batches() {
        let device = Device::flex();
        device.seed(4);
        let b = 12;
        let d = 5;
        let x = Tensor::<3>::random([b, 2, d], Distribution::Normal(0.0, 1.0), &device);
        let tracked = x.clone().autodiff().require_grad();
        let expected = reference(tracked.clone(), 0.3);
        let expected_grad = tracked.grad(&expected.clone().backward()).unwrap();
        for n in [1, 3, 4] {
            let comm = Communicator::solo();
            let peers = Peers::new(&comm, n);
            let views: Vec<Tensor<3>> = (0..n).map(|index| unit(micro_batch(&x, index, n))).collect();
            let contrast = Contrast::new(&views, 0.3, peers).unwrap();
            let mut total = 0.0;
            for index in 0..n {
                let leaf = micro_batch(&x, index, n).autodiff().require_grad();
                let positions: Vec<usize> = (index..b).step_by(n).collect();
                let loss = contrast.loss(unit(leaf.clone()), &positions);
                total += loss.clone().into_scalar::<f32>() / n as f32;
                let grad = leaf.grad(&loss.backward()).unwrap() / n as f64;
                assert_close("gradient", grad, micro_batch(&expected_grad, index, n), 2e-5);
            }
            let expected = expected.clone().into_scalar::<f32>();
            assert!((total - expected).abs() <= 1e-5 * expected, "{total} {expected}");
        }
    }
}
