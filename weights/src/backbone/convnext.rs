//! ConvNeXts of DINOv3, timm, torchvision and transformers. Ocelli has the names of timm.

use networks::{ConvnextConfig, ModelConfig};
use serde_json::{Map, Value, json};

use super::convolutional::{IMAGE_PX, cells};
use super::layers::{gelu, linear, norm};
use super::renamed::{ours, renamed};
use super::{Drawn, Exchange, PythonNetwork, Recognized, TimmModel, in_chans, no_such};
use crate::decimal::decimal;
use crate::export::Export;
use crate::file::{Array, Arrays};
use crate::library::Library;
use crate::onnx::{self, Graph, PIXELS, Setting};
use crate::pretrained::Hints;
use crate::source::{Found, Source};

/// Number that layer norms add to the variance.
const EPSILON: f64 = 1e-6;

/// Name of the first convolution in the state dict of transformers' model, where the stages are
/// inside `model` and the last norm is not; in its files neither has a prefix.
const IN_MEMORY: &str = "model.stages.0.downsample_layers.0.weight";

/// Names of the first convolution in timm, torchvision, DINOv3's own files and transformers.
const ANCHORS: [&str; 5] = [
    "stem.0.weight",
    "features.0.0.weight",
    "downsample_layers.0.0.weight",
    IN_MEMORY,
    "stages.0.downsample_layers.0.weight",
];

impl Exchange for ConvnextConfig {
    fn kind() -> &'static str {
        "ConvNeXt"
    }

    fn anchors() -> &'static [&'static str] {
        &ANCHORS
    }

    fn recognizes(found: &Found) -> bool {
        // Other networks have first convolutions of the same names, but no depthwise convolution of
        // 7×7 after it.
        let first = in_file(found.anchor, "stages.0.blocks.0.conv_dw.weight");
        let shape = first.and_then(|name| found.shape(&name));
        matches!(shape, Some([_, 1, 7, 7])) && (found.anchor != IN_MEMORY || found.holds("layer_norm.weight"))
    }

    fn recognized(
        found: &mut Found,
        source: &Source,
        hints: &Hints,
        _: &mut Vec<String>,
    ) -> Result<Recognized, String> {
        let anchor = found.anchor;
        check_config(source.config.as_ref())?;
        // DINOv3's files hold the last norm under two names.
        for name in ["norms.3.weight", "norms.3.bias"] {
            found.take(name);
        }
        let model = of_shapes(found)?;
        let library = hints.library.unwrap_or(library_of(anchor));
        Ok(Recognized {
            model,
            library,
            names: Box::new(move |name: &str| in_file(anchor, name).into_iter().collect::<Vec<String>>()),
            size_px: IMAGE_PX,
            activation: "gelu",
        })
    }

    fn arrays(&self, library: Library, export: &Export<'_>) -> Result<Arrays, String> {
        check_patches(self.patch_px, library)?;
        let mut arrays = match library {
            Library::Dino | Library::Dinov2 => return Err(no_such(library)),
            Library::Timm => return Ok(ours(export)),
            _ => renamed(export, |name| theirs(library, name).into_iter().collect()),
        };
        match library {
            Library::Torchvision => {
                let scales = arrays.iter_mut().filter(|(name, _)| name.ends_with(".layer_scale"));
                scales.for_each(|(_, scale)| scale.shape.extend([1, 1]));
            }
            Library::Dinov3 => {
                let copies: Vec<(String, Array)> = ["weight", "bias"]
                    .iter()
                    .filter_map(|part| {
                        let copy = arrays.get(&format!("norm.{part}"))?.clone();
                        Some((format!("norms.3.{part}"), copy))
                    })
                    .collect();
                arrays.extend(copies);
            }
            _ => {}
        }
        Ok(arrays)
    }

    fn timm(&self, _: &Export<'_>) -> Result<TimmModel, String> {
        check_patches(self.patch_px, Library::Timm)?;
        let mut arguments = json!({ "depths": self.depths, "dims": widths(self) });
        if self.patch_px != 4 {
            arguments["patch_size"] = json!(self.patch_px);
        }
        Ok(TimmModel {
            // Architectures differ by depths and widths alone.
            architecture: "convnext_tiny",
            arguments,
            first_conv: Some("stem.0"),
            classifier: "head.fc",
            pool: "avg",
        })
    }

    fn transformers(&self) -> Result<Value, String> {
        check_patches(self.patch_px, Library::Transformers)?;
        Ok(json!({
            "model_type": "dinov3_convnext",
            "architectures": ["DINOv3ConvNextModel"],
            "num_channels": self.channels,
            "hidden_sizes": widths(self),
            "depths": self.depths,
            "hidden_act": "gelu",
            "layer_norm_eps": EPSILON,
            "layer_scale_init_value": decimal(self.layer_scale),
            "drop_path_rate": 0.0,
            "image_size": self.image_px,
        }))
    }

    fn feature_in_transformers(&self) -> &'static str {
        "last_hidden_state[:, 0]"
    }

    fn python(&self, library: Library) -> Option<PythonNetwork> {
        let widths = widths(self);
        let depths = self.depths;
        let channels = in_chans(self.channels);
        match library {
            Library::Torchvision => {
                let after = widths[1..].iter().map(ToString::to_string).chain(["None".to_string()]);
                let stages = widths.iter().zip(after).zip(depths);
                let stages: Vec<String> = stages
                    .map(|((width, after), depth)| {
                        format!("convnext.CNBlockConfig({width}, {after}, {depth})")
                    })
                    .collect();
                Some(PythonNetwork {
                    imports: "from torchvision.models import convnext\n",
                    expression: format!("convnext.ConvNeXt([{}])", stages.join(", ")),
                    without_classifier: "model.classifier[2] = torch.nn.Identity()\n",
                })
            }
            Library::Dinov3 => Some(PythonNetwork {
                imports: "from dinov3.models.convnext import ConvNeXt\n",
                expression: format!("ConvNeXt({channels}depths={depths:?}, dims={widths:?})"),
                without_classifier: "",
            }),
            _ => None,
        }
    }

    fn draw(&self, graph: &mut Graph<'_>, _: usize) -> Result<Drawn, String> {
        let maps = convolution(graph, "stem.0", &PIXELS.to_string(), [self.patch_px; 2])?;
        let cells_of_stem = channels_last(graph, &maps);
        let mut x = norm(graph, "stem.1", &cells_of_stem, EPSILON)?;
        for (stage, depth) in self.depths.into_iter().enumerate() {
            if stage > 0 {
                let name = format!("stages.{stage}.downsample");
                let h = norm(graph, &format!("{name}.0"), &x, EPSILON)?;
                let h = channels_first(graph, &h);
                let maps = convolution(graph, &format!("{name}.1"), &h, [2; 2])?;
                x = channels_last(graph, &maps);
            }
            for number in 0..depth {
                x = block(graph, &format!("stages.{stage}.blocks.{number}"), &x, self.stage_width(stage))?;
            }
        }
        let maps = channels_first(graph, &x);
        let mean = graph.node("GlobalAveragePool", &[&maps], &[]);
        let mean = graph.node("Flatten", &[&mean], &[Setting::Int("axis", 1)]);
        let embedding = norm(graph, "head.norm", &mean, EPSILON)?;
        let cells = cells(graph, &maps, self.stage_width(3));
        let patches = norm(graph, "head.norm", &cells, EPSILON)?;
        Ok(Drawn { embedding, patches, has_fixed_size: false })
    }

    fn comparable(&self, keys: &mut Map<String, Value>) {
        keys.remove("layer_scale");
    }

    fn pooling(&self) -> &'static str {
        "normalized mean over the last feature map"
    }
}

