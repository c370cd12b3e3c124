//! Opening a network for evaluation: from a run, a checkpoint, or a file of weights.
use std::path::Path;

use anyhow::bail;
use augment::{DecodeRules, MultiCrop, Transform};
use kernels::device::Device;
use networks::Network;
use report::NetworkInfo;
use serde_json::{Value, json};
use trainer::checkpoint::Manifest;

use session::Backbone;

use crate::backbone::{WeightFlags, open_backbone};
use session::machine;

/// Flags for the choice of the network and for its preprocessing.
#[derive(Default, clap::Args)]
pub(crate) struct NetworkFlags {
    /// Network of a run, by name, such as student [default: the one its method evaluates].
    #[arg(long, value_name = "NAME")]
    pub(crate) network: Option<String>,
    /// Input image size in pixels, instead of the model's.
    #[arg(long, value_name = "PX")]
    pub(crate) image_px: Option<u32>,
    /// Short side after resizing, before the center crop [default: from the configuration of the
    /// weights, else 256/224 of the crop; for logreg, the crop]. Set it to the model's size to
    /// leave thumbnails unresized.
    #[arg(long, value_name = "PX")]
    pub(crate) resize_px: Option<u32>,
    #[command(flatten)]
    pub(crate) weights: WeightFlags,
}

/// An open network and its origin.
pub(crate) struct OpenNetwork {
    pub(crate) network: Network,
    /// Name of the network within its run.
    pub(crate) which: String,
    pub(crate) transform: Transform,
    pub(crate) rules: DecodeRules,
    /// Manifest of the checkpoint; `None` for a file of weights.
    pub(crate) manifest: Option<Manifest>,
    /// Side of the square images that the network was trained for, or is evaluated on.
    usual_px: u32,
}

impl NetworkFlags {
    /// Opens the network in `path` (a run, a checkpoint or weights) on `device`.
    pub(crate) fn open(&self, path: &Path, device: &Device) -> anyhow::Result<OpenNetwork> {
        let backbone = open_backbone(path, &self.weights, self.network.as_deref())?;
        let network = backbone.network(0, device)?;
        let usual = backbone.preprocessing.transform;
        let transform = self.transform(usual, network.model.stride_px())?;
        check_memory(&network, device, transform.size_px)?;
        let rules = backbone.rules();
        let Backbone { which, manifest, .. } = backbone;
        Ok(OpenNetwork { network, which, transform, rules, manifest, usual_px: usual.size_px })
    }

    /// Returns the transform for a network whose weights state `usual`.
    fn transform(&self, usual: Transform, stride_px: usize) -> anyhow::Result<Transform> {
        let size_px = self.image_px.unwrap_or(usual.size_px);
        if size_px == 0 || !(size_px as usize).is_multiple_of(stride_px) {
            bail!(eval::EvalError::ImageSize { image_px: size_px as usize, stride_px });
        }
        let transform = match (self.resize_px, self.image_px) {
            (Some(resize_px), _) => Transform::with_resize(resize_px, size_px).map_err(anyhow::Error::msg)?,
            (None, None) => Transform { resize_px: usual.resize_px.max(size_px), size_px },
            (None, Some(_)) => Transform::new(size_px),
        };
        transform.validate().map_err(anyhow::Error::msg)?;
        Ok(transform)
    }
}

/// Checks that this machine's memory holds the activations of one image of `size_px`, if `network`
/// is in that memory.
fn check_memory(network: &Network, device: &Device, size_px: u32) -> anyhow::Result<()> {
    let needed = network.image_bytes(size_px as usize);
    match machine::available_bytes() {
        Some(bytes) if *device == Device::flex() && needed > bytes => bail!(
            "an image of {size_px} px needs {:.1} GB in this network, but only {:.1} GB are free: pass a \
             smaller --image-px",
            needed / 1e9,
            bytes / 1e9
        ),
        _ => Ok(()),
    }
}

impl OpenNetwork {
    /// Returns the number of steps before the checkpoint.
    pub(crate) fn step(&self) -> Option<u64> {
        self.manifest.as_ref().map(|run| run.step)
    }

    /// Returns the views that the network was trained on; DINO's if its run is not known.
    pub(crate) fn multicrop(&self) -> MultiCrop {
        match &self.manifest {
            Some(manifest) => manifest.plan.multicrop(),
            None => self.default_views(self.transform.size_px),
        }
    }

    /// Returns DINO's views of `size_px`, without operations that do not apply to the network's
    /// images.
    fn default_views(&self, size_px: u32) -> MultiCrop {
        let views = MultiCrop::dino(size_px, size_px, 0);
        if self.rules.format.is_rgb8() { views } else { views.into_multichannel(0.0, 0.0) }
    }

    /// Returns warnings about settings that do not fit the weights, a sentence each.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let size_px = self.transform.size_px;
        let usual_px = self.usual_px;
        if size_px == usual_px {
            return Vec::new();
        }
        vec![format!("the network expects {usual_px} px images but gets {size_px} px")]
    }

    /// Returns the metadata that accompanies every result.
    pub(crate) fn about(&self, checkpoint: &Path) -> NetworkInfo {
        let origin = NetworkOrigin {
            network: &self.network,
            which: &self.which,
            step: self.step(),
            recipe: self.manifest.as_ref().map(|run| run.plan.recipe.name.clone()),
            transform: self.transform,
        };
        network_info(&origin, Some(checkpoint))
    }
}

/// Origin and preprocessing of a scored network.
pub(crate) struct NetworkOrigin<'a> {
    pub(crate) network: &'a Network,
    /// Name of the network within its run.
    pub(crate) which: &'a str,
    pub(crate) step: Option<u64>,
    pub(crate) recipe: Option<String>,
    pub(crate) transform: Transform,
}

/// Returns the metadata of a scored network; the probe within a run has no checkpoint.
pub(crate) fn network_info(origin: &NetworkOrigin<'_>, checkpoint: Option<&Path>) -> NetworkInfo {
    let network = origin.network;
    let more = [
        ("checkpoint", json!(checkpoint)),
        ("recipe", json!(origin.recipe)),
        ("weights", json!(format!("{:016x}", network.fingerprint()))),
        ("model", to_json(&network.model)),
        ("normalization", to_json(&network.pixels.normalization)),
    ];
    let format = network.pixels.format();
    let format = (!format.is_rgb8()).then(|| ("pixels", json!(format.to_string())));
    NetworkInfo {
        step: origin.step,
        network: origin.which.to_string(),
        transform: Some(origin.transform),
        transform_in_words: Some(origin.transform.to_string()),
        more: more.into_iter().chain(format).map(|(key, value)| (key.to_string(), value)).collect(),
    }
}

/// Returns the work directory that `checkpoint` is in, if any.
pub(crate) fn find_workdir(checkpoint: &Path) -> Option<&Path> {
    checkpoint.ancestors().find(|folder| folder.join("plan.toml").exists())
}

/// Converts to JSON through text: an f32 that is converted to f64 directly gains digits.
fn to_json(value: &impl serde::Serialize) -> Value {
    let text = serde_json::to_string(value).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}
