//! The recipe as written: a TOML file whose unknown keys are errors; and the plan that it resolves into.

pub(crate) mod compare;
mod flat;
mod lengths;
mod parse;
pub mod plan;
mod values;

use augment::DecodeRules;
use networks::backbone::ModelConfig;
use networks::patches::Normalization;
use ranks::topology::Sharding;
use serde::{Deserialize, Serialize, Serializer};

use crate::error::TrainError;
use crate::method::{MethodConfig, ViewsConfig};
use crate::optim::ClipRule;
use crate::schedule::Duration;
use crate::step::precision::Precision;

/// A recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Its name, for people.
    pub name: String,
    /// Seed of everything random.
    #[serde(default)]
    pub seed: u64,
    /// Where the samples come from.
    #[serde(default)]
    pub data: DataConfig,
    /// The backbone.
    pub model: ModelConfig,
    /// What is learned.
    pub method: MethodConfig,
    /// The views of an image.
    pub views: ViewsConfig,
    /// How the trained network moves.
    pub optim: OptimConfig,
    /// Weights that the backbone starts from; absent for random ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<InitConfig>,
    /// What may differ between two starts of the same run.
    #[serde(default)]
    pub run: RunConfig,
}

impl Recipe {
    /// Parses a recipe and applies `overrides` of the form `optim.lr=1e-3`. `origin` names it in
    /// messages.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] with the key, and for an unknown key the nearest known one.
    pub fn parse(text: &str, origin: &str, overrides: &[String]) -> Result<Self, TrainError> {
        parse::from_toml(text, overrides)
            .map_err(|reason| TrainError::Recipe { recipe: origin.into(), reason })
    }

    /// Every value by its key, such as `optim.batch_size`, in the order of the keys.
    pub fn values(&self) -> Vec<(String, toml::Value)> {
        let mut values = Vec::new();
        // Through text, in which a number of single precision has as many digits as it needs.
        let text = toml::to_string(self).unwrap_or_default();
        if let Ok(table) = toml::from_str::<toml::Value>(&text) {
            flat::flatten("", &table, &mut values);
        }
        values
    }
}

/// Shards and their order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Shard lists; `--shards` replaces them. Written without secrets: every start of a run opens the shards that it names itself.
    #[serde(serialize_with = "without_secrets")]
    pub shards: Vec<String>,
    /// Shards whose samples are permuted together.
    pub window_shards: usize,
    /// Share of unusable samples above which the run stops.
    pub max_bad_rate: f64,
    /// Images with more pixels are refused.
    pub max_pixels: u64,
    /// Whether EXIF orientation is applied.
    pub apply_exif: bool,
    /// What is subtracted from colors, and what they are divided by.
    pub normalization: Normalization,
}

fn without_secrets<S: Serializer>(shards: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(shards.iter().map(|spec| pipeline::secrets::without_secrets(spec)))
}

impl DataConfig {
    /// What the decoder accepts and applies.
    pub fn rules(&self) -> DecodeRules {
        DecodeRules { max_pixels: self.max_pixels, apply_exif: self.apply_exif }
    }
}

impl Default for DataConfig {
    fn default() -> Self {
        let rules = DecodeRules::default();
        Self {
            shards: Vec::new(),
            window_shards: 16,
            max_bad_rate: 0.01,
            max_pixels: rules.max_pixels,
            apply_exif: rules.apply_exif,
            normalization: Normalization::default(),
        }
    }
}

