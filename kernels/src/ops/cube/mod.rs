//! Kernels for the devices that CubeCL supports, one operation per file, with its formula. Tests
//! compare each with the composition of Burn operations in the file of the same name one level up.
//!
//! All kernels read and write f32, bf16 or f16 and compute in f32. The stride of rows may exceed
//! their length, because CUDA's allocations are padded.
//!
//! They cover the steps between matrix products for which Burn has no single operation, in one pass
//! over memory instead of several. Depthwise convolutions, batch normalization and pooling have no
//! kernel here: on GPUs they are Burn's operations.
//!
//! The source is the same for CUDA and `wgpu`, so that tests can run on a Vulkan driver in software
//! (Mesa's llvmpipe). Burn's fusion is disabled. It would fuse the same chains, but does not expose
//! the device addresses that NCCL needs, and compiles a new kernel for every combination of
//! operations that it finds in its queue.

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
mod join_norm;
mod lanes;
mod launch;
mod layer_norm;
#[cfg(feature = "cuda")]
mod library;
mod linear;
mod norm_gradient;
#[cfg(feature = "cuda")]
mod packed_attention;
mod parts;
mod product;
mod rotary;
mod seed;
#[cfg(feature = "cuda")]
mod sizes;
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
pub(super) use self::attention::StreamAttention;
pub(super) use self::conv::{Conv, Windows};
pub(super) use self::cross_entropy::CrossEntropy;
pub(super) use self::gelu::Gelu;
pub(super) use self::join::{Join, join};
pub(super) use self::join_norm::join_norm;
pub(super) use self::layer_norm::LayerNorm;
#[cfg(feature = "cuda")]
pub(super) use self::library::part_in_place;
#[cfg(feature = "cuda")]
pub(crate) use self::library::{is_nvidia, library_version, reports as library_reports};
pub(super) use self::linear::Linear;
#[cfg(feature = "cuda")]
pub(crate) use self::packed_attention::reports as attention_reports;
pub(super) use self::product::Matmul;
pub(super) use self::rotary::Rotate;
pub(super) use self::seed::{AddSeeds, Seed};
pub(super) use self::swiglu::Swiglu;
pub(super) use self::unit_rows::UnitRows;

/// Returns whether the kernels of this module support `tensor`.
pub(super) fn is_cube<const D: usize>(tensor: &Tensor<D>) -> bool {
    matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16)
        && CubeBackend::to_primitive(tensor.clone()).is_some()
}

/// Returns the type of a tensor's elements, for which a kernel is compiled.
fn elem(tensor: &CubeTensor) -> ElemType {
    burn_backend::cubecl::dtype_to_elem_type(tensor.dtype)
}

/// A tensor as rows of its last dimension, with a constant stride.
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
    /// Returns the rows of `tensor`, which is copied only if rows are not contiguous or have no
    /// constant stride.
    fn new(tensor: &CubeTensor) -> Self {
        match row_stride(tensor) {
            Some(stride) => Self::with_stride(tensor.clone(), stride),
            None => {
                let d = tensor.meta.shape()[tensor.meta.num_dims() - 1];
                Self::with_stride(into_contiguous(tensor.clone()), d)
            }
        }
    }

    fn with_stride(tensor: CubeTensor, stride: usize) -> Self {
        let shape = tensor.meta.shape();
        let rank = tensor.meta.num_dims();
        let n = shape.num_elements();
        let d = shape[rank - 1];
        Self { n_rows: n / d.max(1), d, stride, tensor }
    }

    /// Allocates rows of the same shape and type, contiguous and uninitialized.
    fn empty_like(&self) -> Self {
        Self::new(&empty(&self.tensor, self.tensor.shape(), self.tensor.dtype))
    }

    /// Returns the tensor as an argument of a kernel.
    fn arg(&self) -> BufferArg {
        self.tensor.clone().into_buffer_arg()
    }
}

/// Returns the number of elements from the start of one row to the start of the next, if rows are
/// contiguous and their stride is constant.
fn row_stride(tensor: &CubeTensor) -> Option<usize> {
    let dims = tensor.meta.shape().iter().zip(tensor.meta.strides().iter());
    let mut dims = dims.map(|(len, stride)| (*len, *stride)).collect::<Vec<_>>();
    let (d, step) = dims.pop()?;
    // The stride of a dimension of length one is meaningless.
    dims.retain(|(len, _)| *len > 1);
    let are_rows_contiguous = !tensor.meta.is_tiled() && (step == 1 || d == 1);
    let is_stride_constant = dims.windows(2).all(|pair| pair[0].1 == pair[1].1 * pair[1].0);
    let stride = dims.last().map_or(d, |(_, stride)| *stride);
    if are_rows_contiguous && is_stride_constant && stride >= d { Some(stride) } else { None }
}

/// Allocates a contiguous, uninitialized tensor on the device of `like`.
pub fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// Returns a view of `[.., M, N]` matrices, transposed.
fn transposed(matrices: CubeTensor) -> CubeTensor {
    let rank = matrices.meta.num_dims();
    CubeBackend::float_swap_dims(matrices, rank - 2, rank - 1)
}

pub(super) fn cast(tensor: CubeTensor, dtype: DType) -> CubeTensor {
    CubeBackend::float_cast(tensor, dtype.into())
}

/// Returns the number of elements that a unit reads at once: the largest that all `rows` allow.
fn vector_size(rows: &[&Rows]) -> usize {
    rows.iter().map(|rows| largest_vector_size(rows)).min().unwrap_or(1)
}

fn largest_vector_size(rows: &Rows) -> usize {
    let sizes = rows.tensor.client.io_optimized_vector_sizes(rows.tensor.dtype.size());
    sizes.filter(|n| rows.d.is_multiple_of(*n) && rows.stride.is_multiple_of(*n)).max().unwrap_or(1)
}

