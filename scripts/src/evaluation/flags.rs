//! Flags of evaluations: protocols, and where features are kept.

use std::path::Path;

use anyhow::bail;
use eval::{FeatureCache, Progress, Protocol};
use indicatif::ProgressBar;
use serde_json::{Value, json};

use crate::progress::bar;

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
    /// Protocols: knn, linear-honest, linear-dino, linear-dinov2 (as published: hours to days), linear-dinov2-features (the
    /// same heads on features made once), logreg, few-shot, segmentation; several with commas.
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
    /// Steps (linear-dinov2, linear-dinov2-features), or steps of the solver at most (logreg).
    #[arg(long, value_name = "N")]
    iterations: Option<usize>,
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
            ("iterations", self.iterations.map(|value| json!(value))),
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
