//! RegNetYs of timm, torchvision and transformers. Ocelli uses torchvision's names.

use networks::{Design, ModelConfig, NamedSize, RGB_CHANNELS, RegnetConfig, Size};
use serde_json::{Value, json};

use super::convolutional::{self, IMAGE_PX, Layer, outputs, residual_block, shape, stem};
use super::renamed::{ocelli_arrays, renamed_arrays, same_name};
use super::{
    Exchange, GraphOutputs, PythonClassifier, PythonNetwork, Recognized, TimmModel, TransformersClassifier,
    no_such_network,
};
use crate::export::Export;
use crate::file::Arrays;
use crate::library::Library;
use crate::onnx::Graph;
use crate::pretrained::Hints;
use crate::source::{BackboneTensors, Source};

/// Name of the first convolution in torchvision, timm and transformers.
const ANCHORS: [&str; 3] = ["stem.0.weight", "stem.conv.weight", "embedder.embedder.convolution.weight"];

impl Exchange for RegnetConfig {
    fn kind() -> &'static str {
        "RegNetY"
    }

    fn anchors() -> &'static [&'static str] {
        &ANCHORS
    }

    fn matches(tensors: &BackboneTensors) -> bool {
        // ResNets of transformers have the same first convolution, but no squeeze and excitation.
        tensors.anchor != ANCHORS[2]
            || tensors.contains("encoder.stages.0.layers.0.layer.2.attention.0.weight")
    }

    fn recognize(
        tensors: &mut BackboneTensors,
        _: &Source,
        hints: &Hints,
        _: &mut Vec<String>,
    ) -> Result<Recognized, String> {
        let (library, names): (Library, fn(&str) -> Vec<String>) = match tensors.anchor {
            "stem.0.weight" => (Library::Torchvision, same_name),
            "stem.conv.weight" => (Library::Timm, timm_names),
            _ => (Library::Transformers, transformers_names),
        };
        let library = hints.library.unwrap_or(library);
        let model = find_published(tensors, names)?;
        Ok(Recognized { model, library, names: Box::new(names), size_px: IMAGE_PX, activation: "relu" })
    }

    fn arrays(&self, library: Library, export: &Export<'_>) -> Result<Arrays, String> {
        match library {
            Library::Timm => Ok(renamed_arrays(export, timm_names)),
            Library::Torchvision => {
                check_torchvision(self)?;
                Ok(ocelli_arrays(export))
            }
            Library::Transformers => Ok(renamed_arrays(export, transformers_names)),
            Library::Dino => Err("DINO has no RegNets".into()),
            Library::Dinov2 | Library::Dinov3 => Err(no_such_network(library)),
        }
    }

    fn timm(&self, _: &Export<'_>) -> Result<TimmModel, String> {
        Ok(TimmModel {
            architecture: timm_architecture(self)?,
            arguments: json!({}),
            first_conv: Some("stem.conv"),
            pool: "avg",
        })
    }

    fn transformers(&self) -> Result<Value, String> {
        let stages = self.stages();
        let (widths, depths): (Vec<usize>, Vec<usize>) =
            stages.iter().map(|stage| (stage.width, stage.depth)).unzip();
        Ok(json!({
            "model_type": "regnet",
            "architectures": ["RegNetModel"],
            "num_channels": self.channels,
            "embedding_size": 32,
            "hidden_sizes": widths,
            "depths": depths,
            "groups_width": stages.iter().map(|stage| stage.group_width).max(),
            "layer_type": "y",
            "hidden_act": "relu",
            "downsample_in_first_stage": true,
        }))
    }

    fn classifier(&self, library: Library) -> Option<&'static str> {
        match library {
            Library::Timm => Some("head.fc"),
            Library::Torchvision => Some("fc"),
            _ => None,
        }
    }

    fn transformers_classifier(&self) -> Option<TransformersClassifier> {
        Some(TransformersClassifier {
            architecture: "RegNetForImageClassification",
            backbone: "regnet",
            layer: "classifier.1",
            reads_patches: false,
        })
    }

    fn python(&self, library: Library) -> Option<PythonNetwork> {
        if library != Library::Torchvision {
            return None;
        }
        let design = match self.size {
            Size::Named(size) => size.design(),
            Size::Design(design) => design,
        };
        let Design { depth, w_0, w_a, w_m, group_width, .. } = design;
        Some(PythonNetwork {
            imports: "from torchvision.models import regnet\n",
            expression: format!(
                "regnet.RegNet(regnet.BlockParams.from_init_params(depth={depth}, w_0={w_0}, w_a={w_a}, \
                 w_m={w_m}, group_width={group_width}, se_ratio=0.25))"
            ),
            changes: String::new(),
            classifier: Some(PythonClassifier::FC),
        })
    }

    fn own_python(&self) -> Option<PythonNetwork> {
        let stages = self.stages();
        let depths: Vec<usize> = stages.iter().map(|stage| stage.depth).collect();
        let widths: Vec<usize> = stages.iter().map(|stage| stage.width).collect();
        let group_widths: Vec<usize> = stages.iter().map(|stage| stage.group_width).collect();
        let n_stages = stages.len();
        let mut changes = String::new();
        if self.channels != RGB_CHANNELS {
            changes.push_str(&format!(
                "model.stem[0] = torch.nn.Conv2d({}, 32, 3, stride=2, padding=1, bias=False)\n",
                self.channels
            ));
        }
        Some(PythonNetwork {
            imports: "from torchvision.models import regnet\n",
            // Widths as they are, because torchvision would round those of some designs.
            expression: format!(
                "regnet.RegNet(regnet.BlockParams(depths={depths:?}, widths={widths:?}, \
                 group_widths={group_widths:?}, bottleneck_multipliers=[1.0] * {n_stages}, \
                 strides=[2] * {n_stages}, se_ratio=0.25))"
            ),
            changes,
            classifier: Some(PythonClassifier::FC),
        })
    }

    fn build_graph(&self, graph: &mut Graph<'_>, _: usize) -> Result<GraphOutputs, String> {
        let mut x = stem(graph, "stem.0", "stem.1", 3, 2)?;
        let stages = self.stages();
        for (index, stage) in stages.iter().enumerate() {
            for branch_number in 0..stage.depth {
                let name = format!("trunk_output.block{0}.block{0}-{branch_number}", index + 1);
                let stride = if branch_number == 0 { 2 } else { 1 };
                let excitation = format!("{name}.f.se");
                let layers = [
                    Layer {
                        conv: format!("{name}.f.a.0"),
                        norm: format!("{name}.f.a.1"),
                        kernel: 1,
                        stride: 1,
                        groups: 1,
                        excitation: None,
                    },
                    Layer {
                        conv: format!("{name}.f.b.0"),
                        norm: format!("{name}.f.b.1"),
                        kernel: 3,
                        stride,
                        groups: stage.width / stage.group_width,
                        excitation: None,
                    },
                    Layer {
                        conv: format!("{name}.f.c.0"),
                        norm: format!("{name}.f.c.1"),
                        kernel: 1,
                        stride: 1,
                        groups: 1,
                        excitation: Some(&excitation),
                    },
                ];
                let shortcut = format!("{name}.proj");
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
        let width = stages.last().map_or(0, |stage| stage.width);
        Ok(outputs(graph, &x, width))
    }
}

/// Returns the name in a RegNetY of transformers; nothing for a name that the network does not
/// have.
fn transformers_names(name: &str) -> Vec<String> {
    transformers_name(name).into_iter().collect()
}

/// Returns the name in a RegNetY of transformers; `None` for a name that the network does not have.
fn transformers_name(name: &str) -> Option<String> {
    if let Some(part) = name.strip_prefix("stem.") {
        return Some(format!("embedder.embedder.{}", convolutional::transformers_name(part, "0", "1")?));
    }
    let (stage, branch, part) = split_name(name)?;
    let layer = if let Some(part) = part.strip_prefix("proj.") {
        format!("shortcut.{}", convolutional::transformers_name(part, "0", "1")?)
    } else if let Some(part) = part.strip_prefix("f.se.fc1.") {
        format!("layer.2.attention.0.{part}")
    } else if let Some(part) = part.strip_prefix("f.se.fc2.") {
        format!("layer.2.attention.2.{part}")
    } else {
        let (number, part) = numbered_layer(part, [0, 1, 3])?;
        format!("layer.{number}.{}", convolutional::transformers_name(part, "0", "1")?)
    };
    Some(format!("encoder.stages.{}.layers.{branch}.{layer}", stage - 1))
}

/// Returns the name in a RegNetY of timm; nothing for a name that the network does not have.
fn timm_names(name: &str) -> Vec<String> {
    timm_name(name).into_iter().collect()
}

/// Returns the name in a RegNetY of timm; `None` for a name that the network does not have.
fn timm_name(name: &str) -> Option<String> {
    if let Some(part) = name.strip_prefix("stem.") {
        return Some(format!("stem.{}", timm_layer(part)?));
    }
    let (stage, branch, part) = split_name(name)?;
    let layer = if let Some(part) = part.strip_prefix("proj.") {
        format!("downsample.{}", timm_layer(part)?)
    } else if let Some(part) = part.strip_prefix("f.se.") {
        format!("se.{part}")
    } else {
        let (number, part) = numbered_layer(part, [1, 2, 3])?;
        format!("conv{number}.{}", timm_layer(part)?)
    };
    Some(format!("s{stage}.b{}.{layer}", branch + 1))
}

/// Translates the number of a layer to timm's name: `0.weight` to `conv.weight`, and `1.weight` to
/// `bn.weight`.
fn timm_layer(part: &str) -> Option<String> {
    match part.split_once('.')? {
        ("0", rest) => Some(format!("conv.{rest}")),
        ("1", rest) => Some(format!("bn.{rest}")),
        _ => None,
    }
}

/// Splits a name such as `trunk_output.block2.block2-0.f.a.0.weight` into stage, branch and the
/// rest.
fn split_name(name: &str) -> Option<(usize, usize, &str)> {
    let (_, rest) = name.strip_prefix("trunk_output.")?.split_once('.')?;
    let (block, part) = rest.split_once('.')?;
    let (stage, branch) = block.strip_prefix("block")?.split_once('-')?;
    Some((stage.parse().ok()?, branch.parse().ok()?, part))
}

/// Splits a name such as `f.b.0.weight` into the number of the layer and the rest; the layers `a`,
/// `b` and `c` have the given numbers.
fn numbered_layer(part: &str, numbers: [usize; 3]) -> Option<(usize, &str)> {
    let (letter, rest) = part.strip_prefix("f.")?.split_once('.')?;
    let index = ["a", "b", "c"].iter().position(|known| *known == letter)?;
    Some((numbers[index], rest))
}

/// Returns the published RegNetY whose parameters are all in `tensors`.
fn find_published(tensors: &BackboneTensors, names: fn(&str) -> Vec<String>) -> Result<ModelConfig, String> {
    let stem = shape(tensors, names, "stem.0.weight").unwrap_or_default();
    let channels = stem.get(1).copied().unwrap_or_default();
    for (size, _) in published() {
        let model = ModelConfig::RegnetY(RegnetConfig { image_px: IMAGE_PX, size, channels });
        let params = model.params();
        if params.iter().all(|(name, dims)| shape(tensors, names, name) == Some(dims.as_slice())) {
            return Ok(model);
        }
    }
    Err("its RegNet is not one of the published RegNetYs".into())
}

/// Returns the published RegNetYs, and the name of each in timm; `None` if timm does not have it.
fn published() -> Vec<(Size, Option<&'static str>)> {
    let mut sizes = Vec::new();
    for size in NamedSize::ALL {
        sizes.push((Size::Named(size), published_timm_name(size)));
    }
    // Two sizes are wider in torchvision than in the paper; timm has both networks.
    for (size, name) in [(NamedSize::Mf800, "regnety_008"), (NamedSize::Gf8, "regnety_080")] {
        let design = Design { keeps_width: false, ..size.design() };
        sizes.push((Size::Design(design), Some(name)));
    }
    sizes
}

/// Returns the name of a published RegNetY in timm; `None` if timm does not have it.
fn published_timm_name(size: NamedSize) -> Option<&'static str> {
    match size {
        NamedSize::Mf200 => Some("regnety_002"),
        NamedSize::Mf400 => Some("regnety_004"),
        NamedSize::Mf600 => Some("regnety_006"),
        NamedSize::Mf800 => Some("regnety_008_tv"),
        NamedSize::Gf1_6 => Some("regnety_016"),
        NamedSize::Gf3_2 => Some("regnety_032"),
        NamedSize::Gf4 => Some("regnety_040"),
        NamedSize::Gf6_4 => Some("regnety_064"),
        NamedSize::Gf8 => Some("regnety_080_tv"),
        NamedSize::Gf12 => Some("regnety_120"),
        NamedSize::Gf16 => Some("regnety_160"),
        NamedSize::Gf32 => Some("regnety_320"),
        NamedSize::Gf64 => Some("regnety_640"),
        NamedSize::Gf128 => Some("regnety_1280"),
        NamedSize::Gf256 => Some("regnety_2560"),
        NamedSize::B10 => None,
    }
}

