//! Barlow Twins: the channels of two views of an image are equal, and differ from one another
//! (Zbontar et al. 2021).
//!
//! ```text
//! z_v = norm(projector(student(x_v)))      v = 1, 2; norm over the batch, without a gain
//! C = 1/B Σ_n z_1n z_2nᵀ                   over the global batch, [D, D]
//! loss = s · (Σ_i (1 - C_ii)² + λ Σ_{i≠j} C_ij²)
//! ```
//!
//! There is no teacher. Each view has statistics of its own in every batch normalization. A norm
//! divides by √(var + 1e-5), as in the authors' code, whose loss has s = 1.

use augment::MultiCrop;
use burn_tensor::Tensor;
use networks::head::projection::Normalizes;
use networks::outputs::Outputs;
use networks::unit::StatSets;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::{check_bounds, check_positive};
use super::loss::cross_covariance::{self, CovarianceLoss, Parts, products, squares};
use super::network::NetworkSpec;
use super::two_views::{
    PROJECTOR, check_projector, check_two_views, default_wide_hidden, default_wide_output, projector,
    view_output,
};
use super::{BatchLoss, BatchOutputs, Collective, Method, MethodContext, MethodRecipe, MicroBatchLoss};

/// Name of the network.
const STUDENT: &str = "student";

/// Settings of Barlow Twins, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Weight of the redundancy between different channels, λ; 0.0051 by default.
    #[serde(default = "default_redundancy_weight")]
    pub redundancy_weight: f64,
    /// Factor of the loss, s; 1 by default. The loss grows with the number of channels: with an
    /// optimizer whose steps depend on the gradient's length, such as SGD, a smaller factor allows
    /// the learning rates of other methods.
    #[serde(default = "default_loss_scale")]
    pub loss_scale: f64,
    /// Channels of the projector's hidden layers; two layers of 8192 by default.
    #[serde(default = "default_wide_hidden")]
    pub projector_hidden: Vec<usize>,
    /// Channels of the projector's output, D, whose correlations are D² numbers; 8192 by default.
    #[serde(default = "default_wide_output")]
    pub output: usize,
}

fn default_redundancy_weight() -> f64 {
    0.0051
}

fn default_loss_scale() -> f64 {
    1.0
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "Barlow Twins";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        check_bounds(&[("redundancy_weight", self.redundancy_weight, [0.0, 1e3])])?;
        check_positive("loss_scale", self.loss_scale, 1e3)?;
        check_projector(&self.projector_hidden, None, self.output)?;
        check_two_views(&cx.views, Self::TITLE)?;
        Ok(Box::new(BarlowTwins { config: self.clone(), views: cx.views.clone(), width: cx.model.width() }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let config =
            Self { redundancy_weight: 0.05, loss_scale: 0.3, projector_hidden: vec![12, 10], output: 6 };
        vec![(config, MultiCrop::moco_v3(16, [0.2, 1.0]))]
    }
}

struct BarlowTwins {
    config: Config,
    views: MultiCrop,
    width: usize,
}

impl Method for BarlowTwins {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let Config { projector_hidden, output, .. } = &self.config;
        let head = projector(self.width, projector_hidden, *output, Normalizes::All);
        vec![NetworkSpec::trained(STUDENT, vec![head], 2)]
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
        let mut first = Vec::with_capacity(batch.trained.len());
        let mut second = Vec::with_capacity(batch.trained.len());
        for outputs in batch.trained {
            first.push(view_output(outputs, PROJECTOR, 0));
            second.push(view_output(outputs, PROJECTOR, 1));
        }
        Ok(Box::new(BarlowTwinsLoss::new(&first, &second, &self.config, peers)?))
    }

    fn collectives(&self) -> Vec<Collective> {
        vec![cross_covariance::collective(self.config.output)]
    }
}

/// Loss of a batch.
struct BarlowTwinsLoss {
    loss: CovarianceLoss,
    /// Σ_i (1 - C_ii)², `[1]`.
    invariance: Tensor<1>,
    /// Σ_{i≠j} C_ij², `[1]`.
    redundancy: Tensor<1>,
}

