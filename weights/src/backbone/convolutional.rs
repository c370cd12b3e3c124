//! Parts that convolutional networks share: names of layers in transformers, and nodes of their
//! graphs.

use crate::backbone::Drawn;
use crate::onnx::{Graph, PIXELS, Setting, Value};

/// Term that batch normalization adds to the variance.
const EPSILON: f64 = 1e-5;

/// Side of the images for which the published networks were trained.
pub(super) const IMAGE_PX: usize = 224;

/// A convolution and its batch normalization.
pub(super) struct Layer<'a> {
    pub conv: String,
    pub norm: String,
    /// Sides of the kernel and the stride.
    pub window: [usize; 2],
    pub groups: usize,
    /// Name of the squeeze and excitation that precedes the convolution.
    pub excitation: Option<&'a str>,
}

/// Adds the first convolution, its batch normalization and a ReLU.
pub(super) fn stem(
    graph: &mut Graph<'_>,
    [conv, norm]: [&str; 2],
    window: [usize; 2],
) -> Result<Value, String> {
    let layer = Layer { conv: conv.into(), norm: norm.into(), window, groups: 1, excitation: None };
    let h = normalized(graph, &PIXELS.to_string(), &layer)?;
    Ok(graph.node("Relu", &[&h], &[]))
}

/// Adds `relu(layers(x) + shortcut(x))`, with x itself if there is no shortcut layer.
pub(super) fn branch(
    graph: &mut Graph<'_>,
    x: &Value,
    layers: &[Layer<'_>],
    [conv, norm]: [String; 2],
    stride: usize,
) -> Result<Value, String> {
    let mut h = x.clone();
    for (number, layer) in layers.iter().enumerate() {
        if number > 0 {
            h = graph.node("Relu", &[&h], &[]);
        }
        if let Some(name) = layer.excitation {
            h = excited(graph, &h, name)?;
        }
        h = normalized(graph, &h, layer)?;
    }
    let around = match graph.tensor(&format!("{conv}.weight")) {
        Ok(_) => {
            let layer = Layer { conv, norm, window: [1, stride], groups: 1, excitation: None };
            normalized(graph, x, &layer)?
        }
        Err(_) => x.clone(),
    };
    let sum = graph.node("Add", &[&h, &around], &[]);
    Ok(graph.node("Relu", &[&sum], &[]))
}

/// Adds a convolution without bias, and its batch normalization by running statistics.
fn normalized(graph: &mut Graph<'_>, x: &Value, layer: &Layer<'_>) -> Result<Value, String> {
    let [kernel, stride] = layer.window;
    let weight = graph.weight(&format!("{}.weight", layer.conv))?;
    let settings = [
        Setting::Ints("kernel_shape", &[kernel, kernel]),
        Setting::Ints("strides", &[stride, stride]),
        Setting::Ints("pads", &[kernel / 2; 4]),
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
fn excited(graph: &mut Graph<'_>, x: &Value, name: &str) -> Result<Value, String> {
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
pub(super) fn outputs(graph: &mut Graph<'_>, x: &Value, width: usize) -> Drawn {
    let mean = graph.node("GlobalAveragePool", &[x], &[]);
    let embedding = graph.node("Flatten", &[&mean], &[Setting::Int("axis", 1)]);
    let patches = cells(graph, x, width);
    Drawn { embedding, patches, has_fixed_size: false }
}

/// Adds the cells of the feature map `x` of `width` channels, `[B, N, D]`.
pub(super) fn cells(graph: &mut Graph<'_>, x: &Value, width: usize) -> Value {
    let flat = graph.integers(&[0, width as i64, -1]);
    let cells = graph.node("Reshape", &[x, &flat], &[]);
    graph.node("Transpose", &[&cells], &[Setting::Ints("perm", &[0, 2, 1])])
}

/// Translates `{conv}.weight`, `{norm}.bias` and the like to the names in transformers.
pub(super) fn in_transformers(part: &str, conv: &str, norm: &str) -> Option<String> {
    let within = |name: &str| part.strip_prefix(name)?.strip_prefix('.');
    let convolution = within(conv).map(|rest| format!("convolution.{rest}"));
    convolution.or_else(|| Some(format!("normalization.{}", within(norm)?)))
}

/// Returns the number before `number`, `None` before 0.
pub(super) fn before(number: &str) -> Option<usize> {
    number.parse::<usize>().ok()?.checked_sub(1)
}
