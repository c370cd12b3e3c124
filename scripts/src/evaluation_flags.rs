//! Flags of evaluations: protocols, and the cache of features.
use std::path::Path;

use anyhow::bail;
use eval::{FeatureCache, Protocol};
use serde_json::Value;

/// Flags of the cache of features.
#[derive(clap::Args)]
pub(crate) struct CacheFlags {
    /// Size of the feature cache in GB, for later evaluations of the same weights and images; 0
    /// disables it.
    #[arg(
        long,
        env = "OCELLI_FEATURES_GB",
        value_name = "GB",
        default_value_t = 20.0,
        hide_short_help = true
    )]
    features_gb: f64,
}

impl CacheFlags {
    /// Opens the cache in the folder `features` within `folder`; `None` with `--features-gb 0`.
    pub(crate) fn open(&self, folder: &Path) -> Option<FeatureCache> {
        let max_bytes = (self.features_gb * 1e9) as u64;
        (max_bytes > 0).then(|| FeatureCache::new(folder.join("features"), max_bytes))
    }
}

/// Protocols and their settings.
#[derive(clap::Args)]
pub(crate) struct ProtocolFlags {
    /// Protocols, comma-separated: knn, linear-honest, linear-dino, linear-dinov2,
    /// linear-dinov2-features, logreg, few-shot, segmentation. As published, linear-dinov2 takes
    /// hours to days; linear-dinov2-features trains the same heads on features computed once.
    #[arg(long, value_delimiter = ',', default_values = ["knn", "linear-honest"])]
    protocol: Vec<String>,
    /// Setting of a protocol, such as knn.k=5,20 or linear-honest.epochs=20. Can be repeated. An
    /// unknown setting prints a list of valid ones.
    #[arg(long = "set", value_name = "NAME.KEY=VALUE")]
    settings: Vec<String>,
    /// Search each test image's neighbors among the other test images, without a training set
    /// (knn).
    #[arg(long)]
    pub(crate) leave_one_out: bool,
    /// Seed for data order, initial weights and sampling.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

impl ProtocolFlags {
    /// Returns the protocols, with the settings that the flags change.
    pub(crate) fn protocols(&self) -> anyhow::Result<Vec<Protocol>> {
        let mut chosen = Vec::new();
        for name in &self.protocol {
            chosen.push(Protocol::named(name).map_err(anyhow::Error::msg)?);
        }
        if self.leave_one_out && chosen.iter().any(|protocol| !matches!(protocol, Protocol::Knn(_))) {
            bail!("--leave-one-out works only with knn: pass --protocol knn");
        }
        if self.settings.iter().any(|entry| entry.trim_start().starts_with("knn.leave_one_out")) {
            bail!("--set knn.leave_one_out: pass --leave-one-out in place of --train");
        }
        let leave_one_out = self.leave_one_out.then(|| "knn.leave_one_out=true".to_string());
        for entry in self.settings.iter().chain(&leave_one_out) {
            let (name, key, value) = parse_setting(entry)?;
            let Some(protocol) = chosen.iter_mut().find(|protocol| protocol.name() == name) else {
                // The message for an unknown name lists the known ones.
                Protocol::named(name).map_err(anyhow::Error::msg)?;
                bail!(
                    "--set {entry}: {name} is not one of the selected protocols ({})",
                    self.protocol.join(", ")
                );
            };
            *protocol =
                protocol.with(key, &value).map_err(|error| anyhow::anyhow!("--set {entry}: {error}"))?;
        }
        Ok(chosen)
    }
}

/// Splits a setting into protocol, key and value; a value is one number or several with commas.
fn parse_setting(entry: &str) -> anyhow::Result<(&str, &str, Value)> {
    if let Some((path, value)) = entry.split_once('=')
        && let Some((name, key)) = path.rsplit_once('.')
    {
        let value = if value.contains(',') {
            Value::Array(value.split(',').map(parse_value).collect())
        } else {
            parse_value(value)
        };
        return Ok((name.trim(), key.trim(), value));
    }
    bail!("--set {entry}: expected PROTOCOL.KEY=VALUE, such as knn.k=5,20");
}

/// Parses a value as JSON; other text is a string.
fn parse_value(text: &str) -> Value {
    serde_json::from_str(text.trim()).unwrap_or_else(|_| Value::String(text.into()))
}
