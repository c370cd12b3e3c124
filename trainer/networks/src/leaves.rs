//! The parameters of a unit as tensors, cut from its flat buffer.

use std::ops::Range;

use burn_tensor::{DType, Device, Gradients, Tensor};
use kernels::device::host::add;
use kernels::ops::{SharedGradient, cast};

use crate::layout::UnitLayout;
use crate::params::Role;

/// The parameters of a unit, cut from its flat buffer, which is f32 or, as it was gathered, bf16.
pub struct Leaves<'a> {
    layout: &'a UnitLayout,
    tensors: Vec<Tensor<1>>,
    /// Gradients over all uses of each parameter, one use for each size of views.
    gradients: Vec<SharedGradient>,
    /// Input of the operations that use the parameters, before which the backward pass adds their gradients; `None` if it adds them at its
    /// end.
    input: Option<Tensor<3>>,
}

impl<'a> Leaves<'a> {
    /// Cuts `flat` of `[padded]` by `layout`. With `track` every parameter is a leaf of its own:
    /// one big leaf would get a full-size gradient for every slice of it.
    pub fn new(layout: &'a UnitLayout, flat: &Tensor<1>, track: bool) -> Self {
        let cut = |range: Range<usize>, role: Role| {
            let tensor = flat.clone().slice([range]);
            match track {
                true if !role.is_trained() => tensor.autodiff(),
                true => tensor.autodiff().require_grad(),
                false => tensor,
            }
        };
        let tensors: Vec<_> = layout.params.iter().map(|param| cut(param.range(), param.spec.role)).collect();
        let gradients = tensors.iter().map(|_| SharedGradient::default()).collect();
        Self { layout, tensors, gradients, input: None }
    }

    /// Returns the same parameters for uses on `input`, `[B, N, D]`, a tensor of the same graph: on the CPU, the backward pass adds their gradients
    /// before it comes to the units that `input` is a result of, whose gradients it would otherwise hold beside all of these.
    pub fn used_on(&self, input: &Tensor<3>) -> Self {
        let (tensors, gradients) = (self.tensors.clone(), self.gradients.clone());
        Self { layout: self.layout, tensors, gradients, input: Some(input.clone()) }
    }

    /// Returns the parameter `name`, relative to the unit, in its shape: in f32 if it was gathered in fewer bits.
    ///
    /// # Panics
    /// If the unit requests a parameter that it does not list, or in another rank: a bug in the
    /// unit, which `conformance::units` finds.
    pub fn get<const D: usize>(&self, name: &str) -> Tensor<D> {
        self.in_dtype(name, |stored| if stored == DType::BF16 { DType::F32 } else { stored })
    }

    /// Returns the weight `name` as it was gathered, for operations that take it in f32 or bf16: see [`Leaves::get`].
    ///
    /// # Panics
    /// As [`Leaves::get`].
    pub fn stored<const D: usize>(&self, name: &str) -> Tensor<D> {
        self.in_dtype(name, |stored| stored)
    }

    fn in_dtype<const D: usize>(&self, name: &str, dtype: impl FnOnce(DType) -> DType) -> Tensor<D> {
        let at = self.layout.position(name).unwrap_or_else(|| panic!("{} has no {name}", self.layout.name));
        let shape: [usize; D] =
            self.layout.params[at].spec.shape.as_slice().try_into().unwrap_or_else(|_| {
                panic!("{}.{name} has shape {:?}", self.layout.name, self.layout.params[at].spec.shape)
            });
        let tensor = &self.tensors[at];
        self.gradients[at].of(tensor, dtype(tensor.dtype()), self.input.as_ref()).reshape(shape)
    }

    /// Returns the gradients of all parameters as one flat buffer of `[padded]` in f32; zeros where there is none.
    pub fn gradient(&self, grads: &mut Gradients) -> Tensor<1> {
        self.gradients(grads).flat(self.layout, DType::F32)
    }

    /// Returns the gradients of the parameters that have one, in f32.
    pub fn gradients(&self, grads: &mut Gradients) -> ParamGrads {
        let mut of_leaf = |(leaf, shared): (&Tensor<1>, &SharedGradient)| {
            let grad = shared.take().or_else(|| leaf.grad_remove(grads));
            grad.map(|grad| cast(grad, DType::F32))
        };
        let parts = self.tensors.iter().zip(&self.gradients).map(&mut of_leaf).collect();
        ParamGrads { parts, device: self.tensors[0].device().inner() }
    }
}

/// Gradients of a unit's parameters. A stage of a unit uses few of them: the others take neither memory nor time.
pub struct ParamGrads {
    /// Gradient of each parameter of the layout, `[numel]`.
    parts: Vec<Option<Tensor<1>>>,
    device: Device,
}

impl ParamGrads {
    /// Returns the sum of both, parameter by parameter.
    pub fn plus(self, other: Self) -> Self {
        let sum = |pair: (Option<Tensor<1>>, Option<Tensor<1>>)| match pair {
            (Some(a), Some(b)) => Some(add(a, b)),
            (a, b) => a.or(b),
        };
        Self { parts: self.parts.into_iter().zip(other.parts).map(sum).collect(), device: self.device }
    }

    /// Concatenates the gradients to one flat buffer of `[padded]` in `dtype`; zeros where there is none.
    pub fn flat(self, layout: &UnitLayout, dtype: DType) -> Tensor<1> {
        let zeros = |len: usize| Tensor::<1>::zeros([len], &self.device);
        let params = layout.params.iter().zip(self.parts);
        let mut parts: Vec<_> = params
            .map(|(param, grad)| cast(grad.unwrap_or_else(|| zeros(param.spec.numel())), dtype))
            .collect();
        let padding = layout.padded - layout.numel;
        if padding > 0 {
            parts.push(cast(zeros(padding), dtype));
        }
        Tensor::cat(parts, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{Init, ParamSpec};
    use kernels::device::host::to_host;

    /// Gradients in both, in one and in none of two stages; and padding.
    #[test]
    fn gradients_are_added_by_parameter() {
        let device = Device::flex();
        let spec = |name: &str| ParamSpec::weight(name.to_string(), [2, 2], Init::Normal(1.0));
        let layout = UnitLayout::new("unit", ["a", "b", "c"].map(spec).to_vec(), 8);
        let of = |values: Option<[f32; 4]>| values.map(|values| Tensor::from_floats(values, &device));
        let grads = |a, b| ParamGrads { parts: vec![of(a), of(b), None], device: device.clone() };
        let first = grads(Some([1.0, 2.0, 3.0, 4.0]), None);
        let second = grads(Some([10.0; 4]), Some([5.0; 4]));
        let flat = to_host(first.plus(second).flat(&layout, DType::F32));
        assert_eq!(flat.len(), layout.padded);
        assert_eq!(flat[..12], [11.0, 12.0, 13.0, 14.0, 5.0, 5.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0]);
        assert!(flat[12..].iter().all(|value| *value == 0.0));
    }
}
