//! Nodes of layers over the last dimension, which transformers and ConvNeXt share.

use crate::onnx::{Graph, Setting, Value};

/// Adds the layer norm `name` over the last dimension.
pub(super) fn norm(graph: &mut Graph<'_>, name: &str, x: &Value, epsilon: f64) -> Result<Value, String> {
    let gain = graph.weight(&format!("{name}.weight"))?;
    let bias = graph.weight(&format!("{name}.bias"))?;
    let settings = [Setting::Int("axis", -1), Setting::Float("epsilon", epsilon)];
    Ok(graph.node("LayerNormalization", &[x, &gain, &bias], &settings))
}

/// Adds the linear layer `name`: `x · Wᵀ + b`.
pub(super) fn linear(graph: &mut Graph<'_>, name: &str, x: &Value) -> Result<Value, String> {
    let weight = graph.transposed_weight(&format!("{name}.weight"))?;
    let bias = graph.weight(&format!("{name}.bias"))?;
    let product = graph.node("MatMul", &[x, &weight], &[]);
    Ok(graph.node("Add", &[&product, &bias], &[]))
}

/// Adds the GELU `x · (1 + erf(x / √2)) / 2`.
pub(super) fn gelu(graph: &mut Graph<'_>, x: &Value) -> Value {
    let root = graph.scalar("gelu.root", std::f32::consts::FRAC_1_SQRT_2);
    let one = graph.scalar("gelu.one", 1.0);
    let half = graph.scalar("gelu.half", 0.5);
    let scaled = graph.node("Mul", &[x, &root], &[]);
    let erf = graph.node("Erf", &[&scaled], &[]);
    let sum = graph.node("Add", &[&erf, &one], &[]);
    let product = graph.node("Mul", &[x, &sum], &[]);
    graph.node("Mul", &[&product, &half], &[])
}
