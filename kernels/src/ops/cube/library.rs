//! Products computed by cuBLASLt. Each size is checked when it is first used.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Device, Tensor};
use cubecl::client::Client;
use cubecl::zspace::metadata::Metadata;
use cubecl_common::device::DeviceId;

use super::check::{Destination, Effect, EpilogueTensor, RunError, Target, check};
use super::empty;
use crate::native::cublaslt::{ALIGNMENT, Buffers, Epilogue, Layout, Library, Plan, Product, version_name};
use crate::native::stream::is_cuda;
use crate::product_kernels::{self, Checked, Finding, ProductReport, State};

/// Plan of a size, or the reason why the library does not compute it.
#[derive(Debug, Clone)]
enum SizeStatus {
    /// The library computes it.
    Planned { plan: Arc<Plan>, state: State },
    /// The library has no algorithm for it.
    Refused(String),
    /// The library's results were wrong.
    Wrong(String),
}

type Sizes = HashMap<(DeviceId, Product), SizeStatus>;

static SIZES: LazyLock<Mutex<Sizes>> = LazyLock::new(Mutex::default);

/// Computes `a · b`, `[.., M, N]` in `dtype`, into new memory or `destination`; `None` if the
/// library does not compute this product.
pub(super) fn product(
    a: &CubeTensor,
    b: &CubeTensor,
    epilogue: &EpilogueTensor,
    dtype: DType,
    destination: Option<&Destination>,
) -> Option<Target> {
    let client = &a.client;
    if !product_kernels::library_is_chosen() || !is_cuda(client) {
        return None;
    }
    let size = size_of(a, b, epilogue, dtype)?;
    let plan = plan_for(client, &size)?;
    let is_requested_check = product_kernels::is_to_be_checked();
    if !product_kernels::are_checks_disabled() {
        let state = count_use(client, &size);
        if is_requested_check || state.is_some_and(State::is_due) {
            let finding = check(a, b, epilogue, dtype, &|target: &Target, effect: Effect| {
                let buffers = buffers(a, b, epilogue, target, effect == Effect::Add);
                let result = plan.queue_and_wait(client, buffers);
                result.map_err(|_| RunError::Device)?.map_err(RunError::Library)
            });
            record_finding(client, &size, finding)?;
        }
    }
    let out = match destination {
        Some(destination) => destination.out.clone(),
        None => empty(a, out_shape(a, b), dtype),
    };
    let sums = match epilogue {
        EpilogueTensor::Sums { out: Some(sums) } => Some(sums.clone()),
        EpilogueTensor::Sums { out: None } => Some(empty(a, [size.m], dtype)),
        EpilogueTensor::None | EpilogueTensor::Bias(_) => None,
    };
    let target = Target { out, sums };
    let adds = destination.is_some_and(|destination| destination.adds);
    // If there is no memory for the workspace, the next kernels in order of preference may still
    // compute the product.
    plan.queue(client, buffers(a, b, epilogue, &target, adds)).ok()?;
    Some(target)
}

fn buffers(
    a: &CubeTensor,
    b: &CubeTensor,
    epilogue: &EpilogueTensor,
    target: &Target,
    adds: bool,
) -> Buffers {
    let vector = match epilogue {
        EpilogueTensor::None => None,
        EpilogueTensor::Bias(bias) => Some(bias.handle.clone()),
        EpilogueTensor::Sums { .. } => target.sums.as_ref().map(|sums| sums.handle.clone()),
    };
    Buffers { a: a.handle.clone(), b: b.handle.clone(), out: target.out.handle.clone(), vector, adds }
}

/// Returns the plan of a size; `None` if the library does not compute it.
fn plan_for(client: &Client, size: &Product) -> Option<Arc<Plan>> {
    let key = (client.service_id().device, *size);
    {
        let sizes = SIZES.lock().unwrap_or_else(PoisonError::into_inner);
        match sizes.get(&key) {
            Some(SizeStatus::Planned { plan, .. }) => return Some(Arc::clone(plan)),
            Some(SizeStatus::Refused(_) | SizeStatus::Wrong(_)) => return None,
            None => {}
        }
    }
    let library = Library::for_client(client).ok()?;
    let status = match Plan::new(client, &library, size) {
        Ok(plan) => SizeStatus::Planned { plan: Arc::new(plan), state: State::Unchecked(0) },
        Err(reason) => {
            product_kernels::notice(format!(
                "cuBLASLt has no kernel for {}; using CubeCL's: {reason}",
                describe(size)
            ));
            SizeStatus::Refused(reason)
        }
    };
    let plan = match &status {
        SizeStatus::Planned { plan, .. } => Some(Arc::clone(plan)),
        _ => None,
    };
    SIZES.lock().unwrap_or_else(PoisonError::into_inner).insert(key, status);
    plan
}

