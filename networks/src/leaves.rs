//! The parameters of a unit as tensors, cut from its flat buffer.
//!
//! On a CPU each parameter is one leaf of autodiff's graph, and its gradients are added over its
//! uses. On a GPU each use is a leaf of its own, whose gradient the operations add to the unit's
//! flat gradient, and the whole buffer is rounded for products at once.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use burn_tensor::{DType, Device, Gradients, Tensor};
use kernels::device::host::add;
use kernels::ops::{FlatGradient, SharedGradient, cast, part};

use crate::layout::UnitLayout;
use crate::params::Role;

/// The parameters of a unit, cut from its flat buffer, which is f32 or, as it was gathered, bf16.
pub struct Leaves<'a> {
    layout: &'a UnitLayout,
    source: Source,
}

/// Source of the parameters.
#[derive(Clone)]
enum Source {
    Cpu(Box<CpuLeaves>),
    Gpu(Arc<GpuLeaves>),
}

/// A leaf for each parameter.
#[derive(Clone)]
struct CpuLeaves {
    tensors: Vec<Tensor<1>>,
    /// Gradients over all uses of each parameter, one use for each size of views.
    gradients: Vec<SharedGradient>,
    /// Input of the operations that use the parameters, before which the backward pass adds their
    /// gradients; `None` if it adds them at its end.
    input: Option<Tensor<3>>,
}

/// Buffers in the memory of a GPU.
struct GpuLeaves {
    /// The buffer as it was gathered.
    gathered: Tensor<1>,
    /// Type in which products take weights.
    products: DType,
    /// The buffer in bf16, or in f32 where it was gathered in bf16.
    in_other_type: OnceLock<Tensor<1>>,
    /// The gradient of the unit; `None` if gradients are not tracked.
    gradient: Option<Mutex<Option<FlatGradient>>>,
}

impl<'a> Leaves<'a> {
    /// Cuts `flat` of `[padded]` by `layout`. With `track` every parameter is a leaf of its own:
    /// one big leaf would get a full-size gradient for every slice of it.
    pub fn new(layout: &'a UnitLayout, flat: &Tensor<1>, track: bool) -> Self {
        Self::for_products(layout, flat, track, flat.dtype())
    }

    /// Creates [`Leaves::new`] for a unit that computes products in `products`: on a GPU,
    /// [`Leaves::stored`] returns weights in that type.
    pub fn for_products(layout: &'a UnitLayout, flat: &Tensor<1>, track: bool, products: DType) -> Self {
        if let Some(gradient) = FlatGradient::on_device_of(flat, track) {
            let gradient = gradient.map(|gradient| Mutex::new(Some(gradient)));
            let in_other_type = OnceLock::new();
            let buffers = GpuLeaves { gathered: flat.clone(), products, in_other_type, gradient };
            return Self { layout, source: Source::Gpu(Arc::new(buffers)) };
        }
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
        Self { layout, source: Source::Cpu(Box::new(CpuLeaves { tensors, gradients, input: None })) }
    }

    /// Takes `copy`, the values of the buffer in another type, which is not made again.
    #[must_use]
    pub fn with_copy(self, copy: &Tensor<1>) -> Self {
        if let Source::Gpu(buffers) = &self.source
            && buffers.products == copy.dtype()
        {
            // Nobody has asked for one yet: it would be the same.
            let _ = buffers.in_other_type.set(copy.clone());
        }
        self
    }

    /// Returns the same parameters for uses on `input`, `[B, N, D]`, a tensor of the same graph: on
    /// the CPU, the backward pass adds their gradients before it comes to the units that `input` is
    /// a result of, whose gradients it would otherwise hold beside all of these.
    pub fn used_on(&self, input: &Tensor<3>) -> Self {
        let mut source = self.source.clone();
        if let Source::Cpu(leaves) = &mut source {
            leaves.input = Some(input.clone());
        }
        Self { layout: self.layout, source }
    }

