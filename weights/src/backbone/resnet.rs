//! ResNets of timm, torchvision and transformers. Ocelli has the names of torchvision, and so has
//! timm.

use networks::{ModelConfig, ResnetConfig, StemKind};
use serde_json::{Map, Value, json};

use super::convolutional::{self, IMAGE_PX, Layer, branch, outputs, stem};
use super::renamed::{ours, renamed};
use super::{Drawn, Exchange, PythonNetwork, Recognized, TimmModel, no_such};
use crate::export::Export;
use crate::file::Arrays;
use crate::library::Library;
use crate::onnx::{Graph, Setting};
use crate::pretrained::Hints;
use crate::source::{Found, Source};

impl Exchange for ResnetConfig {
    fn kind() -> &'static str {
        "ResNet"
    }

    fn anchors() -> &'static [&'static str] {
        &["embedder.embedder.convolution.weight", "conv1.weight"]
    }

    fn recognized(
        found: &mut Found,
        source: &Source,
        hints: &Hints,
        _: &mut Vec<String>,
    ) -> Result<Recognized, String> {
        let (library, names): (Library, fn(&str) -> Vec<String>) = match found.anchor {
            "conv1.weight" if source.config.is_some() => (Library::Timm, same),
            "conv1.weight" => (Library::Torchvision, same),
            _ => (Library::Transformers, |name| in_transformers(name).into_iter().collect()),
        };
        let library = hints.library.unwrap_or(library);
        let model = of_shapes(found, names)?;
        Ok(Recognized { model, library, names: Box::new(names), size_px: IMAGE_PX, activation: "relu" })
    }

    fn arrays(&self, library: Library, export: &Export<'_>) -> Result<Arrays, String> {
        match library {
            Library::Timm | Library::Torchvision | Library::Dino => Ok(ours(export)),
            Library::Transformers => Ok(renamed(export, |name| in_transformers(name).into_iter().collect())),
            Library::Dinov2 | Library::Dinov3 => Err(no_such(library)),
        }
    }

    fn timm(&self, _: &Export<'_>) -> Result<TimmModel, String> {
        if self.stem == StemKind::Small {
            return Err("timm's ResNets have no 3×3 stem without pooling".into());
        }
        if self.width != 64 {
            return Err(format!("timm's ResNets begin with 64 channels, this one with {}", self.width));
        }
        let (depths, is_bottleneck) = self.stages();
        Ok(TimmModel {
            // The architecture with this kind of branch; the numbers of branches are arguments.
            architecture: if is_bottleneck { "resnet50" } else { "resnet18" },
            arguments: json!({ "layers": depths }),
            first_conv: Some("conv1"),
            classifier: "fc",
            pool: "avg",
        })
    }

    fn transformers(&self) -> Result<Value, String> {
        if self.stem == StemKind::Small {
            return Err("ResNets of transformers have no 3×3 stem without pooling".into());
        }
        let (depths, is_bottleneck) = self.stages();
        let factor = if is_bottleneck { 4 } else { 1 };
        let widths = [0, 1, 2, 3].map(|stage| (self.width << stage) * factor);
        Ok(json!({
            "model_type": "resnet",
            "architectures": ["ResNetModel"],
            "num_channels": self.channels,
            "embedding_size": self.width,
            "hidden_sizes": widths,
            "depths": depths,
            "layer_type": if is_bottleneck { "bottleneck" } else { "basic" },
            "hidden_act": "relu",
            "downsample_in_first_stage": false,
            "downsample_in_bottleneck": false,
        }))
    }

    fn python(&self, library: Library) -> Option<PythonNetwork> {
        if library != Library::Torchvision || self.stem == StemKind::Small || self.width != 64 {
            return None;
        }
        let (depths, is_bottleneck) = self.stages();
        let block = if is_bottleneck { "Bottleneck" } else { "BasicBlock" };
        Some(PythonNetwork {
            imports: "from torchvision.models import resnet\n",
            expression: format!("resnet.ResNet(resnet.{block}, {depths:?})"),
            without_classifier: "model.fc = torch.nn.Identity()\n",
        })
    }

    fn draw(&self, graph: &mut Graph<'_>, _: usize) -> Result<Drawn, String> {
        let (window, pools) = match self.stem {
            StemKind::Imagenet => ([7, 2], true),
            StemKind::Small => ([3, 1], false),
        };
        let mut x = stem(graph, ["conv1", "bn1"], window)?;
        if pools {
            let settings = [
                Setting::Ints("kernel_shape", &[3, 3]),
                Setting::Ints("strides", &[2, 2]),
                Setting::Ints("pads", &[1, 1, 1, 1]),
            ];
            x = graph.node("MaxPool", &[&x], &settings);
        }
        let (depths, is_bottleneck) = self.stages();
        for (stage, depth) in depths.into_iter().enumerate() {
            for number in 0..depth {
                let name = format!("layer{}.{number}", stage + 1);
                let stride = if stage > 0 && number == 0 { 2 } else { 1 };
                let windows: &[[usize; 2]] =
                    if is_bottleneck { &[[1, 1], [3, stride], [1, 1]] } else { &[[3, stride], [3, 1]] };
                let layers: Vec<Layer<'_>> = windows
                    .iter()
                    .enumerate()
                    .map(|(i, window)| Layer {
                        conv: format!("{name}.conv{}", i + 1),
                        norm: format!("{name}.bn{}", i + 1),
                        window: *window,
                        groups: 1,
                        excitation: None,
                    })
                    .collect();
                let shortcut = [format!("{name}.downsample.0"), format!("{name}.downsample.1")];
                x = branch(graph, &x, &layers, shortcut, stride)?;
            }
        }
        Ok(outputs(graph, &x, self.width * 8 * if is_bottleneck { 4 } else { 1 }))
    }

    fn comparable(&self, keys: &mut Map<String, Value>) {
        keys.remove("zero_init_residual");
    }
}

