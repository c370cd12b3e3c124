//! The graphs of residual networks.

use networks::{RegnetConfig, ResnetConfig, StemKind};

use super::graph::{Graph, PIXELS, Setting, Value};

/// What batch normalization adds to the variance.
const EPSILON: f64 = 1e-5;

/// A convolution and its normalization, by their names.
struct Layer<'a> {
    conv: String,
    norm: String,
    window: [usize; 2],
    groups: usize,
    /// What is applied before it to each channel.
    excitation: Option<&'a str>,
}

/// Embedding and patches of a ResNet.
pub(super) fn resnet(graph: &mut Graph<'_>, config: &ResnetConfig) -> Result<(Value, Value), String> {
    let (window, pools) = match config.stem {
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
    let (depths, is_bottleneck) = config.stages();
    for (stage, depth) in depths.into_iter().enumerate() {
        for number in 0..depth {
            let name = format!("layer{}.{number}", stage + 1);
            let stride = if stage > 0 && number == 0 { 2 } else { 1 };
            let windows: &[[usize; 2]] = match is_bottleneck {
                true => &[[1, 1], [3, stride], [1, 1]],
                false => &[[3, stride], [3, 1]],
            };
            let layer = |(i, window): (usize, &[usize; 2])| Layer {
                conv: format!("{name}.conv{}", i + 1),
                norm: format!("{name}.bn{}", i + 1),
                window: *window,
                groups: 1,
                excitation: None,
            };
            let layers: Vec<Layer<'_>> = windows.iter().enumerate().map(layer).collect();
            let shortcut = [format!("{name}.downsample.0"), format!("{name}.downsample.1")];
            x = branch(graph, &x, &layers, shortcut, stride)?;
        }
    }
    Ok(outputs(graph, &x, config.width * 8 * if is_bottleneck { 4 } else { 1 }))
}

/// Embedding and patches of a RegNetY.
pub(super) fn regnet(graph: &mut Graph<'_>, config: &RegnetConfig) -> Result<(Value, Value), String> {
    let mut x = stem(graph, ["stem.0", "stem.1"], [3, 2])?;
    let stages = config.stages();
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

fn stem(graph: &mut Graph<'_>, [conv, norm]: [&str; 2], window: [usize; 2]) -> Result<Value, String> {
    let layer = Layer { conv: conv.into(), norm: norm.into(), window, groups: 1, excitation: None };
    let h = normalized(graph, &PIXELS.to_string(), &layer)?;
    Ok(graph.node("Relu", &[&h], &[]))
}

/// `relu(layers(x) + x)`, with a shortcut in the place of x where there is one.
fn branch(
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

/// A convolution without bias, and its normalization by running statistics.
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

/// Squeeze and excitation: `x · sigmoid(W₂ relu(W₁ mean(x)))`.
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

/// The mean over the last map, and its cells.
fn outputs(graph: &mut Graph<'_>, x: &Value, width: usize) -> (Value, Value) {
    let mean = graph.node("GlobalAveragePool", &[x], &[]);
    let embedding = graph.node("Flatten", &[&mean], &[Setting::Int("axis", 1)]);
    let flat = graph.integers(&[0, width as i64, -1]);
    let cells = graph.node("Reshape", &[x, &flat], &[]);
    let patches = graph.node("Transpose", &[&cells], &[Setting::Ints("perm", &[0, 2, 1])]);
    (embedding, patches)
}
