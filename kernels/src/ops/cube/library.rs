//! Products computed by cuBLASLt. Each size is checked when it is first used.

use std::sync::{Arc, LazyLock};

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Device, Tensor};
use cubecl::client::Client;
use cubecl::zspace::metadata::Metadata;

use super::check::{Destination, Effect, EpilogueTensor, RunError, Target, check};
use super::empty;
use super::sizes::{Size, Sizes};
use crate::native::cublaslt::{ALIGNMENT, Buffers, Epilogue, Layout, Library, Plan, Product, version_name};
use crate::native::stream::is_cuda;
use crate::product_kernels::{self, ProductReport};

static SIZES: LazyLock<Sizes<Product, Arc<Plan>>> = LazyLock::new(|| Sizes::new("cuBLASLt"));

impl Size for Product {
    fn describe(&self) -> String {
        let Self { m, k, n, n_batches, .. } = self;
        let batches = if *n_batches > 1 { format!("{n_batches} of ") } else { String::new() };
        let epilogue = match self.epilogue {
            Epilogue::None => "",
            Epilogue::Bias => " + bias",
            Epilogue::SumsOfA => " with sums",
        };
        let types = match (self.input, self.output) {
            (DType::F32, _) => "tf32",
            (_, DType::F32) => "bf16 to f32",
            _ => "bf16",
        };
        let a = if self.a.transposed { "ᵀ" } else { "" };
        let b = if self.b.transposed { "ᵀ" } else { "" };
        format!("{batches}[{m}, {k}]{a} · [{k}, {n}]{b}{epilogue}, {types}")
    }
}

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
    let library = Library::for_client(client).ok()?;
    let plan = SIZES.plan(client, &size, || Plan::new(client, &library, &size).map(Arc::new))?;
    SIZES.check_if_due(client, &size, || {
        check(a, b, epilogue, dtype, &|target: &Target, effect: Effect| {
            let buffers = buffers(a, b, epilogue, target, effect == Effect::Add);
            let result = plan.queue_and_wait(client, buffers);
            result.map_err(|_| RunError::Device)?.map_err(RunError::Library)
        })
    })?;
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

/// Returns the reports of all sizes, sorted by their descriptions.
pub(crate) fn reports() -> Vec<ProductReport> {
    SIZES.reports(describe_plan)
}

fn describe_plan(plan: &Arc<Plan>) -> String {
    let algorithm = plan.algorithm;
    format!(
        "algorithm {}, tile {}, stages {}, split {}",
        algorithm.id, algorithm.tile, algorithm.stages, algorithm.split_k
    )
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
