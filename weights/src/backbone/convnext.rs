//! ConvNeXts of DINOv3, timm, torchvision and transformers. Ocelli uses timm's names.

use networks::{ConvnextConfig, ModelConfig};
use serde_json::{Map, Value, json};

use super::convolutional::{IMAGE_PX, cells};
use super::layers::{gelu, linear, norm};
use super::renamed::{ocelli_arrays, renamed_arrays};
use super::{
    Exchange, GraphOutputs, PythonClassifier, PythonNetwork, Recognized, TimmModel, in_chans, no_such_network,
};
use crate::decimal::decimal;
use crate::export::Export;
use crate::file::Arrays;
use crate::library::Library;
use crate::onnx::{self, Graph, PIXELS, Setting};
use crate::pretrained::Hints;
use crate::source::{BackboneTensors, Source};

/// Term that layer norms add to the variance.
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

    fn matches(tensors: &BackboneTensors) -> bool {
        // Other networks have first convolutions of the same names, but no 7×7 depthwise
        // convolution after it.
        let depthwise = shape(tensors, "stages.0.blocks.0.conv_dw.weight");
        matches!(depthwise, Some([_, 1, 7, 7]))
            && (tensors.anchor != IN_MEMORY || tensors.contains("layer_norm.weight"))
    }

    fn recognize(
        tensors: &mut BackboneTensors,
        source: &Source,
        hints: &Hints,
        _: &mut Vec<String>,
    ) -> Result<Recognized, String> {
        let anchor = tensors.anchor;
        check_config(source.config.as_ref())?;
        // DINOv3's files hold the last norm under two names.
        for name in ["norms.3.weight", "norms.3.bias"] {
            tensors.remove(name);
        }
        let model = config_from_shapes(tensors)?;
        let library = hints.library.unwrap_or(library_of(anchor));
        Ok(Recognized {
            model,
            library,
            names: Box::new(move |name: &str| {
                name_in_file(anchor, name).into_iter().collect::<Vec<String>>()
            }),
            size_px: IMAGE_PX,
            activation: "gelu",
        })
    }

    fn arrays(&self, library: Library, export: &Export<'_>) -> Result<Arrays, String> {
        check_patches(self.patch_px, library)?;
        let mut arrays = match library {
            Library::Dino | Library::Dinov2 => return Err(no_such_network(library)),
            Library::Timm => return Ok(ocelli_arrays(export)),
            _ => renamed_arrays(export, |name| library_name(library, name).into_iter().collect()),
        };
        match library {
            Library::Torchvision => {
                for (name, array) in &mut arrays {
                    if name.ends_with(".layer_scale") {
                        array.shape.extend([1, 1]);
                    }
                }
            }
            Library::Dinov3 => {
                for parameter in ["weight", "bias"] {
                    if let Some(norm) = arrays.get(&format!("norm.{parameter}")).cloned() {
                        arrays.insert(format!("norms.3.{parameter}"), norm);
                    }
                }
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
            // Architectures differ only in depths and widths.
            architecture: "convnext_tiny",
            arguments,
            first_conv: Some("stem.0"),
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

    fn transformers_feature(&self) -> &'static str {
        "last_hidden_state[:, 0]"
    }

    fn classifier(&self, library: Library) -> Option<&'static str> {
        match library {
            Library::Timm => Some("head.fc"),
            Library::Torchvision => Some("classifier.2"),
            _ => None,
        }
    }

    fn python(&self, library: Library) -> Option<PythonNetwork> {
        let widths = widths(self);
        let depths = self.depths;
        let channels = in_chans(self.channels);
        match library {
            Library::Torchvision => {
                let mut stages = Vec::new();
                for (stage, depth) in depths.into_iter().enumerate() {
                    let width = widths[stage];
                    let next_width = widths.get(stage + 1).map_or("None".to_string(), ToString::to_string);
                    stages.push(format!("convnext.CNBlockConfig({width}, {next_width}, {depth})"));
                }
                Some(PythonNetwork {
                    imports: "from torchvision.models import convnext\n",
                    expression: format!("convnext.ConvNeXt([{}])", stages.join(", ")),
                    changes: String::new(),
                    classifier: Some(PythonClassifier { module: "classifier[2]", layer: "classifier[2]" }),
                })
            }
            Library::Dinov3 => Some(PythonNetwork {
                imports: "from dinov3.models.convnext import ConvNeXt\n",
                expression: format!("ConvNeXt({channels}depths={depths:?}, dims={widths:?})"),
                changes: String::new(),
                classifier: None,
            }),
            _ => None,
        }
    }

    fn build_graph(&self, graph: &mut Graph<'_>, _: usize) -> Result<GraphOutputs, String> {
        let maps = convolution(graph, "stem.0", &PIXELS.to_string(), [self.patch_px; 2])?;
        let stem = channels_last(graph, &maps);
        let mut x = norm(graph, "stem.1", &stem, EPSILON)?;
        for (stage, depth) in self.depths.into_iter().enumerate() {
            if stage > 0 {
                let name = format!("stages.{stage}.downsample");
                let h = norm(graph, &format!("{name}.0"), &x, EPSILON)?;
                let h = channels_first(graph, &h);
                let maps = convolution(graph, &format!("{name}.1"), &h, [2; 2])?;
                x = channels_last(graph, &maps);
            }
            for index in 0..depth {
                x = block(graph, &format!("stages.{stage}.blocks.{index}"), &x, self.stage_width(stage))?;
            }
        }
        let maps = channels_first(graph, &x);
        let mean = graph.node("GlobalAveragePool", &[&maps], &[]);
        let mean = graph.node("Flatten", &[&mean], &[Setting::Int("axis", 1)]);
        let embedding = norm(graph, "head.norm", &mean, EPSILON)?;
        let cells = cells(graph, &maps, self.stage_width(3));
        let patches = norm(graph, "head.norm", &cells, EPSILON)?;
        Ok(GraphOutputs { embedding, patches, has_fixed_size: false })
    }

    fn canonicalize_keys(&self, keys: &mut Map<String, Value>) {
        keys.remove("layer_scale");
    }

    fn pooling(&self) -> &'static str {
        "normalized mean over the last feature map"
    }
}

