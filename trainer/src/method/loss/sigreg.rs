//! Sketched isotropic Gaussian regularization (Balestriero and LeCun 2025, section 4): embeddings
//! of a batch look like a standard normal distribution along random directions.
//!
//! ```text
//! p = Z A          Z [N, D] the embeddings of a kind of view, A [D, M] directions of length one
//! c_t = mean_n cos(t p)      s_t = mean_n sin(t p)      over the whole batch, at T points t from 0 to 3
//! sigreg = mean_m N Σ_t w_t e^{-t²/2} ((c_t - e^{-t²/2})² + s_t²)       w_t = 2 dt, dt at both ends: the trapezoid rule,
//!                                                                        twice for negative t
//! ```

use augment::ViewRng;
use burn_tensor::{Tensor, TensorData};
use kernels::ops::{matmul_transposed, total, wave_sums, weighted_waves};
use ranks::EngineError;
use ranks::peers::Peers;

use crate::method::Collective;

/// Number of points t, T.
const N_POINTS: usize = 17;

/// Last of the points t.
const LAST_POINT: f64 = 3.0;

/// Distance between two points, dt.
const SPACING: f64 = LAST_POINT / (N_POINTS - 1) as f64;

/// Domain that separates these random numbers from those of views and initial weights.
const DOMAIN: u64 = 0x7369_6772_6567_0000;

/// Draws M directions of length one in D dimensions, `[M, D]`: a function of seed and step alone.
pub(crate) fn directions(seed: u64, step: u64, [m, d]: [usize; 2]) -> Vec<f32> {
    let mut all = vec![0.0f32; m * d];
    for (number, direction) in all.chunks_exact_mut(d).enumerate() {
        let mut rng = ViewRng::from_words([seed, step, number as u64, DOMAIN]);
        direction.fill_with(|| rng.normal());
        let length = direction.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
        // All numbers are zero with negligible probability.
        let factor = if length > 0.0 { (1.0 / length) as f32 } else { 0.0 };
        direction.iter_mut().for_each(|x| *x *= factor);
    }
    all
}

/// The regularizer of a batch, for each kind of view.
pub(crate) struct Sigreg {
    /// Directions, `[M, D]`.
    directions: Tensor<2>,
    /// Gradients at the sums of cosines and sines, `[2 T M]`, by kind of view.
    weights: Vec<Tensor<1>>,
    /// Mean value over kinds of views, `[1]`.
    value: Tensor<1>,
    n_micro_batches: usize,
}

/// Returns the collective of [`Sigreg::of`] along `n_directions` for `n_views` views.
pub(crate) fn collective(n_views: usize, n_directions: usize) -> Collective {
    Collective::Sum(n_views * 2 * N_POINTS * n_directions)
}

impl Sigreg {
    /// Computes the regularizer along `directions` of `[M, D]` of a batch, of which this rank has
    /// `views` of `[b, V, D]` by micro-batch, without a graph.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn of(
        views: &[Tensor<3>],
        directions: Vec<f32>,
        peers: Peers<'_>,
    ) -> Result<Self, EngineError> {
        let [b, v, d] = views[0].dims();
        let m = directions.len() / d;
        let directions = Tensor::<2>::from_data(TensorData::new(directions, [m, d]), &views[0].device());
        let sums = |views: &Tensor<3>| {
            let of_view = |i: usize| {
                let p = matmul_transposed(view(views, i), directions.clone());
                wave_sums(p, N_POINTS, SPACING)
            };
            Tensor::cat((0..v).map(of_view).collect(), 0)
        };
        let sums: Vec<Tensor<1>> = views.iter().map(sums).collect();
        let sums = peers.sum("sigreg", &sums)?;
        let n = (b * peers.n_micro_batches()) as f64;
        let [normal, weights] = [normal_waves(m), quadrature(m)];
        let [normal, weights] =
            [normal, weights].map(|values| Tensor::<1>::from_floats(values.as_slice(), &sums.device()));
        let len = 2 * N_POINTS * m;
        let (values, weights): (Vec<_>, Vec<_>) = (0..v)
            .map(|i: usize| {
                let off = sums.clone().slice(i * len..(i + 1) * len) / n - normal.clone();
                let value = total(off.clone() * off.clone() * weights.clone()) * (n / m as f64);
                (value, off * weights.clone() * (2.0 / (m * v) as f64))
            })
            .unzip();
        let value = Tensor::cat(values, 0).mean();
        Ok(Self { directions, weights, value, n_micro_batches: peers.n_micro_batches() })
    }

    /// Returns the regularizer, `[1]`, given the embeddings of one micro-batch, `[b, V, D]` with a
    /// graph. The value is that of the whole batch; the gradient too, times the number of
    /// micro-batches, over which losses are averaged.
    pub(crate) fn loss(&self, views: Tensor<3>) -> Tensor<1> {
        let directions = self.directions.clone().autodiff();
        let moves = self
            .weights
            .iter()
            .enumerate()
            .map(|(i, weights)| {
                let p = matmul_transposed(view(&views, i), directions.clone());
                weighted_waves(p, weights.clone(), SPACING)
            })
            .reduce(|sum, term| sum + term);
        // Every method has a view.
        let moves = moves.expect("a view") * self.n_micro_batches as f64;
        let stands = moves.clone().inner();
        moves + (self.value.clone() - stands).autodiff()
    }

    /// Value of the regularizer, `[1]`.
    pub(crate) fn value(&self) -> Tensor<1> {
        self.value.clone()
    }
}

