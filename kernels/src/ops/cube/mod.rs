//! CubeCL kernels for the devices that it compiles for, one file each, with its formula. Tests
//! compare each with the composition of Burn operations in the file of the same name one level up.
//!
//! All of them read and write f32, bf16 or f16 and compute in f32. Rows may be further apart than
//! they are long: CUDA's allocations are padded that way.

mod accumulate;
mod attention;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod check;
mod column_sums;
mod conv;
mod cross_entropy;
mod gelu;
mod heads;
mod join;
mod lanes;
mod launch;
mod layer_norm;
#[cfg(feature = "cuda")]
mod library;
mod linear;
mod parts;
mod product;
mod rotary;
mod seed;
mod softmax;
mod swiglu;
mod unit_rows;

use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Shape, Tensor};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::bridge::PrimitiveBackend;

pub(super) use self::accumulate::add_to_place;
pub(super) use self::attention::Attention;
pub(super) use self::conv::{Conv, Windows};
pub(super) use self::cross_entropy::CrossEntropy;
pub(super) use self::gelu::Gelu;
pub(super) use self::join::join;
pub(super) use self::layer_norm::LayerNorm;
#[cfg(feature = "cuda")]
pub(super) use self::library::part_in_place;
#[cfg(feature = "cuda")]
pub(crate) use self::library::{is_nvidia, library_version, reports as library_reports};
pub(super) use self::linear::Linear;
pub(super) use self::product::Matmul;
pub(super) use self::rotary::Rotate;
pub(super) use self::seed::{Both, Seed};
pub(super) use self::swiglu::Swiglu;
pub(super) use self::unit_rows::UnitRows;

/// Returns whether the kernels here accept `tensor`.
pub(super) fn is_cube<const D: usize>(tensor: &Tensor<D>) -> bool {
    matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16)
        && CubeBackend::to_primitive(tensor.clone()).is_some()
}

/// Returns the type of a tensor's elements, as kernels are compiled for it.
fn elem(tensor: &CubeTensor) -> ElemType {
    burn_backend::cubecl::dtype_to_elem_type(tensor.dtype)
}

/// A tensor as rows of its last dimension, equally far apart.
#[derive(Debug, Clone)]
struct Rows {
    tensor: CubeTensor,
    n_rows: usize,
    /// Length of a row.
    d: usize,
    /// Elements from the start of one row to the start of the next.
    stride: usize,
}

impl Rows {
    /// Returns the rows of `tensor`, which is copied only if they are not contiguous and equally
    /// far apart.
    fn of(tensor: &CubeTensor) -> Self {
        match row_stride(tensor) {
            Some(stride) => Self::spaced(tensor.clone(), stride),
            None => {
                let d = tensor.meta.shape()[tensor.meta.num_dims() - 1];
                Self::spaced(into_contiguous(tensor.clone()), d)
            }
        }
    }

    fn spaced(tensor: CubeTensor, stride: usize) -> Self {
        let shape = tensor.meta.shape();
        let rank = tensor.meta.num_dims();
        let n = shape.num_elements();
        let d = shape[rank - 1];
        Self { n_rows: n / d.max(1), d, stride, tensor }
    }

    /// Allocates rows of the same shape and type, contiguous and uninitialized.
    fn empty_like(&self) -> Self {
        Self::of(&empty(&self.tensor, self.tensor.shape(), self.tensor.dtype))
    }

    /// Returns the argument for a kernel.
    fn arg(&self) -> BufferArg {
        self.tensor.clone().into_buffer_arg()
    }
}

/// Returns the elements from one row's start to the next one's, if rows are contiguous and equally
/// far apart.
fn row_stride(tensor: &CubeTensor) -> Option<usize> {
    let dims = tensor.meta.shape().iter().zip(tensor.meta.strides().iter());
    // The stride of a dimension of length one is meaningless.
    let mut dims = dims.map(|(len, stride)| (*len, *stride)).collect::<Vec<_>>();
    let (d, step) = dims.pop()?;
    dims.retain(|(len, _)| *len > 1);
    let whole = !tensor.meta.is_tiled() && (step == 1 || d == 1);
    let nested = dims.windows(2).all(|pair| pair[0].1 == pair[1].1 * pair[1].0);
    let stride = dims.last().map_or(d, |(_, stride)| *stride);
    (whole && nested && stride >= d).then_some(stride)
}

/// Allocates a contiguous, uninitialized tensor on the device of `like`.
pub fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// Returns the matrices of `[.., M, N]` transposed, as a view.
fn transposed(matrices: CubeTensor) -> CubeTensor {
    let rank = matrices.meta.num_dims();
    CubeBackend::float_swap_dims(matrices, rank - 2, rank - 1)
}

pub(super) fn cast(tensor: CubeTensor, dtype: DType) -> CubeTensor {
    CubeBackend::float_cast(tensor, dtype.into())
}

/// Returns the number of elements that a unit reads at once: the most that all `rows` allow.
fn vector_size(rows: &[&Rows]) -> usize {
    rows.iter()
        .map(|rows| {
            let sizes = rows.tensor.client.io_optimized_vector_sizes(rows.tensor.dtype.size());
            sizes.filter(|n| rows.d.is_multiple_of(*n) && rows.stride.is_multiple_of(*n)).max().unwrap_or(1)
        })
        .min()
        .unwrap_or(1)
}