/// Counts a use of a size with a plan, and returns the state of its checks.
fn count_use(client: &Client, size: &Product) -> Option<State> {
    let mut sizes = SIZES.lock().unwrap_or_else(PoisonError::into_inner);
    match sizes.get_mut(&(client.service_id().device, *size)) {
        Some(SizeStatus::Planned { state, .. }) => {
            if let State::Unchecked(n_uses) = state {
                *n_uses += 1;
            }
            Some(*state)
        }
        _ => None,
    }
}

/// Records the result of a check; `None` if the library is not to be used for this size.
fn record_finding(client: &Client, size: &Product, finding: Finding) -> Option<()> {
    let mut sizes = SIZES.lock().unwrap_or_else(PoisonError::into_inner);
    let status = sizes.get_mut(&(client.service_id().device, *size))?;
    let SizeStatus::Planned { state, .. } = status else { return None };
    match state.after_check(finding, &describe(size)) {
        Ok(next) => {
            *state = next;
            Some(())
        }
        Err(fault) => {
            *status = SizeStatus::Wrong(fault);
            None
        }
    }
}

/// Returns the size of a product; `None` if the library does not support its types or layouts.
fn size_of(a: &CubeTensor, b: &CubeTensor, epilogue: &EpilogueTensor, dtype: DType) -> Option<Product> {
    let epilogue = match epilogue {
        EpilogueTensor::Bias(bias) if bias.dtype != dtype || !is_aligned(bias) => return None,
        EpilogueTensor::Bias(_) => Epilogue::Bias,
        EpilogueTensor::Sums { .. } => Epilogue::SumsOfA,
        EpilogueTensor::None => Epilogue::None,
    };
    if !matches!(a.dtype, DType::F32 | DType::BF16) || a.dtype != b.dtype || !is_aligned(a) || !is_aligned(b)
    {
        return None;
    }
    let rank = a.meta.num_dims();
    let m = a.meta.shape()[rank - 2];
    let k = a.meta.shape()[rank - 1];
    let do_shapes_match = b.meta.num_dims() == rank
        && b.meta.shape()[rank - 2] == k
        && (0..rank - 2).all(|dim| a.meta.shape()[dim] == b.meta.shape()[dim]);
    assert!(do_shapes_match, "a product of {:?} and {:?}", a.meta.shape(), b.meta.shape());
    let n = b.meta.shape()[rank - 1];
    let n_batches: usize = a.meta.shape().iter().take(rank - 2).product();
    if m * k * n * n_batches == 0 {
        return None;
    }
    Some(Product {
        m,
        k,
        n,
        n_batches,
        a: layout(a)?,
        b: layout(b)?,
        out: Layout { stride: n, transposed: false, batch_stride: m * n },
        input: a.dtype,
        output: dtype,
        epilogue,
    })
}

/// Returns the memory layout of a batch of matrices; `None` if neither rows nor columns are
/// contiguous, or the stride of matrices is not constant.
fn layout(tensor: &CubeTensor) -> Option<Layout> {
    let shape = tensor.meta.shape();
    let strides = tensor.meta.strides();
    let rank = tensor.meta.num_dims();
    let rows = shape[rank - 2];
    let columns = shape[rank - 1];
    let row_stride = strides[rank - 2];
    let column_stride = strides[rank - 1];
    let is_batch_stride_constant =
        (1..rank.saturating_sub(2)).all(|dim| strides[dim - 1] == strides[dim] * shape[dim]);
    if tensor.meta.is_tiled() || !is_batch_stride_constant {
        return None;
    }
    let batch_stride = if rank > 2 { strides[rank - 3] } else { 0 };
    if (column_stride == 1 || columns == 1) && (row_stride >= columns || rows == 1) {
        return Some(Layout { stride: row_stride.max(columns), transposed: false, batch_stride });
    }
    if (row_stride == 1 || rows == 1) && (column_stride >= rows || columns == 1) {
        return Some(Layout { stride: column_stride.max(rows), transposed: true, batch_stride });
    }
    None
}

