//! Residual branch of a convolutional network, undivided or as one of the parts that it is divided
//! into.
//!
//! ```text
//! h₁ = conv₁(x)   h_i = conv_i(e_i(relu(norm(h_{i-1}))))      e_L an excitation if there is one, otherwise identity
//! y = relu(norm(h_L) + x)      or norm(conv(x)) in place of x, where grid or width change
//! ```
//!
//! x `[B, H·W, C]`, h_i `[B, H'·W', C_i]`. A branch is a list of steps. A step computes columns of
//! the output of one product from rows of its weight; in an undivided branch it computes all of
//! them. Columns that are computed in several steps equal those of one step bit by bit, and so do
//! the gradients of weights; the gradient at the input of a product is a sum over its steps, whose
//! rounding differs. A normalization belongs to the last step of its product, and to the next stage
//! of the same unit.

mod part;
mod shapes;
mod steps;

pub(super) use part::BranchPart;
pub(super) use steps::Branch;
