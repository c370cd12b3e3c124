//! SimCLR: each view identifies the other view of its image among all views of the batch (Chen et
//! al. 2020).
//!
//! ```text
//! z_i = head(student(x_i))        two views of every image
//! loss = mean_i log Σ_{j≠i} exp(ẑ_i·ẑ_j / τ) - ẑ_i·ẑ_p(i) / τ       over all views j of the global batch
//! ```
//!
//! There is no teacher.

use augment::MultiCrop;
use burn_tensor::Tensor;
use kernels::ops::{NORM_EPSILON, unit_rows};
use networks::head::projection::Projection;
use networks::head::{Head, Reads};
use networks::outputs::Outputs;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::check_positive;
use super::loss::nt_xent::{self, Contrast, N_VIEWS};
use super::network::NetworkSpec;
use super::{BatchLoss, BatchOutputs, Collective, Method, MethodContext, MethodRecipe, MicroBatchLoss};

/// Name of the head.
const HEAD: &str = "head";

/// Name of the network.
const STUDENT: &str = "student";

/// Settings of SimCLR, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Temperature of the contrast, τ; 0.1 by default.
    #[serde(default = "default_temperature")]
    pub temperature: f64,
    /// Channels of the head's hidden layers; one layer of 2048 by default.
    #[serde(default = "default_hidden")]
    pub head_hidden: Vec<usize>,
    /// Channels of the head's output, in which views are compared; 128 by default.
    #[serde(default = "default_output")]
    pub head_output: usize,
    /// Whether the head's hidden layers are normalized over the batch; false by default.
    #[serde(default)]
    pub head_batch_norm: bool,
}

fn default_temperature() -> f64 {
    0.1
}

fn default_hidden() -> Vec<usize> {
    vec![2048]
}

fn default_output() -> usize {
    128
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "SimCLR";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        check_positive("temperature", self.temperature, 1e3)?;
        if self.head_output == 0 || self.head_hidden.contains(&0) {
            return Err("method.head_output and every number of method.head_hidden must be at least 1".into());
        }
        if cx.length.batch_size < 2 {
            return Err(
                "optim.batch_size 1: must be at least 2, because SimCLR compares each image with others"
                    .into(),
            );
        }
        match cx.views.groups()[..] {
            [group] if group.n_views == N_VIEWS => {}
            _ => return Err("views: SimCLR compares two views of one size".into()),
        }
        Ok(Box::new(SimClr { config: self.clone(), views: cx.views.clone(), width: cx.model.width() }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let plain = Self { temperature: 0.2, head_hidden: vec![12], head_output: 6, head_batch_norm: false };
        let views = MultiCrop::dino(16, 8, 0);
        vec![(plain.clone(), views.clone()), (Self { head_batch_norm: true, ..plain }, views)]
    }
}

struct SimClr {
    config: Config,
    views: MultiCrop,
    width: usize,
}

impl Method for SimClr {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let Config { head_hidden, head_output, head_batch_norm, .. } = &self.config;
        let projection = Projection::for_head(self.width, head_hidden, *head_output, *head_batch_norm);
        let head = Head::new(HEAD, Reads::Pooled, vec![Box::new(projection)]);
        vec![NetworkSpec::trained(STUDENT, vec![head], 1)]
    }

    fn evaluated(&self) -> &'static str {
        STUDENT
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
        let views: Vec<Tensor<3>> = batch.trained.iter().map(unit_views).collect();
        let [b, _, _] = views[0].dims();
        let contrast = Contrast::new(&views, self.config.temperature, peers)?;
        let positions = peers.positions(b);
        Ok(Box::new(SimClrLoss { contrast, positions }))
    }

    fn collectives(&self) -> Vec<Collective> {
        nt_xent::collectives(self.config.head_output)
    }
}

/// Returns both views of each image, scaled to length one, `[B, 2, D]`.
fn unit_views(outputs: &Outputs) -> Tensor<3> {
    let z = outputs.heads.on_views(HEAD, 0);
    let [b, v, d] = z.dims();
    unit_rows(z.reshape([b * v, d]), NORM_EPSILON).reshape([b, v, d])
}

/// SimCLR's loss of a batch.
struct SimClrLoss {
    contrast: Contrast,
    /// Positions in the batch of the images of each micro-batch.
    positions: Vec<Vec<usize>>,
}

impl BatchLoss for SimClrLoss {
    fn micro_batch_loss(&self, index: usize, student: &Outputs) -> MicroBatchLoss {
        let loss = self.contrast.loss(unit_views(student), &self.positions[index]);
        MicroBatchLoss { loss, gauges: Vec::new() }
    }
}
