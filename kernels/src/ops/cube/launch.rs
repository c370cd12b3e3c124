//! Launches of CubeCL's kernels for matrix products.
//!
//! On GPUs with a tensor memory accelerator (compute capability 9.0 and above), the accelerator
//! copies blocks of both factors into shared memory while the product of the previous blocks is
//! computed. On other GPUs, and for factors whose layout it does not support, threads copy them.

use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::kernel::matmul::init_matmul_output;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems, MatmulSetupError};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy;
use cubek::matmul::multi_level::components::tile::TileMatmulKind;
use cubek::matmul::multi_level::routines::batch::double_buffering::DoubleBufferingArgs;
use cubek::matmul::routine::BlueprintStrategy;
use cubek::std::InputBinding;

/// Launches the product, with a result of type `dtype`, on matrix instructions, which compute f32
/// as TF32. Returns `None` if the device has none for these types and sizes.
pub(super) fn launch(a: &CubeTensor, b: &CubeTensor, dtype: DType) -> Option<CubeTensor> {
    let out = init_matmul_output(a, b, dtype);
    // With warps that only load (`specialized`), the cyclic kernel has twice the threads and half
    // the registers for each, and spills 4.8 KB.
    let arguments = DoubleBufferingArgs { specialized: false, tile_matmul: TileMatmulKind::Mma };
    let cyclic = Strategy::DoubleCyclicMma(BlueprintStrategy::Inferred(arguments));
    let accelerated = Strategy::DoubleTmaMma(BlueprintStrategy::Inferred(arguments));
    let are_supported = supports_accelerator(a) && supports_accelerator(b);
    if are_supported && launch_with(accelerated, a, b, &out).is_ok() {
        return Some(out);
    }
    launch_with(cyclic, a, b, &out).ok()?;
    Some(out)
}

/// Launches one kernel, which writes the product into `out`.
///
/// # Errors
/// [`MatmulSetupError`] if the device cannot run the kernel on these types and sizes. Nothing has
/// been launched then.
fn launch_with(
    strategy: Strategy,
    a: &CubeTensor,
    b: &CubeTensor,
    out: &CubeTensor,
) -> Result<(), MatmulSetupError> {
    let lhs = dtype_to_storage_type(a.dtype);
    let rhs = dtype_to_storage_type(b.dtype);
    let globals = MatmulGlobalElems { lhs, rhs, out: dtype_to_storage_type(out.dtype) };
    let a = InputBinding::new(a.clone().binding(), lhs);
    let b = InputBinding::new(b.clone().binding(), rhs);
    let mut types = MatmulElems::from_globals(&globals);
    launch_ref(&strategy.into(), &out.client, a, b, out.clone().binding(), &mut types)
}

/// Returns whether the tensor memory accelerator can read blocks of `tensor`: it is not empty,
/// the elements of a row or of a column are contiguous, all other strides and the start are
/// multiples of 16 bytes, and the stride of matrices is constant. CubeCL reports any other layout
/// only after the launch.
fn supports_accelerator(tensor: &CubeTensor) -> bool {
    let shape = tensor.meta.shape();
    let strides = tensor.meta.strides();
    let rank = tensor.meta.num_dims();
    let Some(contiguous_dim) = (rank - 2..rank).find(|dim| strides[*dim] == 1) else { return false };
    if shape.iter().any(|length| *length == 0) {
        return false;
    }
    for (dim, stride) in strides.iter().enumerate() {
        let n_bytes = stride * tensor.dtype.size();
        if dim != contiguous_dim && (n_bytes == 0 || !n_bytes.is_multiple_of(16)) {
            return false;
        }
    }
    let is_batch_stride_constant = (1..rank - 2).all(|dim| strides[dim - 1] == strides[dim] * shape[dim]);
    is_batch_stride_constant && tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16)
}
