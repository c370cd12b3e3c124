//! Kernels in CUDA C++: compiled by NVRTC when they are first used, and launched on CubeCL's
//! stream.

#![allow(unsafe_code)]

use std::ffi::{CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::client::Client;
use cudarc::driver::result::{launch_kernel, module};
use cudarc::driver::sys::CUfunction;
use cudarc::nvrtc::safe::{CompileOptions, compile_ptx_with_opts};

use super::cublaslt::compute_capability;
use super::stream::{self, Stream};

/// Kernels of one source file, on one device. They stay loaded until the process ends.
#[derive(Debug)]
pub(super) struct Module<const N: usize> {
    /// In the order in which [`Module::load`] was given their names.
    functions: [CUfunction; N],
}

// SAFETY: the driver accepts a function from any thread that has the context it was loaded in, and
// `launch` runs on the device's one thread.
unsafe impl<const N: usize> Send for Module<N> {}
// SAFETY: as above; nothing in it changes.
unsafe impl<const N: usize> Sync for Module<N> {}

/// Blocks of a launch, and threads of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) n_blocks: usize,
    pub(super) n_threads: usize,
}

impl<const N: usize> Module<N> {
    /// Compiles `source` for the device of `client` and loads the kernels `names`.
    ///
    /// Products and sums are rounded each by itself, as on the CPU: no fused multiply-add.
    ///
    /// # Errors
    /// One line, or the compiler's messages.
    pub(super) fn load(client: &Client, source: &str, names: [&'static str; N]) -> Result<Self, String> {
        let (major, minor) = compute_capability(client.service_id().device.index_id)?;
        let options = CompileOptions {
            fmad: Some(false),
            options: vec![format!("--gpu-architecture=compute_{major}{minor}")],
            ..CompileOptions::default()
        };
        // A library that is missing makes cudarc panic.
        let compiled = catch_unwind(AssertUnwindSafe(|| compile_ptx_with_opts(source, options)));
        let ptx = match compiled {
            Ok(Ok(ptx)) => ptx.to_src(),
            Ok(Err(error)) => return Err(format!("NVRTC: {error}")),
            Err(_) => return Err("libnvrtc.so cannot be loaded".into()),
        };
        let ptx = CString::new(ptx).map_err(|_| "NVRTC: the program has a zero byte".to_string())?;
        stream::wait_for(client, Vec::new(), |_| Self::on_device_thread(&ptx, names))
            .map_err(|error| error.to_string())?
    }

    fn on_device_thread(ptx: &CString, names: [&'static str; N]) -> Result<Self, String> {
        // SAFETY: the text ends with a zero byte, and the device's thread has set the context.
        let module = unsafe { module::load_data(ptx.as_ptr().cast()) };
        let module = module.map_err(|error| format!("cuModuleLoadData: {error}"))?;
        let mut functions = [std::ptr::null_mut(); N];
        for (function, name) in functions.iter_mut().zip(names) {
            let text = CString::new(name).map_err(|_| format!("{name:?} is no name"))?;
            // SAFETY: the module was loaded above, and is never unloaded.
            *function = unsafe { module::get_function(module, text) }
                .map_err(|error| format!("cuModuleGetFunction: {name}: {error}"))?;
        }
        Ok(Self { functions })
    }

    /// Launches kernel `number` on `stream`, with one argument by value.
    ///
    /// # Safety
    /// The kernel's one parameter has the layout of `A`, the addresses in it are those of buffers
    /// that the kernel may read and write as far as it does, and the caller holds them as
    /// [`stream::queue`] says.
    ///
    /// # Errors
    /// The driver's words.
    pub(super) unsafe fn launch<A>(
        &self,
        number: usize,
        grid: Grid,
        stream: &Stream<'_>,
        argument: &A,
    ) -> Result<(), String> {
        let mut arguments = [std::ptr::from_ref(argument).cast_mut().cast::<c_void>()];
        let blocks = u32::try_from(grid.n_blocks).map_err(|_| format!("{} blocks", grid.n_blocks))?;
        // SAFETY: the function is loaded; the driver copies the argument, whose layout the caller
        // answers for, before it returns.
        let launched = unsafe {
            launch_kernel(
                self.functions[number],
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