/// Checks that a configuration does not state other norms or strides than Ocelli's ConvNeXts have.
fn check_config(config: Option<&Value>) -> Result<(), String> {
    let Some(config) = config else { return Ok(()) };
    let arguments = &config["model_args"];
    let epsilon = [&config["layer_norm_eps"], &arguments["norm_eps"]].iter().find_map(|value| value.as_f64());
    // The only architecture of timm with another default.
    let is_largest = config["architecture"].as_str().is_some_and(|name| name.starts_with("convnext_xxlarge"));
    let epsilon = epsilon.unwrap_or(if is_largest { 1e-5 } else { EPSILON });
    if (epsilon - EPSILON).abs() > 1e-9 {
        return Err(format!(
            "its norms add {epsilon} to the variance, but ConvNeXts of Ocelli add {EPSILON}"
        ));
    }
    match arguments["output_stride"].as_u64() {
        Some(stride) if stride != 32 => {
            Err(format!("its stride is {stride}, but ConvNeXts of Ocelli have 32"))
        }
        _ => Ok(()),
    }
}

/// Checks that `library` has ConvNeXts with patches of `patch_px` that compute the same as
/// Ocelli's.
fn check_patches(patch_px: usize, library: Library) -> Result<(), String> {
    match (library, patch_px) {
        (_, 4) | (Library::Timm, 1 | 3..=7) => Ok(()),
        // It halves the grid after patches of 2 px, and never below a 32nd of the image.
        (Library::Timm, px) => {
            Err(format!("timm's ConvNeXts with patches of {px} px have other strides than Ocelli's"))
        }
        (_, px) => Err(format!("{}'s ConvNeXts have patches of 4 px, but this one has {px}", library.name())),
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
fn name_in_file(anchor: &str, name: &str) -> Option<String> {
    let name = library_name(library_of(anchor), name)?;
    let is_inside = anchor == IN_MEMORY && name.starts_with("stages.");
    Some(if is_inside { format!("model.{name}") } else { name })
}

/// Returns the shape of a parameter by Ocelli's name; `None` if it is missing.
fn shape<'a>(tensors: &'a BackboneTensors, name: &str) -> Option<&'a [usize]> {
    tensors.shape(&name_in_file(tensors.anchor, name)?)
}