/// Checks that a configuration states no norms or strides but those of ConvNeXts here.
fn check_config(config: Option<&Value>) -> Result<(), String> {
    let Some(config) = config else { return Ok(()) };
    let arguments = &config["model_args"];
    let epsilon = [&config["layer_norm_eps"], &arguments["norm_eps"]].iter().find_map(|value| value.as_f64());
    // The one architecture of timm with another default.
    let is_largest = config["architecture"].as_str().is_some_and(|name| name.starts_with("convnext_xxlarge"));
    let epsilon = epsilon.unwrap_or(if is_largest { 1e-5 } else { EPSILON });
    if (epsilon - EPSILON).abs() > 1e-9 {
        return Err(format!("its norms add {epsilon} to the variance, ConvNeXts here {EPSILON}"));
    }
    match arguments["output_stride"].as_u64() {
        Some(stride) if stride != 32 => Err(format!("its stride is {stride}, that of ConvNeXts here 32")),
        _ => Ok(()),
    }
}

/// Checks that `library` has ConvNeXts with patches of `patch_px` that compute the same as those
/// here.
fn check_patches(patch_px: usize, library: Library) -> Result<(), String> {
    match (library, patch_px) {
        (_, 4) | (Library::Timm, 1 | 3..=7) => Ok(()),
        // It halves the grid behind patches of 2 px, and never below a 32nd of the image.
        (Library::Timm, px) => {
            Err(format!("timm's ConvNeXts with patches of {px} px have other strides than those here"))
        }
        (_, px) => Err(format!("{}'s ConvNeXts have patches of 4 px, this one of {px}", library.name())),
    }
}

