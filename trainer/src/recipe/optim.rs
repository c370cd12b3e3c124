//! The `[optim]` section of a recipe: optimizer, schedules, batch and length of the run.

use networks::adapter::Adapter;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::optim::ClipRule;
use crate::schedule::{Duration, Length};
use crate::step::precision::Precision;

/// The optimizer and the length of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OptimConfig {
    /// Number of images in a step, over all ranks.
    pub batch_size: usize,
    /// Length of the run. Minutes count from the start of the program to its end and become steps
    /// before the run begins: a few steps are timed on its images, with a checkpoint and the
    /// probes, and the plan has the number of steps that fit, so that a resumed run and one with
    /// the same plan take as many. `--hours` sets it.
    pub length: Length,
    /// Update rule of the parameters; AdamW by default.
    #[serde(default)]
    pub algorithm: Algorithm,
    /// Learning rate for a batch of 256 images; `lr_scaling` adapts it to the batch size.
    pub lr: f64,
    /// Rule that scales `lr` and `start_lr` with the batch size; linear by default.
    #[serde(default)]
    pub lr_scaling: LrScaling,
    /// Learning rate of the first step of the warm-up, for 256 images like `lr`; 0 by default.
    #[serde(default)]
    pub start_lr: f64,
    /// Final learning rate, which is not scaled with the batch size; 1e-6 by default.
    #[serde(default = "default_min_lr")]
    pub min_lr: f64,
    /// Length of the learning rate's linear warm-up.
    pub warmup: Duration,
    /// Schedule of the learning rate after the warm-up; a cosine by default.
    #[serde(default)]
    pub schedule: LrSchedule,
    /// Length of the decay at the end of a run with a constant learning rate; none by default.
    #[serde(default = "no_time")]
    pub cooldown: Duration,
    /// Weight decay at start and end. If absent: 0.04 to 0.4 with AdamW (DINO's), 1e-4 with SGD
    /// (DINO's on ResNet-50) and 1e-6 with LARS and LARC (SimCLR's and SwAV's).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<[f64; 2]>,
    /// Whether to decay biases, gains and other vectors as well; false by default.
    #[serde(default)]
    pub decay_vectors: bool,
    /// Decay rates of AdamW's two moments; 0.9 and 0.999 by default.
    #[serde(default = "default_betas")]
    pub betas: [f64; 2],
    /// Momentum of all algorithms but AdamW; 0.9 by default.
    #[serde(default = "default_momentum")]
    pub momentum: f64,
    /// Whether to use Nesterov momentum; false by default.
    #[serde(default)]
    pub nesterov: bool,
    /// Trust coefficient of LARS and LARC: norm of an update over that of its parameter, at rate 1;
    /// 1e-3 by default.
    #[serde(default = "default_trust")]
    pub trust: f64,
    /// Largest gradient norm of a clip group; 0 for no clipping. If absent: 3 with AdamW, no
    /// clipping with the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// Parameters that are clipped as a group; each tensor separately by default.
    #[serde(default)]
    pub clip: ClipRule,
    /// Ratio of the learning rate of a backbone unit to that of the unit after it; the last unit
    /// has the run's rate; 1 by default.
    #[serde(default = "default_ratio", skip_serializing_if = "is_one")]
    pub layer_decay: f64,
    /// Ratio of the learning rate of a transformer's projection of patches to that of its unit; 1
    /// by default.
    #[serde(default = "default_ratio", skip_serializing_if = "is_one")]
    pub patch_rate: f64,
    /// Length of time at the start during which the trained network's backbone is frozen, so that
    /// new heads do not disturb its initial weights; none by default.
    #[serde(default = "no_time", skip_serializing_if = "is_no_time")]
    pub freeze_backbone: Duration,
    /// Number of units of the trained network's backbone, counted from the last, that are trained;
    /// all by default. The last unit of a transformer is its norm, the first its embedding, the
    /// others its blocks: 5 are the last four blocks and the norm, and 0 trains only heads. The
    /// units before them keep their initial weights and run as in training, without graphs and
    /// without a backward pass: steps take less time and memory. Running statistics still follow
    /// the batches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_units: Option<usize>,
    /// Adapters of low rank, such as `{ rank = 8, alpha = 16 }`, that are trained in place of the
    /// backbone's weights. Moments are those of adapters alone, whose gradients a step makes of
    /// those of whole weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<Adapter>,
    /// Number of micro-batches in a global batch, over all ranks; 0 for one per rank, or more where
    /// `stat_images` needs it. A rank passes its micro-batches through a unit one at a time, so a
    /// unit that does not keep its graph needs activation memory for only one. The order of sums
    /// depends on this number, not on the number of ranks: if it is set, 1, 2, 4 … ranks give the
    /// same bits, as long as gradients are sent in f32.
    #[serde(default)]
    pub micro_batches: usize,
    /// Number of images that share statistics, such as those of batch normalization; 0 for the
    /// whole batch. Published runs compute them over groups of ranks: 128 is a group of 8 GPUs with
    /// 16 images each.
    #[serde(default)]
    pub stat_images: usize,
    /// Data types of computation, and of the weights and gradients sent between ranks.
    #[serde(default)]
    pub precision: Precision,
}