/// The optimizer and the length of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimConfig {
    /// Images of a step, over all ranks.
    pub batch_size: usize,
    /// Length of the run.
    pub length: Duration,
    /// How parameters move.
    #[serde(default)]
    pub algorithm: Algorithm,
    /// Learning rate for 256 images.
    pub lr: f64,
    /// How the rate of the run follows its batch size.
    #[serde(default)]
    pub lr_scaling: LrScaling,
    /// Learning rate of the first step of the warm-up, for 256 images, like `lr`.
    #[serde(default)]
    pub start_lr: f64,
    /// What the learning rate falls to, whatever the batch.
    #[serde(default = "default_min_lr")]
    pub min_lr: f64,
    /// Warm-up of the learning rate.
    pub warmup: Duration,
    /// How the learning rate goes on after its warm-up.
    #[serde(default)]
    pub schedule: LrSchedule,
    /// Last part of the run, over which a constant learning rate falls.
    #[serde(default = "default_cooldown")]
    pub cooldown: Duration,
    /// Weight decay at start and end. Absent for 0.04 to 0.4 with AdamW (DINO's), 1e-4 with SGD (DINO's on ResNet-50) and
    /// 1e-6 with LARS and LARC (SimCLR's and SwAV's).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<[f64; 2]>,
    /// Whether biases, gains and other vectors are decayed as well.
    #[serde(default)]
    pub decay_vectors: bool,
    /// Decay rates of AdamW's moments.
    #[serde(default = "default_betas")]
    pub betas: [f64; 2],
    /// Momentum of all algorithms but AdamW.
    #[serde(default = "default_momentum")]
    pub momentum: f64,
    /// Whether this momentum is Nesterov's.
    #[serde(default)]
    pub nesterov: bool,
    /// How far LARS and LARC move a parameter over its length, at a rate of one.
    #[serde(default = "default_trust")]
    pub trust: f64,
    /// Largest gradient norm of a clip group, 0 for none. Absent for 3 with AdamW and none with the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// What a clip group is.
    #[serde(default)]
    pub clip: ClipRule,
    /// Micro-batches in a global batch, over all ranks; 0 for one per rank, or more where `stat_images` needs it. A rank takes its own through a
    /// unit one after another: a unit that does not keep its graph needs activation memory for one only.
    /// The order of sums depends on this number, not on the number of ranks: if it is set, 1, 2, 4 … ranks
    /// give the same bits, as long as gradients are sent in f32.
    #[serde(default)]
    pub micro_batches: usize,
    /// Images that share statistics over the batch, such as those of batch normalization; 0 for the whole batch. The
    /// groups of ranks that published runs have: 128 is a group of 8 GPUs with 16 images each.
    #[serde(default)]
    pub stat_images: usize,
    /// How weights and gradients travel between ranks.
    #[serde(default)]
    pub precision: Precision,
}

fn default_min_lr() -> f64 {
    1e-6
}

fn default_betas() -> [f64; 2] {
    [0.9, 0.999]
}

fn default_cooldown() -> Duration {
    Duration::Steps(0)
}

fn default_momentum() -> f64 {
    0.9
}

fn default_trust() -> f64 {
    1e-3
}

impl OptimConfig {
    /// Writes out what depends on the algorithm, so that a plan has every value and an absent one equals it.
    pub(crate) fn fill_in(&mut self) {
        self.weight_decay = Some(self.weight_decay());
        self.clip_norm = Some(self.clip_norm());
    }

    /// Images that share statistics.
    pub fn stat_images(&self) -> usize {
        if self.stat_images == 0 { self.batch_size } else { self.stat_images }
    }

    /// Groups of a batch that share statistics.
    pub fn n_stat_groups(&self) -> usize {
        (self.batch_size / self.stat_images()).max(1)
    }

    /// Weight decay at start and end.
    pub fn weight_decay(&self) -> [f64; 2] {
        self.weight_decay.unwrap_or(match self.algorithm {
            Algorithm::Adamw => [0.04, 0.4],
            Algorithm::Sgd => [1e-4; 2],
            Algorithm::Lars | Algorithm::Larc => [1e-6; 2],
        })
    }

    /// Largest gradient norm of a clip group; 0 for none.
    pub fn clip_norm(&self) -> f64 {
        self.clip_norm.unwrap_or(match self.algorithm {
            Algorithm::Adamw => 3.0,
            Algorithm::Sgd | Algorithm::Lars | Algorithm::Larc => 0.0,
        })
    }
}

