//! Backbones with their weights, from a run, a checkpoint or a weights file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use augment::DecodeRules;
use kernels::device::Device;
use networks::backbone::Readout;
use networks::unit::Unit;
use networks::{ClassHead, ModelConfig, NamedTensor, Network, NetworkError, PixelHead};
use trainer::Recipe;
use trainer::checkpoint::{Manifest, steps};
use trainer::run::open_result;
use weights::{Hints, Preprocessing};

use crate::error::SessionError;
use crate::head::{TrainedHead, trained_head};
use crate::provenance::Provenance;

/// Beginnings of the names of models in other libraries.
const MODEL_NAMES: [&str; 9] =
    ["vit_", "vit-", "dino_", "dinov2", "dinov3", "resnet", "regnet", "convnext", "deit"];

/// Extensions of files of weights. The name of a model of timm has a tag there, such as
/// `vit_base_patch16_224.augreg_in21k`.
const FILE_EXTENSIONS: [&str; 7] = ["pth", "pt", "bin", "ckpt", "tar", "safetensors", "onnx"];

/// A backbone with its weights.
pub struct Backbone {
    /// Configuration of the network.
    pub model: ModelConfig,
    /// Parameters by name; with the parameters of heads, if it was opened with them.
    pub tensors: Vec<NamedTensor>,
    /// Classifier on its features, of a run that has learned from labels, or of an exported one.
    pub classifier: Option<ClassHead>,
    /// Decoder of its features, of a run that has learned from masks, or of an exported one.
    pub decoder: Option<PixelHead>,
    /// Preprocessing of its images.
    pub preprocessing: Preprocessing,
    /// Name of the network within its run, or `weights`.
    pub network_name: String,
    /// Manifest of the checkpoint; a weights file has none.
    pub manifest: Option<Manifest>,
    /// Where the weights come from.
    pub provenance: Provenance,
}

impl Backbone {
    /// Opens the backbone in `path`: in a weights file, whose missing facts are taken from `hints`,
    /// or in the network `hints.network` of a run; by default, in the network that its method
    /// evaluates. Of a run that keeps its best weights, these are opened, else the newest.
    /// Assumptions about a file are reported.
    ///
    /// # Errors
    /// [`SessionError`] when there is no network, or its weights cannot be read.
    pub fn open(path: &Path, hints: &Hints) -> Result<Self, SessionError> {
        check_exists(path)?;
        if weights::is_weights(path) {
            let read = weights::read(path, hints)?;
            for sentence in &read.assumed {
                tracing::info!("{}: {sentence}", path.display());
            }
            return Ok(Self {
                model: read.model,
                tensors: read.tensors,
                classifier: read.classifier,
                decoder: read.decoder,
                preprocessing: read.preprocessing,
                network_name: read.network_name,
                manifest: None,
                provenance: Provenance {
                    library: read.origin,
                    license: read.license,
                    step: None,
                    began_with: read.began_with,
                },
            });
        }
        if hints.states_facts() {
            tracing::warn!(
                "{} is a run, which states all facts about its weights: those that are given are not used",
                path.display()
            );
        }
        // Opened once: a running job may write another checkpoint meanwhile.
        let checkpoint = open_result(path)?;
        let (tensors, network_name) = checkpoint.backbone(hints.network.as_deref())?;
        let recipe = &checkpoint.manifest.plan.recipe;
        let mut head = None;
        if trained_head(recipe).is_some() {
            let (with_heads, _) = checkpoint.network(Some(&network_name))?;
            head = TrainedHead::find(recipe, &with_heads)?;
        }
        Ok(Self::from_checkpoint(checkpoint.manifest, tensors, head, network_name))
    }

    /// Opens the network `name` of the run or checkpoint in `path`, by default the evaluated one,
    /// with its heads and the parameters that only its training uses.
    ///
    /// # Errors
    /// [`SessionError::NoHeads`] for a weights file, and as [`open`](Self::open).
    pub fn open_with_heads(path: &Path, name: Option<&str>) -> Result<Self, SessionError> {
        check_exists(path)?;
        if weights::is_weights(path) {
            return Err(SessionError::NoHeads { path: path.to_path_buf() });
        }
        let checkpoint = open_result(path)?;
        let (tensors, network_name) = checkpoint.network(name)?;
        let head = TrainedHead::find(&checkpoint.manifest.plan.recipe, &tensors)?;
        Ok(Self::from_checkpoint(checkpoint.manifest, tensors, head, network_name))
    }

    /// Creates the backbone of a checkpoint with the tensors of its network `network_name`, and its
    /// head if it has learned from labels or masks.
    fn from_checkpoint(
        manifest: Manifest,
        tensors: Vec<NamedTensor>,
        head: Option<TrainedHead>,
        network_name: String,
    ) -> Self {
        let mut classifier = None;
        let mut decoder = None;
        match head {
            Some(TrainedHead::Classifier(head)) => classifier = Some(head),
            Some(TrainedHead::Decoder(head)) => decoder = Some(head),
            None => {}
        }
        let recipe = &manifest.plan.recipe;
        let model = recipe.model.clone();
        let preprocessing = preprocessing_of_recipe(recipe);
        let provenance = Provenance::from_checkpoint(&manifest);
        let manifest = Some(manifest);
        Self { model, tensors, classifier, decoder, preprocessing, network_name, manifest, provenance }
    }

