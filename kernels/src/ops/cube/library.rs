//! Products by cuBLASLt, each size of which is checked when it is first used.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Device, Tensor};
use cubecl::client::Client;
use cubecl::zspace::metadata::Metadata;
use cubecl_common::device::DeviceId;

use super::check::{Beside, Into, NotRun, Target, check};
use super::empty;
use crate::native::cublaslt::{ALIGNMENT, Buffers, Epilogue, Layout, Library, Plan, Product, version_name};
use crate::native::stream::is_cuda;
use crate::products::{self, Checked, Finding, ProductReport, State};

/// Knowledge of a size.
#[derive(Debug, Clone)]
enum Known {
    /// The library computes it.
    Planned { plan: Arc<Plan>, state: State },
    /// The library has no algorithm for it.
    Refused(String),
    /// The library's results were wrong.
    Wrong(String),
}

type Sizes = HashMap<(DeviceId, Product), Known>;

static SIZES: LazyLock<Mutex<Sizes>> = LazyLock::new(Mutex::default);

/// Computes `a · b`, `[.., M, N]` in `dtype`; `None` if that is not for the library. With `into`,
/// it is written or added there.
pub(super) fn product(
    a: &CubeTensor,
    b: &CubeTensor,
    beside: &Beside,
    dtype: DType,
    into: Option<&Into>,
) -> Option<Target> {
    let client = &a.client;
    if !products::library_is_chosen() || !is_cuda(client) {
        return None;
    }
    let size = size_of(a, b, beside, dtype)?;
    let plan = planned(client, &size)?;
    let is_live_check = products::is_to_be_checked();
    if !products::is_trusted() {
        let state = state_at_use(client, &size);
        if is_live_check || state.is_some_and(State::is_due) {
            let finding = check(a, b, beside, dtype, &|target: &Target, adds: bool| match plan
                .queue_and_wait(client, buffers(a, b, beside, target, adds))
            {
                Ok(taken) => taken.map_err(NotRun::ByLibrary),
                Err(_) => Err(NotRun::ByDevice),
            });
            note(client, &size, finding)?;
        }
    }
    let target = Target {
        out: match into {
            Some(into) => into.out.clone(),
            None => empty(a, out_shape(a, b), dtype),
        },
        sums: match beside {
            Beside::Sums { into } => Some(into.clone().unwrap_or_else(|| empty(a, [size.m], dtype))),
            Beside::None | Beside::Bias(_) => None,
        },
    };
    let adds = into.is_some_and(|into| into.adds);
    // Without memory for the workspace, the next step of the ladder may still compute it.
    plan.queue(client, buffers(a, b, beside, &target, adds)).ok()?;
    Some(target)
}

fn buffers(a: &CubeTensor, b: &CubeTensor, beside: &Beside, target: &Target, adds: bool) -> Buffers {
    let vector = match beside {
        Beside::None => None,
        Beside::Bias(bias) => Some(bias.handle.clone()),
        Beside::Sums { .. } => target.sums.as_ref().map(|sums| sums.handle.clone()),
    };
    Buffers { a: a.handle.clone(), b: b.handle.clone(), out: target.out.handle.clone(), vector, adds }
}

/// Returns the plan of a size; `None` if the library does not compute it.
fn planned(client: &Client, size: &Product) -> Option<Arc<Plan>> {
    let key = (client.service_id().device, *size);
    {
        let sizes = SIZES.lock().unwrap_or_else(PoisonError::into_inner);
        match sizes.get(&key) {
            Some(Known::Planned { plan, .. }) => return Some(Arc::clone(plan)),
            Some(Known::Refused(_) | Known::Wrong(_)) => return None,
            None => {}
        }
    }
    let library = Library::on(client).ok()?;
    let known = match Plan::new(client, &library, size) {
        Ok(plan) => Known::Planned { plan: Arc::new(plan), state: State::Unchecked(0) },
        Err(reason) => {
            products::notice(format!(
                "cuBLASLt has no kernel for {}, which CubeCL computes: {reason}",
                words(size)
            ));
            Known::Refused(reason)
        }
    };
    let plan = match &known {
        Known::Planned { plan, .. } => Some(Arc::clone(plan)),
        _ => None,
    };
    SIZES.lock().unwrap_or_else(PoisonError::into_inner).insert(key, known);
    plan
}