fn widths(config: &ConvnextConfig) -> [usize; 4] {
    [0, 1, 2, 3].map(|stage| config.stage_width(stage))
}

/// Returns the library whose name of the first convolution is `anchor`.
fn library_of(anchor: &str) -> Library {
    match ANCHORS.iter().position(|known| *known == anchor) {
        Some(1) => Library::Torchvision,
        Some(2) => Library::Dinov3,
        Some(3 | 4) => Library::Transformers,
        _ => Library::Timm,
    }
}

/// Returns the name of a parameter in a file whose first convolution is called `anchor`.
fn in_file(anchor: &str, name: &str) -> Option<String> {
    let name = theirs(library_of(anchor), name)?;
    let is_inside = anchor == IN_MEMORY && name.starts_with("stages.");
    Some(if is_inside { format!("model.{name}") } else { name })
}

/// Determines the configuration from the shapes in `found`.
fn of_shapes(found: &Found) -> Result<ModelConfig, String> {
    let shape =
        |name: &str| in_file(found.anchor, name).and_then(|name| found.shape(&name).map(<[usize]>::to_vec));
    let stem = shape("stem.0.weight");
    let Some([width, channels, patch_px, _]) =
        stem.as_deref().and_then(|shape| <[usize; 4]>::try_from(shape).ok())
    else {
        return Err(format!("its first convolution has shape {stem:?}, not [D, C, p, p]"));
    };
    check_patches(patch_px, library_of(found.anchor))?;
    let config = ConvnextConfig {
        image_px: IMAGE_PX,
        depths: [0, 1, 2, 3].map(|stage: usize| {
            (0..)
                .take_while(|n| shape(&format!("stages.{stage}.blocks.{n}.conv_dw.weight")).is_some())
                .count()
        }),
        width,
        patch_px,
        layer_scale: 1e-6,
        drop_path: 0.0,
        channels,
    };
    Ok(ModelConfig::Convnext(config))
}

/// Returns the name of a parameter in `library`; `None` for a name that the network does not have.
fn theirs(library: Library, name: &str) -> Option<String> {
    let place = match library {
        Library::Timm | Library::Dino | Library::Dinov2 => return Some(name.into()),
        Library::Torchvision => Place::of(name)?.in_torchvision(),
        Library::Dinov3 => Place::of(name)?.in_dinov3(),
        Library::Transformers => Place::of(name)?.in_transformers(),
    };
    Some(place)
}

