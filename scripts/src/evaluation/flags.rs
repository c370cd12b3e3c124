//! Flags of the verbs that look at a checkpoint.

use std::path::{Path, PathBuf};

use anyhow::bail;
use augment::{DecodeRules, MultiCrop};
use eval::{FeatureCache, Progress, Protocol, Transform};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use trainer::Network;
use trainer::checkpoint::{Checkpoint, Manifest};
use trainer::device::Device;

use crate::console::bar;

/// Which network, and how it sees images.
#[derive(clap::Args)]
pub(crate) struct NetworkFlags {
    /// A run's work directory, a checkpoint's folder, or a file of `ocelli export`.
    #[arg(long)]
    pub(crate) checkpoint: PathBuf,
    /// Take the student even if the method has a teacher.
    #[arg(long)]
    pub(crate) student: bool,
    /// Side of the square that the network sees, in place of the model's.
    #[arg(long, value_name = "PX")]
    pub(crate) image_px: Option<u32>,
    /// Length of the short side after the resize, before the square is cut out of it [default: 256/224 of the square's
    /// side, and nothing for images that are as large as the square].
    #[arg(long, value_name = "PX")]
    pub(crate) resize_px: Option<u32>,
}

/// A network that is open, and what is known of it.
pub(crate) struct OpenNetwork {
    pub(crate) network: Network,
    /// Which of a run's networks it is.
    pub(crate) which: &'static str,
    pub(crate) transform: Transform,
    pub(crate) rules: DecodeRules,
    /// What the checkpoint says of its run; an exported file says nothing.
    pub(crate) manifest: Option<Manifest>,
}

impl NetworkFlags {
    /// Opens the network on `device`.
    pub(crate) fn open(&self, device: &Device) -> anyhow::Result<OpenNetwork> {
        let (network, which) = Network::open(&self.checkpoint, self.student, 0, device)?;
        let size_px = self.image_px.unwrap_or(network.model.image_px() as u32);
        let stride_px = network.model.stride_px();
        if size_px == 0 || !(size_px as usize).is_multiple_of(stride_px) {
            bail!(eval::EvalError::ImageSize { image_px: size_px as usize, stride_px });
        }
        let transform = match self.resize_px {
            Some(resize_px) => Transform::resizing(resize_px, size_px).map_err(anyhow::Error::msg)?,
            None => Transform::new(size_px),
        };
        let manifest = Checkpoint::open(&self.checkpoint).ok().map(|checkpoint| checkpoint.manifest);
        let rules = manifest.as_ref().map_or_else(DecodeRules::default, |run| run.plan.recipe.data.rules());
        Ok(OpenNetwork { network, which, transform, rules, manifest })
    }

    /// The work directory of the run that the checkpoint belongs to, if it lies in one.
    pub(crate) fn workdir(&self) -> Option<&Path> {
        self.checkpoint.ancestors().find(|folder| folder.join("plan.toml").exists())
    }
}

impl OpenNetwork {
    /// The step that the checkpoint follows.
    pub(crate) fn step(&self) -> Option<u64> {
        self.manifest.as_ref().map(|run| run.step)
    }

    /// The views that it was trained on, or DINO's where nothing is known of its run.
    pub(crate) fn multicrop(&self) -> MultiCrop {
        let size_px = self.transform.size_px;
        self.manifest
            .as_ref()
            .map_or_else(|| MultiCrop::dino(size_px, size_px, 0), |run| run.plan.multicrop())
    }

    /// What does not fit the weights, a sentence each.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let (seen_px, made_px) = (self.transform.size_px as usize, self.network.model.image_px());
        let differs = seen_px != made_px;
        differs
            .then(|| format!("the network was made for images of {made_px} px and sees {seen_px} px"))
            .into_iter()
            .collect()
    }

    /// What numbers of it are to be read with.
    pub(crate) fn about(&self, checkpoint: &Path) -> Value {
        json!({
            "checkpoint": checkpoint,
            "network": self.which,
            "step": self.step(),
            "recipe": self.manifest.as_ref().map(|run| run.plan.recipe.name.clone()),
            "weights": format!("{:016x}", self.network.fingerprint()),
            "model": as_written(&self.network.model),
            "normalization": as_written(&self.network.normalization),
            "transform": self.transform,
            "transform_in_words": self.transform.to_string(),
        })
    }
}