/// Returns what is known at one more use of a size that is planned.
fn state_at_use(client: &Client, size: &Product) -> Option<State> {
    let mut sizes = SIZES.lock().unwrap_or_else(PoisonError::into_inner);
    match sizes.get_mut(&(client.service_id().device, *size)) {
        Some(Known::Planned { state, .. }) => {
            if let State::Unchecked(n_uses) = state {
                *n_uses += 1;
            }
            Some(*state)
        }
        _ => None,
    }
}

/// Notes what a check has found; `None` if the library is not to be used for this size.
fn note(client: &Client, size: &Product, finding: Finding) -> Option<()> {
    let mut sizes = SIZES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = sizes.get_mut(&(client.service_id().device, *size))?;
    let Known::Planned { state, .. } = known else { return None };
    match state.after(finding, &words(size)) {
        Ok(next) => *state = next,
        Err(fault) => {
            *known = Known::Wrong(fault);
            return None;
        }
    }
    Some(())
}

/// Returns the size of a product as the library is told it; `None` if it cannot be told.
fn size_of(a: &CubeTensor, b: &CubeTensor, beside: &Beside, dtype: DType) -> Option<Product> {
    let supported = |tensor: &CubeTensor| matches!(tensor.dtype, DType::F32 | DType::BF16);
    let vector = match beside {
        Beside::Bias(bias) if bias.dtype != dtype || !is_aligned(bias) => return None,
        Beside::Bias(_) => Epilogue::Bias,
        Beside::Sums { .. } => Epilogue::SumsOfA,
        Beside::None => Epilogue::None,
    };
    if !supported(a) || a.dtype != b.dtype || !is_aligned(a) || !is_aligned(b) {
        return None;
    }
    let rank = a.meta.num_dims();
    let [m, k] = [a.meta.shape()[rank - 2], a.meta.shape()[rank - 1]];
    let fits = b.meta.num_dims() == rank
        && b.meta.shape()[rank - 2] == k
        && (0..rank - 2).all(|dim| a.meta.shape()[dim] == b.meta.shape()[dim]);
    assert!(fits, "a product of {:?} and {:?}", a.meta.shape(), b.meta.shape());
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
        epilogue: vector,
    })
}