/// How parameters move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// By moments of the gradient, with weight decay apart (Loshchilov and Hutter 2019).
    #[default]
    Adamw,
    /// Along the gradient, with momentum.
    Sgd,
    /// Along the gradient, with a rate for each parameter that is decayed (You et al. 2017), as VISSL and MoCo v3 have it.
    Lars,
    /// Along the gradient, with a rate for every parameter, as in NVIDIA's apex.
    Larc,
}

/// How the learning rate goes on after its warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedule {
    /// Half a cosine that begins after the warm-up, whose last step has the full rate: DINO, SwAV.
    #[default]
    Cosine,
    /// The same, but for the warm-up, whose last step lies short of the full rate: MoCo v3.
    HalfCosine,
    /// Half a cosine over the whole run, whose beginning the warm-up replaces: VISSL. The rate drops slightly where the warm-up
    /// ends.
    CosineOfRun,
    /// Constant, but for `cooldown` at the end.
    Constant,
}

/// A rule for the learning rate of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrScaling {
    /// `lr · batch_size / 256` (Goyal et al. 2017).
    #[default]
    Linear,
    /// `lr · √(batch_size / 256)`.
    Sqrt,
    /// `lr` whatever the batch.
    Fixed,
}

impl LrScaling {
    /// The rate of a run over `optim.lr`.
    pub fn factor(self, batch_size: usize) -> f64 {
        let ratio = batch_size as f64 / 256.0;
        match self {
            Self::Linear => ratio,
            Self::Sqrt => ratio.sqrt(),
            Self::Fixed => 1.0,
        }
    }
}

/// Weights that a run starts from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InitConfig {
    /// File or folder of the weights: of another library, or of a run of this program.
    pub weights: String,
    /// What they were when the run began: two files with the same one hold the same weights. A plan has it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fingerprint: String,
}

/// What does not change what is learned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Steps between rows of metrics.
    pub log_every_steps: u64,
    /// Steps between checkpoints.
    pub checkpoint_every_steps: u64,
    /// Minutes after which one is written in between; 0 for none.
    pub checkpoint_every_minutes: f64,
    /// Checkpoints that are kept, the newest.
    pub keep_checkpoints: usize,
    /// Steps between probes; 0 for none.
    pub probe_every_steps: u64,
    /// Worker threads of the trainer; 0 for one a core. Another number changes the order of sums,
    /// and with it the last bits.
    pub workers: usize,
    /// Threads that decode and augment; 0 for one a core.
    pub data_threads: usize,
    /// Backbone units that keep their graph, counted from the last; the others are recomputed in the
    /// backward pass. Absent for as many as fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<usize>,
    /// What is cut over ranks.
    pub shard: Sharding,
    /// Ranks that share a copy of the model; 0 for all. Fewer make replicas: less traffic between nodes
    /// for more memory.
    pub shard_group: usize,
    /// Whether master weights and moments of all networks stay in the host's memory while a GPU computes, which gets
    /// weights unit by unit.
    pub offload: bool,
    /// Whether gradients are summed in a fixed order, which costs the same traffic and gives the same
    /// bits on any number of ranks; otherwise the engine chooses the order.
    pub exact_sums: bool,
    /// Seconds after which a collective that has not finished is an error.
    pub deadline_s: u64,
    /// How often a run may return to its last checkpoint after three non-finite steps in a row and skip
    /// the batches since then.
    pub max_rollbacks: u64,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            log_every_steps: 10,
            checkpoint_every_steps: 500,
            checkpoint_every_minutes: 30.0,
            keep_checkpoints: 2,
            probe_every_steps: 0,
            workers: 0,
            data_threads: 0,
            keep: None,
            shard: Sharding::Full,
            shard_group: 0,
            offload: false,
            exact_sums: true,
            deadline_s: 600,
            max_rollbacks: 2,
        }
    }
}
