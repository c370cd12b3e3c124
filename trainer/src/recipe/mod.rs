//! The recipe as written, a TOML file in which unknown keys are errors, and the plan that it
//! resolves into.

mod channels;
pub(crate) mod check;
pub(crate) mod compare;
mod flat;
mod lengths;
pub(crate) mod optim;
mod parse;
pub mod plan;
pub(crate) mod resolve;
mod schema;
mod template;
mod title;
mod values;
pub(crate) mod warnings;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::LazyLock;

use augment::{DecodeRules, Depth, NoData, PixelFormat};
use kernels::product_kernels::Kernels;
use networks::FirstLayer;
use networks::backbone::{ModelConfig, RGB_CHANNELS};
use networks::patches::{Normalization, Pixels};
use pipeline::source_name::split_source;
use pipeline::url::contains_command;
use ranks::topology::Sharding;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

pub use self::channels::{MissingSetting, PixelFacts, describe_missing};
use self::optim::OptimConfig;
use self::parse::override_key;
pub use self::parse::{StatedKeys, is_set};
use self::schema::Form;
pub use self::schema::{Key, distinct_paths};
pub use self::template::{TemplateRequest, Templates};
pub use self::title::title;
use crate::error::TrainError;
use crate::method::{MethodConfig, ViewsConfig};

/// Returns the reference of all keys of a recipe, section by section.
pub fn keys() -> Vec<Key> {
    schema::keys(form())
}

/// Returns the keys whose last part is `name`, with hyphens or underscores. Keys of a frozen
/// teacher, which a run records from its weights, are left out.
pub fn keys_named(name: &str) -> Vec<Key> {
    schema::keys_named(form(), name)
}

/// Returns the keys whose paths begin with `prefix`, or else those whose last part is `prefix`.
///
/// # Errors
/// [`TrainError::NoKey`] with the most similar key if there is none.
pub fn find_keys(prefix: &str) -> Result<Vec<Key>, TrainError> {
    let all = keys();
    let found: Vec<Key> = all.iter().filter(|key| key.path.starts_with(prefix)).cloned().collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let named = keys_named(prefix);
    if !named.is_empty() {
        return Ok(named);
    }
    let closest = all.iter().max_by(|a, b| similarity(a, prefix).total_cmp(&similarity(b, prefix)));
    let closest = closest.map_or_else(|| "none".into(), |key| key.path.clone());
    Err(TrainError::NoKey { prefix: prefix.into(), closest })
}

/// Returns the similarity of `text` to the path of `key`, or to its last part if that is larger.
fn similarity(key: &Key, text: &str) -> f64 {
    strsim::jaro_winkler(&key.path, text).max(strsim::jaro_winkler(key.last_part(), text))
}

/// Returns the form of a recipe.
fn form() -> &'static Form {
    static FORM: LazyLock<Form> = LazyLock::new(Form::from_type::<Recipe>);
    &FORM
}

/// A recipe: all settings of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Name of the recipe, for display.
    pub name: String,
    /// Seed of all random numbers of the run; 0 by default.
    #[serde(default)]
    pub seed: u64,
    /// Source of the samples: shards, and rules for reading them.
    #[serde(default)]
    pub data: DataConfig,
    /// Architecture of the backbone.
    pub model: ModelConfig,
    /// Method, with its settings.
    pub method: MethodConfig,
    /// Views that are made of an image.
    pub views: ViewsConfig,
    /// Optimizer of the trained network, and length of the run.
    pub optim: OptimConfig,
    /// Initial weights of the backbone; random if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<InitConfig>,
    /// Settings that may differ between two starts of the same run.
    #[serde(default)]
    pub run: RunConfig,
}

impl Recipe {
    /// Returns the side of the images on which the network is evaluated: that of its first views,
    /// unless its table of positions is for smaller ones.
    pub fn evaluated_px(&self) -> usize {
        let model_px = self.model.image_px();
        let Ok(views) = self.views.multicrop() else { return model_px };
        match views.groups().first() {
            Some(group) => model_px.min(group.size_px as usize),
            None => model_px,
        }
    }

    /// Parses a recipe, or takes that of a run's plan, and applies `overrides` of the form
    /// `optim.lr=1e-3`. `origin` names it in messages.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] with all keys that are missing, unknown or of another form, and what
    /// is expected.
    pub fn parse(text: &str, origin: &str, overrides: &[String]) -> Result<Self, TrainError> {
        parse::parse_recipe(text, overrides, form(), None)
            .map(Self::with_channels_of_data)
            .map_err(|reason| TrainError::Recipe { recipe: origin.into(), reason })
    }

