//! VICReg: two views of an image agree, while every channel varies within the batch and no two
//! channels vary together (Bardes, Ponce and LeCun 2022).
//!
//! ```text
//! z_v = expander(student(x_v))                                       v = 1, 2
//! K_v = 1/(B-1) Σ_n (z_vn - mean z_v)(z_vn - mean z_v)ᵀ              over the global batch, [D, D]
//! loss = λ · mean_n,d (z_1 - z_2)²
//!      + μ · 1/2 Σ_v mean_i max(0, 1 - √(K_v,ii + ε))                ε = 1e-4
//!      + ν · Σ_v 1/D Σ_{i≠j} K_v,ij²
//! ```
//!
//! There is no teacher. The mean over channels in the first term and the factor 1/2 in the second
//! are those of the authors' code. Each view has statistics of its own in every batch
//! normalization. The hidden layers of the authors' code have biases, which a normalization
//! cancels, and which are left out here.

use augment::MultiCrop;
use burn_tensor::Tensor;
use networks::head::projection::Normalizes;
use networks::outputs::Outputs;
use networks::unit::StatSets;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::check_bounds;
use super::loss::cross_covariance::{self, CovarianceLoss, Parts, products, squares};
use super::network::NetworkSpec;
use super::two_views::{
    PROJECTOR, check_projector, check_two_views, default_wide_hidden, default_wide_output, projector,
    view_output,
};
use super::{BatchLoss, BatchOutputs, Collective, Method, MethodContext, MethodRecipe, MicroBatchLoss};

/// Name of the network.
const STUDENT: &str = "student";

/// Number of views.
const N_VIEWS: usize = 2;

/// Keeps a standard deviation away from zero, ε.
const EPSILON: f64 = 1e-4;

/// Settings of VICReg, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Weight of the distance between views, λ; 25 by default.
    #[serde(default = "default_weight")]
    pub invariance_weight: f64,
    /// Weight of the lack of variance, μ; 25 by default.
    #[serde(default = "default_weight")]
    pub variance_weight: f64,
    /// Weight of the covariance of channels, ν; 1 by default.
    #[serde(default = "default_covariance_weight")]
    pub covariance_weight: f64,
    /// Channels of the hidden layers of the projector, which the paper calls expander; two layers
    /// of 8192 by default.
    #[serde(default = "default_wide_hidden")]
    pub projector_hidden: Vec<usize>,
    /// Channels of the projector's output, D, whose covariances are D² numbers; 8192 by default.
    #[serde(default = "default_wide_output")]
    pub output: usize,
}

fn default_weight() -> f64 {
    25.0
}

fn default_covariance_weight() -> f64 {
    1.0
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "VICReg";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        check_bounds(&[
            ("invariance_weight", self.invariance_weight, [0.0, 1e6]),
            ("variance_weight", self.variance_weight, [0.0, 1e6]),
            ("covariance_weight", self.covariance_weight, [0.0, 1e6]),
        ])?;
        check_projector(&self.projector_hidden, None, self.output)?;
        if cx.length.batch_size < 2 {
            return Err(
                "optim.batch_size 1: must be at least 2, because VICReg computes variances over the batch"
                    .into(),
            );
        }
        check_two_views(&cx.views, Self::TITLE)?;
        Ok(Box::new(VicReg { config: self.clone(), views: cx.views.clone(), width: cx.model.width() }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let config = Self {
            invariance_weight: 20.0,
            variance_weight: 15.0,
            covariance_weight: 2.0,
            projector_hidden: vec![12, 10],
            output: 6,
        };
        vec![(config, MultiCrop::moco_v3(16, [0.2, 1.0]))]
    }
}

struct VicReg {
    config: Config,
    views: MultiCrop,
    width: usize,
}

impl Method for VicReg {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let Config { projector_hidden, output, .. } = &self.config;
        let head = projector(self.width, projector_hidden, *output, Normalizes::Hidden);
        vec![NetworkSpec::trained(STUDENT, vec![head], N_VIEWS)]
    }

    fn evaluated(&self) -> &'static str {
        STUDENT
    }

    fn head_stat_sets(&self) -> StatSets {
        self.stat_sets()
    }

    fn prepares_with_heads(&self) -> bool {
        true
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        _: u64,
        peers: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let mut views: Vec<Vec<Tensor<2>>> = Vec::with_capacity(N_VIEWS);
        for view in 0..N_VIEWS {
            views.push(batch.trained.iter().map(|outputs| view_output(outputs, PROJECTOR, view)).collect());
        }
        Ok(Box::new(VicRegLoss::new(&views, &self.config, peers)?))
    }

    fn collectives(&self) -> Vec<Collective> {
        let d = self.config.output;
        let mut collectives = Vec::new();
        for _ in 0..N_VIEWS {
            collectives.extend([Collective::Sum(d), cross_covariance::collective(d)]);
        }
        collectives
    }
}