/// Determines the configuration from the shapes of `tensors`.
fn config_from_shapes(tensors: &BackboneTensors) -> Result<ModelConfig, String> {
    let stem = shape(tensors, "stem.0.weight");
    let Some(&[width, channels, patch_px, _]) = stem else {
        return Err(format!("its first convolution has shape {stem:?}, not [D, C, p, p]"));
    };
    check_patches(patch_px, library_of(tensors.anchor))?;
    let mut depths = [0; 4];
    for (stage, depth) in depths.iter_mut().enumerate() {
        while shape(tensors, &format!("stages.{stage}.blocks.{depth}.conv_dw.weight")).is_some() {
            *depth += 1;
        }
    }
    let config = ConvnextConfig {
        image_px: IMAGE_PX,
        depths,
        width,
        patch_px,
        layer_scale: 1e-6,
        drop_path: 0.0,
        channels,
    };
    Ok(ModelConfig::Convnext(config))
}

/// Returns the name of a parameter in `library`; `None` for a name that the network does not have.
fn library_name(library: Library, name: &str) -> Option<String> {
    match library {
        Library::Timm | Library::Dino | Library::Dinov2 => Some(name.into()),
        Library::Torchvision => Some(Location::parse(name)?.torchvision_name()),
        Library::Dinov3 => Some(Location::parse(name)?.dinov3_name()),
        Library::Transformers => Some(Location::parse(name)?.transformers_name()),
    }
}