    /// Parses as [`Recipe::parse`]. Where `model.arch` is `from_init`, `read_model` is called with
    /// `init.weights`, and returns the backbone of the weights that the run starts with; other keys
    /// of `[model]` replace its keys.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] as [`Recipe::parse`], and with the message of `read_model`.
    pub fn parse_with_model(
        text: &str,
        origin: &str,
        overrides: &[String],
        mut read_model: impl FnMut(Option<&str>) -> Result<ModelConfig, String>,
    ) -> Result<Self, TrainError> {
        let mut read_table = |weights: Option<&str>| {
            let model = read_model(weights)?;
            toml::Table::try_from(model).map_err(|error| error.to_string())
        };
        parse::parse_recipe(text, overrides, form(), Some(&mut read_table))
            .map(Self::with_channels_of_data)
            .map_err(|reason| TrainError::Recipe { recipe: origin.into(), reason })
    }

    /// Sets the channels of the backbone to those of the data, unless the recipe sets others.
    fn with_channels_of_data(self) -> Self {
        let converts = self.init.as_ref().is_some_and(|init| init.first_layer.is_some());
        if self.model.n_channels() == RGB_CHANNELS || converts {
            Self { model: self.model.with_channels(self.data.channels), ..self }
        } else {
            self
        }
    }

    /// Rejects commands among the shards: recipes are shared, and must not run commands
    /// unexpectedly. Shards in `overrides` come from the command line and are allowed.
    ///
    /// # Errors
    /// [`TrainError::Recipe`].
    pub fn refuse_commands(&self, overrides: &[String]) -> Result<(), TrainError> {
        let overrides_shards =
            overrides.iter().any(|entry| matches!(override_key(entry), "data.shards" | "data"));
        if overrides_shards || !contains_command(&self.data.shards) {
            return Ok(());
        }
        let reason = "data.shards names a command (pipe:…), which recipes may not run: pass it with --shards";
        Err(self.error(reason.into()))
    }

    /// Sets the images of a step to `batch_size`, and adapts settings that count images.
    pub fn fit_batch(&mut self, batch_size: usize) {
        self.optim.batch_size = batch_size;
        // Groups of a batch of thousands do not divide a small one.
        if !batch_size.is_multiple_of(self.optim.stat_images()) {
            self.optim.stat_images = 0;
        }
        self.method.fit_batch(batch_size);
    }

    /// Returns the error of this recipe, for `reason`.
    fn error(&self, reason: String) -> TrainError {
        TrainError::Recipe { recipe: self.name.clone(), reason }
    }

    /// Returns every value with its key, such as `optim.batch_size`, in the order of the keys.
    pub fn values(&self) -> Vec<(String, toml::Value)> {
        let mut values = Vec::new();
        // Goes through text, in which a single-precision number has only the digits that it needs.
        let text = toml::to_string(self).unwrap_or_default();
        if let Ok(table) = toml::from_str::<toml::Value>(&text) {
            flat::flatten("", &table, &mut values);
        }
        values
    }
}

/// Shards, their order, and the decoding of images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Shard lists; `--shards` replaces them. Plans omit their secrets, since each start opens the
    /// shards given to it.
    #[serde(serialize_with = "redact_list")]
    pub shards: Vec<String>,
    /// Relative shares of the sources to mix, by name, such as `{ web = 0.7, photos = 0.3 }`;
    /// `--shards web=FOLDER photos=FOLDER` gives the shards of each. Of every thousand images,
    /// counted from the first, each source provides its share, rounded to a thousandth and at least
    /// one. An epoch has as many images as all sources together.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub mix: BTreeMap<String, f64>,
    /// File of image weights: a .jsonl, .csv or .tsv with columns `key` and `weight`, and `shard`
    /// if keys are not unique, such as the list.jsonl of `ocelli curate balance --weights`. Images
    /// of a source are shown in proportion to their weights; images that are not listed are not
    /// shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<PathBuf>,
    /// How much more often images of rare classes are shown, for methods that learn from labels: 0,
    /// the default, to show all images alike, 1 to show each class equally often, and less for a
    /// part of that. A class is drawn in proportion to n^(1 - balance), n being the number of its
    /// images, or the sum of their data.weights, and then an image of it. An image of several
    /// classes is drawn for each of them.
    #[serde(skip_serializing_if = "is_off")]
    pub balance: f64,
    /// Share of the labeled images of each class, or of the images with masks, up to 0.5, that is
    /// held out of training, to validate on; for methods that learn from labels or masks. `ocelli
    /// finetune` without `--val-shards` holds out 0.1. The keys of the images choose them, not the
    /// seed: runs on the same images hold out the same ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<f64>,
    /// Number of shards whose samples are shuffled together; 16 by default.
    pub window_shards: usize,
    /// Share of unusable samples, in 0..=1, above which the run stops; 0.01 by default. Checked
    /// after 100 samples. Up to three bad samples are tolerated, unless the rate is 0.
    pub max_bad_rate: f64,
    /// Largest image, in pixels with three channels, proportionally fewer with more; larger images
    /// are refused.
    pub max_pixels: u64,
    /// Whether to apply the EXIF orientation of images.
    pub apply_exif: bool,
    /// Color behind transparent pixels of RGB images: red, green and blue in 0..=255. Without it,
    /// transparency is ignored.
    pub background: Option<[u8; 3]>,
    /// Number of channels of an image; 3 by default. Images with other channels or bits can be PNG,
    /// TIFF with any number of bands or pages, `.npy`, or samples of several files, one per band,
    /// such as `tile.b02.tif` and `tile.b08.tif`.
    #[serde(skip_serializing_if = "is_rgb")]
    pub channels: usize,
    /// Bits per channel: 8, the default, 16, or 32 for floating point, to which numbers of any type
    /// are converted.
    #[serde(rename = "bits", skip_serializing_if = "Depth::is_eight")]
    pub depth: Depth,
    /// Number of bits that 16-bit images actually use, such as 12 for many cameras and scanners:
    /// values are scaled as if they used all 16, and an image with a larger value is refused.
    /// `ocelli shards stats` reports how many bits are used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits_used: Option<u8>,
    /// Value that marks pixels without data, in images other than 8-bit RGB: `{ value = -9999 }`;
    /// in floating-point images, NaN always does. Such pixels get the mean of the other pixels of
    /// their image and channel, or the number `fill`. Without this table, images with NaN are
    /// refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_data: Option<NoData>,
    /// Mean subtracted from each channel, and standard deviation by which it is divided, where 1 is
    /// the largest value of 8 or 16 bits; ImageNet's by default, for three channels. `ocelli shards
    /// stats` measures those of other images.
    pub normalization: Normalization,
}

