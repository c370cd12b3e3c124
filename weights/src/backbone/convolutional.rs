//! Parts that convolutional networks share: names of layers in transformers, and nodes of their
//! graphs.

use crate::backbone::GraphOutputs;
use crate::onnx::{Graph, PIXELS, Setting, Value};
use crate::source::BackboneTensors;

/// Term that batch normalization adds to the variance.
const EPSILON: f64 = 1e-5;

/// Side of the images for which the published networks were trained.
pub(super) const IMAGE_PX: usize = 224;

/// A convolution and its batch normalization.
pub(super) struct Layer<'a> {
    pub conv: String,
    pub norm: String,
    /// Side of the kernel.
    pub kernel: usize,
    pub stride: usize,
    pub groups: usize,
    /// Name of the squeeze and excitation that precedes the convolution.
    pub excitation: Option<&'a str>,
}

/// Adds the first convolution, its batch normalization and a ReLU.
pub(super) fn stem(
    graph: &mut Graph<'_>,
    conv: &str,
    norm: &str,
    kernel: usize,
    stride: usize,
) -> Result<Value, String> {
    let layer = Layer { conv: conv.into(), norm: norm.into(), kernel, stride, groups: 1, excitation: None };
    let h = conv_norm(graph, &PIXELS.to_string(), &layer)?;
    Ok(graph.node("Relu", &[&h], &[]))
}

/// Adds the nodes of a residual block, `relu(layers(x) + shortcut(x))`. The shortcut is the
/// identity if the network has no convolution named `shortcut_conv`.
pub(super) fn residual_block(
    graph: &mut Graph<'_>,
    x: &Value,
    layers: &[Layer<'_>],
    shortcut_conv: &str,
    shortcut_norm: &str,
    stride: usize,
) -> Result<Value, String> {
    let mut h = x.clone();
    for (index, layer) in layers.iter().enumerate() {
        if index > 0 {
            h = graph.node("Relu", &[&h], &[]);
        }
        if let Some(name) = layer.excitation {
            h = squeeze_excitation(graph, &h, name)?;
        }
        h = conv_norm(graph, &h, layer)?;
    }
    let shortcut = if graph.tensor(&format!("{shortcut_conv}.weight")).is_ok() {
        let layer = Layer {
            conv: shortcut_conv.into(),
            norm: shortcut_norm.into(),
            kernel: 1,
            stride,
            groups: 1,
            excitation: None,
        };
        conv_norm(graph, x, &layer)?
    } else {
        x.clone()
    };
    let sum = graph.node("Add", &[&h, &shortcut], &[]);
    Ok(graph.node("Relu", &[&sum], &[]))
}

/// Adds a convolution without bias, and its batch normalization by running statistics.
fn conv_norm(graph: &mut Graph<'_>, x: &Value, layer: &Layer<'_>) -> Result<Value, String> {
    let weight = graph.weight(&format!("{}.weight", layer.conv))?;
    let settings = [
        Setting::Ints("kernel_shape", &[layer.kernel; 2]),
        Setting::Ints("strides", &[layer.stride; 2]),
        Setting::Ints("pads", &[layer.kernel / 2; 4]),
        Setting::Int("group", layer.groups as i64),
    ];
    let h = graph.node("Conv", &[x, &weight], &settings);
    let mut inputs = vec![h];
    for part in ["weight", "bias", "running_mean", "running_var"] {
        inputs.push(graph.weight(&format!("{}.{part}", layer.norm))?);
    }
    let inputs: Vec<&Value> = inputs.iter().collect();
    Ok(graph.node("BatchNormalization", &inputs, &[Setting::Float("epsilon", EPSILON)]))
}

/// Adds squeeze and excitation: `x · sigmoid(W₂ relu(W₁ mean(x)))`.
fn squeeze_excitation(graph: &mut Graph<'_>, x: &Value, name: &str) -> Result<Value, String> {
    let mut h = graph.node("GlobalAveragePool", &[x], &[]);
    for (part, activation) in [("fc1", "Relu"), ("fc2", "Sigmoid")] {
        let weight = graph.weight(&format!("{name}.{part}.weight"))?;
        let bias = graph.weight(&format!("{name}.{part}.bias"))?;
        h = graph.node("Conv", &[&h, &weight, &bias], &[Setting::Ints("kernel_shape", &[1, 1])]);
        h = graph.node(activation, &[&h], &[]);
    }
    Ok(graph.node("Mul", &[x, &h], &[]))
}

/// Adds the mean over the last feature map, and the map's cells.
pub(super) fn outputs(graph: &mut Graph<'_>, x: &Value, width: usize) -> GraphOutputs {
    let mean = graph.node("GlobalAveragePool", &[x], &[]);
    let embedding = graph.node("Flatten", &[&mean], &[Setting::Int("axis", 1)]);
    let patches = cells(graph, x, width);
    GraphOutputs { embedding, patches, has_fixed_size: false }
}

/// Adds the cells, `[B, N, D]`, of the feature map `x` of `width` channels.
pub(super) fn cells(graph: &mut Graph<'_>, x: &Value, width: usize) -> Value {
    let flat = graph.integers(&[0, width as i64, -1]);
    let cells = graph.node("Reshape", &[x, &flat], &[]);
    graph.node("Transpose", &[&cells], &[Setting::Ints("perm", &[0, 2, 1])])
}

/// Returns the shape of a parameter by Ocelli's name, in a file whose name for it is the first that
/// `library_names` returns; `None` if it is missing.
pub(super) fn shape<'a>(
    tensors: &'a BackboneTensors,
    library_names: fn(&str) -> Vec<String>,
    name: &str,
) -> Option<&'a [usize]> {
    tensors.shape(library_names(name).first()?)
}

/// Translates `{conv}.weight`, `{norm}.bias` and the like to the names in transformers.
pub(super) fn transformers_name(part: &str, conv: &str, norm: &str) -> Option<String> {
    if let Some(rest) = part.strip_prefix(conv).and_then(|rest| rest.strip_prefix('.')) {
        return Some(format!("convolution.{rest}"));
    }
    let rest = part.strip_prefix(norm)?.strip_prefix('.')?;
    Some(format!("normalization.{rest}"))
}

/// Returns the number before `number`; `None` before 0.
pub(super) fn previous_number(number: &str) -> Option<usize> {
    number.parse::<usize>().ok()?.checked_sub(1)
}