/// By way of the text: as numbers of 64 bits, those of 32 would end in digits that nobody wrote.
fn as_written(value: &impl serde::Serialize) -> Value {
    let text = serde_json::to_string(value).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

/// Where features are kept.
#[derive(clap::Args)]
pub(crate) struct CacheFlags {
    /// Gigabytes of features that are kept for the next look at the same weights and images; 0 keeps none.
    #[arg(long, env = "OCELLI_FEATURES_GB", value_name = "GB", default_value_t = 20.0)]
    features_gb: f64,
}

impl CacheFlags {
    /// The features below `folder`, if any are kept.
    pub(crate) fn open(&self, folder: &Path) -> Option<FeatureCache> {
        let max_bytes = (self.features_gb * 1e9) as u64;
        (max_bytes > 0).then(|| FeatureCache::new(folder.join("features"), max_bytes))
    }
}

/// Protocols and their settings.
#[derive(clap::Args)]
pub(crate) struct ProtocolFlags {
    /// Protocols: knn, linear-honest, linear-dino, linear-dinov2, logreg, few-shot; several with commas.
    #[arg(long, value_delimiter = ',', default_values = ["knn", "linear-honest"])]
    protocol: Vec<String>,
    /// Numbers of neighbors (knn), with commas.
    #[arg(long, value_delimiter = ',', value_name = "N")]
    k: Vec<usize>,
    /// Temperature of the neighbors' votes (knn, few-shot).
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Passes over train (linear probes).
    #[arg(long, value_name = "N")]
    epochs: Option<usize>,
    /// Images of a mini-batch (linear probes).
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// Learning rates to choose from, with commas (linear-honest, linear-dinov2).
    #[arg(long, value_delimiter = ',', value_name = "RATE")]
    rates: Vec<f32>,
    /// Learning rate (linear-dino).
    #[arg(long)]
    rate: Option<f32>,
    /// Last blocks whose class tokens are concatenated (linear-dino: one number; linear-dinov2: with commas).
    #[arg(long, value_delimiter = ',', value_name = "N")]
    levels: Vec<usize>,
    /// Add the mean patch token (linear-dino).
    #[arg(long)]
    average: bool,
    /// Values of C to choose from, with commas (logreg).
    #[arg(long, value_delimiter = ',')]
    c: Vec<f64>,
    /// Images of each class, with commas (few-shot).
    #[arg(long, value_delimiter = ',', value_name = "N")]
    shots: Vec<usize>,
    /// Draws of each number of shots (few-shot).
    #[arg(long, value_name = "N")]
    tries: Option<usize>,
}

impl ProtocolFlags {
    /// The protocols with the settings that the flags change.
    pub(crate) fn protocols(&self) -> anyhow::Result<Vec<Protocol>> {
        let chosen: Result<Vec<_>, String> = self.protocol.iter().map(|name| Protocol::named(name)).collect();
        let mut chosen = chosen.map_err(anyhow::Error::msg)?;
        for (key, value) in self.settings() {
            let mut known = false;
            for protocol in &mut chosen {
                // A protocol of one learning rate and one number of levels takes the first.
                let single = matches!(protocol.settings()[key], Value::Number(_));
                let value = if single && value.is_array() { &value[0] } else { &value };
                if let Some(changed) = protocol.with(key, value).map_err(anyhow::Error::msg)? {
                    *protocol = changed;
                    known = true;
                }
            }
            if !known {
                bail!("--{key} is no setting of {}", self.protocol.join(", "));
            }
        }
        Ok(chosen)
    }

    /// What is given, by the name of the setting.
    fn settings(&self) -> Vec<(&'static str, Value)> {
        let list =
            |values: Value| values.as_array().is_some_and(|values| !values.is_empty()).then_some(values);
        let all = [
            ("k", list(json!(self.k))),
            ("temperature", self.temperature.map(|value| json!(value))),
            ("epochs", self.epochs.map(|value| json!(value))),
            ("batch", self.batch.map(|value| json!(value))),
            ("rates", list(json!(self.rates))),
            ("rate", self.rate.map(|value| json!(value))),
            ("levels", list(json!(self.levels))),
            ("average", self.average.then_some(json!(true))),
            ("c", list(json!(self.c))),
            ("shots", list(json!(self.shots))),
            ("tries", self.tries.map(|value| json!(value))),
        ];
        all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }
}

/// A bar of images that have been seen.
pub(crate) struct SeenBar(ProgressBar);

impl SeenBar {
    /// For `n_images`.
    pub(crate) fn new(n_images: usize) -> Self {
        Self(bar(n_images as u64, "features"))
    }
}

impl Progress for SeenBar {
    fn seen(&self, n_images: usize) {
        self.0.inc(n_images as u64);
    }
}

impl Drop for SeenBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
