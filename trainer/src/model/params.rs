//! Parameters before they exist: names, shapes, how they start and how they are updated.

/// A parameter before it exists.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// Relative to the unit: `attn.qkv.weight`.
    pub name: String,
    /// Its dimensions, as PyTorch stores them.
    pub shape: Vec<usize>,
    /// How it starts.
    pub init: Init,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Whether it belongs to the layer that is frozen during the first epochs.
    pub last_layer: bool,
}

/// How a parameter starts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All equal.
    Constant(f32),
    /// Normal with this deviation, cut at ±2 (absolute), as timm's `trunc_normal_`.
    TruncNormal(f32),
    /// Uniform in `±bound`.
    Uniform(f32),
}

impl ParamSpec {
    /// A weight that is decayed.
    pub fn weight(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> Self {
        Self { name: name.into(), shape: shape.into(), init, decay: true, last_layer: false }
    }

    /// A bias, gain or other vector that is not decayed.
    pub fn vector(name: impl Into<String>, len: usize, value: f32) -> Self {
        let init = Init::Constant(value);
        Self { name: name.into(), shape: vec![len], init, decay: false, last_layer: false }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}