/// Checks that torchvision's rule results in the widths of this design.
fn check_torchvision(config: &RegnetConfig) -> Result<(), String> {
    let Size::Design(design) = config.size else { return Ok(()) };
    let torchvision_config =
        RegnetConfig { size: Size::Design(Design { keeps_width: true, ..design }), ..config.clone() };
    if torchvision_config.stages() == config.stages() {
        Ok(())
    } else {
        Err("torchvision rounds the widths of this RegNetY up (keeps_width)".into())
    }
}

/// Returns the name of the architecture in timm.
fn timm_architecture(config: &RegnetConfig) -> Result<&'static str, String> {
    let stages = config.stages();
    for (size, name) in published() {
        let candidate = RegnetConfig { size, ..config.clone() };
        if candidate.stages() == stages {
            return name.ok_or_else(|| "timm has no RegNetY of 10 billion parameters".into());
        }
    }
    Err("timm has only the published RegNetYs".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_the_names_of_the_libraries() {
        for (name, expected) in [
            (
                "trunk_output.block2.block2-3.f.c.0.weight",
                "encoder.stages.1.layers.3.layer.3.convolution.weight",
            ),
            (
                "trunk_output.block1.block1-0.f.se.fc2.bias",
                "encoder.stages.0.layers.0.layer.2.attention.2.bias",
            ),
            ("stem.1.weight", "embedder.embedder.normalization.weight"),
        ] {
            assert_eq!(transformers_name(name).as_deref(), Some(expected), "{name}");
        }
        for (name, expected) in [
            ("trunk_output.block1.block1-0.f.b.1.bias", "s1.b1.conv2.bn.bias"),
            ("trunk_output.block4.block4-5.proj.0.weight", "s4.b6.downsample.conv.weight"),
            ("stem.0.weight", "stem.conv.weight"),
        ] {
            assert_eq!(timm_name(name).as_deref(), Some(expected), "{name}");
        }
    }
}