/// Loss of a batch.
struct VicRegLoss {
    /// Mean of each view over the global batch, `[1, D]`.
    means: Vec<Tensor<2>>,
    /// The terms of variance and covariance, with their weights.
    regularizer: CovarianceLoss,
    invariance_weight: f64,
    /// The term of variance, `[1]`.
    variance: Tensor<1>,
    /// The term of covariance, `[1]`.
    covariance: Tensor<1>,
}

impl VicRegLoss {
    /// Computes the terms of the global batch, given the outputs of this rank by view, `[b, D]` by
    /// micro-batch, without a graph.
    fn new(views: &[Vec<Tensor<2>>], config: &Config, peers: Peers<'_>) -> Result<Self, EngineError> {
        let [b, d] = views[0][0].dims();
        let batch_size = (b * peers.n_micro_batches()) as f64;
        let mut means = Vec::with_capacity(N_VIEWS);
        let mut gradients = Vec::with_capacity(N_VIEWS);
        let mut variances = Vec::with_capacity(N_VIEWS);
        let mut covariances = Vec::with_capacity(N_VIEWS);
        for view in views {
            let sums: Vec<Tensor<1>> = view.iter().map(|z| z.clone().sum_dim(0).reshape([d])).collect();
            let mean = (peers.sum("means", &sums)? / batch_size).reshape([1, d]);
            // Centered before products are summed: the mean may be much larger than the deviation.
            let centered: Vec<Tensor<2>> = view.iter().map(|z| z.clone() - mean.clone()).collect();
            let covariance = Parts::new(products(&centered, &centered, peers)? / (batch_size - 1.0));
            let deviation = (covariance.diagonal + EPSILON).sqrt();
            let lack = (-deviation.clone() + 1.0).clamp_min(0.0);
            variances.push(lack.clone().mean() / 2.0);
            covariances.push(squares(covariance.rest.clone()) / d as f64);
            // Of the sum of products, which is (B - 1) K. The sign is one where variance lacks.
            let factor = 1.0 / (d as f64 * (batch_size - 1.0));
            let gradient = Parts {
                diagonal: lack.sign() / deviation * (-0.25 * config.variance_weight * factor),
                rest: covariance.rest * (2.0 * config.covariance_weight * factor),
            };
            gradients.push(gradient.join());
            means.push(mean);
        }
        let variance = Tensor::cat(variances, 0).sum();
        let covariance = Tensor::cat(covariances, 0).sum();
        let value = variance.clone() * config.variance_weight + covariance.clone() * config.covariance_weight;
        let regularizer = CovarianceLoss::new(value, gradients, peers);
        Ok(Self { means, regularizer, invariance_weight: config.invariance_weight, variance, covariance })
    }

    /// Returns the loss, given the outputs of a micro-batch by view, `[b, D]`, with a graph.
    fn loss(&self, views: &[Tensor<2>; N_VIEWS]) -> MicroBatchLoss {
        let invariance = (views[0].clone() - views[1].clone()).powi_scalar(2).mean();
        // The gradient at the means is zero: they are constants.
        let mut centered = Vec::with_capacity(N_VIEWS);
        for (view, mean) in views.iter().zip(&self.means) {
            centered.push(view.clone() - mean.clone().autodiff());
        }
        let gauges = vec![
            ("train/invariance_loss", invariance.clone().inner()),
            ("train/variance_loss", self.variance.clone()),
            ("train/covariance_loss", self.covariance.clone()),
        ];
        let loss = invariance * self.invariance_weight + self.regularizer.loss(&centered, &centered);
        MicroBatchLoss { loss, gauges }
    }
}