    /// Returns the shapes of the parameters that are not the backbone's, by name: the parameters of
    /// heads, if it was opened with them.
    pub fn head_shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let masked = self.model.masked_units(Readout::All);
        let backbone = param_names(masked.unwrap_or_else(|| self.model.units(Readout::All)));
        let mut shapes = BTreeMap::new();
        for tensor in &self.tensors {
            if !backbone.contains(&tensor.name) {
                shapes.insert(tensor.name.clone(), tensor.shape.clone());
            }
        }
        shapes
    }

    /// Returns whether the weights have parameters that only training with masked patches uses, if
    /// it was opened with them.
    pub fn saw_masks(&self) -> bool {
        let Some(masked) = self.model.masked_units(Readout::All) else { return false };
        let masked = param_names(masked);
        let plain = param_names(self.model.units(Readout::All));
        self.tensors.iter().any(|tensor| masked.contains(&tensor.name) && !plain.contains(&tensor.name))
    }

    /// Returns the rules for decoding images: the rules of the run, or the usual ones in the format
    /// that the weights take.
    pub fn rules(&self) -> DecodeRules {
        match &self.manifest {
            Some(manifest) => manifest.plan.recipe.data.rules(),
            None => self.preprocessing.decoding.rules(self.preprocessing.pixels.format()),
        }
    }

    /// Returns the network with these weights on `device`.
    ///
    /// # Errors
    /// [`NetworkError`] when a parameter is missing or has another shape.
    pub fn network(&self, n_workers: usize, device: &Device) -> Result<Network, NetworkError> {
        Network::new(&self.model, self.preprocessing.pixels.clone(), &self.tensors, n_workers, device)
    }
}

/// Returns the names of the parameters of `units`.
fn param_names(units: Vec<Box<dyn Unit>>) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for unit in units {
        let layout = unit.layout(1);
        for slot in &layout.params {
            names.insert(layout.full_name(slot));
        }
    }
    names
}

/// Returns the configuration of the backbone in `path`, as [`Backbone::open`] finds it, and reports
/// nothing.
///
/// # Errors
/// As [`Backbone::open`].
pub fn model_of(path: &Path, hints: &Hints) -> Result<ModelConfig, SessionError> {
    check_exists(path)?;
    if weights::is_weights(path) {
        Ok(weights::read(path, hints)?.model)
    } else {
        let checkpoint = open_result(path)?;
        if hints.network.is_some() {
            checkpoint.evaluated(hints.network.as_deref())?;
        }
        Ok(checkpoint.manifest.plan.recipe.model)
    }
}

/// Returns the preprocessing of the images of the backbone in `path`, as [`Backbone::open`] finds
/// it, and reports nothing.
///
/// # Errors
/// As [`Backbone::open`].
pub(crate) fn preprocessing_of(path: &Path, hints: &Hints) -> Result<Preprocessing, SessionError> {
    check_exists(path)?;
    if weights::is_weights(path) {
        Ok(weights::read(path, hints)?.preprocessing)
    } else {
        Ok(preprocessing_of_recipe(&open_result(path)?.manifest.plan.recipe))
    }
}

/// Returns the preprocessing of the images on which the network of a run of `recipe` is evaluated.
pub(crate) fn preprocessing_of_recipe(recipe: &Recipe) -> Preprocessing {
    let mut preprocessing = Preprocessing::with_size(recipe.evaluated_px() as u32, recipe.data.pixels());
    preprocessing.decoding = recipe.data.rules().decoding();
    preprocessing
}

/// Returns whether `path` looks like the address of weights, or the name of a model in a library.
fn is_model_name(path: &Path) -> bool {
    let text = path.to_string_lossy();
    let name = text.rsplit('/').next().unwrap_or_default();
    let begins_like_model = MODEL_NAMES.iter().any(|start| name.starts_with(start));
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    let is_file = FILE_EXTENSIONS.contains(&extension.as_ref());
    let is_address = text.contains("://") || text.starts_with("hf-hub:") || text.starts_with("hf_hub:");
    is_address || (begins_like_model && !is_file)
}

/// Checks that `path` exists; the error about a removed checkpoint lists the remaining ones.
pub(crate) fn check_exists(path: &Path) -> Result<(), SessionError> {
    let Err(source) = std::fs::metadata(path) else { return Ok(()) };
    let path = path.to_path_buf();
    let others = path.parent().map(steps).unwrap_or_default();
    if others.is_empty() {
        return Err(if is_model_name(&path) {
            SessionError::NotDownloaded { path, source }
        } else {
            SessionError::Io { action: "open", path, source }
        });
    }
    let steps = others.iter().map(|(step, _)| *step).collect();
    Err(SessionError::CheckpointRemoved { path, steps, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_models_are_told_from_missing_files() {
        for name in [
            "timm/vit_small_patch14_dinov2.lvd142m",
            "hf-hub:timm/some_model",
            "https://host/weights.pth",
            "facebook/dinov2-small",
            "resnet50",
        ] {
            let result = check_exists(Path::new(name));
            assert!(matches!(result, Err(SessionError::NotDownloaded { .. })), "{name}: {result:?}");
        }
        for name in ["runs/none", "dinov2_vits14_pretrain.pth"] {
            let result = check_exists(Path::new(name));
            assert!(matches!(result, Err(SessionError::Io { .. })), "{name}: {result:?}");
        }
    }
}