/// Returns view `i`, `[b, D]`, of `[b, V, D]`.
fn view(views: &Tensor<3>, i: usize) -> Tensor<2> {
    let [b, _, d] = views.dims();
    views.clone().slice([0..b, i..i + 1, 0..d]).reshape([b, d])
}

/// Means of cosines and sines of a standard normal distribution, `[2 T M]`.
fn normal_waves(m: usize) -> Vec<f32> {
    let cosines = (0..N_POINTS).map(|k| (-0.5 * (k as f64 * SPACING).powi(2)).exp() as f32);
    cosines.chain([0.0; N_POINTS]).flat_map(|value| std::iter::repeat_n(value, m)).collect()
}

/// Quadrature weights w_t e^{-t²/2} for cosines and for sines, `[2 T M]`.
fn quadrature(m: usize) -> Vec<f32> {
    let weights: Vec<f32> = (0..N_POINTS)
        .map(|k: usize| {
            let t = k as f64 * SPACING;
            let ends = k == 0 || k + 1 == N_POINTS;
            let width = if ends { SPACING } else { 2.0 * SPACING };
            (width * (-0.5 * t * t).exp()) as f32
        })
        .collect();
    [weights.clone(), weights].concat().into_iter().flat_map(|value| std::iter::repeat_n(value, m)).collect()
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Distribution};

    use super::*;
    use kernels::ops::twin::assert_close;
    use ranks::communicator::Communicator;

    /// Evaluates the formula with one graph for the whole batch.
    fn plain(views: Tensor<3>, directions: &[f32]) -> Tensor<1> {
        let [n, v, d] = views.dims();
        let m = directions.len() / d;
        let device = views.device().inner();
        let a = Tensor::<2>::from_data(TensorData::new(directions.to_vec(), [m, d]), &device).autodiff();
        (0..v)
            .map(|i: usize| {
                let p = view(&views, i).matmul(a.clone().transpose());
                (0..N_POINTS)
                    .map(|k: usize| {
                        let t = k as f64 * SPACING;
                        let normal = (-0.5 * t * t).exp();
                        let c = (p.clone() * t).cos().mean_dim(0) - normal;
                        let s = (p.clone() * t).sin().mean_dim(0);
                        let ends = k == 0 || k + 1 == N_POINTS;
                        (c.clone() * c + s.clone() * s)
                            * (if ends { SPACING } else { 2.0 * SPACING } * normal)
                    })
                    .reduce(|a, b| a + b)
                    .unwrap()
                    .mean()
                    * n as f64
            })
            .reduce(|a, b| a + b)
            .unwrap()
            / v as f64
    }

    #[test]
    fn micro_batches_share_one_statistic() {
        let device = Device::flex();
        device.seed(6);
        let n = 12;
        let v = 3;
        let d = 5;
        let x = Tensor::<3>::random([n, v, d], Distribution::Normal(0.3, 1.4), &device);
        let a = directions(1, 2, [7, d]);
        let whole = x.clone().autodiff().require_grad();
        let expected = plain(whole.clone(), &a);
        let grad = whole.grad(&expected.clone().backward()).unwrap();
        let comm = Communicator::solo();
        for parts in [1, 3] {
            let part =
                |t: &Tensor<3>, number: usize| t.clone().slice(number * n / parts..(number + 1) * n / parts);
            let views: Vec<Tensor<3>> = (0..parts).map(|number| part(&x, number)).collect();
            let sigreg = Sigreg::of(&views, a.clone(), Peers::new(&comm, parts)).unwrap();
            for number in 0..parts {
                let leaf = part(&x, number).autodiff().require_grad();
                let loss = sigreg.loss(leaf.clone());
                assert_close("value", loss.clone().inner(), expected.clone().inner(), 2e-5);
                let given = leaf.grad(&loss.backward()).unwrap() / parts as f64;
                assert_close("gradient", given, part(&grad, number), 5e-5);
            }
        }
    }

    /// The value is large far from a normal distribution, and at chance level for normal numbers.
    #[test]
    fn it_knows_a_normal_distribution() {
        let device = Device::flex();
        device.seed(7);
        let comm = Communicator::solo();
        let of = |x: Tensor<3>| {
            let a = directions(0, 0, [64, 8]);
            Sigreg::of(&[x], a, Peers::new(&comm, 1)).unwrap().value().into_scalar::<f32>()
        };
        let normal = of(Tensor::random([512, 1, 8], Distribution::Normal(0.0, 1.0), &device));
        let collapsed = of(Tensor::zeros([512, 1, 8], &device));
        assert!(normal < 2.0 && collapsed > 100.0, "{normal} {collapsed}");
    }

    #[test]
    fn directions_are_a_function_of_seed_and_step() {
        let a = directions(3, 5, [9, 4]);
        assert_eq!(a, directions(3, 5, [9, 4]));
        assert_ne!(a, directions(3, 6, [9, 4]));
        assert!(a.chunks_exact(4).all(|row| (row.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5));
    }
}