/// Returns the launch dimensions for `n_units` units.
pub fn one_unit_each(client: &Client, n_units: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new_1d(256.min(client.properties().hardware.max_units_per_cube));
    let n_cubes = n_units.div_ceil(dim.num_elems() as usize);
    (cube_count(client, n_cubes), dim)
}

/// Returns the launch dimensions for at least `n_cubes` cubes, within the limit of each dimension.
pub fn cube_count(client: &Client, n_cubes: usize) -> CubeCount {
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
    use crate::ops::testing::{assert_close, devices, leaves};
    use crate::ops::{Lengths, attention, gelu, layer_norm, swiglu};

    /// Returns the output and the input's gradient of `op`, in f32.
    fn output_and_gradient(
        op: impl Fn(Tensor<3>) -> Tensor<3>,
        x: &Tensor<3>,
        dtype: DType,
    ) -> [Tensor<3>; 2] {
        let y = op(x.clone().cast(dtype));
        assert_eq!(y.dtype(), dtype);
        let y = y.cast(DType::F32);
        let grads = (y.clone() * y.clone().inner().powi_scalar(2).autodiff()).sum().backward();
        [y.inner(), x.grad(&grads).expect("a leaf")]
    }

    /// Layer norm of tracked rows with ones for both parameters.
    fn tracked_layer_norm(x: Tensor<3>, device: &burn_tensor::Device) -> Tensor<3> {
        let gain = Tensor::<1>::ones([72], device).autodiff().cast(x.dtype());
        let shift = Tensor::<1>::ones([72], device).autodiff().cast(x.dtype());
        layer_norm(x, gain, shift, 1e-6)
    }

    /// Attention over the tokens of each image of `x`, `[B, N, 3·D]`.
    fn attention_of_images(x: Tensor<3>, n_heads: usize) -> Tensor<3> {
        let [b, n, d3] = x.dims();
        let y = attention(x.reshape([b * n, d3]), &Lengths::equal(b, n), n_heads);
        y.reshape([b, n, d3 / 3])
    }

    /// Layer norm without scale and shift.
    fn plain_layer_norm(x: Tensor<3>) -> Tensor<3> {
        let [_, _, d] = x.dims();
        let gain = Tensor::ones([d], &x.device());
        let shift = Tensor::zeros([d], &x.device());
        layer_norm(x, gain, shift, 1e-6)
    }

    #[test]
    fn sixteen_bit_results_equal_rounded_f32_results() {
        for device in devices() {
            for (dtype, tolerance) in [(DType::F16, 4e-3), (DType::BF16, 3e-2)] {
                if device == burn_tensor::Device::flex() || !device.supports_dtype(dtype) {
                    continue;
                }
                let x = leaves(&device, &[[2, 21, 72]], 1).remove(0);
                // Rounded beforehand, so that both types have the same input.
                let x = x.inner().cast(dtype).cast(DType::F32).autodiff().require_grad();
                let ops: [(&str, &dyn Fn(Tensor<3>) -> Tensor<3>); 4] = [
                    ("gelu", &gelu),
                    ("swiglu", &swiglu),
                    ("layer norm", &|x| tracked_layer_norm(x, &device)),
                    ("attention", &|x| attention_of_images(x, 3)),
                ];
                for (name, op) in ops {
                    let [y, gx] = output_and_gradient(op, &x, dtype);
                    let [y32, gx32] = output_and_gradient(op, &x, DType::F32);
                    assert_close(name, y, y32, tolerance);
                    assert_close(name, gx, gx32, tolerance);
                }
            }
        }
    }

    /// Padded rows are read in place; others are copied.
    #[test]
    fn padded_and_sliced_rows_are_read_correctly() {
        let cpu = burn_tensor::Device::flex();
        for device in devices() {
            let x = leaves(&device, &[[4, 6, 128]], 3).remove(0).inner();
            if !is_cube(&x) {
                continue;
            }
            // A view, because it ends at a multiple of the device's vector size.
            let padded = x.clone().slice([0..4, 0..6, 0..64]);
            let primitive = padded.clone().try_into_primitive::<CubeBackend>().unwrap();
            assert_eq!(Rows::new(&primitive).stride, 128);
            let swapped = x.clone().swap_dims(0, 1);
            let single_image = x.clone().slice([0..1, 0..6, 0..128]).swap_dims(0, 1);
            let inner_slice = x.clone().slice([1..3, 2..5, 3..9]);
            for part in [padded, swapped.clone(), swapped.swap_dims(1, 2), single_image, inner_slice] {
                let on_cpu = part.clone().to_device(&cpu);
                assert_close("gelu", gelu(part.clone()).to_device(&cpu), gelu(on_cpu.clone()), 1e-6);
                let normalized = plain_layer_norm(part).to_device(&cpu);
                assert_close("layer norm", normalized, plain_layer_norm(on_cpu), 1e-5);
            }
        }
    }

    /// Launches more cubes than the limit of one dimension.
    #[test]
    fn large_launches_use_several_dimensions() {
        for device in devices() {
            let n = 65_537 * 256 + 3;
            let x = Tensor::<1>::ones([n], &device);
            if is_cube(&x) {
                // Not summed on the device: see `ops::total` for Burn's sum of so many numbers.
                let y = gelu(x.reshape([1, n])).into_data().to_vec::<f32>().unwrap();
                let n_wrong = y.iter().filter(|y| (**y - 0.841_345).abs() > 1e-5).count();
                assert_eq!(n_wrong, 0, "of {n}");
            }
        }
    }
}
