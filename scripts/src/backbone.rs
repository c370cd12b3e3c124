//! Backbones with their weights, from a run, a checkpoint or a file of weights.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::bail;
use augment::{DecodeRules, Depth, Fill, NoData, PixelFormat};
use kernels::device::Device;
use networks::backbone::Readout;
use networks::layout::UnitLayout;
use networks::unit::Unit;
use networks::{ModelConfig, NamedTensor, Network, NetworkError, Normalization};
use trainer::checkpoint::{Checkpoint, Manifest, steps};
use weights::{Hints, Library, Preprocessing, Pretrained};

use crate::console::say;

/// A backbone with its weights.
pub(crate) struct Backbone {
    pub(crate) model: ModelConfig,
    pub(crate) tensors: Vec<NamedTensor>,
    pub(crate) preprocessing: Preprocessing,
    /// Name of the network within its run, or `weights`.
    pub(crate) which: String,
    /// Manifest of the checkpoint; a file of weights has none.
    pub(crate) manifest: Option<Manifest>,
    /// Name of the library that made the weights, or `ocelli`.
    pub(crate) origin: &'static str,
}

impl Backbone {
    /// Opens the backbone of the network `network` in `path`; by default, of the network that its
    /// method evaluates.
    pub(crate) fn open(path: &Path, flags: &WeightFlags, network: Option<&str>) -> anyhow::Result<Self> {
        check_there(path)?;
        if weights::is_weights(path) {
            let Pretrained { model, mut preprocessing, tensors, which, origin, .. } =
                flags.read(path, network)?;
            flags.values.apply_to(&mut preprocessing)?;
            return Ok(Self { model, tensors, preprocessing, which, manifest: None, origin });
        }
        flags.values.refuse_for_run(path)?;
        // Opened once: a running job may write another checkpoint meanwhile.
        let checkpoint = Checkpoint::open(path)?;
        let read = checkpoint.backbone(network)?;
        Ok(Self::of_checkpoint(checkpoint, read))
    }

    /// Opens the evaluated network of the run or checkpoint in `path` with its heads, and with what
    /// only its training uses.
    pub(crate) fn open_with_heads(path: &Path) -> anyhow::Result<Self> {
        check_there(path)?;
        if weights::is_weights(path) {
            bail!(
                "{} holds a backbone without heads; heads are in the runs and checkpoints of this program",
                path.display()
            );
        }
        let checkpoint = Checkpoint::open(path)?;
        let read = checkpoint.network(None)?;
        Ok(Self::of_checkpoint(checkpoint, read))
    }

    /// Creates the backbone of `checkpoint` with the tensors, and the name of their network, that
    /// were read from it.
    fn of_checkpoint(checkpoint: Checkpoint, (tensors, which): (Vec<NamedTensor>, String)) -> Self {
        let manifest = checkpoint.manifest;
        let recipe = &manifest.plan.recipe;
        let model = recipe.model.clone();
        let pixels = recipe.data.pixels();
        let mut preprocessing = Preprocessing::of_size(recipe.evaluated_px() as u32, pixels);
        preprocessing.decoding = recipe.data.rules().decoding();
        Self { model, tensors, preprocessing, which, manifest: Some(manifest), origin: "ocelli" }
    }

