//! Matrix products of cuBLASLt, which is loaded when the program runs.
//!
//! ```text
//! C = A · B + β C [+ bias]         A [M, K]   B [K, N]   C [M, N]   bias [N]   β 0 or 1
//! sums = Σ_k A[:, k]               [M], computed with a product: the gradient of a bias,
//!                                  where A is a gradient, transposed
//! ```
//!
//! cuBLASLt's matrices are column-major: the rows of a matrix here are the columns of one there, so
//! that Cᵀ = Bᵀ · Aᵀ is computed.
//!
//! Results are bit-identical between runs: the algorithm of a size is the first that the library's
//! heuristic returns, never the fastest of several that are timed; partial sums are added in the
//! workspace and in order, not in place by atomic operations; and the size of the workspace is
//! constant. Another version of the library may choose another algorithm.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use burn_tensor::DType;
use cubecl::client::Client;
use cubecl_common::device::DeviceId;
use cubecl_runtime::server::{Handle, ServerError};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulAlgoConfigAttributes_t as Config, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cudaDataType,
};

use super::stream::{self, Stream};

/// Bytes of the workspace, as recommended by NVIDIA for its newer GPUs.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Oldest version of the library with the interface used here: 12.0.
const OLDEST_VERSION: usize = 120_000;

/// Oldest GPU: compute capability 8.0, the first with matrix instructions for bf16.
const OLDEST_CAPABILITY: i32 = 8;

/// Bytes to which the address of every matrix is aligned.
pub(crate) const ALIGNMENT: usize = 16;

/// The library on one device.
#[derive(Debug)]
pub(crate) struct Library {
    handle: cublasLtHandle_t,
    /// Version, such as 130200.
    pub(crate) version: usize,
}

// SAFETY: cuBLASLt's functions may be called with one handle from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// Memory layout of a matrix: row-major, or column-major if it is `transposed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    /// Elements from the start of one row (or column) to the start of the next.
    pub(crate) stride: usize,
    /// Whether the elements of a column are contiguous, instead of those of a row.
    pub(crate) transposed: bool,
    /// Elements from the start of one matrix of a batch to the start of the next.
    pub(crate) batch_stride: usize,
}

/// Operation that is fused with a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    /// No operation.
    None,
    /// A vector of N numbers, of the type of the result, is added to each row. The library supports
    /// other types only for products of 8 bits (`cublasLt.h`,
    /// `CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE`).
    Bias,
    /// The sums of A over K are stored as well, `[M]`, in the type of the result.
    SumsOfA,
}

/// The size of a product, its types and its layouts, which determine the choice of an algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) k: usize,
    pub(crate) n: usize,
    pub(crate) n_batches: usize,
    pub(crate) a: Layout,
    pub(crate) b: Layout,
    pub(crate) out: Layout,
    /// Type of A and B: bf16, or f32, which is multiplied as TF32.
    pub(crate) input: DType,
    /// Type of the result.
    pub(crate) output: DType,
    pub(crate) epilogue: Epilogue,
}

/// The algorithm that the library's heuristic returns for a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Algorithm {
    pub(crate) id: u32,
    pub(crate) tile: u32,
    pub(crate) split_k: u32,
    pub(crate) stages: u32,
}

/// A product that is ready to be queued.
#[derive(Debug)]
pub(crate) struct Plan {
    library: Arc<Library>,
    desc: cublasLtMatmulDesc_t,
    a: cublasLtMatrixLayout_t,
    b: cublasLtMatrixLayout_t,
    out: cublasLtMatrixLayout_t,
    algo: cublasLtMatmulAlgo_t,
    /// Description of `algo`.
    pub(crate) algorithm: Algorithm,
    epilogue: Epilogue,
}

// SAFETY: the descriptors are changed only in `run`, which runs on the device's single thread.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

/// Buffers of a product. Each begins at the first element of its matrix.
pub(crate) struct Buffers {
    pub(crate) a: Handle,
    pub(crate) b: Handle,
    pub(crate) out: Handle,
    /// Vector of the epilogue, if it has one.
    pub(crate) vector: Option<Handle>,
    /// Whether the product is added to the contents of `out`.
    pub(crate) adds: bool,
}

impl Library {
    /// Returns the library on the device of `client`, which is loaded once for each device.
    ///
    /// # Errors
    /// The reason why it cannot be used, in one line.
    pub(crate) fn for_client(client: &Client) -> Result<Arc<Self>, String> {
        type Libraries = HashMap<DeviceId, Result<Arc<Library>, String>>;
        static LIBRARIES: LazyLock<Mutex<Libraries>> = LazyLock::new(Mutex::default);
        let device = client.service_id().device;
        // Entries are inserted atomically: the map remains valid if a thread panics with the lock.
        let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
        libraries.entry(device).or_insert_with(|| Self::load(client)).clone()
    }