    /// Returns the parameter `name`, relative to the unit, in its shape: in f32 if it was gathered
    /// in fewer bits.
    ///
    /// # Panics
    /// If the unit requests a parameter that it does not list, or in another rank: a bug in the
    /// unit, which `conformance::units` finds.
    pub fn get<const D: usize>(&self, name: &str) -> Tensor<D> {
        let number = self.position(name);
        self.in_dtype(
            number,
            self.shape(number),
            |stored, _| {
                if stored == DType::BF16 { DType::F32 } else { stored }
            },
        )
    }

    /// Returns the weight `name` for operations that take it in f32 or bf16: on a CPU as it was
    /// gathered, on a GPU in the type of products. See [`Leaves::get`].
    ///
    /// # Panics
    /// As [`Leaves::get`].
    pub fn stored<const D: usize>(&self, name: &str) -> Tensor<D> {
        let number = self.position(name);
        self.in_dtype(number, self.shape(number), |stored, products| products.unwrap_or(stored))
    }

    /// Returns the weight `name` as a matrix, with its first dimension as rows. See
    /// [`Leaves::stored`].
    ///
    /// # Panics
    /// If the unit requests a parameter that it does not list: a bug in the unit.
    pub fn matrix(&self, name: &str) -> Tensor<2> {
        let number = self.position(name);
        let spec = &self.layout.params[number].spec;
        let shape = [spec.shape[0], spec.numel() / spec.shape[0]];
        self.in_dtype(number, shape, |stored, products| products.unwrap_or(stored))
    }

    /// Returns the vector `name`, which is added to a product: on a GPU in the type of products.
    /// See [`Leaves::get`].
    ///
    /// # Panics
    /// As [`Leaves::get`].
    pub fn bias(&self, name: &str) -> Tensor<1> {
        match &self.source {
            Source::Cpu(_) => self.get(name),
            Source::Gpu(_) => self.stored(name),
        }
    }

    fn position(&self, name: &str) -> usize {
        self.layout.position(name).unwrap_or_else(|| panic!("{} has no {name}", self.layout.name))
    }

    fn shape<const D: usize>(&self, number: usize) -> [usize; D] {
        let slot = &self.layout.params[number];
        slot.spec.shape.as_slice().try_into().unwrap_or_else(|_| {
            panic!("{}.{} has shape {:?}", self.layout.name, slot.spec.name, slot.spec.shape)
        })
    }

    /// Returns parameter `number` in the type that `dtype` returns, given that of the gathered
    /// buffer and, on a GPU, that of products.
    fn in_dtype<const D: usize>(
        &self,
        number: usize,
        shape: [usize; D],
        dtype: impl FnOnce(DType, Option<DType>) -> DType,
    ) -> Tensor<D> {
        match &self.source {
            Source::Cpu(leaves) => {
                let tensor = &leaves.tensors[number];
                let dtype = dtype(tensor.dtype(), None);
                leaves.gradients[number].of(tensor, dtype, leaves.input.as_ref()).reshape(shape)
            }
            Source::Gpu(buffers) => {
                let slot = &self.layout.params[number];
                let dtype = dtype(buffers.gathered.dtype(), Some(buffers.products));
                let value = part(buffers.flat(dtype), slot.range()).reshape(shape);
                let Some(gradient) = &buffers.gradient else { return value };
                let mut gradient = gradient.lock().unwrap_or_else(PoisonError::into_inner);
                match gradient.as_mut() {
                    Some(gradient) if slot.spec.role.is_trained() => gradient.leaf(value, slot.range()),
                    _ => value.autodiff(),
                }
            }
        }
    }

    /// Returns the gradients of all parameters as one flat buffer of `[padded]` in f32; zeros where
    /// there is none.
    pub fn gradient(&self, grads: &mut Gradients) -> Tensor<1> {
        self.gradients(grads).flat(self.layout, DType::F32)
    }