    /// Returns the shapes of the parameters that are not the backbone's, by name: those of heads,
    /// if it was opened with them.
    pub(crate) fn head_shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let units = self.model.masked_units(Readout::All).unwrap_or_else(|| self.model.units(Readout::All));
        let backbone = param_names(units);
        let heads = self.tensors.iter().filter(|tensor| !backbone.contains(&tensor.name));
        heads.map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect()
    }

    /// Returns whether the weights have parameters that only training with masked patches uses, if
    /// it was opened with them.
    pub(crate) fn saw_masks(&self) -> bool {
        let Some(masked) = self.model.masked_units(Readout::All) else { return false };
        let masked = param_names(masked);
        let plain = param_names(self.model.units(Readout::All));
        self.tensors.iter().any(|tensor| masked.contains(&tensor.name) && !plain.contains(&tensor.name))
    }

    /// Returns the rules for decoding images: those of the run, or the usual ones in the format
    /// that the weights take.
    pub(crate) fn rules(&self) -> DecodeRules {
        match &self.manifest {
            Some(manifest) => manifest.plan.recipe.data.rules(),
            None => self.preprocessing.decoding.rules(self.preprocessing.pixels.format()),
        }
    }

    /// Returns the network with these weights on `device`.
    pub(crate) fn network(&self, n_workers: usize, device: &Device) -> Result<Network, NetworkError> {
        Network::new(&self.model, self.preprocessing.pixels.clone(), &self.tensors, n_workers, device)
    }
}

/// Returns the names of the parameters of `units`.
fn param_names(units: Vec<Box<dyn Unit>>) -> BTreeSet<String> {
    let names =
        |layout: UnitLayout| layout.params.iter().map(|slot| layout.full_name(slot)).collect::<Vec<_>>();
    units.into_iter().flat_map(|unit| names(unit.layout(1))).collect()
}

/// Returns the configuration of the backbone in `path`, as [`Backbone::open`] finds it; prints
/// nothing.
pub(crate) fn model_of(path: &Path, flags: &WeightFlags) -> anyhow::Result<ModelConfig> {
    check_there(path)?;
    if weights::is_weights(path) {
        Ok(weights::read(path, &flags.hints(None))?.model)
    } else {
        Ok(Checkpoint::open(path)?.manifest.plan.recipe.model)
    }
}

/// Checks that `path` exists; the error about a removed checkpoint lists the remaining ones.
fn check_there(path: &Path) -> anyhow::Result<()> {
    let Err(error) = std::fs::metadata(path) else { return Ok(()) };
    let others = path.parent().map(steps).unwrap_or_default();
    let names: Vec<String> = others.iter().map(|(step, _)| step.to_string()).collect();
    let error = anyhow::Error::from(error);
    Err(if names.is_empty() {
        error.context(format!("cannot open {}", path.display()))
    } else {
        error.context(format!(
            "cannot open {}: available checkpoints: steps {}; older ones are removed (run.keep_checkpoints)",
            path.display(),
            names.join(", ")
        ))
    })
}

/// Flags for facts that a file of weights may not state.
#[derive(Clone, Default, clap::Args)]
pub(crate) struct WeightFlags {
    /// Library that wrote a file of weights, if its names are ambiguous: dino, dinov2, dinov3,
    /// timm, torchvision or transformers.
    #[arg(long, value_name = "LIBRARY")]
    source: Option<Library>,
    /// Number of attention heads of a file's network [default: as its config.json says, else one
    /// for each 64 channels].
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Normalization of a file's network: imagenet, half (0.5, as many of timm's), or
    /// `R,G,B/R,G,B`, a mean and a deviation for each channel [default: as the file says, else
    /// imagenet].
    #[arg(long, value_name = "COLORS", value_parser = normalization)]
    normalization: Option<Normalization>,
    /// Term that the layer norms of a file's network add to the variance [default: as the file
    /// says, else that of the published networks].
    #[arg(long, value_name = "EPSILON", value_parser = epsilon)]
    norm_epsilon: Option<f64>,
    /// Bits of a channel's values for a file's network: 8, 16 or 32 (floating point) [default: as
    /// the file says, else 8].
    #[arg(long = "bits", value_name = "BITS", value_parser = depth)]
    depth: Option<Depth>,
    #[command(flatten)]
    pub(crate) values: ValueFlags,
}

/// Flags for the values of pixels of other formats than 8 bits.
#[derive(Clone, Default, clap::Args)]
pub(crate) struct ValueFlags {
    /// Bits that the values of 16-bit images use, as the recipe's data.bits_used [default: all].
    #[arg(long, value_name = "BITS", value_parser = clap::value_parser!(u8).range(1..16))]
    pub(crate) bits_used: Option<u8>,
    /// Value of pixels without data, as the recipe's data.no_data; nan if only NaN stands for no
    /// data. They get the mean of the others.
    #[arg(long, value_name = "VALUE", allow_hyphen_values = true)]
    pub(crate) no_data: Option<f32>,
}

