//! Construction of a graph, node by node.

use std::collections::{HashMap, HashSet};

use networks::NamedTensor;

use super::message::{
    Attribute, BFLOAT16, Dimension, FLOAT, FLOAT16, GraphMessage, INT8, INT64, Node, Shape, TensorMessage,
    TensorType, TypeMessage, ValueInfo,
};
use crate::file::safetensors::to_bytes;
use crate::precision::{Precision, is_quantized, quantize};

/// Name of the input.
pub(crate) const PIXELS: &str = "pixels";

/// Description of a matrix that is stored as `[in, out]`.
pub(super) const TRANSPOSED: &str = "transposed";

/// Name of a value within a graph.
pub(crate) type Value = String;

/// A graph under construction.
pub(crate) struct Graph<'a> {
    tensors: HashMap<&'a str, &'a NamedTensor>,
    precision: Precision,
    nodes: Vec<Node>,
    initializers: Vec<TensorMessage>,
}

/// A setting of a node.
pub(crate) enum Setting<'a> {
    Int(&'a str, i64),
    Ints(&'a str, &'a [usize]),
    Float(&'a str, f64),
    Text(&'a str, &'a str),
}

impl Setting<'_> {
    /// Converts to an attribute, whose kind is a number of `onnx.proto`: 1 for a float, 2 for an
    /// integer, 3 for text, 7 for integers.
    fn to_attribute(&self) -> Attribute {
        match self {
            Self::Int(name, value) => {
                Attribute { name: (*name).into(), i: Some(*value), kind: 2, ..Attribute::default() }
            }
            Self::Ints(name, values) => {
                let ints = values.iter().map(|value| *value as i64).collect();
                Attribute { name: (*name).into(), ints, kind: 7, ..Attribute::default() }
            }
            Self::Float(name, value) => {
                Attribute { name: (*name).into(), f: Some(*value as f32), kind: 1, ..Attribute::default() }
            }
            Self::Text(name, text) => {
                let bytes = text.as_bytes().to_vec();
                Attribute { name: (*name).into(), s: Some(bytes), kind: 3, ..Attribute::default() }
            }
        }
    }
}

impl<'a> Graph<'a> {
    /// Creates an empty graph that takes its weights from `tensors`.
    pub(crate) fn new(tensors: impl IntoIterator<Item = &'a NamedTensor>, precision: Precision) -> Self {
        let tensors = tensors.into_iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        Self { tensors, precision, nodes: Vec::new(), initializers: Vec::new() }
    }

    /// Adds a node of the operator `kind`; returns its output.
    pub(crate) fn node(&mut self, kind: &str, inputs: &[&Value], settings: &[Setting<'_>]) -> Value {
        let name = format!("{}_{}", kind.to_lowercase(), self.nodes.len());
        self.nodes.push(Node {
            input: inputs.iter().map(|input| (*input).clone()).collect(),
            output: vec![name.clone()],
            name: name.clone(),
            op_type: kind.into(),
            attribute: settings.iter().map(Setting::to_attribute).collect(),
        });
        name
    }

    /// Returns the parameter `name`.
    pub(crate) fn tensor(&self, name: &str) -> Result<&'a NamedTensor, String> {
        self.tensors.get(name).copied().ok_or_else(|| format!("it has no parameter {name}"))
    }

    /// Adds the parameter `name`; returns its value as f32.
    pub(crate) fn weight(&mut self, name: &str) -> Result<Value, String> {
        let tensor = self.tensor(name)?;
        if self.precision == Precision::Int8 && is_quantized(&tensor.shape) {
            let (codes, scales) = quantize(&tensor.values, tensor.shape[0]);
            return Ok(self.codes(name, &tensor.shape, codes, &scales, 0));
        }
        Ok(self.float_tensor(name, &tensor.shape, &tensor.values))
    }

