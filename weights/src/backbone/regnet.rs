//! RegNetYs of timm, torchvision and transformers. Ocelli has the names of torchvision.

use networks::{Design, ModelConfig, NamedSize, RegnetConfig, Size};
use serde_json::{Value, json};

use super::convolutional::{self, IMAGE_PX, Layer, branch, outputs, stem};
use super::renamed::{ours, renamed};
use super::{Drawn, Exchange, PythonNetwork, Recognized, TimmModel, no_such};
use crate::export::Export;
use crate::file::Arrays;
use crate::library::Library;
use crate::onnx::Graph;
use crate::pretrained::Hints;
use crate::source::{Found, Source};

/// Name of the first convolution in torchvision, timm and transformers.
const ANCHORS: [&str; 3] = ["stem.0.weight", "stem.conv.weight", "embedder.embedder.convolution.weight"];

impl Exchange for RegnetConfig {
    fn kind() -> &'static str {
        "RegNetY"
    }

    fn anchors() -> &'static [&'static str] {
        &ANCHORS
    }

    fn recognizes(found: &Found) -> bool {
        // ResNets of transformers have the same first convolution, but no squeeze and excitation.
        found.anchor != ANCHORS[2] || found.holds("encoder.stages.0.layers.0.layer.2.attention.0.weight")
    }

    fn recognized(
        found: &mut Found,
        _: &Source,
        hints: &Hints,
        _: &mut Vec<String>,
    ) -> Result<Recognized, String> {
        let (library, names): (Library, fn(&str) -> Vec<String>) = match found.anchor {
            "stem.0.weight" => (Library::Torchvision, |name| vec![name.to_string()]),
            "stem.conv.weight" => (Library::Timm, |name| in_timm(name).into_iter().collect()),
            _ => (Library::Transformers, |name| in_transformers(name).into_iter().collect()),
        };
        let library = hints.library.unwrap_or(library);
        let model = of_shapes(found, names)?;
        Ok(Recognized { model, library, names: Box::new(names), size_px: IMAGE_PX, activation: "relu" })
    }

    fn arrays(&self, library: Library, export: &Export<'_>) -> Result<Arrays, String> {
        match library {
            Library::Timm => Ok(renamed(export, |name| in_timm(name).into_iter().collect())),
            Library::Torchvision => {
                check_torchvision(self)?;
                Ok(ours(export))
            }
            Library::Transformers => Ok(renamed(export, |name| in_transformers(name).into_iter().collect())),
            Library::Dino => Err("DINO has no RegNets".into()),
            Library::Dinov2 | Library::Dinov3 => Err(no_such(library)),
        }
    }

    fn timm(&self, _: &Export<'_>) -> Result<TimmModel, String> {
        Ok(TimmModel {
            architecture: timm_architecture(self)?,
            arguments: json!({}),
            first_conv: Some("stem.conv"),
            classifier: "head.fc",
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

    fn python(&self, library: Library) -> Option<PythonNetwork> {
        let design = match self.size {
            Size::Named(size) => size.design(),
            Size::Design(design) => design,
        };
        let Design { depth, w_0, w_a, w_m, group_width, .. } = design;
        (library == Library::Torchvision).then(|| PythonNetwork {
            imports: "from torchvision.models import regnet\n",
            expression: format!(
                "regnet.RegNet(regnet.BlockParams.from_init_params(depth={depth}, w_0={w_0}, w_a={w_a}, w_m={w_m}, \
                 group_width={group_width}, se_ratio=0.25))"
            ),
            without_classifier: "model.fc = torch.nn.Identity()\n",
        })
    }

    fn draw(&self, graph: &mut Graph<'_>, _: usize) -> Result<Drawn, String> {
        let mut x = stem(graph, ["stem.0", "stem.1"], [3, 2])?;
        let stages = self.stages();
        for (number, stage) in stages.iter().enumerate() {
            for branch_number in 0..stage.depth {
                let name = format!("trunk_output.block{0}.block{0}-{branch_number}", number + 1);
                let stride = if branch_number == 0 { 2 } else { 1 };
                let excitation = format!("{name}.f.se");
                let layer = |part: &str, window, groups, excitation| Layer {
                    conv: format!("{name}.f.{part}.0"),
                    norm: format!("{name}.f.{part}.1"),
                    window,
                    groups,
                    excitation,
                };
                let layers = [
                    layer("a", [1, 1], 1, None),
                    layer("b", [3, stride], stage.width / stage.group_width, None),
                    layer("c", [1, 1], 1, Some(excitation.as_str())),
                ];
                let shortcut = [format!("{name}.proj.0"), format!("{name}.proj.1")];
                x = branch(graph, &x, &layers, shortcut, stride)?;
            }
        }
        let width = stages.last().map_or(0, |stage| stage.width);
        Ok(outputs(graph, &x, width))
    }
}

/// Returns the name in a RegNetY of transformers; `None` for a name that the network does not have.
fn in_transformers(name: &str) -> Option<String> {
    if let Some(part) = name.strip_prefix("stem.") {
        return Some(format!("embedder.embedder.{}", convolutional::in_transformers(part, "0", "1")?));
    }
    let (stage, branch, part) = regnet_branch(name)?;
    let of_layer = |number: usize, part: &str| {
        Some(format!("layer.{number}.{}", convolutional::in_transformers(part, "0", "1")?))
    };
    let layer = if let Some(part) = part.strip_prefix("proj.") {
        format!("shortcut.{}", convolutional::in_transformers(part, "0", "1")?)
    } else if let Some(part) = part.strip_prefix("f.se.fc1.") {
        format!("layer.2.attention.0.{part}")
    } else if let Some(part) = part.strip_prefix("f.se.fc2.") {
        format!("layer.2.attention.2.{part}")
    } else {
        let (number, part) = in_branch(part, [0, 1, 3])?;
        of_layer(number, part)?
    };
    Some(format!("encoder.stages.{}.layers.{branch}.{layer}", stage - 1))
}

/// Returns the name in a RegNetY of timm; `None` for a name that the network does not have.
fn in_timm(name: &str) -> Option<String> {
    let layer = |part: &str| match part.split_once('.')? {
        ("0", rest) => Some(format!("conv.{rest}")),
        ("1", rest) => Some(format!("bn.{rest}")),
        _ => None,
    };
    if let Some(part) = name.strip_prefix("stem.") {
        return Some(format!("stem.{}", layer(part)?));
    }
    let (stage, branch, part) = regnet_branch(name)?;
    let layer = if let Some(part) = part.strip_prefix("proj.") {
        format!("downsample.{}", layer(part)?)
    } else if let Some(part) = part.strip_prefix("f.se.") {
        format!("se.{part}")
    } else {
        let (number, part) = in_branch(part, [1, 2, 3])?;
        format!("conv{number}.{}", layer(part)?)
    };
    Some(format!("s{stage}.b{}.{layer}", branch + 1))
}

/// Splits a name such as `trunk_output.block2.block2-0.f.a.0.weight` into stage, branch and the
/// rest.
fn regnet_branch(name: &str) -> Option<(usize, usize, &str)> {
    let (_, rest) = name.strip_prefix("trunk_output.")?.split_once('.')?;
    let (block, part) = rest.split_once('.')?;
    let (stage, branch) = block.strip_prefix("block")?.split_once('-')?;
    Some((stage.parse().ok()?, branch.parse().ok()?, part))
}

/// Splits a name such as `f.b.0.weight` into the one of `numbers` for `a`, `b` or `c`, and the
/// rest.
fn in_branch(part: &str, numbers: [usize; 3]) -> Option<(usize, &str)> {
    let (letter, rest) = part.strip_prefix("f.")?.split_once('.')?;
    let at = ["a", "b", "c"].iter().position(|known| *known == letter)?;
    Some((numbers[at], rest))
}

/// Returns the published RegNetY whose parameters are all in `found`.
fn of_shapes(found: &Found, names: impl Fn(&str) -> Vec<String>) -> Result<ModelConfig, String> {
    let stem = names("stem.0.weight").first().and_then(|name| found.shape(name)?.get(1)).copied();
    let channels = stem.unwrap_or_default();
    let of_size = |size| ModelConfig::RegnetY(RegnetConfig { image_px: IMAGE_PX, size, channels });
    let mut models = published().into_iter().map(|(size, _)| of_size(size));
    models
        .find(|model| {
            model.params().iter().all(|(name, shape)| {
                names(name).first().and_then(|name| found.shape(name)) == Some(shape.as_slice())
            })
        })
        .ok_or_else(|| "its RegNet is none of the published RegNetYs".into())
}

/// Returns the published RegNetYs, and the name of each in timm; `None` if timm does not have it.
fn published() -> Vec<(Size, Option<&'static str>)> {
    let in_timm = |size| match size {
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
    };
    let named = NamedSize::ALL.into_iter().map(|size| (Size::Named(size), in_timm(size)));
    // Two sizes are wider in torchvision than in the paper; timm has both networks.
    let of_paper = [(NamedSize::Mf800, "regnety_008"), (NamedSize::Gf8, "regnety_080")]
        .map(|(size, name)| (Size::Design(Design { keeps_width: false, ..size.design() }), Some(name)));
    named.chain(of_paper).collect()
}

/// Checks that torchvision's rule makes the widths of this design.
fn check_torchvision(config: &RegnetConfig) -> Result<(), String> {
    let Size::Design(design) = config.size else { return Ok(()) };
    let by_its_rule =
        RegnetConfig { size: Size::Design(Design { keeps_width: true, ..design }), ..config.clone() };
    if by_its_rule.stages() == config.stages() {
        Ok(())
    } else {
        Err("torchvision rounds the widths of this RegNetY up (keeps_width)".into())
    }
}

/// Returns the name of the architecture in timm.
fn timm_architecture(config: &RegnetConfig) -> Result<&'static str, String> {
    let stages = config.stages();
    let of_size = |size| RegnetConfig { size, ..config.clone() };
    let same = published().into_iter().find(|(size, _)| of_size(*size).stages() == stages);
    match same {
        Some((_, Some(name))) => Ok(name),
        Some((_, None)) => Err("timm has no RegNetY of 10 billion parameters".into()),
        None => Err("timm has only the published RegNetYs".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_libraries() {
        for (ours, theirs) in [
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
            assert_eq!(in_transformers(ours).as_deref(), Some(theirs), "{ours}");
        }
        for (ours, theirs) in [
            ("trunk_output.block1.block1-0.f.b.1.bias", "s1.b1.conv2.bn.bias"),
            ("trunk_output.block4.block4-5.proj.0.weight", "s4.b6.downsample.conv.weight"),
            ("stem.0.weight", "stem.conv.weight"),
        ] {
            assert_eq!(in_timm(ours).as_deref(), Some(theirs), "{ours}");
        }
    }
}
