//! The choice of the kernels that multiply matrices on a GPU, and what they have computed so far.
//!
//! The kernel of a single product is chosen where it is computed (`ops::cube::product`), in the
//! order of preference of [`product_kernels`].

use burn_tensor::{DType, Device, Distribution, Tensor};

use super::cast::cast;
use super::gradient::FlatGradient;
use super::linear::linear;
use super::part::part;
use super::seed::seed;
use crate::product_kernels::{self, Kernels, KernelsError, ProductReport};

/// Sets the kernels of this process, and returns the name of the set on `device`:
/// `cublaslt-13.2.0`, `cubecl-0.11.3`, or `cpu`. Results are bit-identical with the same set on the
/// same kind of device. Kernels that are not used, and the reasons, are among the
/// [`notices`](product_kernels::notices).
///
/// # Errors
/// [`KernelsError`] if `kernels` asks for kernels that the device does not support.
pub fn choose_kernels(kernels: Kernels, device: &Device) -> Result<String, KernelsError> {
    product_kernels::set(kernels);
    if *device == Device::flex() {
        return match kernels {
            Kernels::Cublaslt => Err(KernelsError::NoCublaslt { reason: "it is for NVIDIA GPUs".into() }),
            _ => Ok("cpu".into()),
        };
    }
    if kernels != Kernels::Cubecl {
        match library_version(device) {
            Ok(version) => return Ok(format!("cublaslt-{version}")),
            Err(reason) if kernels == Kernels::Cublaslt => return Err(KernelsError::NoCublaslt { reason }),
            Err(reason) if is_nvidia(device) => product_kernels::notice(format!(
                "using CubeCL's kernels for products, not cuBLASLt: {reason}"
            )),
            Err(_) => {}
        }
    }
    Ok("cubecl-0.11.3".into())
}

/// Returns a report on every size of product and of attention that this process has computed on a
/// GPU, unless CubeCL's kernels were chosen.
pub fn product_reports() -> Vec<ProductReport> {
    #[cfg(feature = "cuda")]
    return [super::cube::library_reports(), super::cube::attention_reports()].concat();
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}

/// Runs a linear layer of ViT-S forward and backward on random numbers, in bf16 and f32 if `device`
/// supports them, so that [`product_reports`] has products to report on.
pub fn try_products(device: &Device) {
    const TOKENS: [usize; 3] = [4, 197, 384];
    const WIDTH: usize = 1152;
    for dtype in [DType::BF16, DType::F32] {
        if !device.supports_dtype(dtype) {
            continue;
        }
        let n_weights = WIDTH * TOKENS[2];
        let flat = cast(random([1, 1, n_weights + WIDTH], device).reshape([n_weights + WIDTH]), dtype);
        let Some(mut gradient) = FlatGradient::on_device_of(&flat) else { continue };
        let weight = part(&flat, 0..n_weights).reshape([WIDTH, TOKENS[2]]);
        let weight = gradient.leaf(weight, 0..n_weights);
        let range = n_weights..n_weights + WIDTH;
        let bias = gradient.leaf(part(&flat, range.clone()), range);
        let x = cast(random(TOKENS, device), dtype).autodiff().require_grad();
        let y = linear(x, weight, bias);
        let grad = cast(random([TOKENS[0], TOKENS[1], WIDTH], device), dtype);
        let mut grads = seed(y, grad).backward();
        gradient.finish(&mut grads);
    }
}

fn random(shape: [usize; 3], device: &Device) -> Tensor<3> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

#[cfg(feature = "cuda")]
fn library_version(device: &Device) -> Result<String, String> {
    super::cube::library_version(device)
}

#[cfg(not(feature = "cuda"))]
fn library_version(_: &Device) -> Result<String, String> {
    Err("this program was built without --features cuda".into())
}

fn is_nvidia(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    return super::cube::is_nvidia(device);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = device;
        false
    }
}
