//! Launches of CubeCL's kernels for matrix products.
//!
//! On GPUs with a tensor memory accelerator (compute capability 9.0 and above), the accelerator
//! copies blocks of both factors into shared memory while the product of the blocks before is
//! computed. On others, and for factors whose rows it cannot read, threads copy them.

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

/// Launches the product, with a result of type `dtype`, on matrix instructions, which take f32 as
/// TF32. Returns `None` if the device has none for these types and sizes.
pub(super) fn launch(a: &CubeTensor, b: &CubeTensor, dtype: DType) -> Option<CubeTensor> {
    let out = init_matmul_output(a, b, dtype);
    // With warps that only load (`specialized`), the cyclic kernel has twice the threads, half the
    // registers for each, and spills 4.8 KB.
    let arguments = DoubleBufferingArgs { specialized: false, tile_matmul: TileMatmulKind::Mma };
    let by_threads = Strategy::DoubleCyclicMma(BlueprintStrategy::Inferred(arguments));
    let by_accelerator = Strategy::DoubleTmaMma(BlueprintStrategy::Inferred(arguments));
    let is_launched =
        (is_read_in_blocks(a) && is_read_in_blocks(b) && launch_with(by_accelerator, a, b, &out).is_ok())
            || launch_with(by_threads, a, b, &out).is_ok();
    is_launched.then_some(out)
}

/// Launches one kernel, which writes the product into `out`.
///
/// # Errors
/// [`MatmulSetupError`] if the device cannot run the kernel on these types and sizes. The product
/// has not been launched then.
fn launch_with(
    strategy: Strategy,
    a: &CubeTensor,
    b: &CubeTensor,
    out: &CubeTensor,
) -> Result<(), MatmulSetupError> {
    let storage = |tensor: &CubeTensor| dtype_to_storage_type(tensor.dtype);
    let input = |tensor: &CubeTensor| InputBinding::new(tensor.clone().binding(), storage(tensor));
    let mut types =
        MatmulElems::from_globals(&MatmulGlobalElems { lhs: storage(a), rhs: storage(b), out: storage(out) });
    launch_ref(&strategy.into(), &out.client, input(a), input(b), out.clone().binding(), &mut types)
}

/// Returns whether the tensor memory accelerator can read blocks of `tensor`, which CubeCL finds
/// out only after the launch: there are elements, those of a row are neighbors, rows start at
/// multiples of 16 bytes, and matrices are equally far apart.
fn is_read_in_blocks(tensor: &CubeTensor) -> bool {
    let shape = tensor.meta.shape();
    let strides = tensor.meta.strides();
    let rank = tensor.meta.num_dims();
    let is_aligned = |elements: usize| elements > 0 && (elements * tensor.dtype.size()).is_multiple_of(16);
    let of_neighbors = (rank - 2..rank).find(|dim| strides[*dim] == 1);
    let are_matrices_equally_far = (1..rank - 2).all(|dim| strides[dim - 1] == strides[dim] * shape[dim]);
    of_neighbors.is_some()
        && shape.iter().all(|length| *length > 0)
        && (0..rank).filter(|dim| Some(*dim) != of_neighbors).all(|dim| is_aligned(strides[dim]))
        && are_matrices_equally_far
        && tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16)
}
