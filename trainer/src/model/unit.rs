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

use burn_tensor::Tensor;

use super::features::Tokens;
use super::leaves::Leaves;
use super::params::ParamSpec;

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