/// Returns how a batch of matrices lies in memory; `None` if neither rows nor columns consist of
/// neighbors, or matrices are not equally far apart.
fn layout(tensor: &CubeTensor) -> Option<Layout> {
    let shape = tensor.meta.shape();
    let strides = tensor.meta.strides();
    let rank = tensor.meta.num_dims();
    let rows = shape[rank - 2];
    let columns = shape[rank - 1];
    let row_stride = strides[rank - 2];
    let column_stride = strides[rank - 1];
    let are_equally_far =
        (1..rank.saturating_sub(2)).all(|dim| strides[dim - 1] == strides[dim] * shape[dim]);
    if tensor.meta.is_tiled() || !are_equally_far {
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

/// Returns whether a tensor begins where the library can read it.
pub(super) fn is_aligned(tensor: &CubeTensor) -> bool {
    tensor.handle.offset_start.unwrap_or(0).is_multiple_of(ALIGNMENT as u64)
}

fn out_shape(a: &CubeTensor, b: &CubeTensor) -> Vec<usize> {
    let rank = a.meta.num_dims();
    let mut shape: Vec<usize> = a.meta.shape().iter().copied().collect();
    shape[rank - 1] = b.meta.shape()[rank - 1];
    shape
}

/// Returns the size in words.
fn words(size: &Product) -> String {
    let Product { m, k, n, n_batches, .. } = size;
    let transposed = |layout: Layout| if layout.transposed { "ᵀ" } else { "" };
    let name = |dtype: DType| if dtype == DType::F32 { "f32" } else { "bf16" };
    let batches = if *n_batches > 1 { format!("{n_batches} of ") } else { String::new() };
    let beside = match size.epilogue {
        Epilogue::None => "",
        Epilogue::Bias => " + bias",
        Epilogue::SumsOfA => " with sums",
    };
    let types = match (size.input, size.output) {
        (DType::F32, _) => "tf32",
        (_, DType::F32) => "bf16 to f32",
        (_, output) => name(output),
    };
    let a = transposed(size.a);
    let b = transposed(size.b);
    format!("{batches}[{m}, {k}]{a} · [{k}, {n}]{b}{beside}, {types}")
}

/// Returns what is known of every size, in the order of their names.
pub(crate) fn reports() -> Vec<ProductReport> {
    let sizes = SIZES.lock().unwrap_or_else(PoisonError::into_inner);
    let mut reports: Vec<ProductReport> =
        sizes.iter().map(|((_, size), known)| report(size, known)).collect();
    reports.sort_by(|a, b| a.size.cmp(&b.size));
    reports
}

fn report(size: &Product, known: &Known) -> ProductReport {
    let (kernel, checked) = match known {
        Known::Planned { plan, state } => {
            let found = plan.algorithm;
            let kernel = format!(
                "algorithm {}, tile {}, stages {}, split {}",
                found.id, found.tile, found.stages, found.split_k
            );
            let checked = match state {
                State::Unchecked(_) => Checked::NotYet,
                State::Right { worst, .. } => Checked::Right(*worst),
            };
            (kernel, checked)
        }
        Known::Refused(reason) => ("cubecl".to_string(), Checked::Refused(reason.clone())),
        Known::Wrong(what) => ("cubecl".to_string(), Checked::Wrong(what.clone())),
    };
    ProductReport { size: words(size), kernel, checked }
}

/// Returns the elements `range` of a flat tensor on an NVIDIA GPU as a view, if they begin where
/// they can be read in blocks of 16 bytes. Burn copies all that does not begin at a multiple of
/// 512.
pub(in crate::ops) fn part_in_place(flat: &Tensor<1>, range: &std::ops::Range<usize>) -> Option<Tensor<1>> {
    let mut part = flat.clone().try_into_primitive::<CubeBackend>().ok()?;
    let size = part.dtype.size();
    let n_behind = part.meta.shape()[0] - range.end;
    if !is_cuda(&part.client) || part.meta.strides()[0] != 1 {
        return None;
    }
    let handle = part.handle.clone().offset_start((range.start * size) as u64);
    part.handle = handle.offset_end((n_behind * size) as u64);
    *part.meta = Metadata::new([range.len()], [1]);
    is_aligned(&part).then(|| Tensor::from_primitive::<CubeBackend>(part))
}

/// Returns the client of a device.
fn client(device: &Device) -> Option<Client> {
    let tensor = Tensor::<1>::empty([1], device);
    tensor.try_into_primitive::<CubeBackend>().ok().map(|tensor| tensor.client)
}

/// Returns the version of the library on `device`, such as 13.2.0.
///
/// # Errors
/// One line that says why it cannot be used.
pub(crate) fn library_version(device: &Device) -> Result<String, String> {
    let client = client(device).filter(is_cuda).ok_or_else(|| "the device is no NVIDIA GPU".to_string())?;
    Ok(version_name(Library::on(&client)?.version))
}

/// Returns whether `device` is an NVIDIA GPU.
pub(crate) fn is_nvidia(device: &Device) -> bool {
    client(device).is_some_and(|client| is_cuda(&client))
}
