//! A ResNet or RegNetY among the tensors of a file: which one is read from names and shapes.

use networks::Normalization;
use networks::{ModelConfig, NamedSize, RegnetConfig, ResnetConfig, Size, StemKind};

use super::config;
use super::found::Found;
use super::pretrained::{Hints, Pretrained};
use super::source::Source;
use crate::library::Library;
use crate::library::convnet::{
    Renaming, regnet_in_timm, regnet_in_transformers, resnet_in_transformers, same,
};
use crate::metadata::UNNAMED;
use crate::preprocessing::Preprocessing;

/// Side of the images that the published networks are made for.
const IMAGE_PX: usize = 224;

/// The network in `found`.
pub(super) fn read(found: Found, source: &Source, hints: &Hints) -> Result<Pretrained, String> {
    let in_transformers = found.anchor == "embedder.embedder.convolution.weight";
    let is_regnet = match in_transformers {
        true => found.holds("encoder.stages.0.layers.0.layer.2.attention.0.weight"),
        false => found.anchor != "conv1.weight",
    };
    let (library, renaming): (Library, Renaming) = match (in_transformers, is_regnet, found.anchor) {
        (true, true, _) => (Library::Transformers, regnet_in_transformers),
        (true, false, _) => (Library::Transformers, resnet_in_transformers),
        (_, true, "stem.conv.weight") => (Library::Timm, regnet_in_timm),
        // timm has torchvision's names for ResNets.
        (_, false, _) if source.config.is_some() => (Library::Timm, same),
        _ => (Library::Torchvision, same),
    };
    let library = hints.library.unwrap_or(library);
    let model = match is_regnet {
        true => regnet(&found, renaming)?,
        false => resnet(&found, renaming)?,
    };
    let mut assumed = Vec::new();
    let otherwise = Preprocessing::of_size(IMAGE_PX as u32, Normalization::default());
    let is_known = library == Library::Torchvision || hints.normalization.is_some();
    config::check_activation(source, "relu")?;
    let preprocessing = config::preprocessing(source, otherwise, is_known, &mut assumed)?;
    if library == Library::Torchvision {
        assumed.push("torchvision resizes bilinearly; images are resized bicubically here".into());
    }
    let tensors = found.renamed(&model, renaming)?;
    Ok(Pretrained { model, preprocessing, tensors, which: UNNAMED.into(), origin: library.name(), assumed })
}

/// The ResNet whose branches are there.
fn resnet(found: &Found, renaming: Renaming) -> Result<ModelConfig, String> {
    let holds = |name: &str| renaming(name).is_some_and(|name| found.holds(&name));
    let branches =
        |stage: usize| (0..).take_while(|b| holds(&format!("layer{stage}.{b}.conv1.weight"))).count();
    let depths = [1, 2, 3, 4].map(branches);
    let is_bottleneck = holds("layer1.0.conv3.weight");
    let layers = depths.iter().sum::<usize>() * if is_bottleneck { 3 } else { 2 } + 2;
    let stem = renaming("conv1.weight").and_then(|name| Some(found.shape(&name)?.to_vec()));
    let stem = stem.unwrap_or_default();
    let (width, kind) = match stem.as_slice() {
        [width, 3, 7, 7] => (*width, StemKind::Imagenet),
        [width, 3, 3, 3] => (*width, StemKind::Small),
        _ => {
            return Err(format!("the first convolution of its ResNet has shape {stem:?}, not [64, 3, 7, 7]"));
        }
    };
    let image_px = if kind == StemKind::Small { 32 } else { IMAGE_PX };
    let config = ResnetConfig { image_px, depth: layers, width, stem: kind, zero_init_residual: false };
    let model = ModelConfig::Resnet(config.clone());
    model.validate().map_err(|_| format!("a ResNet with {depths:?} branches is not known here"))?;
    match config.stages() == (depths, is_bottleneck) {
        true => Ok(model),
        false => Err(format!("a ResNet with {depths:?} branches is not known here")),
    }
}

/// The published RegNetY whose parameters are all there.
fn regnet(found: &Found, renaming: Renaming) -> Result<ModelConfig, String> {
    let of_size = |size| ModelConfig::RegnetY(RegnetConfig { image_px: IMAGE_PX, size: Size::Named(size) });
    let fits = |model: &ModelConfig| {
        model
            .params()
            .iter()
            .all(|(name, shape)| renaming(name).and_then(|name| found.shape(&name)) == Some(shape.as_slice()))
    };
    let mut models = NamedSize::ALL.into_iter().map(of_size);
    models.find(fits).ok_or_else(|| "its RegNet is none of the published RegNetYs".into())
}
