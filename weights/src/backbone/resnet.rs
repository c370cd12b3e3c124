//! ResNets of timm, torchvision and transformers. Ocelli uses torchvision's names, as timm does.

use networks::{ModelConfig, RGB_CHANNELS, ResnetConfig, StemKind};
use serde_json::{Map, Value, json};

use super::convolutional::{self, IMAGE_PX, Layer, outputs, residual_block, shape, stem};
use super::renamed::{ocelli_arrays, renamed_arrays, same_name};
use super::{
    Exchange, GraphOutputs, PythonClassifier, PythonNetwork, Recognized, TimmModel, TransformersClassifier,
    no_such_network,
};
use crate::export::Export;
use crate::file::Arrays;
use crate::library::Library;
use crate::onnx::{Graph, Setting};
use crate::pretrained::Hints;
use crate::source::{BackboneTensors, Source};

/// Channels of the first stage in torchvision's class, which takes no others.
const TORCHVISION_WIDTH: usize = 64;

/// Checks that a configuration does not state a ResNet that has the same parameters as Ocelli's and
/// computes something else.
fn check_config(config: Option<&Value>) -> Result<(), String> {
    let Some(config) = config else { return Ok(()) };
    let architecture = config["architecture"].as_str().unwrap_or_default();
    let arguments = &config["model_args"];
    let has_name_of_blur = ["resnetblur", "resnetaa"].iter().any(|name| architecture.contains(name));
    if has_name_of_blur || !arguments["aa_layer"].is_null() {
        return Err("it blurs its feature maps before it reduces them, which ResNets of Ocelli do not".into());
    }
    if let Some(stride) = arguments["output_stride"].as_u64()
        && stride != 32
    {
        return Err(format!("its stride is {stride}, but ResNets of Ocelli have 32"));
    }
    for key in ["downsample_in_bottleneck", "downsample_in_first_stage"] {
        if config[key] == true {
            return Err(format!("{key} is true: its strides are elsewhere than in ResNets of Ocelli"));
        }
    }
    Ok(())
}

