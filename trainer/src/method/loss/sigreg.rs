//! Sketched isotropic Gaussian regularization (Balestriero and LeCun 2025, section 4): the
//! distribution of a batch's embeddings along random directions approaches a standard normal one.
//!
//! ```text
//! p = Z A          Z [N, D] the embeddings of a kind of view, A [D, M] directions of length one
//! c_t = mean_n cos(t p)      s_t = mean_n sin(t p)      over the whole batch, at T points t from 0 to 3
//! sigreg = mean_m N Σ_t w_t e^{-t²/2} ((c_t - e^{-t²/2})² + s_t²)       w_t = 2 dt, dt at both ends: the trapezoid rule,
//!                                                                        twice for negative t
//! ```

use augment::ViewRng;
use burn_tensor::{Tensor, TensorData};
use kernels::ops::{add_term, matmul_transposed, total, wave_sums, weighted_waves};
use ranks::EngineError;
use ranks::peers::Peers;

use super::koleo::view;
use crate::method::Collective;

/// Number of points t, T.
const N_POINTS: usize = 17;

/// Last of the points t.
const LAST_POINT: f64 = 3.0;

/// Distance between two points, dt.
const SPACING: f64 = LAST_POINT / (N_POINTS - 1) as f64;

/// Domain that separates these random streams from those of views and initial weights.
const DOMAIN: u64 = 0x7369_6772_6567_0000;

/// Draws M directions of length one in `d` dimensions, `[M, D]`: a function of seed and step alone.
pub(crate) fn draw_directions(seed: u64, step: u64, m: usize, d: usize) -> Vec<f32> {
    let mut all = vec![0.0f32; m * d];
    for (index, direction) in all.chunks_exact_mut(d).enumerate() {
        let mut rng = ViewRng::from_words([seed, step, index as u64, DOMAIN]);
        direction.fill_with(|| rng.normal());
        let length = direction.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
        // All numbers are zero with negligible probability.
        let factor = if length > 0.0 { (1.0 / length) as f32 } else { 0.0 };
        for x in direction {
            *x *= factor;
        }
    }
    all
}

/// The regularizer of a batch, for each kind of view.
pub(crate) struct Sigreg {
    /// Directions, `[M, D]`.
    directions: Tensor<2>,
    /// Gradients with respect to the sums of cosines and sines, `[2 T M]`, by kind of view.
    gradients: Vec<Tensor<1>>,
    /// Mean value over kinds of views, `[1]`.
    value: Tensor<1>,
    n_micro_batches: usize,
}

/// Returns the collective of [`Sigreg::new`] along `n_directions` for `n_views` views.
pub(crate) fn collective(n_views: usize, n_directions: usize) -> Collective {
    Collective::Sum(n_views * 2 * N_POINTS * n_directions)
}

impl Sigreg {
    /// Computes the regularizer of the global batch along `directions` `[M, D]`, given this rank's
    /// `views`, `[b, V, D]` by micro-batch, without a graph.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn new(
        views: &[Tensor<3>],
        directions: Vec<f32>,
        peers: Peers<'_>,
    ) -> Result<Self, EngineError> {
        let [b, v, d] = views[0].dims();
        let m = directions.len() / d;
        let directions = Tensor::<2>::from_data(TensorData::new(directions, [m, d]), &views[0].device());
        let mut sums: Vec<Tensor<1>> = Vec::with_capacity(views.len());
        for views in views {
            let mut view_sums = Vec::with_capacity(v);
            for i in 0..v {
                let p = matmul_transposed(view(views, i), directions.clone());
                view_sums.push(wave_sums(p, N_POINTS, SPACING));
            }
            sums.push(Tensor::cat(view_sums, 0));
        }
        let sums = peers.sum("sigreg", &sums)?;
        let n = (b * peers.n_micro_batches()) as f64;
        let normal = Tensor::<1>::from_floats(normal_waves(m).as_slice(), &sums.device());
        let weights = Tensor::<1>::from_floats(quadrature(m).as_slice(), &sums.device());
        let len = 2 * N_POINTS * m;
        let mut values = Vec::with_capacity(v);
        let mut gradients = Vec::with_capacity(v);
        for i in 0..v {
            let difference = sums.clone().slice(i * len..(i + 1) * len) / n - normal.clone();
            values.push(total(difference.clone() * difference.clone() * weights.clone()) * (n / m as f64));
            gradients.push(difference * weights.clone() * (2.0 / (m * v) as f64));
        }
        let value = Tensor::cat(values, 0).mean();
        Ok(Self { directions, gradients, value, n_micro_batches: peers.n_micro_batches() })
    }

    /// Returns the regularizer, `[1]`, given the embeddings of one micro-batch, `[b, V, D]`, with a
    /// graph. The value is the value of the global batch. The gradient is the gradient of the
    /// global batch times the number of micro-batches, over which losses are averaged.
    pub(crate) fn loss(&self, views: Tensor<3>) -> Tensor<1> {
        let directions = self.directions.clone().autodiff();
        let mut terms: Option<Tensor<1>> = None;
        for (i, gradient) in self.gradients.iter().enumerate() {
            let p = matmul_transposed(view(&views, i), directions.clone());
            let term = weighted_waves(p, gradient.clone(), SPACING);
            terms = Some(add_term(terms, term));
        }
        // A linear function of the sums with the gradient, shifted to the value. Every method has a
        // view.
        let linear = terms.expect("a view") * self.n_micro_batches as f64;
        let linear_value = linear.clone().inner();
        linear + (self.value.clone() - linear_value).autodiff()
    }

    /// Value of the regularizer, `[1]`.
    pub(crate) fn value(&self) -> Tensor<1> {
        self.value.clone()
    }
}