/// Returns whether the start of a tensor is aligned as the library requires.
pub(super) fn is_aligned(tensor: &CubeTensor) -> bool {
    tensor.handle.offset_start.unwrap_or(0).is_multiple_of(ALIGNMENT as u64)
}

fn out_shape(a: &CubeTensor, b: &CubeTensor) -> Vec<usize> {
    let rank = a.meta.num_dims();
    let mut shape: Vec<usize> = a.meta.shape().iter().copied().collect();
    shape[rank - 1] = b.meta.shape()[rank - 1];
    shape
}

/// Returns a description of the size for messages and reports.
fn describe(size: &Product) -> String {
    let Product { m, k, n, n_batches, .. } = size;
    let batches = if *n_batches > 1 { format!("{n_batches} of ") } else { String::new() };
    let epilogue = match size.epilogue {
        Epilogue::None => "",
        Epilogue::Bias => " + bias",
        Epilogue::SumsOfA => " with sums",
    };
    let types = match (size.input, size.output) {
        (DType::F32, _) => "tf32",
        (_, DType::F32) => "bf16 to f32",
        _ => "bf16",
    };
    let a = if size.a.transposed { "ᵀ" } else { "" };
    let b = if size.b.transposed { "ᵀ" } else { "" };
    format!("{batches}[{m}, {k}]{a} · [{k}, {n}]{b}{epilogue}, {types}")
}

/// Returns the reports of all sizes, sorted by their descriptions.
pub(crate) fn reports() -> Vec<ProductReport> {
    let sizes = SIZES.lock().unwrap_or_else(PoisonError::into_inner);
    let mut reports: Vec<ProductReport> =
        sizes.iter().map(|((_, size), status)| report(size, status)).collect();
    reports.sort_by(|a, b| a.size.cmp(&b.size));
    reports
}

fn report(size: &Product, status: &SizeStatus) -> ProductReport {
    let (kernel, checked) = match status {
        SizeStatus::Planned { plan, state } => {
            let algorithm = plan.algorithm;
            let kernel = format!(
                "algorithm {}, tile {}, stages {}, split {}",
                algorithm.id, algorithm.tile, algorithm.stages, algorithm.split_k
            );
            let checked = match state {
                State::Unchecked(_) => Checked::NotYet,
                State::Right { worst, .. } => Checked::Right(*worst),
            };
            (kernel, checked)
        }
        SizeStatus::Refused(reason) => ("cubecl".to_string(), Checked::Refused(reason.clone())),
        SizeStatus::Wrong(what) => ("cubecl".to_string(), Checked::Wrong(what.clone())),
    };
    ProductReport { size: describe(size), kernel, checked }
}

/// Returns a view of the elements `range` of a flat tensor on an NVIDIA GPU, if it is aligned to 16
/// bytes. Burn copies slices that do not begin at a multiple of 512 bytes.
pub(in crate::ops) fn part_in_place(flat: &Tensor<1>, range: &std::ops::Range<usize>) -> Option<Tensor<1>> {
    let mut part = flat.clone().try_into_primitive::<CubeBackend>().ok()?;
    let size = part.dtype.size();
    let n_after = part.meta.shape()[0] - range.end;
    if !is_cuda(&part.client) || part.meta.strides()[0] != 1 {
        return None;
    }
    let handle = part.handle.clone().offset_start((range.start * size) as u64);
    part.handle = handle.offset_end((n_after * size) as u64);
    *part.meta = Metadata::new([range.len()], [1]);
    if !is_aligned(&part) {
        return None;
    }
    Some(Tensor::from_primitive::<CubeBackend>(part))
}

/// Returns the client of a device.
fn client(device: &Device) -> Option<Client> {
    let tensor = Tensor::<1>::empty([1], device).try_into_primitive::<CubeBackend>().ok()?;
    Some(tensor.client)
}

/// Returns the version of the library on `device`, such as 13.2.0.
///
/// # Errors
/// The reason why it cannot be used, in one line.
pub(crate) fn library_version(device: &Device) -> Result<String, String> {
    let client =
        client(device).filter(is_cuda).ok_or_else(|| "the device is not an NVIDIA GPU".to_string())?;
    Ok(version_name(Library::for_client(&client)?.version))
}

/// Returns whether `device` is an NVIDIA GPU.
pub(crate) fn is_nvidia(device: &Device) -> bool {
    client(device).is_some_and(|client| is_cuda(&client))
}