impl Exchange for ResnetConfig {
    fn kind() -> &'static str {
        "ResNet"
    }

    fn anchors() -> &'static [&'static str] {
        &["embedder.embedder.convolution.weight", "conv1.weight"]
    }

    fn recognize(
        tensors: &mut BackboneTensors,
        source: &Source,
        hints: &Hints,
        _: &mut Vec<String>,
    ) -> Result<Recognized, String> {
        let (library, names): (Library, fn(&str) -> Vec<String>) = match tensors.anchor {
            "conv1.weight" if source.config.is_some() => (Library::Timm, same_name),
            "conv1.weight" => (Library::Torchvision, same_name),
            _ => (Library::Transformers, transformers_names),
        };
        check_config(source.config.as_ref())?;
        let library = hints.library.unwrap_or(library);
        let model = config_from_shapes(tensors, names)?;
        Ok(Recognized { model, library, names: Box::new(names), size_px: IMAGE_PX, activation: "relu" })
    }

    fn arrays(&self, library: Library, export: &Export<'_>) -> Result<Arrays, String> {
        match library {
            Library::Timm | Library::Torchvision | Library::Dino => Ok(ocelli_arrays(export)),
            Library::Transformers => Ok(renamed_arrays(export, transformers_names)),
            Library::Dinov2 | Library::Dinov3 => Err(no_such_network(library)),
        }
    }

    fn timm(&self, _: &Export<'_>) -> Result<TimmModel, String> {
        if self.stem == StemKind::Small {
            return Err("timm's ResNets have no 3×3 stem without pooling".into());
        }
        if self.width != 64 {
            return Err(format!("timm's ResNets begin with 64 channels, but this one with {}", self.width));
        }
        let (depths, is_bottleneck) = self.stages();
        Ok(TimmModel {
            // An architecture with this kind of branch; the numbers of branches are arguments.
            architecture: if is_bottleneck { "resnet50" } else { "resnet18" },
            arguments: json!({ "layers": depths }),
            first_conv: Some("conv1"),
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

    fn classifier(&self, library: Library) -> Option<&'static str> {
        match library {
            Library::Timm | Library::Torchvision => Some("fc"),
            _ => None,
        }
    }

    fn transformers_classifier(&self) -> Option<TransformersClassifier> {
        Some(TransformersClassifier {
            architecture: "ResNetForImageClassification",
            backbone: "resnet",
            layer: "classifier.1",
            reads_patches: false,
        })
    }

    fn python(&self, library: Library) -> Option<PythonNetwork> {
        if library != Library::Torchvision || self.stem == StemKind::Small {
            return None;
        }
        self.own_python()
    }

    fn own_python(&self) -> Option<PythonNetwork> {
        if self.width != TORCHVISION_WIDTH {
            return None;
        }
        let (depths, is_bottleneck) = self.stages();
        let block = if is_bottleneck { "Bottleneck" } else { "BasicBlock" };
        let channels = self.channels;
        let mut changes = String::new();
        if self.stem == StemKind::Small {
            changes.push_str(&format!(
                "model.conv1 = torch.nn.Conv2d({channels}, {TORCHVISION_WIDTH}, 3, padding=1, bias=False)\n\
                 model.maxpool = torch.nn.Identity()\n"
            ));
        } else if channels != RGB_CHANNELS {
            changes.push_str(&format!(
                "model.conv1 = torch.nn.Conv2d({channels}, {TORCHVISION_WIDTH}, 7, stride=2, padding=3, \
                 bias=False)\n"
            ));
        }
        Some(PythonNetwork {
            imports: "from torchvision.models import resnet\n",
            expression: format!("resnet.ResNet(resnet.{block}, {depths:?})"),
            changes,
            classifier: Some(PythonClassifier::FC),
        })
    }

    fn build_graph(&self, graph: &mut Graph<'_>, _: usize) -> Result<GraphOutputs, String> {
        let (kernel, stride, has_pooling) = match self.stem {
            StemKind::Imagenet => (7, 2, true),
            StemKind::Small => (3, 1, false),
        };
        let mut x = stem(graph, "conv1", "bn1", kernel, stride)?;
        if has_pooling {
            let settings = [
                Setting::Ints("kernel_shape", &[3, 3]),
                Setting::Ints("strides", &[2, 2]),
                Setting::Ints("pads", &[1, 1, 1, 1]),
            ];
            x = graph.node("MaxPool", &[&x], &settings);
        }
        let (depths, is_bottleneck) = self.stages();
        for (stage, depth) in depths.into_iter().enumerate() {
            for index in 0..depth {
                let name = format!("layer{}.{index}", stage + 1);
                let stride = if stage > 0 && index == 0 { 2 } else { 1 };
                let kernels_and_strides =
                    if is_bottleneck { vec![(1, 1), (3, stride), (1, 1)] } else { vec![(3, stride), (3, 1)] };
                let mut layers = Vec::with_capacity(kernels_and_strides.len());
                for (i, (kernel, stride)) in kernels_and_strides.into_iter().enumerate() {
                    layers.push(Layer {
                        conv: format!("{name}.conv{}", i + 1),
                        norm: format!("{name}.bn{}", i + 1),
                        kernel,
                        stride,
                        groups: 1,
                        excitation: None,
                    });
                }
                let shortcut = format!("{name}.downsample");
                x = residual_block(
                    graph,
                    &x,
                    &layers,
                    &format!("{shortcut}.0"),
                    &format!("{shortcut}.1"),
                    stride,
                )?;
            }
        }
        Ok(outputs(graph, &x, self.width * 8 * if is_bottleneck { 4 } else { 1 }))
    }

    fn canonicalize_keys(&self, keys: &mut Map<String, Value>) {
        keys.remove("zero_init_residual");
    }
}

/// Returns the name in a ResNet of transformers; nothing for a name that the network does not have.
fn transformers_names(name: &str) -> Vec<String> {
    transformers_name(name).into_iter().collect()
}

/// Returns the name in a ResNet of transformers; `None` for a name that the network does not have.
fn transformers_name(name: &str) -> Option<String> {
    if let Some(layer) = convolutional::transformers_name(name, "conv1", "bn1") {
        return Some(format!("embedder.embedder.{layer}"));
    }
    let (stage, rest) = name.strip_prefix("layer")?.split_once('.')?;
    let (branch, part) = rest.split_once('.')?;
    let layer = match part.strip_prefix("downsample.") {
        Some(part) => format!("shortcut.{}", convolutional::transformers_name(part, "0", "1")?),
        None => {
            let number = part.trim_start_matches(|c: char| c.is_alphabetic()).split('.').next()?;
            let layer =
                convolutional::transformers_name(part, &format!("conv{number}"), &format!("bn{number}"))?;
            format!("layer.{}.{layer}", convolutional::previous_number(number)?)
        }
    };
    Some(format!("encoder.stages.{}.layers.{branch}.{layer}", convolutional::previous_number(stage)?))
}

/// Determines the configuration from the branches in `tensors`.
fn config_from_shapes(
    tensors: &BackboneTensors,
    names: fn(&str) -> Vec<String>,
) -> Result<ModelConfig, String> {
    let mut depths = [0usize; 4];
    for (i, depth) in depths.iter_mut().enumerate() {
        while shape(tensors, names, &format!("layer{}.{depth}.conv1.weight", i + 1)).is_some() {
            *depth += 1;
        }
    }
    let is_bottleneck = shape(tensors, names, "layer1.0.conv3.weight").is_some();
    let depth = depths.iter().sum::<usize>() * if is_bottleneck { 3 } else { 2 } + 2;
    let conv1 = shape(tensors, names, "conv1.weight").unwrap_or_default();
    let (width, channels, stem) = match *conv1 {
        [width, channels, 7, 7] => (width, channels, StemKind::Imagenet),
        [width, channels, 3, 3] => (width, channels, StemKind::Small),
        _ => {
            return Err(format!(
                "the first convolution of its ResNet has shape {conv1:?}, not [64, C, 7, 7]"
            ));
        }
    };
    check_branches(tensors, names, width)?;
    let image_px = if stem == StemKind::Small { 32 } else { IMAGE_PX };
    let config = ResnetConfig { image_px, depth, width, stem, zero_init_residual: false, channels };
    let model = ModelConfig::Resnet(config.clone());
    model.validate().map_err(|_| format!("a ResNet with {depths:?} blocks is not supported"))?;
    if config.stages() == (depths, is_bottleneck) {
        Ok(model)
    } else {
        Err(format!("a ResNet with {depths:?} blocks is not supported"))
    }
}

/// Checks that the first branch belongs to a ResNet whose stem has `width` channels: ResNeXts and
/// Wide ResNets have the same names.
fn check_branches(
    tensors: &BackboneTensors,
    names: fn(&str) -> Vec<String>,
    width: usize,
) -> Result<(), String> {
    let conv1 = shape(tensors, names, "layer1.0.conv1.weight");
    let conv2 = shape(tensors, names, "layer1.0.conv2.weight");
    let (Some(&[channels, ..]), Some(&[_, group_channels, ..])) = (conv1, conv2) else { return Ok(()) };
    if group_channels < channels && channels.is_multiple_of(group_channels) {
        return Err(format!(
            "it is a ResNeXt: its convolutions are in {} groups, which is not supported",
            channels / group_channels
        ));
    }
    if channels == width {
        Ok(())
    } else {
        Err(format!(
            "it is a Wide ResNet: its first block has {channels} channels instead of {width}, which is not \
             supported"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_the_names_of_transformers() {
        for (name, expected) in [
            ("bn1.running_var", "embedder.embedder.normalization.running_var"),
            ("layer2.0.conv2.weight", "encoder.stages.1.layers.0.layer.1.convolution.weight"),
            ("layer4.1.downsample.1.bias", "encoder.stages.3.layers.1.shortcut.normalization.bias"),
        ] {
            assert_eq!(transformers_name(name).as_deref(), Some(expected), "{name}");
        }
        assert_eq!(transformers_name("fc.weight"), None);
    }

    /// Networks with the names and shapes of a ResNet that compute something else are refused.
    #[test]
    fn other_resnets_are_refused() {
        for config in [
            json!({ "architecture": "resnet50" }),
            json!({ "architecture": "resnet18", "model_args": { "output_stride": 32 } }),
            json!({ "downsample_in_bottleneck": false }),
        ] {
            assert_eq!(check_config(Some(&config)), Ok(()), "{config}");
        }
        for config in [
            json!({ "architecture": "resnetaa50" }),
            json!({ "architecture": "resnetblur50" }),
            json!({ "architecture": "resnet50", "model_args": { "aa_layer": "avg" } }),
            json!({ "architecture": "resnet50", "model_args": { "output_stride": 8 } }),
            json!({ "downsample_in_first_stage": true }),
        ] {
            assert!(check_config(Some(&config)).is_err(), "{config}");
        }
    }
}