fn default_min_lr() -> f64 {
    1e-6
}

pub(super) fn default_betas() -> [f64; 2] {
    [0.9, 0.999]
}

fn no_time() -> Duration {
    Duration::Steps(0)
}

fn is_no_time(duration: &Duration) -> bool {
    *duration == no_time()
}

fn default_ratio() -> f64 {
    1.0
}

fn is_one(ratio: &f64) -> bool {
    *ratio == 1.0
}

pub(super) fn default_momentum() -> f64 {
    0.9
}

pub(super) fn default_trust() -> f64 {
    1e-3
}

impl OptimConfig {
    /// Fills in defaults that depend on the algorithm, so that a plan is the same whether a recipe
    /// states them or not.
    pub(crate) fn fill_defaults(&mut self) {
        self.weight_decay = Some(self.weight_decay());
        self.clip_norm = Some(self.clip_norm());
    }

    /// Returns the number of images over which batch statistics are computed.
    pub fn stat_images(&self) -> usize {
        if self.stat_images == 0 { self.batch_size } else { self.stat_images }
    }

    /// Returns the number of groups into which a batch is divided, each with its own statistics.
    pub fn n_stat_groups(&self) -> usize {
        (self.batch_size / self.stat_images()).max(1)
    }

    /// Returns the weight decay at start and end.
    pub fn weight_decay(&self) -> [f64; 2] {
        self.weight_decay.unwrap_or(match self.algorithm {
            Algorithm::Adamw => [0.04, 0.4],
            Algorithm::Sgd => [1e-4; 2],
            Algorithm::Lars | Algorithm::Larc => [1e-6; 2],
        })
    }

    /// Returns the largest gradient norm of a clip group; 0 for no clipping.
    pub fn clip_norm(&self) -> f64 {
        self.clip_norm.unwrap_or(match self.algorithm {
            Algorithm::Adamw => 3.0,
            Algorithm::Sgd | Algorithm::Lars | Algorithm::Larc => 0.0,
        })
    }
}

/// Update rule of the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// AdamW: moments of the gradient, with decoupled weight decay (Loshchilov and Hutter 2019).
    #[default]
    Adamw,
    /// Stochastic gradient descent with momentum.
    Sgd,
    /// Gradient descent with a separate rate for each decayed parameter (You et al. 2017), as in
    /// VISSL and MoCo v3.
    Lars,
    /// Gradient descent with a separate rate for each parameter, as in NVIDIA's apex.
    Larc,
}

impl Algorithm {
    /// Returns the name that recipes use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Adamw => "adamw",
            Self::Sgd => "sgd",
            Self::Lars => "lars",
            Self::Larc => "larc",
        }
    }
}

/// Schedule of the learning rate after its warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedule {
    /// Half a cosine after the warm-up; the last step of the warm-up has the full rate: DINO, SwAV.
    #[default]
    Cosine,
    /// Half a cosine after the warm-up; the last step of the warm-up is one increment below the
    /// full rate: MoCo v3.
    HalfCosine,
    /// Half a cosine over the whole run, whose beginning the warm-up replaces: VISSL. The rate
    /// drops slightly at the end of the warm-up.
    CosineOfRun,
    /// Constant until the `cooldown` at the end.
    Constant,
}

/// Rule that scales the learning rate with the batch size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LrScaling {
    /// Linear scaling: `lr · batch_size / 256` (Goyal et al. 2017).
    #[default]
    Linear,
    /// Square-root scaling: `lr · √(batch_size / 256)`.
    Sqrt,
    /// No scaling: `lr`, whatever the batch size.
    Fixed,
}

impl LrScaling {
    /// Returns the learning rate of a run divided by `optim.lr`.
    pub fn factor(self, batch_size: usize) -> f64 {
        let ratio = batch_size as f64 / 256.0;
        match self {
            Self::Linear => ratio,
            Self::Sqrt => ratio.sqrt(),
            Self::Fixed => 1.0,
        }
    }
}
