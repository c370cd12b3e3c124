//! Weights of a product on the CPU in the type that they are stored in: f32, or bf16 if they were
//! gathered in bf16.

use burn_flex::FlexTensor;
use burn_tensor::DType;
use half::bf16;

use super::cpu::elements;

/// Elements of a contiguous weight.
#[derive(Debug, Clone, Copy)]
pub(super) enum Weights<'a> {
    /// Elements in f32.
    Wide(&'a [f32]),
    /// Elements in bf16, which a product in bf16 reads without conversion.
    Narrow(&'a [bf16]),
}

impl<'a> Weights<'a> {
    /// Returns the elements of a contiguous tensor in f32 or bf16.
    pub(super) fn from_tensor(tensor: &'a FlexTensor) -> Self {
        match tensor.dtype() {
            DType::BF16 => Self::Narrow(elements(tensor)),
            _ => Self::Wide(elements(tensor)),
        }
    }
}
