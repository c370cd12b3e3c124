//! Flags of the verbs that look at a checkpoint.

use std::path::Path;

use anyhow::bail;
use augment::{DecodeRules, MultiCrop};
use eval::{FeatureCache, Progress, Protocol, Transform};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use trainer::Network;
use trainer::checkpoint::{Checkpoint, Manifest};
use trainer::device::Device;

use crate::console::bar;

/// Which network of a checkpoint, and how it sees images.
#[derive(Default, clap::Args)]
pub(crate) struct NetworkFlags {
    /// Take the student even if the method has a teacher.
    #[arg(long)]
    pub(crate) student: bool,
    /// Side of the square that the network sees, in place of the model's.
    #[arg(long, value_name = "PX")]
    pub(crate) image_px: Option<u32>,
    /// Length of the short side after the resize, before the square is cut out [default: 256/224 of the square's side;
    /// images that already have the square's size are not resized].
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
    /// Opens the network of `checkpoint` on `device`.
    pub(crate) fn open(&self, checkpoint: &Path, device: &Device) -> anyhow::Result<OpenNetwork> {
        let (network, which, manifest) = match Network::is_export(checkpoint) {
            true => {
                let (network, which) = Network::open(checkpoint, self.student, 0, device)?;
                (network, which, None)
            }
            // Opened once: a run that goes on may write another one meanwhile.
            false => {
                let checkpoint = Checkpoint::open(checkpoint)?;
                let (network, which) = Network::of_checkpoint(&checkpoint, self.student, 0, device)?;
                (network, which, Some(checkpoint.manifest))
            }
        };
        let size_px = self.image_px.unwrap_or(network.model.image_px() as u32);
        let stride_px = network.model.stride_px();
        if size_px == 0 || !(size_px as usize).is_multiple_of(stride_px) {
            bail!(eval::EvalError::ImageSize { image_px: size_px as usize, stride_px });
        }
        let transform = match self.resize_px {
            Some(resize_px) => Transform::resizing(resize_px, size_px).map_err(anyhow::Error::msg)?,
            None => Transform::new(size_px),
        };
        let rules = manifest.as_ref().map_or_else(DecodeRules::default, |run| run.plan.recipe.data.rules());
        Ok(OpenNetwork { network, which, transform, rules, manifest })
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

    /// Metadata that goes with every result.
    pub(crate) fn about(&self, checkpoint: &Path) -> Value {
        let described = Described {
            network: &self.network,
            which: self.which,
            step: self.step(),
            recipe: self.manifest.as_ref().map(|run| run.plan.recipe.name.clone()),
            transform: self.transform,
        };
        about(&described, Some(checkpoint))
    }
}

/// What is known of a network that is scored.
pub(crate) struct Described<'a> {
    pub(crate) network: &'a Network,
    /// Which of a run's networks it is.
    pub(crate) which: &'static str,
    pub(crate) step: Option<u64>,
    pub(crate) recipe: Option<String>,
    pub(crate) transform: Transform,
}

/// The same as metadata; the probe within a run has no checkpoint.
pub(crate) fn about(described: &Described<'_>, checkpoint: Option<&Path>) -> Value {
    let network = described.network;
    json!({
        "checkpoint": checkpoint,
        "network": described.which,
        "step": described.step,
        "recipe": described.recipe,
        "weights": format!("{:016x}", network.fingerprint()),
        "model": as_written(&network.model),
        "normalization": as_written(&network.normalization),
        "transform": described.transform,
        "transform_in_words": described.transform.to_string(),
    })
}