    /// Adds the matrix `name`, `[out, in]`, transposed to `[in, out]` for a matrix product.
    pub(crate) fn transposed_weight(&mut self, name: &str) -> Result<Value, String> {
        let tensor = self.tensor(name)?;
        let [n_out, n_in] = tensor.shape[..] else {
            return Err(format!("{name} has shape {:?}, not [out, in]", tensor.shape));
        };
        if self.precision == Precision::Int8 {
            let (codes, scales) = quantize(&tensor.values, n_out);
            let codes = transpose(&codes, n_out, n_in);
            let value = self.codes(name, &[n_in, n_out], codes, &scales, 1);
            self.describe(name, TRANSPOSED);
            return Ok(value);
        }
        let value = self.float_tensor(name, &[n_in, n_out], &transpose(&tensor.values, n_out, n_in));
        self.describe(name, TRANSPOSED);
        Ok(value)
    }

    /// Sets the description of the constant `name`.
    fn describe(&mut self, name: &str, description: &str) {
        for tensor in self.initializers.iter_mut().filter(|tensor| tensor.name == name) {
            tensor.doc_string = description.into();
        }
    }

    /// Adds a tensor in the precision of the file; returns its value as f32.
    pub(crate) fn float_tensor(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Value {
        let kind = match self.precision {
            Precision::F32 | Precision::Int8 => FLOAT,
            Precision::F16 => FLOAT16,
            Precision::Bf16 => BFLOAT16,
        };
        let value = self.constant(name, kind, shape, to_bytes(values, self.precision));
        if kind == FLOAT {
            value
        } else {
            self.node("Cast", &[&value], &[Setting::Int("to", i64::from(FLOAT))])
        }
    }

    /// Adds a tensor of f32, whatever the precision of the file: for values that are no parameters.
    pub(crate) fn exact_tensor(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Value {
        self.constant(name, FLOAT, shape, to_bytes(values, Precision::F32))
    }

    /// Adds a vector of f32, whatever the precision of the file.
    pub(crate) fn floats(&mut self, name: &str, values: &[f32]) -> Value {
        self.exact_tensor(name, &[values.len()], values)
    }

    /// Adds a scalar of f32.
    pub(crate) fn scalar(&mut self, name: &str, value: f32) -> Value {
        self.exact_tensor(name, &[], &[value])
    }

    /// Adds a vector of integers: dimensions or indices.
    pub(crate) fn integers(&mut self, values: &[i64]) -> Value {
        let name = format!("integers_{}", self.initializers.len());
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.constant(&name, INT64, &[values.len()], bytes)
    }

    /// Adds a scalar index.
    pub(crate) fn index(&mut self, value: i64) -> Value {
        let name = format!("place_{}", self.initializers.len());
        self.constant(&name, INT64, &[], value.to_le_bytes().to_vec())
    }

    /// Adds 8-bit codes with one scale for each index along `axis`; returns their values as f32.
    fn codes(&mut self, name: &str, shape: &[usize], codes: Vec<i8>, scales: &[f32], axis: i64) -> Value {
        let bytes = codes.into_iter().map(|code| code as u8).collect();
        let codes = self.constant(name, INT8, shape, bytes);
        let scales = self.floats(&format!("{name}.scale"), scales);
        self.node("DequantizeLinear", &[&codes, &scales], &[Setting::Int("axis", axis)])
    }

    fn constant(&mut self, name: &str, data_type: i32, shape: &[usize], raw_data: Vec<u8>) -> Value {
        let dims = shape.iter().map(|n| *n as i64).collect();
        let tensor = TensorMessage {
            dims,
            data_type,
            name: name.into(),
            raw_data: Some(raw_data),
            doc_string: String::new(),
        };
        // A parameter may be added twice.
        if self.initializers.iter().all(|initializer| initializer.name != name) {
            self.initializers.push(tensor);
        }
        name.into()
    }

    /// Finishes the graph. Its input is a batch of images with this number of channels, and with
    /// sides of `side` pixels, or of any size if it is `None`. Its outputs are `embedding`,
    /// `[B, width]`, and `patches`, `[B, cells, width]`.
    pub(crate) fn finish(
        self,
        embedding: &Value,
        patches: &Value,
        channels: usize,
        side: Option<usize>,
        cells: Option<usize>,
        width: usize,
    ) -> GraphMessage {
        let outputs = [
            (embedding, batch("embedding", &[fixed_dimension(width)])),
            (patches, batch("patches", &[dimension(cells, "cells"), fixed_dimension(width)])),
        ];
        self.into_message("backbone", outputs, channels, side)
    }

    /// Finishes the graph of a classifier, with the input of [`Graph::finish`]. Its output `name`
    /// is `scores`, `[B, n_classes]`; nodes that it does not depend on are left out.
    pub(crate) fn finish_classifier(
        mut self,
        scores: &Value,
        name: &str,
        channels: usize,
        side: Option<usize>,
        n_classes: usize,
    ) -> GraphMessage {
        self.retain_inputs_of(scores);
        let outputs = [(scores, batch(name, &[fixed_dimension(n_classes)]))];
        self.into_message("classifier", outputs, channels, side)
    }

    /// Finishes the graph of a network that labels pixels, with the input of [`Graph::finish`]. Its
    /// output `logits` is `scores`, `[B, n_classes, H, W]`; nodes that it does not depend on are
    /// left out.
    pub(crate) fn finish_decoder(
        mut self,
        scores: &Value,
        channels: usize,
        side: Option<usize>,
        n_classes: usize,
    ) -> GraphMessage {
        self.retain_inputs_of(scores);
        let dimensions = [fixed_dimension(n_classes), dimension(side, "height"), dimension(side, "width")];
        self.into_message("decoder", [(scores, batch("logits", &dimensions))], channels, side)
    }

    /// Removes the nodes and constants on which `value` does not depend.
    fn retain_inputs_of(&mut self, value: &Value) {
        let mut used = HashSet::from([value.clone()]);
        let mut nodes = Vec::with_capacity(self.nodes.len());
        // A node follows those that it depends on.
        while let Some(node) = self.nodes.pop() {
            if node.output.iter().any(|output| used.contains(output)) {
                used.extend(node.input.iter().cloned());
                nodes.push(node);
            }
        }
        nodes.reverse();
        self.nodes = nodes;
        self.initializers.retain(|initializer| used.contains(&initializer.name));
    }

    /// Returns the graph `name` with `outputs`: the value of each, and its description.
    fn into_message<const N: usize>(
        mut self,
        name: &str,
        outputs: [(&Value, ValueInfo); N],
        channels: usize,
        side: Option<usize>,
    ) -> GraphMessage {
        let mut output = Vec::with_capacity(N);
        for (value, info) in outputs {
            self.nodes.push(Node {
                input: vec![value.clone()],
                output: vec![info.name.clone()],
                name: info.name.clone(),
                op_type: "Identity".into(),
                attribute: Vec::new(),
            });
            output.push(info);
        }
        GraphMessage {
            node: self.nodes,
            name: name.into(),
            initializer: self.initializers,
            input: vec![batch(
                PIXELS,
                &[fixed_dimension(channels), dimension(side, "height"), dimension(side, "width")],
            )],
            output,
        }
    }
}

/// Describes a tensor of f32 whose first dimension is the batch, of any size.
fn batch(name: &str, dimensions: &[Dimension]) -> ValueInfo {
    let dim = [&[dimension(None, "batch")], dimensions].concat();
    let tensor = TensorType { elem_type: FLOAT, shape: Some(Shape { dim }) };
    ValueInfo { name: name.into(), kind: Some(TypeMessage { tensor: Some(tensor) }) }
}

fn fixed_dimension(n: usize) -> Dimension {
    Dimension { value: Some(n as i64), param: None }
}

/// Returns a dimension of size `n`, or a free dimension called `name`.
fn dimension(n: Option<usize>, name: &str) -> Dimension {
    match n {
        Some(n) => fixed_dimension(n),
        None => Dimension { value: None, param: Some(name.to_string()) },
    }
}

/// Transposes a matrix `[rows, columns]` in row-major order.
pub(super) fn transpose<T: Copy>(values: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}
