//! The parameters of a unit as tensors, cut from its flat buffer.

use std::ops::Range;

use burn_tensor::{DType, Gradients, Tensor};

use super::layout::UnitLayout;
use super::params::Role;
use crate::ops::SharedGradient;

/// The parameters of a unit, cut from its flat buffer.
pub struct Leaves<'a> {
    layout: &'a UnitLayout,
    tensors: Vec<Tensor<1>>,
    /// A parameter is used once for each size of views.
    gradients: Vec<SharedGradient>,
}

impl<'a> Leaves<'a> {
    /// Cuts `flat` of `[padded]` by `layout`. With `track` every parameter is a leaf of its own:
    /// one big leaf would get a full-size gradient for every slice of it.
    pub fn new(layout: &'a UnitLayout, flat: &Tensor<1>, track: bool) -> Self {
        let cut = |range: Range<usize>, role: Role| {
            let tensor = flat.clone().slice([range]);
            match track {
                true if role == Role::Running => tensor.autodiff(),
                true => tensor.autodiff().require_grad(),
                false => tensor,
            }
        };
        let tensors: Vec<_> = layout.params.iter().map(|param| cut(param.range(), param.spec.role)).collect();
        let gradients = tensors.iter().map(|_| SharedGradient::default()).collect();
        Self { layout, tensors, gradients }
    }

    /// The parameter `name`, relative to the unit, in its shape.
    ///
    /// # Panics
    /// If the unit asks for a parameter that it does not list, or in another rank: a bug in the
    /// unit, which `conformance::units` finds.
    pub fn get<const D: usize>(&self, name: &str) -> Tensor<D> {
        let at = self.layout.position(name).unwrap_or_else(|| panic!("{} has no {name}", self.layout.name));
        let shape: [usize; D] =
            self.layout.params[at].spec.shape.as_slice().try_into().unwrap_or_else(|_| {
                panic!("{}.{name} has shape {:?}", self.layout.name, self.layout.params[at].spec.shape)
            });
        self.gradients[at].of(&self.tensors[at]).reshape(shape)
    }

    /// The gradients of all parameters as one flat buffer of `[padded]` in f32; zeros where there is none.
    pub fn gradient(&self, grads: &mut Gradients) -> Tensor<1> {
        let device = self.tensors[0].device().inner();
        let mut parts: Vec<Tensor<1>> = self
            .layout
            .params
            .iter()
            .zip(self.tensors.iter().zip(&self.gradients))
            .map(|(param, (leaf, shared))| {
                let grad = shared.take().or_else(|| leaf.grad_remove(grads));
                let grad = grad.map(|grad| grad.cast(DType::F32));
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