/// Place of a parameter in the network.
enum Place<'a> {
    /// Layer of the stem or of a later stage's beginning, and its parameter: 0 for the layer that
    /// stands first.
    Beginning { stage: usize, rest: &'a str },
    /// Part of a block, and its parameter.
    Block { stage: usize, number: &'a str, part: &'a str, parameter: &'a str },
    /// Last norm.
    Norm { parameter: &'a str },
}

impl<'a> Place<'a> {
    fn of(name: &'a str) -> Option<Self> {
        if let Some(rest) = name.strip_prefix("stem.") {
            return Some(Self::Beginning { stage: 0, rest });
        }
        if let Some(parameter) = name.strip_prefix("head.norm.") {
            return Some(Self::Norm { parameter });
        }
        let (stage, rest) = name.strip_prefix("stages.")?.split_once('.')?;
        let stage = stage.parse().ok()?;
        if let Some(rest) = rest.strip_prefix("downsample.") {
            return Some(Self::Beginning { stage, rest });
        }
        let (number, rest) = rest.strip_prefix("blocks.")?.split_once('.')?;
        let (part, parameter) = rest.rsplit_once('.').unwrap_or((rest, ""));
        Some(Self::Block { stage, number, part, parameter })
    }

    fn in_torchvision(&self) -> String {
        match self {
            Self::Beginning { stage, rest } => format!("features.{}.{rest}", 2 * stage),
            Self::Norm { parameter } => format!("classifier.0.{parameter}"),
            Self::Block { stage, number, part: "gamma", .. } => {
                format!("features.{}.{number}.layer_scale", 2 * stage + 1)
            }
            Self::Block { stage, number, part, parameter } => {
                let layer = within(part, ["0", "2", "3", "5"]);
                format!("features.{}.{number}.block.{layer}.{parameter}", 2 * stage + 1)
            }
        }
    }

    fn in_dinov3(&self) -> String {
        match self {
            Self::Beginning { stage, rest } => format!("downsample_layers.{stage}.{rest}"),
            Self::Norm { parameter } => format!("norm.{parameter}"),
            Self::Block { stage, number, part: "gamma", .. } => format!("stages.{stage}.{number}.gamma"),
            Self::Block { stage, number, part, parameter } => {
                let layer = within(part, ["dwconv", "norm", "pwconv1", "pwconv2"]);
                format!("stages.{stage}.{number}.{layer}.{parameter}")
            }
        }
    }

    fn in_transformers(&self) -> String {
        match self {
            Self::Beginning { stage, rest } => format!("stages.{stage}.downsample_layers.{rest}"),
            Self::Norm { parameter } => format!("layer_norm.{parameter}"),
            Self::Block { stage, number, part: "gamma", .. } => {
                format!("stages.{stage}.layers.{number}.gamma")
            }
            Self::Block { stage, number, part, parameter } => {
                let layer =
                    within(part, ["depthwise_conv", "layer_norm", "pointwise_conv1", "pointwise_conv2"]);
                format!("stages.{stage}.layers.{number}.{layer}.{parameter}")
            }
        }
    }
}

/// Returns the name of the layer `part` of a block among those of a library, in the order of the
/// layers.
fn within(part: &str, [depthwise, norm, first, second]: [&'static str; 4]) -> &'static str {
    match part {
        "conv_dw" => depthwise,
        "norm" => norm,
        "mlp.fc1" => first,
        _ => second,
    }
}

fn channels_last(graph: &mut Graph<'_>, maps: &onnx::Value) -> onnx::Value {
    graph.node("Transpose", &[maps], &[Setting::Ints("perm", &[0, 2, 3, 1])])
}

fn channels_first(graph: &mut Graph<'_>, x: &onnx::Value) -> onnx::Value {
    graph.node("Transpose", &[x], &[Setting::Ints("perm", &[0, 3, 1, 2])])
}

/// Adds the convolution `name` with windows of `sides` that do not overlap.
fn convolution(
    graph: &mut Graph<'_>,
    name: &str,
    x: &onnx::Value,
    sides: [usize; 2],
) -> Result<onnx::Value, String> {
    let weight = graph.weight(&format!("{name}.weight"))?;
    let bias = graph.weight(&format!("{name}.bias"))?;
    let settings = [Setting::Ints("kernel_shape", &sides), Setting::Ints("strides", &sides)];
    Ok(graph.node("Conv", &[x, &weight, &bias], &settings))
}

/// Adds a block of `width` channels; `x` and its output have channels last.
fn block(graph: &mut Graph<'_>, name: &str, x: &onnx::Value, width: usize) -> Result<onnx::Value, String> {
    let part = |part: &str| format!("{name}.{part}");
    let weight = graph.weight(&part("conv_dw.weight"))?;
    let bias = graph.weight(&part("conv_dw.bias"))?;
    let settings = [
        Setting::Ints("kernel_shape", &[7, 7]),
        Setting::Ints("pads", &[3; 4]),
        Setting::Int("group", width as i64),
    ];
    let maps = channels_first(graph, x);
    let maps = graph.node("Conv", &[&maps, &weight, &bias], &settings);
    let h = channels_last(graph, &maps);
    let h = norm(graph, &part("norm"), &h, EPSILON)?;
    let h = linear(graph, &part("mlp.fc1"), &h)?;
    let h = gelu(graph, &h);
    let h = linear(graph, &part("mlp.fc2"), &h)?;
    let gamma = graph.weight(&part("gamma"))?;
    let h = graph.node("Mul", &[&h, &gamma], &[]);
    Ok(graph.node("Add", &[x, &h], &[]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_libraries() {
        let of =
            |name| [Library::Torchvision, Library::Dinov3, Library::Transformers].map(|l| theirs(l, name));
        for (ours, expected) in [
            (
                "stem.0.weight",
                [
                    "features.0.0.weight",
                    "downsample_layers.0.0.weight",
                    "stages.0.downsample_layers.0.weight",
                ],
            ),
            (
                "stages.2.downsample.1.bias",
                ["features.4.1.bias", "downsample_layers.2.1.bias", "stages.2.downsample_layers.1.bias"],
            ),
            (
                "stages.1.blocks.2.mlp.fc2.weight",
                [
                    "features.3.2.block.5.weight",
                    "stages.1.2.pwconv2.weight",
                    "stages.1.layers.2.pointwise_conv2.weight",
                ],
            ),
            (
                "stages.3.blocks.0.gamma",
                ["features.7.0.layer_scale", "stages.3.0.gamma", "stages.3.layers.0.gamma"],
            ),
            ("head.norm.bias", ["classifier.0.bias", "norm.bias", "layer_norm.bias"]),
        ] {
            assert_eq!(of(ours), expected.map(|name| Some(name.to_string())), "{ours}");
        }
    }
}