impl BatchLoss for VicRegLoss {
    fn micro_batch_loss(&self, _: usize, student: &Outputs) -> MicroBatchLoss {
        self.loss(&[0, 1].map(|view| view_output(student, PROJECTOR, view)))
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Distribution};
    use kernels::ops::testing::assert_close;
    use ranks::communicator::Communicator;

    use super::*;

    /// Returns the images of micro-batch `index` of `n`.
    fn micro_batch(t: &Tensor<2>, index: usize, n: usize) -> Tensor<2> {
        let [b, _] = t.dims();
        Tensor::cat((index..b).step_by(n).map(|i| t.clone().slice(i..i + 1)).collect(), 0)
    }

    /// Evaluates the formula with one graph for the global batch.
    fn reference(views: &[Tensor<2>; 2], config: &Config) -> Tensor<1> {
        let [b, d] = views[0].dims();
        let difference = views[0].clone() - views[1].clone();
        let mut loss = difference.powi_scalar(2).mean() * config.invariance_weight;
        for view in views {
            let centered = view.clone() - view.clone().mean_dim(0);
            let covariance = centered.clone().transpose().matmul(centered) / (b - 1) as f64;
            let identity = Tensor::<2>::eye(d, &covariance.device().inner()).autodiff();
            let diagonal = covariance.clone() * identity;
            let deviation = (diagonal.clone().sum_dim(1) + EPSILON).sqrt();
            let lack = (-deviation + 1.0).clamp_min(0.0);
            loss = loss + lack.mean() * (config.variance_weight / 2.0);
            let rest = covariance - diagonal;
            loss = loss + rest.powi_scalar(2).sum() * (config.covariance_weight / d as f64);
        }
        loss
    }

    /// Channels of which some vary by more than one, and some by less.
    #[test]
    fn value_and_gradient_do_not_depend_on_the_number_of_micro_batches() {
        let device = Device::flex();
        device.seed(5);
        let b = 12;
        let d = 5;
        let config = Config::examples().remove(0).0;
        let spread = Tensor::<1>::from_floats([0.2f32, 0.5, 0.8, 1.5, 3.0].as_slice(), &device);
        let views = [0.3, -0.2].map(|mean| {
            let normal = Tensor::<2>::random([b, d], Distribution::Normal(mean, 1.0), &device);
            normal * spread.clone().reshape([1, d])
        });
        let tracked = views.clone().map(|view| view.autodiff().require_grad());
        let expected = reference(&tracked, &config);
        let expected_grads = expected.clone().backward();
        let expected_value = expected.into_scalar::<f32>();
        let comm = Communicator::solo();
        for n in [1, 3, 4] {
            let mut parts: Vec<Vec<Tensor<2>>> = Vec::new();
            for view in &views {
                parts.push((0..n).map(|index| micro_batch(view, index, n)).collect());
            }
            let prepared = VicRegLoss::new(&parts, &config, Peers::new(&comm, n)).unwrap();
            let mut value = 0.0;
            let [first, second] = &parts[..] else { unreachable!("two views") };
            for (index, (first, second)) in first.iter().zip(second).enumerate() {
                let leaves = [first, second].map(|part| part.clone().autodiff().require_grad());
                let loss = prepared.loss(&leaves).loss;
                value += loss.clone().into_scalar::<f32>() / n as f32;
                let grads = loss.backward();
                for (leaf, tracked) in leaves.iter().zip(&tracked) {
                    let gradient = leaf.grad(&grads).unwrap() / n as f64;
                    let expected = micro_batch(&tracked.grad(&expected_grads).unwrap(), index, n);
                    assert_close("gradient", gradient, expected, 5e-5);
                }
            }
            assert!((value - expected_value).abs() <= 2e-5 * expected_value, "{value} {expected_value}");
        }
    }
}