/// By way of the text: as numbers of 64 bits, those of 32 would end in digits that nobody wrote.
fn as_written(value: &impl serde::Serialize) -> Value {
    let text = serde_json::to_string(value).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

/// The work directory of the run that `checkpoint` belongs to, if it lies in one.
pub(crate) fn workdir_of(checkpoint: &Path) -> Option<&Path> {
    checkpoint.ancestors().find(|folder| folder.join("plan.toml").exists())
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
    /// Protocols: knn, linear-honest, linear-dino, linear-dinov2, logreg, few-shot, segmentation; several with commas.
    #[arg(long, value_delimiter = ',', default_values = ["knn", "linear-honest"])]
    protocol: Vec<String>,
    /// Numbers of neighbors (knn), with commas.
    #[arg(long, value_delimiter = ',', value_name = "N")]
    k: Vec<usize>,
    /// Temperature of the neighbors' votes (knn, few-shot).
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// Look for the neighbors of each test image among the other test images, without a training set (knn).
    #[arg(long)]
    pub(crate) leave_one_out: bool,
    /// Passes over train (linear probes, segmentation).
    #[arg(long, value_name = "N")]
    epochs: Option<usize>,
    /// Images of a mini-batch (linear probes, segmentation).
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// Learning rates to choose from, with commas (linear-honest, linear-dinov2).
    #[arg(long, value_delimiter = ',', value_name = "RATE")]
    rates: Vec<f64>,
    /// Learning rate (linear-dino, segmentation).
    #[arg(long)]
    rate: Option<f64>,
    /// Last blocks whose class tokens are concatenated (linear-dino: one number; linear-dinov2: with commas).
    #[arg(long, value_delimiter = ',', value_name = "N")]
    levels: Vec<usize>,
    /// Add the mean patch token (linear-dino).
    #[arg(long)]
    average: bool,
    /// Draw crops and flips of the training images anew in every epoch, as published; without this, features are made once
    /// (linear-dinov2).
    #[arg(long)]
    crops: bool,
    /// Values of C to choose from, with commas (logreg).
    #[arg(long, value_delimiter = ',')]
    c: Vec<f64>,
    /// Images of each class, with commas (few-shot).
    #[arg(long, value_delimiter = ',', value_name = "N")]
    shots: Vec<usize>,
    /// Draws of each number of shots (few-shot).
    #[arg(long, value_name = "N")]
    tries: Option<usize>,
    /// Seed of orders, initial weights and draws.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

impl ProtocolFlags {
    /// The protocols with the settings that the flags change.
    pub(crate) fn protocols(&self) -> anyhow::Result<Vec<Protocol>> {
        let chosen: Result<Vec<_>, String> = self.protocol.iter().map(|name| Protocol::named(name)).collect();
        let mut chosen = chosen.map_err(anyhow::Error::msg)?;
        if self.leave_one_out && chosen.iter().any(|protocol| !matches!(protocol, Protocol::Knn(_))) {
            bail!("--leave-one-out is for knn alone: --protocol knn");
        }
        for (key, value) in self.settings() {
            let mut known = false;
            for protocol in &mut chosen {
                let single = matches!(protocol.settings()[key], Value::Number(_));
                let value = match value.as_array() {
                    Some(values) if single && values.len() > 1 => {
                        bail!("{} takes one number for --{key}, not {}", protocol.name(), values.len())
                    }
                    Some(values) if single => &values[0],
                    _ => &value,
                };
                if let Some(changed) = protocol.with(key, value).map_err(anyhow::Error::msg)? {
                    *protocol = changed;
                    known = true;
                }
            }
            if !known {
                bail!("--{key} does not apply to {}", self.protocol.join(", "));
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
            ("leave_one_out", self.leave_one_out.then_some(json!(true))),
            ("epochs", self.epochs.map(|value| json!(value))),
            ("batch", self.batch.map(|value| json!(value))),
            ("rates", list(json!(self.rates))),
            ("rate", self.rate.map(|value| json!(value))),
            ("levels", list(json!(self.levels))),
            ("average", self.average.then_some(json!(true))),
            ("crops", self.crops.then_some(json!(true))),
            ("c", list(json!(self.c))),
            ("shots", list(json!(self.shots))),
            ("tries", self.tries.map(|value| json!(value))),
        ];
        all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }
}

/// A bar for each stage of an evaluation.
pub(crate) struct StageBar(ProgressBar);

impl StageBar {
    /// Shows nothing until a stage begins.
    pub(crate) fn new() -> Self {
        Self(bar(0, ""))
    }
}

impl Progress for StageBar {
    fn begins(&self, stage: &str, n: usize) {
        self.0.set_prefix(stage.to_string());
        self.0.set_length(n as u64);
        self.0.reset();
    }

    fn seen(&self, n: usize) {
        self.0.inc(n as u64);
    }
}

impl Drop for StageBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
