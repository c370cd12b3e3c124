//! LeJEPA: views of an image agree, and embeddings of a batch are normally distributed (Balestriero
//! and LeCun 2025).
//!
//! ```text
//! z_v = projection(W student(x_v) + b)                     all views v; without an embedding W = 1, b = 0
//! loss = (1 - λ) mean_v,d (z_v - mean_{global} z)²  +  λ mean_v sigreg(z_v)
//! ```
//!
//! There is no teacher, no stopped gradient and no schedule of the method. Directions of the
//! regularizer are drawn anew in each step.

use augment::MultiCrop;
use burn_tensor::Tensor;
use networks::head::projection::{Normalizes, Projection};
use networks::head::{Head, Reads};
use networks::outputs::Outputs;
use networks::unit::Unit;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::loss::sigreg::{self, Sigreg, draw_directions};
use super::network::NetworkSpec;
use super::{BatchLoss, BatchOutputs, Collective, Method, MethodContext, MethodRecipe, MicroBatchLoss};

/// Name of the head.
const HEAD: &str = "head";

/// Name of the network.
const STUDENT: &str = "student";

/// Settings of LeJEPA, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Weight of the regularizer, λ; 0.02 by default.
    #[serde(default = "default_weight")]
    pub sigreg_weight: f64,
    /// Number of directions of the regularizer, M; 256 by default.
    #[serde(default = "default_directions")]
    pub directions: usize,
    /// Views whose mean is the target of all views; `global` by default.
    #[serde(default)]
    pub center: Center,
    /// Channels of a linear layer between the backbone and the projection, as in the authors'
    /// examples; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<usize>,
    /// Channels of the head's hidden layers; two layers of 2048 by default.
    #[serde(default = "default_hidden")]
    pub head_hidden: Vec<usize>,
    /// Channels of the head's output.
    pub head_output: usize,
    /// Whether the head's hidden layers are normalized over the batch; true by default.
    #[serde(default = "default_batch_norm")]
    pub head_batch_norm: bool,
}

/// Views whose mean is the target of all views.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Center {
    /// Views of the first size: the paper.
    #[default]
    Global,
    /// All views: the authors' minimal example.
    All,
}

fn default_weight() -> f64 {
    0.02
}

fn default_directions() -> usize {
    256
}

fn default_hidden() -> Vec<usize> {
    vec![2048, 2048]
}

fn default_batch_norm() -> bool {
    true
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "LeJEPA";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        if !(0.0..=1.0).contains(&self.sigreg_weight) {
            return Err(format!("method.sigreg_weight {} must lie in 0..=1", self.sigreg_weight));
        }
        if self.directions == 0
            || self.head_output == 0
            || self.embedding == Some(0)
            || self.head_hidden.contains(&0)
        {
            return Err("method.directions, method.embedding, method.head_output and every number of \
                 method.head_hidden must be at least 1"
                .into());
        }
        let n_views: usize = cx.views.groups().iter().map(|group| group.n_views).sum();
        if n_views < 2 {
            return Err("views: LeJEPA needs at least two views".into());
        }
        let config = self.clone();
        let views = cx.views.clone();
        let width = cx.model.width();
        let seed = cx.seed;
        Ok(Box::new(LeJepa { config, views, width, seed }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let paper = Self {
            sigreg_weight: 0.05,
            directions: 11,
            center: Center::Global,
            embedding: None,
            head_hidden: vec![12, 10],
            head_output: 6,
            head_batch_norm: true,
        };
        let minimal = Self { center: Center::All, embedding: Some(9), ..paper.clone() };
        let plain = Self { head_batch_norm: false, ..minimal.clone() };
        vec![
            (paper, MultiCrop::dino(16, 8, 2)),
            (minimal, MultiCrop::dino(16, 8, 0)),
            (plain, MultiCrop::dino(16, 8, 0)),
        ]
    }
}

struct LeJepa {
    config: Config,
    views: MultiCrop,
    width: usize,
    seed: u64,
}

impl Method for LeJepa {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let Config { embedding, head_hidden, head_output, head_batch_norm, .. } = &self.config;
        let mut units: Vec<Box<dyn Unit>> = Vec::new();
        if let Some(embedding) = embedding {
            units.push(Box::new(Projection {
                name: "head.embedding".into(),
                widths: vec![self.width, *embedding],
                normalizes: Normalizes::Nothing,
                has_biases: true,
            }));
        }
        let width = embedding.unwrap_or(self.width);
        units.push(Box::new(Projection::for_head(width, head_hidden, *head_output, *head_batch_norm)));
        let heads = vec![Head::new(HEAD, Reads::Pooled, units)];
        vec![NetworkSpec::trained(STUDENT, heads, self.views.groups().len())]
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
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let views: Vec<Tensor<3>> = batch.trained.iter().map(all_views).collect();
        let [_, _, d] = views[0].dims();
        let directions = draw_directions(self.seed, step, self.config.directions, d);
        let sigreg = Sigreg::new(&views, directions, peers)?;
        let n_central = match self.config.center {
            Center::Global => self.views.groups()[0].n_views,
            Center::All => self.views.groups().iter().map(|group| group.n_views).sum(),
        };
        Ok(Box::new(LeJepaLoss { sigreg, n_central, weight: self.config.sigreg_weight }))
    }

    fn collectives(&self) -> Vec<Collective> {
        let n_views = self.views.groups().iter().map(|group| group.n_views).sum();
        vec![sigreg::collective(n_views, self.config.directions)]
    }
}

/// Returns all views of each image, `[B, V, D]`.
fn all_views(outputs: &Outputs) -> Tensor<3> {
    let mut sizes = outputs.heads.on_all_views(HEAD);
    if sizes.len() == 1 { sizes.remove(0) } else { Tensor::cat(sizes, 1) }
}

/// LeJEPA's loss of a batch.
struct LeJepaLoss {
    sigreg: Sigreg,
    /// Number of views, from the first on, whose mean is the target of all views.
    n_central: usize,
    weight: f64,
}

impl BatchLoss for LeJepaLoss {
    fn micro_batch_loss(&self, _: usize, student: &Outputs) -> MicroBatchLoss {
        let views = all_views(student);
        let [b, _, d] = views.dims();
        let center = views.clone().slice([0..b, 0..self.n_central, 0..d]).mean_dim(1);
        let difference = views.clone() - center;
        let invariance = (difference.clone() * difference).mean();
        let gauges = vec![
            ("train/invariance_loss", invariance.clone().inner()),
            ("train/sigreg_loss", self.sigreg.value()),
        ];
        let loss = invariance * (1.0 - self.weight) + self.sigreg.loss(views) * self.weight;
        MicroBatchLoss { loss, gauges }
    }
}
