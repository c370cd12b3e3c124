//! The recipe as written: a TOML file whose unknown keys are errors.

use augment::{BlurRule, CropSpec, DecodeRules, MultiCrop};
use serde::{Deserialize, Serialize};

use crate::backbone::ModelConfig;
use crate::error::TrainError;
use crate::method::MethodConfig;
use crate::optim::ClipRule;
use crate::shard::mesh::Sharding;
use crate::shard::wire::Precision;

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
    /// How the student moves.
    pub optim: OptimConfig,
    /// How the teacher moves.
    pub teacher: TeacherConfig,
    /// What may differ between two starts of the same run.
    #[serde(default)]
    pub run: RunConfig,
}

/// Shards and their order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Shard lists; `--shards` replaces them.
    pub shards: Vec<String>,
    /// Shards whose samples are permuted together.
    pub window_shards: usize,
    /// Share of unusable samples above which the run stops.
    pub max_bad_rate: f64,
    /// Images with more pixels are refused.
    pub max_pixels: u64,
    /// Whether EXIF orientation is applied.
    pub apply_exif: bool,
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
        }
    }
}

/// The multi-crop: a preset of the literature, or view by view.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "preset", rename_all = "snake_case")]
pub enum ViewsConfig {
    /// DINO's.
    Dino(PresetSizes),
    /// DINOv2's.
    Dinov2(Dinov2Views),
    /// As listed.
    Custom(CustomViews),
}

/// Sizes of a preset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PresetSizes {
    /// Side of the two global views.
    pub global_px: u32,
    /// Side of the local views.
    pub local_px: u32,
    /// Local views.
    pub n_local: usize,
}

/// Sizes of DINOv2's views, and its blur.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dinov2Views {
    /// Side of the two global views.
    pub global_px: u32,
    /// Side of the local views.
    pub local_px: u32,
    /// Local views.
    pub n_local: usize,
    /// Probabilities of blur: the paper's, or those of the released models.
    #[serde(default)]
    pub blur: BlurRule,
}

/// Views one by one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CustomViews {
    /// In order; those that the teacher sees come first.
    pub crops: Vec<CropSpec>,
}

impl ViewsConfig {
    /// The multi-crop that is meant.
    pub fn multicrop(&self) -> MultiCrop {
        match self {
            Self::Dino(s) => MultiCrop::dino(s.global_px, s.local_px, s.n_local),
            Self::Dinov2(s) => MultiCrop::dinov2(s.global_px, s.local_px, s.n_local, s.blur),
            Self::Custom(views) => MultiCrop { crops: views.crops.clone() },
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
    /// Learning rate for 256 images; the run's is `lr · batch_size / 256`.
    pub lr: f64,
    /// What the learning rate falls to.
    #[serde(default = "default_min_lr")]
    pub min_lr: f64,
    /// Warm-up of the learning rate.
    pub warmup: Duration,
    /// Weight decay at start and end.
    #[serde(default = "default_weight_decay")]
    pub weight_decay: [f64; 2],
    /// Decay rates of Adam's moments.
    #[serde(default = "default_betas")]
    pub betas: [f64; 2],
    /// Largest gradient norm of a clip group; 0 for none.
    #[serde(default = "default_clip_norm")]
    pub clip_norm: f64,
    /// What a clip group is.
    #[serde(default)]
    pub clip: ClipRule,
    /// How long the last layer stays as it is.
    #[serde(default = "default_freeze")]
    pub freeze_last_layer: Duration,
    /// Parts that a global batch is cut into, over all ranks; 0 for one a rank. A rank takes its parts
    /// through a unit one after another: units that do not keep their graph need the memory of one part.
    /// Sums follow the parts: with a number set here 1, 2, 4 … ranks give the same bits, as long as
    /// gradients travel in f32.
    #[serde(default)]
    pub micro_batches: usize,
    /// How weights and gradients travel between ranks.
    #[serde(default)]
    pub precision: Precision,
}

fn default_min_lr() -> f64 {
    1e-6
}

fn default_weight_decay() -> [f64; 2] {
    [0.04, 0.4]
}

fn default_betas() -> [f64; 2] {
    [0.9, 0.999]
}

fn default_clip_norm() -> f64 {
    3.0
}

fn default_freeze() -> Duration {
    Duration::Epochs(1.0)
}

/// The teacher.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TeacherConfig {
    /// Share of the old teacher that stays, at start and end.
    pub decay: [f64; 2],
    /// Temperature of its softmax at start and after the warm-up.
    pub temp: [f64; 2],
    /// Warm-up of the temperature.
    pub temp_warmup: Duration,
}

/// What does not change what is learned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Steps between rows of metrics.
    pub log_every_steps: u64,
    /// Steps between checkpoints.
    pub checkpoint_every_steps: u64,
    /// Checkpoints that are kept, the newest.
    pub keep_checkpoints: usize,
    /// Steps between probes; 0 for none.
    pub probe_every_steps: u64,
    /// Worker threads of the trainer; 0 for one a core. Another number changes the order of sums,
    /// and with it the last bits.
    pub workers: usize,
    /// Threads that decode and augment; 0 for one a core.
    pub data_threads: usize,
    /// Backbone units that keep their graph, from the last on: the others run again on the way back.
    /// Absent for as many as fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<usize>,
    /// What is cut over ranks.
    pub shard: Sharding,
    /// Ranks that share a copy of the model; 0 for all. Fewer make replicas: less traffic between nodes
    /// for more memory.
    pub shard_group: usize,
    /// Whether master weights, moments and teacher stay in the host's memory while a GPU computes, which gets
    /// weights unit by unit.
    pub offload: bool,
    /// Whether gradients are summed in an order of ours, which costs the same bytes and gives the same
    /// bits on any number of ranks; else in the engine's.
    pub exact_sums: bool,
    /// Seconds after which a collective that does not end is given up.
    pub deadline_s: u64,
    /// Times that a run goes back to its last checkpoint after three steps that are not finite in a row,
    /// to pass over the batches that they saw.
    pub max_rollbacks: u64,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            log_every_steps: 10,
            checkpoint_every_steps: 500,
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

/// A length in the unit that suits: `{ epochs = 10 }`, `{ steps = 500 }`, `{ samples = 1e6 }` or
/// `{ percent = 5 }` of the run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Duration {
    /// Updates.
    Steps(u64),
    /// Passes over the data.
    Epochs(f64),
    /// Images.
    Samples(f64),
    /// Of the run's length.
    Percent(f64),
}