impl BarlowTwinsLoss {
    /// Computes the loss of the global batch, given the normalized outputs of this rank for both
    /// views, `[b, D]` by micro-batch, without a graph.
    fn new(
        first: &[Tensor<2>],
        second: &[Tensor<2>],
        config: &Config,
        peers: Peers<'_>,
    ) -> Result<Self, EngineError> {
        let [b, _] = first[0].dims();
        let batch_size = (b * peers.n_micro_batches()) as f64;
        let correlation = Parts::new(products(first, second, peers)? / batch_size);
        let error = correlation.diagonal - 1.0;
        let invariance = squares(error.clone());
        let redundancy = squares(correlation.rest.clone());
        let weight = config.redundancy_weight;
        let value = (invariance.clone() + redundancy.clone() * weight) * config.loss_scale;
        // Of the sum of products, which is B · C.
        let factor = 2.0 * config.loss_scale / batch_size;
        let gradient = Parts { diagonal: error * factor, rest: correlation.rest * (factor * weight) };
        let loss = CovarianceLoss::new(value, vec![gradient.join()], peers);
        Ok(Self { loss, invariance, redundancy })
    }
}

impl BatchLoss for BarlowTwinsLoss {
    fn micro_batch_loss(&self, _: usize, student: &Outputs) -> MicroBatchLoss {
        let first = view_output(student, PROJECTOR, 0);
        let second = view_output(student, PROJECTOR, 1);
        let gauges = vec![
            ("train/invariance_loss", self.invariance.clone()),
            ("train/redundancy_loss", self.redundancy.clone()),
        ];
        MicroBatchLoss { loss: self.loss.loss(&[first], &[second]), gauges }
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
    fn reference(first: Tensor<2>, second: Tensor<2>, config: &Config) -> Tensor<1> {
        let [b, d] = first.dims();
        let correlation = first.transpose().matmul(second) / b as f64;
        let identity = Tensor::<2>::eye(d, &correlation.device().inner()).autodiff();
        let diagonal = correlation.clone() * identity.clone();
        let rest = correlation - diagonal.clone();
        let invariance = (diagonal - identity).powi_scalar(2).sum();
        (invariance + rest.powi_scalar(2).sum() * config.redundancy_weight) * config.loss_scale
    }

    #[test]
    fn value_and_gradient_do_not_depend_on_the_number_of_micro_batches() {
        let device = Device::flex();
        device.seed(3);
        let b = 12;
        let d = 5;
        let config = Config::examples().remove(0).0;
        let first = Tensor::<2>::random([b, d], Distribution::Normal(0.0, 1.0), &device);
        let second = Tensor::<2>::random([b, d], Distribution::Normal(0.0, 1.0), &device);
        let tracked_first = first.clone().autodiff().require_grad();
        let tracked_second = second.clone().autodiff().require_grad();
        let expected = reference(tracked_first.clone(), tracked_second.clone(), &config);
        let expected_grads = expected.clone().backward();
        let first_grad = tracked_first.grad(&expected_grads).unwrap();
        let second_grad = tracked_second.grad(&expected_grads).unwrap();
        let comm = Communicator::solo();
        for n in [1, 3, 4] {
            let firsts: Vec<Tensor<2>> = (0..n).map(|index| micro_batch(&first, index, n)).collect();
            let seconds: Vec<Tensor<2>> = (0..n).map(|index| micro_batch(&second, index, n)).collect();
            let prepared = BarlowTwinsLoss::new(&firsts, &seconds, &config, Peers::new(&comm, n)).unwrap();
            for index in 0..n {
                let first_leaf = firsts[index].clone().autodiff().require_grad();
                let second_leaf = seconds[index].clone().autodiff().require_grad();
                let loss =
                    prepared.loss.loss(std::slice::from_ref(&first_leaf), std::slice::from_ref(&second_leaf));
                assert_close("value", loss.clone().inner(), expected.clone().inner(), 2e-5);
                let grads = loss.backward();
                let gradient = first_leaf.grad(&grads).unwrap() / n as f64;
                assert_close("first view", gradient, micro_batch(&first_grad, index, n), 2e-5);
                let gradient = second_leaf.grad(&grads).unwrap() / n as f64;
                assert_close("second view", gradient, micro_batch(&second_grad, index, n), 2e-5);
            }
        }
    }
}