fn is_off(balance: &f64) -> bool {
    *balance == 0.0
}

fn is_rgb(channels: &usize) -> bool {
    *channels == PixelFormat::RGB8.n_channels
}

fn redact_list<S: Serializer>(shards: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(shards.iter().map(|spec| pipeline::secrets::redact_list(spec)))
}

impl DataConfig {
    /// Returns the shard lists, without the names of sources.
    pub fn shard_lists(&self) -> Vec<String> {
        self.shards
            .iter()
            .map(|spec| match split_source(spec) {
                Some((name, rest)) if self.mix.contains_key(name) => rest.to_string(),
                _ => spec.clone(),
            })
            .collect()
    }

    /// Returns the format of the pixels.
    pub fn format(&self) -> PixelFormat {
        PixelFormat { n_channels: self.channels, depth: self.depth }
    }

    /// Returns the pixels that the networks take.
    pub fn pixels(&self) -> Pixels {
        Pixels { normalization: self.normalization.clone(), depth: self.depth }
    }

    /// Returns the rules for decoding an image.
    pub fn rules(&self) -> DecodeRules {
        DecodeRules {
            max_pixels: self.max_pixels,
            apply_exif: self.apply_exif,
            background: self.background,
            format: self.format(),
            bits_used: self.bits_used,
            no_data: self.no_data,
        }
    }
}

impl Default for DataConfig {
    fn default() -> Self {
        let rules = DecodeRules::default();
        Self {
            shards: Vec::new(),
            mix: BTreeMap::new(),
            weights: None,
            balance: 0.0,
            validation: None,
            window_shards: 16,
            max_bad_rate: 0.01,
            max_pixels: rules.max_pixels,
            apply_exif: rules.apply_exif,
            background: rules.background,
            channels: rules.format.n_channels,
            depth: rules.format.depth,
            bits_used: rules.bits_used,
            no_data: rules.no_data,
            normalization: Normalization::default(),
        }
    }
}

/// Weights that a run starts from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InitConfig {
    /// File or folder of the weights, written by another library or by a run of ocelli; empty for
    /// those given on the command line.
    #[serde(default)]
    pub weights: String,
    /// Fingerprint of the weights when the run began: files with the same fingerprint have the same
    /// weights. Set in a plan.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fingerprint: String,
    /// Network of the weights, if they hold several, such as student or teacher; by default, the
    /// one that the method of their run evaluates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// Starts with the heads of the run that the weights come from, which must have the same sizes;
    /// random heads by default.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub heads: bool,
    /// Kernels of the first layer if data.channels differs from the channels of the weights: those
    /// of red, green and blue in turn, or their mean, both times 3 / channels. If absent, such
    /// weights are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_layer: Option<FirstLayer>,
}

/// Kernels that multiply matrices on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KernelChoice {
    /// cuBLASLt where it can be used, else CubeCL's.
    #[default]
    Auto,
    /// cuBLASLt, without which a run does not start.
    Cublaslt,
    /// CubeCL's.
    Cubecl,
}

