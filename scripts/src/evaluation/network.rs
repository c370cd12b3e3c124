//! Networks that verbs look at: of a run, a checkpoint, or a file of weights.

use std::path::Path;

use anyhow::bail;
use augment::{DecodeRules, MultiCrop};
use eval::Transform;
use kernels::device::Device;
use networks::Network;
use report::About;
use serde_json::{Value, json};
use trainer::checkpoint::{Checkpoint, Manifest};
use weights::Preprocessing;

use crate::backbone::{WeightFlags, check_there};
use crate::cluster::machine;

/// Which network of a checkpoint, and how it sees images.
#[derive(Default, clap::Args)]
pub(crate) struct NetworkFlags {
    /// Network of a run, by its name, such as student [default: the one that its method evaluates].
    #[arg(long, value_name = "NAME")]
    pub(crate) network: Option<String>,
    /// Side of the square that the network sees, in place of the model's.
    #[arg(long, value_name = "PX")]
    pub(crate) image_px: Option<u32>,
    /// Length of the short side after the resize, before the square is cut out [default: what the configuration of the
    /// weights says, else 256/224 of the square's side; the side itself for logreg]. With the model's size, thumbnails are
    /// not resized.
    #[arg(long, value_name = "PX")]
    pub(crate) resize_px: Option<u32>,
    #[command(flatten)]
    pub(crate) weights: WeightFlags,
}

/// A network that is open, and what is known of it.
pub(crate) struct OpenNetwork {
    pub(crate) network: Network,
    /// Which of a run's networks it is.
    pub(crate) which: String,
    pub(crate) transform: Transform,
    pub(crate) rules: DecodeRules,
    /// What the checkpoint says of its run; a file of weights says nothing.
    pub(crate) manifest: Option<Manifest>,
    /// Side of the squares that it was made for, or is evaluated on.
    usual_px: u32,
}

impl NetworkFlags {
    /// Opens the network of `path`, a run, a checkpoint or weights, on `device`.
    pub(crate) fn open(&self, path: &Path, device: &Device) -> anyhow::Result<OpenNetwork> {
        check_there(path)?;
        let opened = match weights::is_weights(path) {
            true => self.of_weights(path, device)?,
            // Opened once: a run that goes on may write another one meanwhile.
            false => {
                let checkpoint = Checkpoint::open(path)?;
                let (network, which) = checkpoint.network(self.network.as_deref(), 0, device)?;
                let size_px = network.model.image_px() as u32;
                let preprocessing = Preprocessing::of_size(size_px, network.normalization);
                (network, which, preprocessing, Some(checkpoint.manifest))
            }
        };
        let (network, which, preprocessing, manifest) = opened;
        let size_px = self.image_px.unwrap_or(preprocessing.size_px);
        let stride_px = network.model.stride_px();
        if size_px == 0 || !(size_px as usize).is_multiple_of(stride_px) {
            bail!(eval::EvalError::ImageSize { image_px: size_px as usize, stride_px });
        }
        let usual = Transform::new(size_px);
        let transform = match (self.resize_px, self.image_px) {
            (Some(resize_px), _) => Transform::resizing(resize_px, size_px).map_err(anyhow::Error::msg)?,
            (None, None) => Transform { resize_px: preprocessing.resize_px.max(size_px), ..usual },
            (None, Some(_)) => usual,
        };
        let Transform { resize_px, size_px } = transform;
        let seen = Preprocessing { normalization: preprocessing.normalization, resize_px, size_px };
        seen.validate().map_err(anyhow::Error::msg)?;
        check_memory(&network, device, size_px)?;
        let rules = manifest.as_ref().map_or_else(DecodeRules::default, |run| run.plan.recipe.data.rules());
        Ok(OpenNetwork { network, which, transform, rules, manifest, usual_px: preprocessing.size_px })
    }

    fn of_weights(&self, path: &Path, device: &Device) -> anyhow::Result<Opened> {
        let read = self.weights.read(path, self.network.as_deref())?;
        let normalization = read.preprocessing.normalization;
        let network = Network::with_tensors(&read.model, normalization, &read.tensors, 0, device)?;
        Ok((network, read.which, read.preprocessing, None))
    }
}

/// Checks that one image of `size_px` has room on its way through `network`, where that is in the memory of this machine.
fn check_memory(network: &Network, device: &Device, size_px: u32) -> anyhow::Result<()> {
    let needed = network.image_bytes(size_px as usize);
    match machine::available_bytes() {
        Some(bytes) if *device == Device::flex() && needed > bytes => bail!(
            "an image of {size_px} px takes {:.1} GB in this network, and {:.1} GB are free: --image-px makes it smaller",
            needed / 1e9,
            bytes / 1e9
        ),
        _ => Ok(()),
    }
}

/// A network, which of a run's it is, how it sees images, and what its checkpoint says.
type Opened = (Network, String, Preprocessing, Option<Manifest>);

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
        let (seen_px, made_px) = (self.transform.size_px, self.usual_px);
        let differs = seen_px != made_px;
        differs
            .then(|| format!("the network was made for images of {made_px} px and sees {seen_px} px"))
            .into_iter()
            .collect()
    }

    /// Metadata that goes with every result.
    pub(crate) fn about(&self, checkpoint: &Path) -> About {
        let described = Described {
            network: &self.network,
            which: &self.which,
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
    pub(crate) which: &'a str,
    pub(crate) step: Option<u64>,
    pub(crate) recipe: Option<String>,
    pub(crate) transform: Transform,
}

/// The same as metadata; the probe within a run has no checkpoint.
pub(crate) fn about(described: &Described<'_>, checkpoint: Option<&Path>) -> About {
    let network = described.network;
    let more = [
        ("checkpoint", json!(checkpoint)),
        ("recipe", json!(described.recipe)),
        ("weights", json!(format!("{:016x}", network.fingerprint()))),
        ("model", as_written(&network.model)),
        ("normalization", as_written(&network.normalization)),
    ];
    About {
        step: described.step,
        network: described.which.to_string(),
        transform: Some(described.transform),
        transform_in_words: Some(described.transform.to_string()),
        more: more.into_iter().map(|(key, value)| (key.to_string(), value)).collect(),
    }
}

/// The work directory of the run that `checkpoint` belongs to, if it lies in one.
pub(crate) fn workdir_of(checkpoint: &Path) -> Option<&Path> {
    checkpoint.ancestors().find(|folder| folder.join("plan.toml").exists())
}

/// By way of the text: as numbers of 64 bits, those of 32 would end in digits that nobody wrote.
fn as_written(value: &impl serde::Serialize) -> Value {
    let text = serde_json::to_string(value).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}
