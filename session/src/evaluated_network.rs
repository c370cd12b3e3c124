//! Networks that are opened to be evaluated, from a run, a checkpoint or a weights file, and the
//! record of their scores.

use std::path::Path;

use augment::{DecodeRules, Depth, MultiCrop, NoData, PixelFormat, Transform};
use eval::check_image_size;
use eval::row::{EvaluationRow, NetworkInfo, append};
use kernels::device::Device;
use networks::Network;
use serde_json::{Value, json};
use trainer::checkpoint::Manifest;
use trainer::run::telemetry::append_scalars;
use weights::Hints;

use crate::error::SessionError;
use crate::machine;
use crate::network::Backbone;
use crate::provenance::Provenance;

/// Choice of a network and of the preprocessing of its images. Unset fields take the value of the
/// run or of the weights file.
#[derive(Debug, Clone, Default)]
pub struct NetworkSettings {
    /// Name of the network in a run, and facts that a weights file may not state.
    pub hints: Hints,
    /// Number of bits that 16-bit images use; only for weights files.
    pub bits_used: Option<u8>,
    /// Pixels without data; only for weights files.
    pub no_data: Option<NoData>,
    /// Side of the square images, in pixels.
    pub image_px: Option<u32>,
    /// Short side after resizing, before the center crop, in pixels.
    pub resize_px: Option<u32>,
}

impl NetworkSettings {
    /// Opens the backbone in `path`, a run, a checkpoint or weights.
    ///
    /// # Errors
    /// [`SessionError`] when there is no network, its weights cannot be read, or a setting does not
    /// apply to it.
    pub fn open_backbone(&self, path: &Path) -> Result<Backbone, SessionError> {
        let is_set = self.bits_used.is_some() || self.no_data.is_some();
        if is_set && path.exists() && !weights::is_weights(path) {
            return Err(SessionError::RunValues { path: path.to_path_buf() });
        }
        let mut backbone = Backbone::open(path, &self.hints)?;
        if backbone.manifest.is_none() {
            check_pixel_values(backbone.preprocessing.pixels.format(), self.bits_used, self.no_data)?;
            let decoding = &mut backbone.preprocessing.decoding;
            decoding.bits_used = self.bits_used.or(decoding.bits_used);
            decoding.no_data = self.no_data.or(decoding.no_data);
        }
        Ok(backbone)
    }

    /// Returns the transform for a network that was trained with `trained`.
    fn transform(&self, trained: Transform, stride_px: usize) -> Result<Transform, SessionError> {
        let size_px = self.image_px.unwrap_or(trained.size_px);
        check_image_size(size_px as usize, stride_px)?;
        let transform = match (self.resize_px, self.image_px) {
            (Some(resize_px), _) => Transform::with_resize(resize_px, size_px),
            (None, None) => Ok(Transform { resize_px: trained.resize_px.max(size_px), size_px }),
            (None, Some(_)) => Ok(Transform::new(size_px)),
        };
        let transform = transform.map_err(|reason| SessionError::Transform { reason })?;
        transform.validate().map_err(|reason| SessionError::Transform { reason })?;
        Ok(transform)
    }
}

/// Checks that pixel-value settings apply to images of `format`.
///
/// # Errors
/// [`SessionError::NoDataFormat`] and [`SessionError::FloatBits`].
pub fn check_pixel_values(
    format: PixelFormat,
    bits_used: Option<u8>,
    no_data: Option<NoData>,
) -> Result<(), SessionError> {
    if no_data.is_some() && format.is_rgb8() {
        return Err(SessionError::NoDataFormat { format });
    }
    if bits_used.is_some() && format.depth == Depth::Float {
        return Err(SessionError::FloatBits);
    }
    Ok(())
}

/// A network to evaluate, and its origin.
pub struct EvaluatedNetwork {
    /// The network.
    pub network: Network,
    /// Name of the network within its run, or `weights`.
    pub network_name: String,
    /// Transform of its images.
    pub transform: Transform,
    /// Rules for decoding its images.
    pub rules: DecodeRules,
    /// Manifest of the checkpoint; a weights file has none.
    pub manifest: Option<Manifest>,
    /// Where its weights come from.
    pub provenance: Provenance,
    /// Side of the square images that the network was trained for.
    trained_px: u32,
}

impl EvaluatedNetwork {
    /// Opens the network in `path`, a run, a checkpoint or weights, on `device`.
    ///
    /// # Errors
    /// Those of [`NetworkSettings::open_backbone`], and [`SessionError`] when the network cannot
    /// take images of the size or needs more memory than is free.
    pub fn open(path: &Path, settings: &NetworkSettings, device: &Device) -> Result<Self, SessionError> {
        Self::from_backbone(settings.open_backbone(path)?, settings, device)
    }

    /// Creates the network of `backbone` on `device`.
    ///
    /// # Errors
    /// As [`EvaluatedNetwork::open`].
    pub(crate) fn from_backbone(
        backbone: Backbone,
        settings: &NetworkSettings,
        device: &Device,
    ) -> Result<Self, SessionError> {
        let network = backbone.network(0, device)?;
        let trained = backbone.preprocessing.transform;
        let transform = settings.transform(trained, network.model.stride_px())?;
        check_memory(&network, device, transform.size_px)?;
        let rules = backbone.rules();
        let Backbone { network_name, manifest, provenance, .. } = backbone;
        let trained_px = trained.size_px;
        Ok(Self { network, network_name, transform, rules, manifest, provenance, trained_px })
    }

    /// Returns the step of the checkpoint; `None` for a weights file.
    pub fn step(&self) -> Option<u64> {
        self.manifest.as_ref().map(|run| run.step)
    }