/// Returns the means of cosines and sines of a standard normal distribution, `[2 T M]`.
fn normal_waves(m: usize) -> Vec<f32> {
    let cosines = (0..N_POINTS).map(|k| (-0.5 * (k as f64 * SPACING).powi(2)).exp() as f32);
    cosines.chain([0.0; N_POINTS]).flat_map(|value| std::iter::repeat_n(value, m)).collect()
}

/// Returns w_t of point `k`.
fn point_weight(k: usize) -> f64 {
    let is_end = k == 0 || k + 1 == N_POINTS;
    if is_end { SPACING } else { 2.0 * SPACING }
}

/// Returns the quadrature weights w_t e^{-t²/2} for cosines and for sines, `[2 T M]`.
fn quadrature(m: usize) -> Vec<f32> {
    let weights: Vec<f32> = (0..N_POINTS)
        .map(|k: usize| {
            let t = k as f64 * SPACING;
            (point_weight(k) * (-0.5 * t * t).exp()) as f32
        })
        .collect();
    [weights.clone(), weights].concat().into_iter().flat_map(|value| std::iter::repeat_n(value, m)).collect()
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Distribution};

    use super::*;
    use kernels::ops::testing::assert_close;
    use ranks::communicator::Communicator;

    /// Evaluates the formula with one graph for the global batch.
    fn reference(views: Tensor<3>, directions: &[f32]) -> Tensor<1> {
        let [n, v, d] = views.dims();
        let m = directions.len() / d;
        let device = views.device().inner();
        let a = Tensor::<2>::from_data(TensorData::new(directions.to_vec(), [m, d]), &device).autodiff();
        let mut sum = Tensor::<1>::zeros([1], &device).autodiff();
        for i in 0..v {
            let p = view(&views, i).matmul(a.clone().transpose());
            let mut by_direction = Tensor::<2>::zeros([1, m], &device).autodiff();
            for k in 0..N_POINTS {
                let t = k as f64 * SPACING;
                let normal = (-0.5 * t * t).exp();
                let c = (p.clone() * t).cos().mean_dim(0) - normal;
                let s = (p.clone() * t).sin().mean_dim(0);
                by_direction = by_direction + (c.clone() * c + s.clone() * s) * (point_weight(k) * normal);
            }
            sum = sum + by_direction.mean() * n as f64;
        }
        sum / v as f64
    }

    /// Returns the images of micro-batch `index` of `n_parts`.
    fn micro_batch(t: &Tensor<3>, index: usize, n_parts: usize) -> Tensor<3> {
        let [n, _, _] = t.dims();
        t.clone().slice(index * n / n_parts..(index + 1) * n / n_parts)
    }

    #[test]
    fn value_and_gradient_do_not_depend_on_the_number_of_micro_batches() {
        let device = Device::flex();
        device.seed(6);
        let n = 12;
        let v = 3;
        let d = 5;
        let x = Tensor::<3>::random([n, v, d], Distribution::Normal(0.3, 1.4), &device);
        let directions = draw_directions(1, 2, 7, d);
        let tracked = x.clone().autodiff().require_grad();
        let expected = reference(tracked.clone(), &directions);
        let expected_grad = tracked.grad(&expected.clone().backward()).unwrap();
        let comm = Communicator::solo();
        for n_parts in [1, 3] {
            let views: Vec<Tensor<3>> = (0..n_parts).map(|index| micro_batch(&x, index, n_parts)).collect();
            let sigreg = Sigreg::new(&views, directions.clone(), Peers::new(&comm, n_parts)).unwrap();
            for index in 0..n_parts {
                let leaf = micro_batch(&x, index, n_parts).autodiff().require_grad();
                let loss = sigreg.loss(leaf.clone());
                assert_close("value", loss.clone().inner(), expected.clone().inner(), 2e-5);
                let grad = leaf.grad(&loss.backward()).unwrap() / n_parts as f64;
                assert_close("gradient", grad, micro_batch(&expected_grad, index, n_parts), 5e-5);
            }
        }
    }

    /// Returns the value for embeddings `[B, 1, 8]`.
    fn sigreg_value(x: Tensor<3>) -> f32 {
        let comm = Communicator::solo();
        let directions = draw_directions(0, 0, 64, 8);
        Sigreg::new(&[x], directions, Peers::new(&comm, 1)).unwrap().value().into_scalar::<f32>()
    }

    #[test]
    fn value_is_small_for_a_normal_distribution_and_large_after_a_collapse() {
        let device = Device::flex();
        device.seed(7);
        let normal = sigreg_value(Tensor::random([512, 1, 8], Distribution::Normal(0.0, 1.0), &device));
        let collapsed = sigreg_value(Tensor::zeros([512, 1, 8], &device));
        assert!(normal < 2.0 && collapsed > 100.0, "{normal} {collapsed}");
    }

    #[test]
    fn directions_are_a_function_of_seed_and_step() {
        let directions = draw_directions(3, 5, 9, 4);
        assert_eq!(directions, draw_directions(3, 5, 9, 4));
        assert_ne!(directions, draw_directions(3, 6, 9, 4));
        assert!(
            directions.chunks_exact(4).all(|row| (row.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5)
        );
    }
}
