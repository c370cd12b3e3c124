//! Which kernels multiply matrices on a GPU, and what is known of their results.
//!
//! The ladder is cuBLASLt, CubeCL's kernels, Burn's. A product takes one step down where the library is missing, where it
//! has no algorithm for a size, or where a check of its results fails. Every size is checked when it is first used
//! (`ops::cube::check`), and single products of a run are checked again later, on its own data.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use burn_tensor::{DType, Device, Distribution, Tensor};

use crate::ops::{FlatGradient, cast, linear, part, seed};

/// The kernels that a run asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kernels {
    /// cuBLASLt where it can be used, else CubeCL's.
    #[default]
    Auto,
    /// cuBLASLt, without which the run does not start.
    Cublaslt,
    /// CubeCL's.
    Cubecl,
}

/// The kernels that a run asks for cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelsError {
    /// The device has no such kernels.
    #[error("cuBLASLt cannot be used: {reason}")]
    NoCublaslt {
        /// What is missing.
        reason: String,
    },
}

/// A size of products, and what has been found out about it.
#[derive(Debug, Clone, PartialEq)]
pub struct ProductReport {
    /// Size, types and layout in words: `25216 x 384 x 1152 bf16`.
    pub size: String,
    /// The kernel that computes it: the library's algorithm, or why it is not used.
    pub kernel: String,
    /// What checks have found.
    pub checked: Checked,
}

/// What checks of a product have found.
#[derive(Debug, Clone, PartialEq)]
pub enum Checked {
    /// It was right; the largest error as a share of what rounding explains.
    Right(f32),
    /// All results have been zero so far.
    NotYet,
    /// It was wrong, and is computed by the next kernels of the ladder.
    Wrong(String),
    /// The library refused it.
    Refused(String),
}

static IS_TRUSTED: AtomicBool = AtomicBool::new(false);
static KERNELS: AtomicU8 = AtomicU8::new(Kernels::Auto as u8);
static NOTICES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static WRONG: Mutex<Option<String>> = Mutex::new(None);
/// Products until the one that is checked on a run's data; negative for none.
static UNTIL_CHECK: AtomicI64 = AtomicI64::new(-1);

/// Sets the kernels of this process, and returns the name of the set on `device`: `cublaslt-13.2.0`, `cubecl-0.11.3`, or `cpu`.
/// Results repeat bit for bit with the same set on the same kind of device. What is not used, and why, is among the [`notices`].
///
/// # Errors
/// [`KernelsError`] where `kernels` asks for more than the device has.
pub fn choose(kernels: Kernels, device: &Device) -> Result<String, KernelsError> {
    KERNELS.store(kernels as u8, Ordering::Relaxed);
    if *device == Device::flex() {
        return match kernels {
            Kernels::Cublaslt => Err(KernelsError::NoCublaslt { reason: "it is for NVIDIA GPUs".into() }),
            _ => Ok("cpu".into()),
        };
    }
    let version = match kernels {
        Kernels::Cubecl => Err(None),
        _ => library_version(device).map_err(Some),
    };
    match (version, kernels) {
        (Ok(version), _) => Ok(format!("cublaslt-{version}")),
        (Err(reason), Kernels::Cublaslt) => {
            Err(KernelsError::NoCublaslt { reason: reason.unwrap_or_default() })
        }
        (Err(reason), _) => {
            if let Some(reason) = reason.filter(|_| is_nvidia(device)) {
                notice(format!("products are computed by CubeCL's kernels, without cuBLASLt: {reason}"));
            }
            Ok("cubecl-0.11.3".into())
        }
    }
}

/// Returns whether the library may be used, as far as the run's choice goes.
#[cfg(feature = "cuda")]
pub(crate) fn library_is_chosen() -> bool {
    KERNELS.load(Ordering::Relaxed) != Kernels::Cubecl as u8
}

/// Returns what has been found out about every size of products that this process has met on a GPU.
pub fn reports() -> Vec<ProductReport> {
    #[cfg(feature = "cuda")]
    return crate::ops::cube::library_reports();
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}

/// Runs a layer of ViT-S forwards and backwards on random numbers, in bf16 and f32, so that [`reports`] has something to say.
pub fn try_out(device: &Device) {
    const TOKENS: [usize; 3] = [4, 197, 384];
    const WIDTH: usize = 1152;
    let random = |shape: [usize; 3]| Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), device);
    for dtype in [DType::BF16, DType::F32] {
        if !device.supports_dtype(dtype) {
            continue;
        }
        let n_weights = WIDTH * TOKENS[2];
        let flat = cast(random([1, 1, n_weights + WIDTH]).reshape([n_weights + WIDTH]), dtype);
        let Some(Some(mut gradient)) = FlatGradient::on_device_of(&flat, true) else { continue };
        let weight = part(&flat, 0..n_weights).reshape([WIDTH, TOKENS[2]]);
        let weight = gradient.leaf(weight, 0..n_weights);
        let range = n_weights..n_weights + WIDTH;
        let bias = gradient.leaf(part(&flat, range.clone()), range);
        let x = cast(random(TOKENS), dtype).autodiff().require_grad();
        let y = linear(x, weight, bias);
        let mut grads = seed(y, cast(random([TOKENS[0], TOKENS[1], WIDTH]), dtype)).backward();
        gradient.finish(&mut grads);
    }
}

/// Takes what there is to tell a user: each once.
pub fn notices() -> Vec<String> {
    std::mem::take(&mut NOTICES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Adds a notice.
pub(crate) fn notice(text: String) {
    NOTICES.lock().unwrap_or_else(PoisonError::into_inner).push(text);
}

/// Has one of the next products checked on the data of the run: which one follows from `number`, such as the number of the step.
pub fn check_one(number: u64) {
    /// Products of a short step: the largest prime below 128.
    const N_PRODUCTS: u64 = 127;
    UNTIL_CHECK.store((number % N_PRODUCTS) as i64, Ordering::Relaxed);
}

/// Leaves out all checks of products, for a device that computes nothing, as the stub driver of the tests.
pub fn trust() {
    IS_TRUSTED.store(true, Ordering::Relaxed);
}

/// Returns whether checks are left out.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn is_trusted() -> bool {
    IS_TRUSTED.load(Ordering::Relaxed)
}

/// Returns whether the product that is computed now is to be checked.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn is_to_be_checked() -> bool {
    UNTIL_CHECK.load(Ordering::Relaxed) >= 0 && UNTIL_CHECK.fetch_sub(1, Ordering::Relaxed) == 0
}

/// Returns what is wrong with a product that had been right before, if one has been found: what was computed since the check before may be
/// wrong as well.
pub fn wrong() -> Option<String> {
    WRONG.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Notes that a product has become wrong.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn note_wrong(text: String) {
    WRONG.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(text);
}

#[cfg(feature = "cuda")]
fn library_version(device: &Device) -> Result<String, String> {
    crate::ops::cube::library_version(device)
}

#[cfg(not(feature = "cuda"))]
fn library_version(_: &Device) -> Result<String, String> {
    Err("this program was built without --features cuda".into())
}

fn is_nvidia(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    return crate::ops::cube::is_nvidia(device);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = device;
        false
    }
}