    /// Returns the views that the network was trained on; DINO's if its run is not known, without
    /// operations that do not apply to its images.
    pub fn multicrop(&self) -> MultiCrop {
        if let Some(manifest) = &self.manifest {
            return manifest.plan.multicrop();
        }
        let size_px = self.transform.size_px;
        let views = MultiCrop::dino(size_px, size_px, 0);
        if self.rules.format.is_rgb8() { views } else { views.into_multichannel(0.0, 0.0) }
    }

    /// Returns warnings about settings that do not fit the weights, a sentence each.
    pub fn warnings(&self) -> Vec<String> {
        let size_px = self.transform.size_px;
        let trained_px = self.trained_px;
        if size_px == trained_px {
            return Vec::new();
        }
        vec![format!("the network expects {trained_px} px images but gets {size_px} px")]
    }

    /// Returns the metadata that accompanies every result; the network comes from `checkpoint`.
    ///
    /// # Errors
    /// [`SessionError::Unserializable`].
    pub fn info(&self, checkpoint: &Path) -> Result<NetworkInfo, SessionError> {
        let origin = Origin {
            network_name: &self.network_name,
            step: self.step(),
            recipe: self.manifest.as_ref().map(|run| run.plan.recipe.name.as_str()),
            transform: self.transform,
            checkpoint: Some(checkpoint),
        };
        origin.describe(&self.network)
    }

    /// Returns the scores under their TensorBoard names, which differ from those of the probe
    /// during training.
    pub(crate) fn scalars(&self, rows: &[EvaluationRow]) -> Vec<(String, f64)> {
        let default_network = self.manifest.as_ref().and_then(|manifest| manifest.plan.evaluated().ok());
        let default_network = default_network.unwrap_or(&self.network_name);
        let mut scalars = Vec::new();
        for row in rows {
            if let Some(value) = row.number.value() {
                scalars.push((row.score_name(default_network), value));
            }
        }
        scalars
    }

    /// Adds `rows`, the scores of this network, to the evaluations of the run in `workdir` and to
    /// its TensorBoard files.
    ///
    /// # Errors
    /// [`SessionError`] when a file cannot be written.
    pub fn record(&self, workdir: &Path, rows: &[EvaluationRow]) -> Result<(), SessionError> {
        record(workdir, self.step().unwrap_or_default(), rows, &self.scalars(rows))
    }

    /// Adds `rows`, scores of the weights that the run in `workdir` began with, to its evaluations
    /// and to its TensorBoard files.
    ///
    /// # Errors
    /// [`SessionError`] when a file cannot be written.
    pub fn record_initial(&self, workdir: &Path, rows: &[EvaluationRow]) -> Result<(), SessionError> {
        record(workdir, 0, rows, &self.scalars(rows))
    }
}

/// Appends `rows` to the evaluations of the run in `workdir`, and `scalars` after `step` steps to
/// its TensorBoard files.
pub(crate) fn record(
    workdir: &Path,
    step: u64,
    rows: &[EvaluationRow],
    scalars: &[(String, f64)],
) -> Result<(), SessionError> {
    append(workdir, rows)?;
    if scalars.is_empty() {
        return Ok(());
    }
    // Scalars have the index of the last step, and steps are counted from 0.
    Ok(append_scalars(workdir, step.saturating_sub(1), scalars)?)
}

/// Checks that this machine's memory holds the activations of one image of `size_px` in `network`,
/// if it runs on the CPU.
fn check_memory(network: &Network, device: &Device, size_px: u32) -> Result<(), SessionError> {
    let needed_bytes = network.image_bytes(size_px as usize);
    match machine::available_bytes() {
        Some(free_bytes) if *device == Device::flex() && needed_bytes > free_bytes => {
            Err(SessionError::ImageMemory { size_px, needed_bytes, free_bytes })
        }
        _ => Ok(()),
    }
}

/// Origin and preprocessing of a scored network.
pub(crate) struct Origin<'a> {
    /// Name of the network within its run.
    pub(crate) network_name: &'a str,
    /// Number of steps that it has taken.
    pub(crate) step: Option<u64>,
    /// Name of the recipe of its run.
    pub(crate) recipe: Option<&'a str>,
    pub(crate) transform: Transform,
    /// File that it comes from; within a run there is none.
    pub(crate) checkpoint: Option<&'a Path>,
}

impl Origin<'_> {
    /// Returns the metadata of the scores of `network`.
    ///
    /// # Errors
    /// [`SessionError::Unserializable`].
    pub(crate) fn describe(&self, network: &Network) -> Result<NetworkInfo, SessionError> {
        let more = [
            ("checkpoint", json!(self.checkpoint)),
            ("recipe", json!(self.recipe)),
            ("weights", json!(format!("{:016x}", network.fingerprint()))),
            ("model", from_text(serde_json::to_string(&network.model))?),
            ("normalization", from_text(serde_json::to_string(&network.pixels.normalization))?),
        ];
        let format = network.pixels.format();
        let format = (!format.is_rgb8()).then(|| ("pixels", json!(format.to_string())));
        Ok(NetworkInfo {
            step: self.step,
            network: self.network_name.to_string(),
            transform: Some(self.transform),
            transform_in_words: Some(self.transform.to_string()),
            more: more.into_iter().chain(format).map(|(key, value)| (key.to_string(), value)).collect(),
        })
    }
}

/// Parses a value that was written as JSON: an f32 that is converted to f64 without text in between
/// gains digits.
fn from_text(text: serde_json::Result<String>) -> Result<Value, SessionError> {
    text.and_then(|text| serde_json::from_str(&text)).map_err(SessionError::Unserializable)
}
