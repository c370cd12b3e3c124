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
    /// What moves it.
    pub role: Role,
    /// Its learning rate over the run's.
    pub lr_scale: f64,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Steps at the beginning of a run during which it stays as it is. All parameters of a unit have the same.
    pub frozen_steps: u64,
}

/// What moves a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The optimizer: a matrix, kernel or table.
    Weight,
    /// The optimizer: a bias, gain or other vector.
    Vector,
    /// Observation: running statistics, which have no gradient.
    Running,
    /// Nothing: it stays as it starts, and has no gradient.
    Fixed,
}

impl Role {
    /// Whether the optimizer moves it.
    pub fn is_trained(self) -> bool {
        matches!(self, Self::Weight | Self::Vector)
    }
}

/// How a parameter starts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All equal.
    Constant(f32),
    /// Normal with this deviation.
    Normal(f32),
    /// Normal with this deviation, cut at ±2 (absolute), as timm's `trunc_normal_`.
    TruncNormal(f32),
    /// Uniform in `±bound`.
    Uniform(f32),
    /// Sines and cosines of the rows and columns of a square grid, behind rows of zeros, `[n_before + side², width]`.
    SinCos {
        /// Cells along a side.
        side: usize,
        /// Rows of zeros.
        n_before: usize,
        /// Channels.
        width: usize,
    },
}

impl ParamSpec {
    /// A weight that is decayed.
    pub fn weight(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> Self {
        Self {
            name: name.into(),
            shape: shape.into(),
            init,
            role: Role::Weight,
            lr_scale: 1.0,
            decay: true,
            frozen_steps: 0,
        }
    }

    /// A bias, gain or other vector that is not decayed.
    pub fn vector(name: impl Into<String>, len: usize, value: f32) -> Self {
        let weight = Self::weight(name, [len], Init::Constant(value));
        Self { role: Role::Vector, decay: false, ..weight }
    }

    /// Statistics that follow what is observed.
    pub fn running(name: impl Into<String>, len: usize, value: f32) -> Self {
        Self { role: Role::Running, ..Self::vector(name, len, value) }
    }

    /// The same parameter, which stays as it starts.
    pub fn fixed(self) -> Self {
        Self { role: Role::Fixed, decay: false, ..self }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}
