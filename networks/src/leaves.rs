//! The parameters of a unit as tensors, cut from its flat buffer.
//!
//! On a CPU each parameter is one leaf of autodiff's graph, and its gradients are summed over its
//! uses. On a GPU each use is a separate leaf, whose gradient the operations add to the unit's flat
//! gradient, and the whole buffer is rounded for products at once.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use burn_tensor::{DType, Device, Gradients, Tensor};
use kernels::device::host::add;
use kernels::ops::{FlatGradient, SharedGradient, cast, part};

use crate::layout::UnitLayout;

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
    input: Option<Tensor<2>>,
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
    /// Cuts `flat` of `[padded]` by `layout`. With `track` every parameter is a separate leaf: a
    /// single leaf would get a full-size gradient for every slice of it.
    pub fn new(layout: &'a UnitLayout, flat: &Tensor<1>, track: bool) -> Self {
        Self::for_products(layout, flat, track, flat.dtype())
    }

    /// Creates [`Leaves::new`] for a unit that computes products in `products`: on a GPU,
    /// [`Leaves::stored`] returns weights in that type.
    pub fn for_products(layout: &'a UnitLayout, flat: &Tensor<1>, track: bool, products: DType) -> Self {
        if let Some(gradient) = FlatGradient::on_device_of(flat) {
            let gradient = track.then(|| Mutex::new(Some(gradient)));
            let in_other_type = OnceLock::new();
            let buffers = GpuLeaves { gathered: flat.clone(), products, in_other_type, gradient };
            return Self { layout, source: Source::Gpu(Arc::new(buffers)) };
        }
        let mut tensors = Vec::with_capacity(layout.params.len());
        for param in &layout.params {
            let tensor = flat.clone().slice([param.range()]);
            tensors.push(if !track {
                tensor
            } else if param.spec.role.is_trained() {
                tensor.autodiff().require_grad()
            } else {
                tensor.autodiff()
            });
        }
        let gradients = tensors.iter().map(|_| SharedGradient::default()).collect();
        Self { layout, source: Source::Cpu(Box::new(CpuLeaves { tensors, gradients, input: None })) }
    }

    /// Uses `copy`, the values of the buffer in another type, instead of a conversion of the
    /// buffer.
    #[must_use]
    pub fn with_copy(self, copy: &Tensor<1>) -> Self {
        if let Source::Gpu(buffers) = &self.source
            && buffers.products == copy.dtype()
        {
            // Fails only if the buffer has already been converted, to the same values.
            let _ = buffers.in_other_type.set(copy.clone());
        }
        self
    }

    /// Returns the same parameters for uses on `input`, `[T, D]`, a tensor of the same graph. On
    /// the CPU, the backward pass then adds their gradients before it reaches the units that
    /// compute `input`; otherwise it would hold the gradients of both at the same time.
    pub fn used_on(&self, input: &Tensor<2>) -> Self {
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
        let index = self.position(name);
        self.in_dtype(index, self.shape(index), UsedIn::FullPrecision)
    }

    /// Returns the weight `name` for operations that take it in f32 or bf16: on a CPU as it was
    /// gathered, on a GPU in the type of products. See [`Leaves::get`].
    ///
    /// # Panics
    /// As [`Leaves::get`].
    pub fn stored<const D: usize>(&self, name: &str) -> Tensor<D> {
        let index = self.position(name);
        self.in_dtype(index, self.shape(index), UsedIn::Products)
    }

    /// Returns the weight `name` as a matrix, with its first dimension as rows. See
    /// [`Leaves::stored`].
    ///
    /// # Panics
    /// If the unit requests a parameter that it does not list: a bug in the unit.
    pub fn matrix(&self, name: &str) -> Tensor<2> {
        let index = self.position(name);
        let spec = &self.layout.params[index].spec;
        let shape = [spec.shape[0], spec.numel() / spec.shape[0]];
        self.in_dtype(index, shape, UsedIn::Products)
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

    fn shape<const D: usize>(&self, index: usize) -> [usize; D] {
        let slot = &self.layout.params[index];
        slot.spec.shape.as_slice().try_into().unwrap_or_else(|_| {
            panic!("{}.{} has shape {:?}", self.layout.name, slot.spec.name, slot.spec.shape)
        })
    }

    /// Returns parameter `index` in the type of `used_in`.
    fn in_dtype<const D: usize>(&self, index: usize, shape: [usize; D], used_in: UsedIn) -> Tensor<D> {
        match &self.source {
            Source::Cpu(leaves) => {
                let tensor = &leaves.tensors[index];
                let dtype = used_in.dtype(tensor.dtype(), None);
                leaves.gradients[index].register(tensor, dtype, leaves.input.as_ref()).reshape(shape)
            }
            Source::Gpu(buffers) => {
                let slot = &self.layout.params[index];
                let dtype = used_in.dtype(buffers.gathered.dtype(), Some(buffers.products));
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
        let mut parts = Vec::with_capacity(leaves.tensors.len());
        for (leaf, shared) in leaves.tensors.iter().zip(&leaves.gradients) {
            let grad = shared.take().or_else(|| leaf.grad_remove(grads));
            parts.push(grad.map(|grad| cast(grad, DType::F32)));
        }
        ParamGrads::ByParameter { parts, device: leaves.tensors[0].device().inner() }
    }
}

/// Use of a parameter, which decides its type.
#[derive(Debug, Clone, Copy)]
enum UsedIn {
    /// Operations in full precision: in f32 if it was gathered in bf16, otherwise as it was
    /// gathered.
    FullPrecision,
    /// Products: on a GPU in their type, otherwise as it was gathered.
    Products,
}

impl UsedIn {
    /// Returns the type, given the `gathered` one and, on a GPU, that of `products`.
    fn dtype(self, gathered: DType, products: Option<DType>) -> DType {
        match self {
            Self::FullPrecision if gathered == DType::BF16 => DType::F32,
            Self::FullPrecision => gathered,
            Self::Products => products.unwrap_or(gathered),
        }
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
        let mut flat_gradient = None;
        if let Some(gradient) = &self.gradient {
            flat_gradient = gradient.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
        match flat_gradient {
            Some(gradient) => gradient.finish(grads),
            None => cast(self.gathered.zeros_like(), DType::F32),
        }
    }
}

/// Gradients of a unit's parameters.
pub enum ParamGrads {
    /// Gradient of each parameter of the layout, `[numel]`. A stage of a unit uses few of the
    /// parameters: the others take neither memory nor time.
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
                let mut sums = Vec::with_capacity(parts.len());
                for pair in parts.into_iter().zip(others) {
                    sums.push(match pair {
                        (Some(a), Some(b)) => Some(add(a, b)),
                        (a, b) => a.or(b),
                    });
                }
                Self::ByParameter { parts: sums, device }
            }
            (Self::Flat(a), Self::Flat(b)) => Self::Flat(add(a, b)),
            _ => panic!("gradients of one unit are on one device"),
        }
    }

    /// Takes the gradient of parameter `index` of `layout`, `[numel]`; `None` if there is none.
    pub fn take(&mut self, layout: &UnitLayout, index: usize) -> Option<Tensor<1>> {
        match self {
            Self::ByParameter { parts, .. } => parts[index].take(),
            Self::Flat(flat) => Some(part(flat, layout.params[index].range())),
        }
    }

    /// Concatenates the gradients to one flat buffer of `[padded]` in `dtype`; zeros where there is
    /// none.
    pub fn flat(self, layout: &UnitLayout, dtype: DType) -> Tensor<1> {
        let (parts, device) = match self {
            Self::ByParameter { parts, device } => (parts, device),
            Self::Flat(flat) => return cast(flat, dtype),
        };
        let mut flat_parts = Vec::with_capacity(parts.len() + 1);
        for (param, grad) in layout.params.iter().zip(parts) {
            let grad = grad.unwrap_or_else(|| Tensor::zeros([param.spec.numel()], &device));
            flat_parts.push(cast(grad, dtype));
        }
        let padding = layout.padded - layout.numel;
        if padding > 0 {
            flat_parts.push(cast(Tensor::zeros([padding], &device), dtype));
        }
        Tensor::cat(flat_parts, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{Init, ParamSpec};
    use kernels::device::host::to_host;

    /// Gradients of parameters `a` and `b`; parameter `c` has none.
    fn grads(a: Option<[f32; 4]>, b: Option<[f32; 4]>) -> ParamGrads {
        let device = Device::flex();
        let a = a.map(|values| Tensor::from_floats(values, &device));
        let b = b.map(|values| Tensor::from_floats(values, &device));
        ParamGrads::ByParameter { parts: vec![a, b, None], device }
    }

    /// Covers gradients in both, in one and in neither of two stages; and padding.
    #[test]
    fn gradients_are_added_by_parameter() {
        let specs = ["a", "b", "c"].map(|name| ParamSpec::weight(name, [2, 2], Init::Normal(1.0)));
        let layout = UnitLayout::new("unit", specs.to_vec(), 8);
        let first = grads(Some([1.0, 2.0, 3.0, 4.0]), None);
        let second = grads(Some([10.0; 4]), Some([5.0; 4]));
        let flat = to_host(first.plus(second).flat(&layout, DType::F32));
        assert_eq!(flat.len(), layout.padded);
        assert_eq!(flat[..12], [11.0, 12.0, 13.0, 14.0, 5.0, 5.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0]);
        assert!(flat[12..].iter().all(|value| *value == 0.0));
    }
}
