//! What units hand on to one another.

use burn_tensor::Tensor;

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
