//! Kernels in CUDA C++, which are compiled by NVRTC when they are first used, and launched on
//! CubeCL's stream.

#![allow(unsafe_code)]

use std::ffi::{CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::client::Client;
use cudarc::driver::result::{launch_kernel, module};
use cudarc::driver::sys::CUfunction;
use cudarc::nvrtc::safe::{CompileOptions, compile_ptx_with_opts};

use super::cublaslt::compute_capability;
use super::stream::{self, Stream};

/// Definitions, for CUDA, of the macros in capitals that all sources use.
pub(super) const CUDA_MACROS: &str = "\
#define KERNEL(name, type, job) extern \"C\" __global__ void name(const __grid_constant__ type job)
#define DEVICE __device__ static
#define SHARED __shared__
#define BLOCK blockIdx.x
#define THREAD threadIdx.x
#define BARRIER __syncthreads
#define ALL(condition) __syncthreads_and(condition)
#define BITS(value) __float_as_uint(value)
";

/// Kernels of one source file, on one device. They remain loaded until the process ends.
#[derive(Debug)]
pub(super) struct Module<const N: usize> {
    /// Functions, in the order of the names given to [`Module::load`].
    functions: [CUfunction; N],
}

// SAFETY: the driver accepts a function from any thread with the context in which it was loaded,
// and `launch` runs on the device's single thread.
unsafe impl<const N: usize> Send for Module<N> {}
// SAFETY: as above; the functions are never modified.
unsafe impl<const N: usize> Sync for Module<N> {}

/// Number of blocks of a launch, and of threads of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) n_blocks: usize,
    pub(super) n_threads: usize,
}

impl<const N: usize> Module<N> {
    /// Compiles `source` for the device of `client` and loads the kernels `names`.
    ///
    /// Products and sums are rounded separately, as on the CPU: no fused multiply-add.
    ///
    /// # Errors
    /// A message in one line, or the compiler's messages.
    pub(super) fn load(client: &Client, source: &str, names: [&'static str; N]) -> Result<Self, String> {
        let (major, minor) = compute_capability(client.service_id().device.index_id)?;
        let options = CompileOptions {
            fmad: Some(false),
            options: vec![format!("--gpu-architecture=compute_{major}{minor}")],
            ..CompileOptions::default()
        };
        // cudarc panics if the library is missing.
        let compiled = catch_unwind(AssertUnwindSafe(|| compile_ptx_with_opts(source, options)));
        let ptx = match compiled {
            Ok(Ok(ptx)) => ptx.to_src(),
            Ok(Err(error)) => return Err(format!("NVRTC: {error}")),
            Err(_) => return Err("libnvrtc.so cannot be loaded".into()),
        };
        let ptx = CString::new(ptx).map_err(|_| "NVRTC: the program has a zero byte".to_string())?;
        stream::wait_for(client, Vec::new(), |_| Self::from_ptx(&ptx, names))
            .map_err(|error| error.to_string())?
    }

    /// Loads the kernels. Runs on the device's thread.
    fn from_ptx(ptx: &CString, names: [&'static str; N]) -> Result<Self, String> {
        // SAFETY: the text ends with a zero byte, and the device's thread has set the context.
        let module = unsafe { module::load_data(ptx.as_ptr().cast()) };
        let module = module.map_err(|error| format!("cuModuleLoadData: {error}"))?;
        let mut functions = [std::ptr::null_mut(); N];
        for (function, name) in functions.iter_mut().zip(names) {
            let text = CString::new(name).map_err(|_| format!("{name:?} is no name"))?;
            // SAFETY: the module was loaded above, and is never unloaded.
            let loaded = unsafe { module::get_function(module, text) };
            *function = loaded.map_err(|error| format!("cuModuleGetFunction: {name}: {error}"))?;
        }
        Ok(Self { functions })
    }

    /// Launches kernel `index` on `stream`, with one argument that is passed by value.
    ///
    /// # Safety
    /// The kernel's only parameter has the layout of `A`. The addresses in it are those of buffers
    /// within which the kernel reads and writes, and which the caller holds as required by
    /// [`stream::queue`].
    ///
    /// # Errors
    /// The driver's message.
    pub(super) unsafe fn launch<A>(
        &self,
        index: usize,
        grid: Grid,
        stream: &Stream<'_>,
        argument: &A,
    ) -> Result<(), String> {
        let mut arguments = [std::ptr::from_ref(argument).cast_mut().cast::<c_void>()];
        let blocks = u32::try_from(grid.n_blocks).map_err(|_| format!("{} blocks", grid.n_blocks))?;
        // SAFETY: the function is loaded; the driver copies the argument, whose layout the caller
        // guarantees, before it returns.
        let launched = unsafe {
            launch_kernel(
                self.functions[index],
                (blocks, 1, 1),
                (grid.n_threads as u32, 1, 1),
                0,
                stream.stream,
                &mut arguments,
            )
        };
        launched.map_err(|error| error.to_string())
    }
}