/// Location of a parameter in the network.
enum Location<'a> {
    /// Layer of the stem (stage 0) or of a downsampling before a later stage, and its parameter.
    Downsample { stage: usize, rest: &'a str },
    /// Part of a block, and its parameter.
    Block { stage: usize, number: &'a str, part: &'a str, parameter: &'a str },
    /// Last norm.
    Norm { parameter: &'a str },
}

impl<'a> Location<'a> {
    /// Parses Ocelli's name of a parameter.
    fn parse(name: &'a str) -> Option<Self> {
        if let Some(rest) = name.strip_prefix("stem.") {
            return Some(Self::Downsample { stage: 0, rest });
        }
        if let Some(parameter) = name.strip_prefix("head.norm.") {
            return Some(Self::Norm { parameter });
        }
        let (stage, rest) = name.strip_prefix("stages.")?.split_once('.')?;
        let stage = stage.parse().ok()?;
        if let Some(rest) = rest.strip_prefix("downsample.") {
            return Some(Self::Downsample { stage, rest });
        }
        let (number, rest) = rest.strip_prefix("blocks.")?.split_once('.')?;
        let (part, parameter) = rest.rsplit_once('.').unwrap_or((rest, ""));
        Some(Self::Block { stage, number, part, parameter })
    }

    fn torchvision_name(&self) -> String {
        match self {
            Self::Downsample { stage, rest } => format!("features.{}.{rest}", 2 * stage),
            Self::Norm { parameter } => format!("classifier.0.{parameter}"),
            Self::Block { stage, number, part: "gamma", .. } => {
                format!("features.{}.{number}.layer_scale", 2 * stage + 1)
            }
            Self::Block { stage, number, part, parameter } => {
                let layer = block_layer(part, ["0", "2", "3", "5"]);
                format!("features.{}.{number}.block.{layer}.{parameter}", 2 * stage + 1)
            }
        }
    }

    fn dinov3_name(&self) -> String {
        match self {
            Self::Downsample { stage, rest } => format!("downsample_layers.{stage}.{rest}"),
            Self::Norm { parameter } => format!("norm.{parameter}"),
            Self::Block { stage, number, part: "gamma", .. } => format!("stages.{stage}.{number}.gamma"),
            Self::Block { stage, number, part, parameter } => {
                let layer = block_layer(part, ["dwconv", "norm", "pwconv1", "pwconv2"]);
                format!("stages.{stage}.{number}.{layer}.{parameter}")
            }
        }
    }

    fn transformers_name(&self) -> String {
        match self {
            Self::Downsample { stage, rest } => format!("stages.{stage}.downsample_layers.{rest}"),
            Self::Norm { parameter } => format!("layer_norm.{parameter}"),
            Self::Block { stage, number, part: "gamma", .. } => {
                format!("stages.{stage}.layers.{number}.gamma")
            }
            Self::Block { stage, number, part, parameter } => {
                let layer =
                    block_layer(part, ["depthwise_conv", "layer_norm", "pointwise_conv1", "pointwise_conv2"]);
                format!("stages.{stage}.layers.{number}.{layer}.{parameter}")
            }
        }
    }
}

/// Returns the element of `names` for the layer `part` of a block: `names` are a library's names,
/// in the order of the layers.
fn block_layer(part: &str, names: [&'static str; 4]) -> &'static str {
    match part {
        "conv_dw" => names[0],
        "norm" => names[1],
        "mlp.fc1" => names[2],
        _ => names[3],
    }
}

fn channels_last(graph: &mut Graph<'_>, maps: &onnx::Value) -> onnx::Value {
    graph.node("Transpose", &[maps], &[Setting::Ints("perm", &[0, 2, 3, 1])])
}

fn channels_first(graph: &mut Graph<'_>, x: &onnx::Value) -> onnx::Value {
    graph.node("Transpose", &[x], &[Setting::Ints("perm", &[0, 3, 1, 2])])
}

/// Adds the convolution `name`, whose stride is the size of its kernel.
fn convolution(
    graph: &mut Graph<'_>,
    name: &str,
    x: &onnx::Value,
    kernel: [usize; 2],
) -> Result<onnx::Value, String> {
    let weight = graph.weight(&format!("{name}.weight"))?;
    let bias = graph.weight(&format!("{name}.bias"))?;
    let settings = [Setting::Ints("kernel_shape", &kernel), Setting::Ints("strides", &kernel)];
    Ok(graph.node("Conv", &[x, &weight, &bias], &settings))
}

/// Adds a block of `width` channels; `x` and its output have channels last.
fn block(graph: &mut Graph<'_>, name: &str, x: &onnx::Value, width: usize) -> Result<onnx::Value, String> {
    let weight = graph.weight(&format!("{name}.conv_dw.weight"))?;
    let bias = graph.weight(&format!("{name}.conv_dw.bias"))?;
    let settings = [
        Setting::Ints("kernel_shape", &[7, 7]),
        Setting::Ints("pads", &[3; 4]),
        Setting::Int("group", width as i64),
    ];
    let maps = channels_first(graph, x);
    let maps = graph.node("Conv", &[&maps, &weight, &bias], &settings);
    let h = channels_last(graph, &maps);
    let h = norm(graph, &format!("{name}.norm"), &h, EPSILON)?;
    let h = linear(graph, &format!("{name}.mlp.fc1"), &h)?;
    let h = gelu(graph, &h);
    let h = linear(graph, &format!("{name}.mlp.fc2"), &h)?;
    let gamma = graph.weight(&format!("{name}.gamma"))?;
    let h = graph.node("Mul", &[&h, &gamma], &[]);
    Ok(graph.node("Add", &[x, &h], &[]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_the_names_of_the_libraries() {
        let libraries = [Library::Torchvision, Library::Dinov3, Library::Transformers];
        for (name, expected) in [
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
            for (library, expected) in libraries.into_iter().zip(expected) {
                assert_eq!(library_name(library, name).as_deref(), Some(expected), "{name}");
            }
        }
    }
}
