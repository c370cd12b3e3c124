//! The grain of sharding: a piece of network whose parameters live in one flat buffer.
//!
//! A unit owns no tensor. It says which parameters it has ([`Unit::params`]) and what it computes
//! from them ([`Unit::forward`]); the parameters come as [`Leaves`], slices of a gathered flat
//! buffer. That is what makes the three passes of a step one piece of code:
//!
//! ```text
//! teacher             y = f(slices of θ_T, x)
//! student, forwards   y = f(slices of θ_S, x)                         x is kept
//! student, backwards  y = f(leaves of θ_S, leaf x);  (y · g).sum().backward()
//!                     gives the gradient of x, which is the next g, and of every parameter
//! ```
//!
//! Everything random inside a unit is an argument ([`Draws`]), so that the second forward pass
//! equals the first.

use burn::tensor::{DType, Gradients, Tensor};

use crate::shard::layout::UnitLayout;

/// A piece of network.
pub trait Unit: Send + Sync {
    /// Names the unit within its network, and prefixes its parameters in exports: `blocks.3`.
    fn name(&self) -> &str;

    /// The parameters, with names relative to the unit.
    fn params(&self) -> Vec<ParamSpec>;

    /// Maps each group of tokens; sizes may change, the number of groups may not.
    fn forward(&self, leaves: &Leaves<'_>, groups: Vec<Tokens>, draws: &Draws) -> Vec<Tokens>;

    /// Probability with which each branch of the unit is dropped while training.
    fn drop_path(&self) -> f32 {
        0.0
    }
}

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

/// A group of token sequences of one size.
#[derive(Debug, Clone)]
pub struct Tokens {
    /// `[B·V, N, D]`, views of an image next to one another.
    pub x: Tensor<3>,
    /// Rows and columns of the patch grid that the sequences come from.
    pub grid: [usize; 2],
}

impl Tokens {
    /// The same grid with other tokens.
    pub fn with(&self, x: Tensor<3>) -> Self {
        Self { x, grid: self.grid }
    }
}

/// Drawn randomness of one unit in one step.
#[derive(Debug, Clone, Default)]
pub struct Draws {
    /// For each group and branch, the factor of each sequence: 0, or 1 / (1 - p). Empty when
    /// nothing is dropped.
    pub drop_path: Vec<[Vec<f32>; 2]>,
}

impl Draws {
    /// `x` with the branch's sequences dropped or scaled, `[B·V, N, D]`.
    pub fn apply(&self, x: Tensor<3>, group: usize, branch: usize) -> Tensor<3> {
        let [b, _, _] = x.dims();
        let Some(branches) = self.drop_path.get(group) else { return x };
        let factors = Tensor::<1>::from_floats(branches[branch].as_slice(), &x.device().inner());
        let factors = factors.reshape([b, 1, 1]).cast(x.dtype());
        if x.is_autodiff() { x * factors.autodiff() } else { x * factors }
    }
}

/// The parameters of a unit, cut from its flat buffer.
pub struct Leaves<'a> {
    layout: &'a UnitLayout,
    tensors: Vec<Tensor<1>>,
}

impl<'a> Leaves<'a> {
    /// Cuts `flat` of `[padded]` by `layout`. With `track` every parameter is a leaf of its own:
    /// one big leaf would get a full-size gradient for every slice of it.
    pub fn new(layout: &'a UnitLayout, flat: &Tensor<1>, track: bool) -> Self {
        let cut = |range: std::ops::Range<usize>| {
            let tensor = flat.clone().slice([range]);
            if track { tensor.autodiff().require_grad() } else { tensor }
        };
        Self { layout, tensors: layout.params.iter().map(|param| cut(param.range())).collect() }
    }

    /// The parameter `name`, relative to the unit, in its shape.
    ///
    /// # Panics
    /// If the unit asks for a parameter that it does not list, or in another rank: a bug in the
    /// unit, which the conformance test of units finds.
    pub fn get<const D: usize>(&self, name: &str) -> Tensor<D> {
        let at = self.layout.position(name).unwrap_or_else(|| panic!("{} has no {name}", self.layout.name));
        let shape: [usize; D] =
            self.layout.params[at].spec.shape.as_slice().try_into().unwrap_or_else(|_| {
                panic!("{}.{name} has shape {:?}", self.layout.name, self.layout.params[at].spec.shape)
            });
        self.tensors[at].clone().reshape(shape)
    }

    /// The gradients of all parameters as one flat buffer of `[padded]` in f32; zeros where there is none.
    pub fn gradient(&self, grads: &mut Gradients) -> Tensor<1> {
        let device = self.tensors[0].device().inner();
        let mut parts: Vec<Tensor<1>> = self
            .layout
            .params
            .iter()
            .zip(&self.tensors)
            .map(|(param, leaf)| {
                let grad = leaf.grad_remove(grads).map(|grad| grad.cast(DType::F32));
                grad.unwrap_or_else(|| Tensor::zeros([param.spec.numel()], &device))
            })
            .collect();
        let padding = self.layout.padded - self.layout.numel;
        if padding > 0 {
            parts.push(Tensor::zeros([padding], &device));
        }
        Tensor::cat(parts, 0)
    }
}