impl Duration {
    /// In steps, rounded to the nearest; `total_steps` is `None` for the run's own length.
    ///
    /// # Errors
    /// What makes no sense, in words.
    pub fn steps(&self, n_samples: u64, batch_size: usize, total_steps: Option<u64>) -> Result<u64, String> {
        let batch = batch_size as f64;
        let steps = match *self {
            Self::Steps(steps) => steps as f64,
            Self::Epochs(epochs) => epochs * n_samples as f64 / batch,
            Self::Samples(samples) => samples / batch,
            Self::Percent(percent) => match total_steps {
                Some(total) => total as f64 * percent / 100.0,
                None => return Err("the length of the run cannot be a percentage of itself".into()),
            },
        };
        if !(0.0..1e15).contains(&steps) {
            return Err(format!("{self:?} is {steps} steps"));
        }
        Ok(steps.round() as u64)
    }
}

impl Recipe {
    /// Parses a recipe and applies `overrides` of the form `optim.lr=1e-3`. `origin` names it in
    /// messages.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] with the key, and for an unknown key the nearest known one.
    pub fn parse(text: &str, origin: &str, overrides: &[String]) -> Result<Self, TrainError> {
        let bad = |reason: String| TrainError::Recipe { recipe: origin.into(), reason };
        if overrides.is_empty() {
            // Parsing the text itself, so that messages carry line numbers.
            return toml::from_str(text).map_err(|error| bad(explain(&error.to_string())));
        }
        let mut table: toml::Table = text.parse().map_err(|error: toml::de::Error| bad(error.to_string()))?;
        for entry in overrides {
            set(&mut table, entry).map_err(bad)?;
        }
        Self::deserialize(table).map_err(|error| bad(explain(&error.to_string())))
    }
}

/// Sets one dotted key.
fn set(table: &mut toml::Table, entry: &str) -> Result<(), String> {
    let (path, value) = entry.split_once('=').ok_or(format!("--set {entry}: expected key=value"))?;
    let parsed: toml::Table = format!("v = {value}")
        .parse()
        .or_else(|_| format!("v = {value:?}").parse())
        .map_err(|error: toml::de::Error| format!("--set {entry}: {error}"))?;
    let mut keys: Vec<&str> = path.trim().split('.').collect();
    let last = keys.pop().unwrap_or_default();
    let mut at = table;
    for key in keys {
        at = at
            .entry(key)
            .or_insert_with(|| toml::Table::new().into())
            .as_table_mut()
            .ok_or(format!("--set {entry}: {key} is not a section"))?;
    }
    if let Some(value) = parsed.get("v") {
        at.insert(last.into(), value.clone());
    }
    Ok(())
}

/// Adds the nearest known key to serde's message on an unknown one.
fn explain(message: &str) -> String {
    let message = message.trim_end();
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let Some(list) = message.find("unknown field").or_else(|| message.find("unknown variant")) else {
        return message.into();
    };
    let unknown = message[list..].split('`').nth(1).unwrap_or_default();
    let nearest = quoted
        .iter()
        .filter(|known| **known != unknown)
        .max_by(|a, b| strsim::jaro_winkler(a, unknown).total_cmp(&strsim::jaro_winkler(b, unknown)));
    match nearest {
        Some(nearest) => format!("{message}\nunknown key `{unknown}`: did you mean `{nearest}`?"),
        None => message.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_key_names_the_nearest() {
        let message = explain("unknown field `warmpu`, expected one of `lr`, `warmup`, `betas`");
        assert!(message.contains("did you mean `warmup`"), "{message}");
    }

    #[test]
    fn durations_turn_into_steps() {
        let steps = |d: Duration| d.steps(10_000, 100, Some(1000));
        assert_eq!(steps(Duration::Epochs(2.5)), Ok(250));
        assert_eq!(steps(Duration::Samples(1e4)), Ok(100));
        assert_eq!(steps(Duration::Percent(10.0)), Ok(100));
        assert!(Duration::Percent(1.0).steps(1, 1, None).is_err());
        assert!(Duration::Epochs(-1.0).steps(1, 1, None).is_err());
    }

    #[test]
    fn a_duration_has_one_unit() {
        #[derive(Deserialize, Debug)]
        struct Wrap {
            #[allow(dead_code)]
            d: Duration,
        }
        assert!(toml::from_str::<Wrap>("d = { epochs = 1, steps = 2 }").is_err());
        assert!(toml::from_str::<Wrap>("d = { epochs = 1 }").is_ok());
    }
}
