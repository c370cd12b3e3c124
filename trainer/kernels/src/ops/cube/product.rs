//! Matrix products with one kernel for each kind of size.
//!
//! Burn's own product tries up to thirty kernels for each size that it has not met before, and keeps the fastest. On an NVIDIA
//! GPU each is compiled first: for the sizes of one step of ViT-S/16, NVIDIA's compiler takes twenty minutes, two of
//! them for a single kernel. What a stopwatch chooses also differs between runs, and with it the last bits of results.
//!
//! ```text
//! C = A · B     A [.., M, K]   B [.., K, N]   C [.., M, N]
//! gA = g · Bᵀ   gB = Aᵀ · g
//! ```

use burn_backend::cubecl::dtype_to_storage_type;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::matmul::init_matmul_output;
use burn_cubecl::tensor::CubeTensor;
use cubecl::config::autotune::AutotuneLevel;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems, MatmulSetupError};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy;
use cubek::matmul::multi_level::components::tile::TileMatmulKind;
use cubek::matmul::multi_level::routines::batch::double_buffering::DoubleBufferingArgs;
use cubek::matmul::routine::BlueprintStrategy;
use cubek::std::InputBinding;

use crate::ops::bridge::Kernel;

/// The product as an operation, forwards and backwards. All dimensions before the last two are equal.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Matmul;

impl Kernel<CubeBackend, 2> for Matmul {
    /// Both factors.
    type Saved = (CubeTensor, CubeTensor);

    fn forward(&self, [a, b]: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        (product(a.clone(), b.clone()), (a, b))
    }

    fn backward(&self, (a, b): Self::Saved, grad: CubeTensor, wanted: [bool; 2]) -> [Option<CubeTensor>; 2] {
        let ga = wanted[0].then(|| product(grad.clone(), transposed(b)));
        let gb = wanted[1].then(|| product(transposed(a), grad));
        [ga, gb]
    }
}

/// Returns the matrices of `[.., M, N]` transposed, as a view.
pub(super) fn transposed(matrices: CubeTensor) -> CubeTensor {
    let rank = matrices.meta.num_dims();
    CubeBackend::float_swap_dims(matrices, rank - 2, rank - 1)
}

/// Returns `a · b`, `[.., M, N]`, in the type of `a`.
pub(super) fn product(a: CubeTensor, b: CubeTensor) -> CubeTensor {
    // Whoever asks for more tuning waits for it.
    if matches!(CubeClRuntimeConfig::get().autotune.level, AutotuneLevel::Minimal) {
        let out = init_matmul_output(&a, &b, a.dtype);
        if launch(&a, &b, &out).is_ok() {
            return out;
        }
    }
    // Also for a device without matrix instructions.
    CubeBackend::float_matmul(a, b)
}

/// Launches the product on matrix instructions, which take f32 as TF32.
///
/// # Errors
/// [`MatmulSetupError`] if the device has none for these types and sizes. Nothing has been launched then.
fn launch(a: &CubeTensor, b: &CubeTensor, out: &CubeTensor) -> Result<(), MatmulSetupError> {
    // With planes of its own for loading, the kernel has twice the threads, half the registers for each, and spills 4.8 KB.
    let arguments = DoubleBufferingArgs { specialized: false, tile_matmul: TileMatmulKind::Mma };
    let strategy = Strategy::DoubleCyclicMma(BlueprintStrategy::Inferred(arguments));
    let storage = |tensor: &CubeTensor| dtype_to_storage_type(tensor.dtype);
    let input = |tensor: &CubeTensor| InputBinding::new(tensor.clone().binding(), storage(tensor));
    let mut types =
        MatmulElems::from_globals(&MatmulGlobalElems { lhs: storage(a), rhs: storage(b), out: storage(out) });
    launch_ref(&strategy.into(), &out.client, input(a), input(b), out.clone().binding(), &mut types)
}