    fn load(client: &Client) -> Result<Arc<Self>, String> {
        // SAFETY: opens and closes the library, as any later call would.
        if !unsafe { sys::is_culib_present() } {
            return Err(
                "libcublasLt.so (of CUDA 12 or 13) is not in the library path (LD_LIBRARY_PATH)".into()
            );
        }
        check_capability(client)?;
        // cudarc panics if the library lacks one of the functions.
        let version = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: the function has no arguments and no conditions.
            unsafe { sys::cublasLtGetVersion() }
        }));
        let version = version.map_err(|_| "libcublasLt.so lacks cublasLtGetVersion".to_string())?;
        if version < OLDEST_VERSION {
            return Err(format!(
                "libcublasLt.so is of version {}; 12.0 or later is needed",
                version_name(version)
            ));
        }
        let handle = stream::wait_for(client, Vec::new(), |_| {
            result::create_handle()
                .map(SendHandle)
                .map_err(|error| format!("cublasLtCreate: {}", status(error)))
        });
        let handle = handle.map_err(|error| first_line(&error))??;
        // Allocates the workspace now: without it, no product can run.
        workspace(client)?;
        Ok(Arc::new(Self { handle: handle.0, version }))
    }
}

/// A handle that is sent from the device's thread.
struct SendHandle(cublasLtHandle_t);

// SAFETY: cuBLASLt's functions may be called with one handle from any thread.
unsafe impl Send for SendHandle {}