impl KernelChoice {
    fn is_default(&self) -> bool {
        *self == Self::Auto
    }
}

impl From<KernelChoice> for Kernels {
    fn from(choice: KernelChoice) -> Self {
        match choice {
            KernelChoice::Auto => Self::Auto,
            KernelChoice::Cublaslt => Self::Cublaslt,
            KernelChoice::Cubecl => Self::Cubecl,
        }
    }
}

/// Settings that do not change what is learned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Steps between two rows of metrics; 10 by default. Before the first of these, there is a row
    /// after 1, 2, 4, 8 … steps.
    pub log_every_steps: u64,
    /// Steps between two checkpoints; 500 by default.
    pub checkpoint_every_steps: u64,
    /// Minutes after which an additional checkpoint is written; 0 for never, 30 by default.
    pub checkpoint_every_minutes: f64,
    /// Number of newest checkpoints to keep; 2 by default.
    pub keep_checkpoints: usize,
    /// Steps between two probes; 0, the default, for none but those before the first step and after
    /// the last. `ocelli finetune` validates as often; with 0, eight times in a run.
    pub probe_every_steps: u64,
    /// Number of validations in a row without a better number than those before, after which the
    /// run ends early. Its result is the weights of the best validation, whose checkpoint is kept,
    /// also if it takes all steps; 1 or more. Schedules are those of the whole length. A larger
    /// number continues a run that has ended. If absent, no run ends early, and its result is the
    /// last weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// Most images of which two views each are searched among each other, to see without labels
    /// whether the run learns; 512 by default, 0 for none. Short runs take fewer images, so that it
    /// takes a few percent of their time.
    pub retrieval_images: usize,
    /// Worker threads of a rank; 0 for one per core, or one if a GPU computes. Another number
    /// changes the order of sums, and thus the last bits of the result.
    pub workers: usize,
    /// Threads of a rank that decode and augment; 0 for one per core.
    pub data_threads: usize,
    /// Number of backbone units, counted from the last, that keep their graph; the others are
    /// recomputed in the backward pass. Parts of a divided unit count as units. If absent, as many
    /// as fit into memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<usize>,
    /// Number of backbone units that are recomputed together, among those that keep no graph: only
    /// the first of them keeps its input, from which the others' inputs are computed once more
    /// before their gradients. Less memory for more time, with the same bits. If absent, 1, or more
    /// where a run would not fit otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub segment: Option<usize>,
    /// Data that is sharded over ranks: `none`, `grad` (ZeRO-2) or `full` (ZeRO-3), the default.
    pub shard: Sharding,
    /// Number of ranks that share a copy of the model; 0 for all. Fewer make replicas: less traffic
    /// between nodes for more memory.
    pub shard_group: usize,
    /// Largest number of parameters of a unit of a backbone. A larger unit is divided into parts,
    /// whose weights are gathered and whose gradients are summed one part after another. Residual
    /// branches of ResNet and RegNet divide down to a few output channels of one layer, a
    /// transformer's block into attention and MLP, other units and heads cannot be divided; a
    /// number that cannot be met is refused. If absent, no unit is divided. Where a layer is
    /// divided, gradients differ by rounding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_unit_parameters: Option<usize>,
    /// Kernels that multiply matrices on a GPU: `auto`, `cublaslt` or `cubecl`. `auto`, the
    /// default, is NVIDIA's cuBLASLt where it can be used, else CubeCL's; with `cublaslt`, a run
    /// does not start without it. Results differ by rounding.
    #[serde(skip_serializing_if = "KernelChoice::is_default")]
    pub kernels: KernelChoice,
    /// Whether to keep master weights and moments of all networks in host memory, and send weights
    /// to the GPU unit by unit; false by default.
    pub offload: bool,
    /// Whether to sum gradients in a fixed order, which yields the same bits on any number of
    /// ranks; otherwise the engine chooses the order. A rank receives the same number of bytes
    /// either way, but a fixed order sends more between nodes of several ranks, unless the ranks of
    /// a node are a shard group. True by default.
    pub exact_sums: bool,
    /// Seconds after which a collective that has not finished is an error; 600 by default.
    pub deadline_s: u64,
    /// Number of times that a run may return to its last checkpoint after three non-finite steps in
    /// a row and skip the batches since then; 2 by default.
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
            patience: None,
            retrieval_images: 512,
            workers: 0,
            data_threads: 0,
            keep: None,
            segment: None,
            shard: Sharding::Full,
            shard_group: 0,
            max_unit_parameters: None,
            kernels: KernelChoice::Auto,
            offload: false,
            exact_sums: true,
            deadline_s: 600,
            max_rollbacks: 2,
        }
    }
}