/// Returns the launch dimensions for `n_units` units.
pub fn one_unit_each(client: &Client, n_units: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new_1d(256.min(client.properties().hardware.max_units_per_cube));
    let n_cubes = n_units.div_ceil(dim.num_elems() as usize);
    (spread(client, n_cubes), dim)
}

/// Returns a count of cubes within the limit of each dimension.
pub fn spread(client: &Client, n_cubes: usize) -> CubeCount {
    let (max, _, _) = client.properties().hardware.max_cube_count;
    let n_cubes = n_cubes as u32;
    let max = max.max(1);
    if n_cubes <= max {
        CubeCount::Static(n_cubes, 1, 1)
    } else {
        CubeCount::Static(max, n_cubes.div_ceil(max), 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::twin::{assert_close, devices, leaves};
    use crate::ops::{attention, gelu, layer_norm, swiglu};

    /// Returns the output and the input's gradient of `op`, in f32.
    fn results(op: impl Fn(Tensor<3>) -> Tensor<3>, x: &Tensor<3>, dtype: DType) -> [Tensor<3>; 2] {
        let y = op(x.clone().cast(dtype));
        assert_eq!(y.dtype(), dtype);
        let y = y.cast(DType::F32);
        let grads = (y.clone() * y.clone().inner().powi_scalar(2).autodiff()).sum().backward();
        [y.inner(), x.grad(&grads).expect("a leaf")]
    }

    /// Every operation returns its f32 result, rounded, in 16-bit types.
    #[test]
    fn types_of_16_bits_are_those_of_32_rounded() {
        for (device, (dtype, tolerance)) in devices()
            .into_iter()
            .flat_map(|d| [(DType::F16, 4e-3), (DType::BF16, 3e-2)].map(|t| (d.clone(), t)))
        {
            if device == burn_tensor::Device::flex() || !device.supports_dtype(dtype) {
                continue;
            }
            let x = leaves(&device, &[[2, 21, 72]], 1).remove(0);
            // Rounded beforehand, so that both begin with the same numbers.
            let x = x.inner().cast(dtype).cast(DType::F32).autodiff().require_grad();
            let gain = |dtype| Tensor::<1>::ones([72], &device).autodiff().cast(dtype);
            let norm = |x: Tensor<3>| layer_norm(x.clone(), gain(x.dtype()), gain(x.dtype()), 1e-6);
            let ops: [(&str, &dyn Fn(Tensor<3>) -> Tensor<3>); 4] = [
                ("gelu", &gelu),
                ("swiglu", &swiglu),
                ("layer norm", &norm),
                ("attention", &|x| attention(x, 3)),
            ];
            for (name, op) in ops {
                let [y, gx] = results(op, &x, dtype);
                let [y32, gx32] = results(op, &x, DType::F32);
                assert_close(name, y, y32, tolerance);
                assert_close(name, gx, gx32, tolerance);
            }
        }
    }

    /// Rows that are further apart than they are long are read in place; others are copied, and
    /// none is mixed up.
    #[test]
    fn rows_are_found_in_padded_tensors_and_in_slices() {
        let cpu = burn_tensor::Device::flex();
        for device in devices() {
            let x = leaves(&device, &[[4, 6, 128]], 3).remove(0).inner();
            if !is_cube(&x) {
                continue;
            }
            // A view, because it ends at a multiple of the device's vector size.
            let padded = x.clone().slice([0..4, 0..6, 0..64]);
            let primitive = padded.clone().try_into_primitive::<CubeBackend>().unwrap();
            assert_eq!(Rows::of(&primitive).stride, 128);
            let swapped = x.clone().swap_dims(0, 1);
            let one = x.clone().slice([0..1, 0..6, 0..128]).swap_dims(0, 1);
            let cut = x.clone().slice([1..3, 2..5, 3..9]);
            for part in [padded, swapped.clone(), swapped.swap_dims(1, 2), one, cut] {
                let there = part.clone().to_device(&cpu);
                assert_close("gelu", gelu(part.clone()).to_device(&cpu), gelu(there.clone()), 1e-6);
                let [_, _, d] = part.dims();
                let norm = |x: Tensor<3>| {
                    let gain = Tensor::ones([d], &x.device());
                    let shift = Tensor::zeros([d], &x.device());
                    layer_norm(x, gain, shift, 1e-6)
                };
                assert_close("layer norm", norm(part).to_device(&cpu), norm(there), 1e-5);
            }
        }
    }

    /// More cubes than a dimension allows.
    #[test]
    fn cubes_are_spread_over_dimensions() {
        for device in devices() {
            let n = 65_537 * 256 + 3;
            let x = Tensor::<1>::ones([n], &device);
            if is_cube(&x) {
                let y = gelu(x.reshape([1, n])).sum().into_scalar::<f32>();
                assert!((y / n as f32 - 0.841_345).abs() < 1e-3, "{y}");
            }
        }
    }
}