impl ValueFlags {
    /// Pixels that stand for no data, if a flag says so.
    pub(crate) fn no_data(&self, fill: Fill) -> Option<NoData> {
        let value = self.no_data?;
        Some(NoData { value: value.is_finite().then_some(value), fill })
    }

    /// Refuses flags for a run, which states these choices.
    fn refuse_for_run(&self, path: &Path) -> anyhow::Result<()> {
        if self.is_given() {
            bail!(
                "{} is a run, whose images are decoded as its recipe says (data.bits_used, data.no_data): --bits-used and --no-data are \
                 for weights of other programs",
                path.display()
            );
        }
        Ok(())
    }

    /// Refuses flags that images of `format` have no use for.
    pub(crate) fn check(&self, format: PixelFormat) -> anyhow::Result<()> {
        if self.no_data.is_some() && format.is_rgb8() {
            bail!("--no-data is for images with a value for no data, not for {format}");
        }
        if self.bits_used.is_some() && format.depth == Depth::Float {
            bail!("--bits-used is for images of 16 bits, and --bits 32 takes numbers as they are");
        }
        Ok(())
    }

    /// Takes the choices that the flags state into `preprocessing`.
    fn apply_to(&self, preprocessing: &mut Preprocessing) -> anyhow::Result<()> {
        self.check(preprocessing.pixels.format())?;
        let decoding = &mut preprocessing.decoding;
        decoding.bits_used = self.bits_used.or(decoding.bits_used);
        decoding.no_data = self.no_data(Fill::default()).or(decoding.no_data);
        Ok(())
    }

    /// Returns whether a flag is given.
    pub(crate) fn is_given(&self) -> bool {
        self.bits_used.is_some() || self.no_data.is_some()
    }
}

fn epsilon(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "a number such as 1e-6 is expected".to_string())?;
    if value > 0.0 && value < 1.0 { Ok(value) } else { Err("it lies between 0 and 1".into()) }
}

impl WeightFlags {
    fn hints(&self, network: Option<&str>) -> Hints {
        Hints {
            library: self.source,
            heads: self.heads,
            normalization: self.normalization.clone(),
            depth: self.depth,
            norm_epsilon: self.norm_epsilon,
            network: network.map(str::to_string),
        }
    }

    /// Reads the backbone in `path`; prints the assumptions that were made.
    pub(crate) fn read(&self, path: &Path, network: Option<&str>) -> anyhow::Result<Pretrained> {
        let read = weights::read(path, &self.hints(network))?;
        for sentence in &read.assumed {
            say(format!("note: {}: {sentence}", path.display()));
        }
        Ok(read)
    }
}

/// Parses the number of bits of a value.
pub(crate) fn depth(text: &str) -> Result<Depth, String> {
    text.parse::<u8>().map_err(|error| error.to_string())?.try_into()
}

/// Parses `imagenet`, `half`, or `R,G,B/R,G,B`: means and deviations, of three channels or of
/// others.
fn normalization(text: &str) -> Result<Normalization, String> {
    match text {
        "imagenet" => return Ok(Normalization::default()),
        "half" => return Ok(Normalization::half(3)),
        _ => {}
    }
    let numbers = |text: &str| -> Option<Vec<f32>> {
        text.split(',').map(|number| number.trim().parse().ok()).collect()
    };
    let parts = text.split_once('/').and_then(|(mean, std)| Some((numbers(mean)?, numbers(std)?)));
    match parts {
        Some((mean, std)) => {
            let normalization = Normalization { mean, std };
            normalization.validate().map(|()| normalization)
        }
        None => Err("imagenet, half, or means and deviations: 0.485,0.456,0.406/0.229,0.224,0.225".into()),
    }
}