    /// Returns the gradients of the parameters that have one, in f32. Gradients are taken: a second
    /// call returns zeros.
    pub fn gradients(&self, grads: &mut Gradients) -> ParamGrads {
        let leaves = match &self.source {
            Source::Cpu(leaves) => leaves,
            Source::Gpu(buffers) => return ParamGrads::Flat(buffers.gradient(grads)),
        };
        let mut of_leaf = |(leaf, shared): (&Tensor<1>, &SharedGradient)| {
            let grad = shared.take().or_else(|| leaf.grad_remove(grads));
            grad.map(|grad| cast(grad, DType::F32))
        };
        let parts = leaves.tensors.iter().zip(&leaves.gradients).map(&mut of_leaf).collect();
        ParamGrads::ByParameter { parts, device: leaves.tensors[0].device().inner() }
    }
}

impl GpuLeaves {
    /// Returns the buffer in `dtype`, which is converted once.
    fn flat(&self, dtype: DType) -> &Tensor<1> {
        if dtype == self.gathered.dtype() {
            return &self.gathered;
        }
        self.in_other_type.get_or_init(|| cast(self.gathered.clone(), dtype))
    }

    fn gradient(&self, grads: &mut Gradients) -> Tensor<1> {
        let gradient = self.gradient.as_ref();
        let gradient = gradient.and_then(|held| held.lock().unwrap_or_else(PoisonError::into_inner).take());
        match gradient {
            Some(gradient) => gradient.finish(grads),
            None => cast(self.gathered.zeros_like(), DType::F32),
        }
    }
}

/// Gradients of a unit's parameters.
pub enum ParamGrads {
    /// Gradient of each parameter of the layout, `[numel]`. A stage of a unit uses few of them: the
    /// others take neither memory nor time.
    ByParameter {
        /// Gradients of those that have one.
        parts: Vec<Option<Tensor<1>>>,
        /// Device that holds them.
        device: Device,
    },
    /// One buffer for all of them, `[padded]` in f32.
    Flat(Tensor<1>),
}

impl ParamGrads {
    /// Returns the sum of both, parameter by parameter.
    ///
    /// # Panics
    /// If one is of a CPU and one of a GPU: a bug in the step.
    pub fn plus(self, other: Self) -> Self {
        match (self, other) {
            (Self::ByParameter { parts, device }, Self::ByParameter { parts: others, .. }) => {
                Self::ByParameter {
                    parts: parts
                        .into_iter()
                        .zip(others)
                        .map(|pair| match pair {
                            (Some(a), Some(b)) => Some(add(a, b)),
                            (a, b) => a.or(b),
                        })
                        .collect(),
                    device,
                }
            }
            (Self::Flat(a), Self::Flat(b)) => Self::Flat(add(a, b)),
            _ => panic!("gradients of one unit are on one device"),
        }
    }

    /// Concatenates the gradients to one flat buffer of `[padded]` in `dtype`; zeros where there is
    /// none.
    pub fn flat(self, layout: &UnitLayout, dtype: DType) -> Tensor<1> {
        let (parts, device) = match self {
            Self::ByParameter { parts, device } => (parts, device),
            Self::Flat(flat) => return cast(flat, dtype),
        };
        let zeros = |len: usize| Tensor::<1>::zeros([len], &device);
        let params = layout.params.iter().zip(parts);
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
        let grads =
            |a, b| ParamGrads::ByParameter { parts: vec![of(a), of(b), None], device: device.clone() };
        let first = grads(Some([1.0, 2.0, 3.0, 4.0]), None);
        let second = grads(Some([10.0; 4]), Some([5.0; 4]));
        let flat = to_host(first.plus(second).flat(&layout, DType::F32));
        assert_eq!(flat.len(), layout.padded);
        assert_eq!(flat[..12], [11.0, 12.0, 13.0, 14.0, 5.0, 5.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0]);
        assert!(flat[12..].iter().all(|value| *value == 0.0));
    }
}