/// Returns the name in torchvision and timm, which is Ocelli's.
fn same(name: &str) -> Vec<String> {
    vec![name.to_string()]
}

/// Returns the name in a ResNet of transformers; `None` for a name that the network does not have.
fn in_transformers(name: &str) -> Option<String> {
    if let Some(layer) = convolutional::in_transformers(name, "conv1", "bn1") {
        return Some(format!("embedder.embedder.{layer}"));
    }
    let (stage, rest) = name.strip_prefix("layer")?.split_once('.')?;
    let (branch, part) = rest.split_once('.')?;
    let layer = match part.strip_prefix("downsample.") {
        Some(part) => format!("shortcut.{}", convolutional::in_transformers(part, "0", "1")?),
        None => {
            let number = part.trim_start_matches(|c: char| c.is_alphabetic()).split('.').next()?;
            let layer =
                convolutional::in_transformers(part, &format!("conv{number}"), &format!("bn{number}"))?;
            format!("layer.{}.{layer}", convolutional::before(number)?)
        }
    };
    Some(format!("encoder.stages.{}.layers.{branch}.{layer}", convolutional::before(stage)?))
}

/// Returns the ResNet that has the branches in `found`.
fn of_shapes(found: &Found, names: impl Fn(&str) -> Vec<String>) -> Result<ModelConfig, String> {
    let holds = |name: &str| names(name).iter().any(|name| found.holds(name));
    let depths = [1, 2, 3, 4]
        .map(|stage: usize| (0..).take_while(|b| holds(&format!("layer{stage}.{b}.conv1.weight"))).count());
    let is_bottleneck = holds("layer1.0.conv3.weight");
    let layers = depths.iter().sum::<usize>() * if is_bottleneck { 3 } else { 2 } + 2;
    let stem = names("conv1.weight").first().and_then(|name| Some(found.shape(name)?.to_vec()));
    let stem = stem.unwrap_or_default();
    let ([width, channels], kind) = match stem.as_slice() {
        [width, channels, 7, 7] => ([*width, *channels], StemKind::Imagenet),
        [width, channels, 3, 3] => ([*width, *channels], StemKind::Small),
        _ => {
            return Err(format!("the first convolution of its ResNet has shape {stem:?}, not [64, C, 7, 7]"));
        }
    };
    check_branches(found, &names, width)?;
    let image_px = if kind == StemKind::Small { 32 } else { IMAGE_PX };
    let config =
        ResnetConfig { image_px, depth: layers, width, stem: kind, zero_init_residual: false, channels };
    let model = ModelConfig::Resnet(config.clone());
    model.validate().map_err(|_| format!("a ResNet with {depths:?} branches is not supported"))?;
    if config.stages() == (depths, is_bottleneck) {
        Ok(model)
    } else {
        Err(format!("a ResNet with {depths:?} branches is not supported"))
    }
}

/// Checks that the first branch is a ResNet's behind a stem of `width` channels: ResNeXts and Wide
/// ResNets have the same names.
fn check_branches(found: &Found, names: impl Fn(&str) -> Vec<String>, width: usize) -> Result<(), String> {
    let shape = |name: &str| names(name).first().and_then(|name| found.shape(name));
    let (Some([channels, ..]), Some([_, of_group, ..])) =
        (shape("layer1.0.conv1.weight"), shape("layer1.0.conv2.weight"))
    else {
        return Ok(());
    };
    if of_group < channels && channels.is_multiple_of(*of_group) {
        return Err(format!(
            "it is a ResNeXt: its convolutions are in {} groups, which is not supported",
            channels / of_group
        ));
    }
    if *channels == width {
        Ok(())
    } else {
        Err(format!(
            "it is a Wide ResNet: its first branch has {channels} channels instead of {width}, which is not supported"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_transformers() {
        for (ours, theirs) in [
            ("bn1.running_var", "embedder.embedder.normalization.running_var"),
            ("layer2.0.conv2.weight", "encoder.stages.1.layers.0.layer.1.convolution.weight"),
            ("layer4.1.downsample.1.bias", "encoder.stages.3.layers.1.shortcut.normalization.bias"),
        ] {
            assert_eq!(in_transformers(ours).as_deref(), Some(theirs), "{ours}");
        }
        assert_eq!(in_transformers("fc.weight"), None);
    }
}
