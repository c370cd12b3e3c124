//! Specifications of parameters: names, shapes, initial values and updates.

use std::ops::Range;

/// Specification of a parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// Name relative to the unit: `attn.qkv.weight`.
    pub name: String,
    /// Dimensions, as PyTorch stores them.
    pub shape: Vec<usize>,
    /// Rule for the initial values.
    pub init: Init,
    /// Source of the updates.
    pub role: Role,
    /// Ratio of the learning rate to the run's.
    pub lr_scale: f64,
    /// Whether weight decay is applied.
    pub decay: bool,
    /// Steps at the beginning of a run during which it is not updated.
    pub frozen_steps: u64,
    /// Whether the optimizer's moments follow its gradients while it is frozen.
    pub warms_moments: bool,
    /// Whether it projects patches of pixels, for which a run may have a separate learning rate.
    pub projects_patches: bool,
    /// Whether a file of initial weights may lack it: it then takes the values of `substitute`, or
    /// keeps those of `init`.
    pub is_optional: bool,
    /// Name within the unit of the parameter whose values it takes if a file lacks its own.
    pub substitute: Option<String>,
    /// Whether a method keeps it on a surface, to which [`Unit::constrain`] moves it before a step.
    ///
    /// [`Unit::constrain`]: crate::unit::Unit::constrain
    pub is_constrained: bool,
    /// Rows of the parameter of the undivided unit that it consists of; absent for all rows.
    pub slice: Option<RowSlice>,
    /// Whether it is a matrix that may have an adapter of low rank ([`crate::adapter`]).
    pub is_adaptable: bool,
}

/// Range of rows of a whole parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSlice {
    /// Index of the first row.
    pub first_row: usize,
    /// Number of rows of the whole parameter.
    pub n_rows: usize,
}

/// Source of a parameter's updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Optimizer; for a matrix, kernel or table.
    Weight,
    /// Optimizer; for a bias, gain or other vector.
    Vector,
    /// Observed statistics; for running statistics, which have no gradient.
    Running,
    /// No updates: the parameter keeps its initial values, and has no gradient.
    Fixed,
}

impl Role {
    /// Returns whether the optimizer updates the parameter.
    pub fn is_trained(self) -> bool {
        matches!(self, Self::Weight | Self::Vector)
    }
}

/// Rule for the initial values of a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Equal values.
    Constant(f32),
    /// Normal numbers with this standard deviation.
    Normal(f32),
    /// Normal numbers with this standard deviation, truncated at ±2 (absolute), as in timm's
    /// `trunc_normal_`.
    TruncNormal(f32),
    /// Uniform numbers in `±bound`.
    Uniform(f32),
    /// Sines and cosines of the rows and columns of a square grid, after rows of zeros, `[n_before
    /// + side², width]`.
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
    /// Creates a weight with weight decay.
    pub fn weight(name: impl Into<String>, shape: impl Into<Vec<usize>>, init: Init) -> Self {
        Self {
            name: name.into(),
            shape: shape.into(),
            init,
            role: Role::Weight,
            lr_scale: 1.0,
            decay: true,
            frozen_steps: 0,
            warms_moments: false,
            projects_patches: false,
            is_optional: false,
            substitute: None,
            is_constrained: false,
            slice: None,
            is_adaptable: false,
        }
    }

    /// Creates a bias, gain or other vector without weight decay.
    pub fn vector(name: impl Into<String>, len: usize, value: f32) -> Self {
        let weight = Self::weight(name, [len], Init::Constant(value));
        Self { role: Role::Vector, decay: false, ..weight }
    }

    /// Creates running statistics, which follow observed values.
    pub fn running(name: impl Into<String>, len: usize, value: f32) -> Self {
        Self { role: Role::Running, ..Self::vector(name, len, value) }
    }

    /// Returns the parameter fixed at its initial values.
    pub fn fixed(self) -> Self {
        Self { role: Role::Fixed, decay: false, ..self }
    }

    /// Returns the parameter, a matrix, as one that may have an adapter of low rank.
    pub fn adaptable(self) -> Self {
        Self { is_adaptable: true, ..self }
    }

    /// Returns the parameter with permission for a file of initial weights to lack it.
    pub fn optional(self) -> Self {
        Self { is_optional: true, ..self }
    }

    /// Returns the parameter with the unit's parameter `name` as a substitute, whose values it
    /// takes if a file of initial weights lacks it.
    pub fn or_like(self, name: impl Into<String>) -> Self {
        Self { substitute: Some(name.into()), ..self.optional() }
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the specification of only `rows`, with the name and the initial values of the whole
    /// parameter.
    pub fn rows(self, rows: Range<usize>) -> Self {
        let n_rows = self.shape[0];
        if rows == (0..n_rows) {
            return self;
        }
        let mut shape = self.shape;
        shape[0] = rows.len();
        Self { shape, slice: Some(RowSlice { first_row: rows.start, n_rows }), ..self }
    }

    /// Returns the index of the first element within the whole parameter.
    pub fn first_element(&self) -> usize {
        let first_row = self.slice.map_or(0, |slice| slice.first_row);
        first_row * self.shape.iter().skip(1).product::<usize>()
    }

    /// Returns the dimensions of the whole parameter.
    pub fn whole_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let (Some(slice), Some(rows)) = (self.slice, shape.first_mut()) {
            *rows = slice.n_rows;
        }
        shape
    }
}