/// Returns a version in the usual notation: 13.2.0 for 130200.
pub(crate) fn version_name(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// Checks that the device has matrix instructions for bf16.
///
/// # Errors
/// A message in one line, if the GPU is too old.
pub(super) fn check_capability(client: &Client) -> Result<(), String> {
    let (major, minor) = compute_capability(client.service_id().device.index_id)?;
    if major < OLDEST_CAPABILITY {
        return Err(format!("the GPU has compute capability {major}.{minor}; 8.0 or later is needed"));
    }
    Ok(())
}

pub(super) fn compute_capability(device: u16) -> Result<(i32, i32), String> {
    use cudarc::driver::sys::CUdevice_attribute as Attribute;
    let major = device_attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = device_attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok((major, minor))
}

fn device_attribute(device: u16, attribute: cudarc::driver::sys::CUdevice_attribute) -> Result<i32, String> {
    use cudarc::driver::result::device;
    let value = device::get(i32::from(device)).and_then(|device| {
        // SAFETY: the driver has just returned the device.
        unsafe { device::get_attribute(device, attribute) }
    });
    value.map_err(|error| format!("cannot query the GPU: {error}"))
}

/// Returns the first line of an error of CubeCL, which is followed by its causes and a backtrace.
pub(super) fn first_line(error: &ServerError) -> String {
    error.to_string().lines().next().unwrap_or_default().trim_end_matches(':').to_string()
}

/// Returns the workspace of the calling thread, whose products run one after another on a single
/// stream.
fn workspace(client: &Client) -> Result<Handle, String> {
    thread_local! {
        static WORKSPACES: RefCell<HashMap<DeviceId, Handle>> = RefCell::default();
    }
    let device = client.service_id().device;
    if let Some(handle) = WORKSPACES.with_borrow(|workspaces| workspaces.get(&device).cloned()) {
        return Ok(handle);
    }
    let handle = client.empty(WORKSPACE_BYTES);
    let has_memory = stream::wait_for(client, vec![handle.clone()], |_| ()).is_ok();
    if !has_memory {
        return Err(format!("no memory for a workspace of {} MiB", WORKSPACE_BYTES >> 20));
    }
    WORKSPACES.with_borrow_mut(|workspaces| workspaces.insert(device, handle.clone()));
    Ok(handle)
}

impl Plan {
    /// Creates a plan with the library's algorithm for `product`.
    ///
    /// # Errors
    /// The library's message, if it has no algorithm.
    pub(crate) fn new(client: &Client, library: &Arc<Library>, product: &Product) -> Result<Self, String> {
        let plan = stream::wait_for(client, Vec::new(), |_| Self::create(library, product));
        plan.map_err(|error| first_line(&error))?.map_err(status)
    }

    /// Creates a plan. Runs on the device's thread.
    fn create(library: &Arc<Library>, product: &Product) -> Result<Self, CublasError> {
        let compute = match product.input {
            DType::F32 => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let Product { m, k, n, .. } = *product;
        // Released by `drop` if a call below fails.
        let mut plan = Self {
            library: Arc::clone(library),
            desc: result::create_matmul_desc(compute, cudaDataType::CUDA_R_32F)?,
            a: std::ptr::null_mut(),
            b: std::ptr::null_mut(),
            out: std::ptr::null_mut(),
            algo: cublasLtMatmulAlgo_t { data: [0; 8] },
            algorithm: Algorithm { id: 0, tile: 0, split_k: 0, stages: 0 },
            epilogue: product.epilogue,
        };
        // The first factor of the library's product is B.
        set_desc(plan.desc, DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(product.b.transposed))?;
        set_desc(plan.desc, DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(product.a.transposed))?;
        let epilogue = match product.epilogue {
            Epilogue::None => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::SumsOfA => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADB,
        };
        set_desc(plan.desc, DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        if product.epilogue != Epilogue::None {
            // The address is set before each product; the heuristic may read its alignment.
            let address = ALIGNMENT as u64;
            set_desc(plan.desc, DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &address)?;
        }
        plan.a = layout([m, k], product.a, product.n_batches, product.input)?;
        plan.b = layout([k, n], product.b, product.n_batches, product.input)?;
        plan.out = layout([m, n], product.out, product.n_batches, product.output)?;
        plan.algo = plan.first_algorithm()?;
        plan.algorithm = Algorithm {
            id: config(&plan.algo, Config::CUBLASLT_ALGO_CONFIG_ID),
            tile: config(&plan.algo, Config::CUBLASLT_ALGO_CONFIG_TILE_ID),
            split_k: config(&plan.algo, Config::CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
            stages: config(&plan.algo, Config::CUBLASLT_ALGO_CONFIG_STAGES_ID),
        };
        Ok(plan)
    }

    /// Returns the first algorithm of the library's heuristic among the deterministic ones.
    fn first_algorithm(&self) -> Result<cublasLtMatmulAlgo_t, CublasError> {
        /// Reduction scheme that adds partial sums in the workspace, in f32. The other schemes add
        /// them in place, by atomic operations, or rounded to the type of the result.
        const REDUCTION_IN_WORKSPACE: u32 = 2;
        let preference = result::create_matmul_pref()?;
        let alignment = ALIGNMENT as u32;
        let preferences_set = [
            set_preference(
                preference,
                Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                &WORKSPACE_BYTES,
            ),
            set_preference(
                preference,
                Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                &REDUCTION_IN_WORKSPACE,
            ),
            set_preference(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment),
            set_preference(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment),
            set_preference(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment),
            set_preference(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment),
        ];
        let preferences_set: Result<(), CublasError> = preferences_set.into_iter().collect();
        let heuristic = preferences_set.and_then(|()| {
            // SAFETY: all descriptors exist.
            unsafe {
                result::get_matmul_algo_heuristic(
                    self.library.handle,
                    self.desc,
                    self.b,
                    self.a,
                    self.out,
                    self.out,
                    preference,
                )
            }
        });
        // SAFETY: it was created above, and nothing refers to it any more.
        unsafe { result::destroy_matmul_pref(preference)? };
        Ok(heuristic?.algo)
    }

    /// Queues the product behind everything that the calling thread has launched before.
    ///
    /// # Errors
    /// A message in one line, if there is no memory for the workspace. Errors of the product itself
    /// are reported when its result is read.
    pub(crate) fn queue(self: &Arc<Self>, client: &Client, buffers: Buffers) -> Result<(), String> {
        let adds = buffers.adds;
        let (read, written) = self.handles(client, buffers)?;
        let n_read = read.len();
        let plan = Arc::clone(self);
        stream::queue(client, "cublasLtMatmul", read, written, move |stream| plan.run(&stream, n_read, adds));
        Ok(())
    }

    /// Queues the product like [`Plan::queue`], and waits until the library has accepted it. The
    /// inner result is the library's message if it refuses.
    ///
    /// # Errors
    /// The device's message, if a buffer has no memory.
    pub(crate) fn queue_and_wait(
        &self,
        client: &Client,
        buffers: Buffers,
    ) -> Result<Result<(), String>, String> {
        let adds = buffers.adds;
        let (mut handles, written) = self.handles(client, buffers)?;
        let n_read = handles.len();
        handles.extend(written);
        let accepted = stream::wait_for(client, handles, |stream| self.run(&stream, n_read, adds));
        let accepted = accepted.map_err(|error| first_line(&error))?;
        Ok(accepted.map_err(|reason| format!("cublasLtMatmul: {reason}")))
    }

    /// Returns the buffers that the product reads, and those that it writes.
    fn handles(&self, client: &Client, buffers: Buffers) -> Result<(Vec<Handle>, Vec<Handle>), String> {
        let Buffers { a, b, out, vector, adds } = buffers;
        let mut read = vec![a, b];
        let mut written = vec![out.clone(), workspace(client)?];
        match (self.epilogue, vector) {
            (Epilogue::Bias, Some(bias)) => read.push(bias),
            (Epilogue::SumsOfA, Some(sums)) => written.push(sums),
            _ => {}
        }
        if adds {
            // The last input, because `run` indexes the others. A tainted result is not added to.
            read.push(out);
        }
        Ok((read, written))
    }

    /// Submits the product to the library, on the device's thread. Addresses are A, B, the bias if
    /// there is one; then, from `n_read` on, the result, the workspace, and the sums if they are
    /// requested.
    fn run(&self, stream: &Stream<'_>, n_read: usize, adds: bool) -> Result<(), String> {
        let (read, written) = stream.addresses.split_at(n_read);
        let vector = match self.epilogue {
            Epilogue::None => None,
            Epilogue::Bias => Some(read[2]),
            Epilogue::SumsOfA => Some(written[2]),
        };
        let alpha = 1.0f32;
        let beta = if adds { 1.0f32 } else { 0.0 };
        if let Some(vector) = vector {
            set_desc(self.desc, DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &vector).map_err(status)?;
        }
        // SAFETY: the addresses are those of buffers that hold the matrices of the plan's layouts,
        // which were derived from `Product`. They live until the work queued here has run, because
        // CubeCL reuses memory in the order of the stream.
        let submitted = unsafe {
            result::matmul(
                self.library.handle,
                self.desc,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                read[1] as *const c_void,
                self.b,
                read[0] as *const c_void,
                self.a,
                written[0] as *const c_void,
                self.out,
                written[0] as *mut c_void,
                self.out,
                &raw const self.algo,
                written[1] as *mut c_void,
                WORKSPACE_BYTES,
                stream.stream.cast(),
            )
        };
        submitted.map_err(status)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // A descriptor that cannot be released is leaked; nothing else depends on it.
        for layout in [self.a, self.b, self.out] {
            if !layout.is_null() {
                // SAFETY: the plan created it, and nothing that is queued refers to it: the library
                // reads it when it is called.
                let _ = unsafe { result::destroy_matrix_layout(layout) };
            }
        }
        // SAFETY: as above.
        let _ = unsafe { result::destroy_matmul_desc(self.desc) };
    }
}

/// Returns the library's name for an error.
fn status(error: CublasError) -> String {
    format!("{:?}", error.0)
}

/// Creates the library's descriptor of a batch of `[rows, columns]` matrices.
fn layout(
    [rows, columns]: [usize; 2],
    layout: Layout,
    n_batches: usize,
    dtype: DType,
) -> Result<cublasLtMatrixLayout_t, CublasError> {
    let dtype = match dtype {
        DType::F32 => cudaDataType::CUDA_R_32F,
        _ => cudaDataType::CUDA_R_16BF,
    };
    // The library's matrices are column-major: rows are the contiguous dimension.
    let (inner, outer) = if layout.transposed { (rows, columns) } else { (columns, rows) };
    let created = result::create_matrix_layout(dtype, inner as u64, outer as u64, layout.stride as i64)?;
    if n_batches > 1 {
        set_layout(created, LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &(n_batches as i32))?;
        let stride = layout.batch_stride as i64;
        set_layout(created, LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride)?;
    }
    Ok(created)
}

fn set_desc<T>(desc: cublasLtMatmulDesc_t, attribute: DescAttribute, value: &T) -> Result<(), CublasError> {
    // SAFETY: callers give each attribute a value of its type.
    unsafe {
        result::set_matmul_desc_attribute(desc, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    }
}

fn set_layout<T>(
    layout: cublasLtMatrixLayout_t,
    attribute: LayoutAttribute,
    value: &T,
) -> Result<(), CublasError> {
    // SAFETY: callers give each attribute a value of its type.
    unsafe {
        result::set_matrix_layout_attribute(
            layout,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}

fn set_preference<T>(
    preference: sys::cublasLtMatmulPreference_t,
    attribute: Preference,
    value: &T,
) -> Result<(), CublasError> {
    // SAFETY: callers give each attribute a value of its type.
    unsafe {
        result::set_matmul_pref_attribute(
            preference,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}

/// Returns an attribute of an algorithm, 0 if the library does not report it.
fn config(algo: &cublasLtMatmulAlgo_t, attribute: Config) -> u32 {
    let mut value = 0u32;
    // SAFETY: the requested attributes have four bytes.
    let status = unsafe {
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algo,
            attribute,
            (&raw mut value).cast(),
            size_of::<u32>(),
            std::ptr::null_mut(),
        )
    };
    if status.result().is_ok() { value } else { 0 }
}
