//! Choice of the device that a rank computes on.

use std::str::FromStr;

use burn_tensor::Device;

/// A device as a user writes it: `auto`, `cpu`, `cuda`, `cuda:1`, `wgpu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The local rank's NVIDIA GPU if this build supports CUDA and finds one, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU: the one with this number, or, if `None`, the local rank's.
    Cuda(Option<usize>),
    /// A GPU over Vulkan, Metal or WebGPU: the one with this number, or, if `None`, the local
    /// rank's.
    Wgpu(Option<usize>),
}

/// An opened device.
#[derive(Debug, Clone)]
pub struct Opened {
    /// Device on which tensors are allocated.
    pub device: Device,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Name for display: `cuda:0, NVIDIA H200`.
    pub name: String,
    /// Free bytes of the device's own memory; `None` if it shares the host's, or does not report
    /// them.
    pub free_bytes: Option<u64>,
    /// Identifier of a GPU, unique across machines; zeros for a device without one.
    pub id: [u8; 16],
    /// Error that made [`DeviceChoice::Auto`] fall back to the CPU.
    pub fallback_error: Option<DeviceError>,
}

/// Kinds of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// The host's cores and memory.
    Cpu,
    /// The NVIDIA GPU with this number.
    Cuda(usize),
    /// A GPU over Vulkan, Metal or WebGPU.
    Wgpu,
}

/// An error from opening a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The text names no device.
    #[error("unknown device {text:?}: use auto, cpu, cuda, cuda:1 or wgpu")]
    Unknown {
        /// The text.
        text: String,
    },
    /// The build does not support this kind of device.
    #[error("this build has no {kind} support: build with `cargo build --release --features {kind}`")]
    NotBuilt {
        /// The kind, which is also the name of the feature.
        kind: &'static str,
    },
    /// The machine has no usable device of this kind.
    #[error("no {kind} device: {reason}")]
    None {
        /// The kind.
        kind: &'static str,
        /// The reason, in words.
        reason: String,
    },
    /// The machine has fewer devices of this kind.
    #[error("{kind}:{number} was asked for, and there are {n_devices}, counted from 0")]
    TooFew {
        /// The kind.
        kind: &'static str,
        /// Number that was asked for.
        number: usize,
        /// Number of devices.
        n_devices: usize,
    },
}

impl FromStr for DeviceChoice {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let unknown = || DeviceError::Unknown { text: text.into() };
        let (kind, number) = match text.split_once(':') {
            Some((kind, number)) => (kind, Some(number.parse().map_err(|_| unknown())?)),
            None => (text, None),
        };
        match (kind, number) {
            ("auto", None) => Ok(Self::Auto),
            ("cpu", None) => Ok(Self::Cpu),
            ("cuda", number) => Ok(Self::Cuda(number)),
            ("wgpu", number) => Ok(Self::Wgpu(number)),
            _ => Err(unknown()),
        }
    }
}

impl DeviceChoice {
    /// Opens the device for the process with rank `local_rank` on its machine. Several ranks may
    /// share one.
    ///
    /// # Errors
    /// [`DeviceError`]; never for [`DeviceChoice::Auto`], which falls back to the CPU with the
    /// error in `fallback_error`.
    pub fn open(self, local_rank: usize) -> Result<Opened, DeviceError> {
        match self {
            Self::Auto => Ok(cuda(None, local_rank)
                .unwrap_or_else(|error| Opened { fallback_error: Some(error), ..Opened::cpu() })),
            Self::Cpu => Ok(Opened::cpu()),
            Self::Cuda(number) => cuda(number, local_rank),
            Self::Wgpu(number) => wgpu(number, local_rank),
        }
    }
}

impl Opened {
    /// Returns the CPU.
    pub fn cpu() -> Self {
        Self {
            device: Device::flex(),
            kind: DeviceKind::Cpu,
            name: "cpu".into(),
            free_bytes: None,
            id: [0; 16],
            fallback_error: None,
        }
    }
}

/// Returns the device number for the `local_rank`-th process: the one asked for, else round-robin
/// over `n_devices`.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn device_index(
    kind: &'static str,
    asked: Option<usize>,
    local_rank: usize,
    n_devices: usize,
) -> Result<usize, DeviceError> {
    match asked {
        Some(number) if number >= n_devices => Err(DeviceError::TooFew { kind, number, n_devices }),
        Some(number) => Ok(number),
        None => Ok(local_rank % n_devices),
    }
}

/// Returns the names of the NVIDIA GPUs that this process sees.
///
/// # Errors
/// [`DeviceError`].
#[cfg(feature = "cuda")]
pub fn cuda_devices() -> Result<Vec<String>, DeviceError> {
    use cudarc::driver::{result, sys};
    let none = |reason: String| DeviceError::None { kind: "cuda", reason };
    // SAFETY: tries to load the driver's library, whose initializers are trusted.
    #[allow(unsafe_code)]
    let has_driver = unsafe { sys::is_culib_present() };
    if !has_driver {
        return Err(none("libcuda.so, which comes with NVIDIA's driver, cannot be loaded".into()));
    }
    let failed = |error: result::DriverError| none(format!("NVIDIA's driver says: {error}"));
    result::init().map_err(failed)?;
    let n_devices = result::device::get_count().map_err(failed)?;
    if n_devices == 0 {
        return Err(none("the driver is there and sees no GPU; is CUDA_VISIBLE_DEVICES set?".into()));
    }
    (0..n_devices)
        .map(|number| result::device::get(number).and_then(result::device::get_name).map_err(failed))
        .collect()
}

/// Fails, because this build has no CUDA support.
///
/// # Errors
/// [`DeviceError::NotBuilt`].
#[cfg(not(feature = "cuda"))]
pub fn cuda_devices() -> Result<Vec<String>, DeviceError> {
    Err(DeviceError::NotBuilt { kind: "cuda" })
}

/// Checks that the driver is for the CUDA of the compiler, whose programs an older one does not
/// load.
///
/// # Errors
/// One line with both versions.
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
fn check_driver() -> Result<(), String> {
    use cudarc::{driver, nvrtc};
    let mut of_driver = 0;
    // SAFETY: writes to a local that outlives the call.
    let asked = unsafe { driver::sys::cuDriverGetVersion(&mut of_driver) };
    // SAFETY: tries to load the compiler's library, whose initializers are trusted.
    let has_compiler = unsafe { nvrtc::sys::is_culib_present() };
    if asked != driver::sys::CUresult::CUDA_SUCCESS || !has_compiler {
        // Whoever needs them says more.
        return Ok(());
    }
    let mut major = 0;
    let mut minor = 0;
    // SAFETY: writes to locals that outlive the call.
    unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    if of_driver / 1000 < major {
        return Err(format!(
            "NVIDIA's driver is for CUDA {}.{}, and libnvrtc.so, which compiles kernels, of CUDA {major}.{minor}: install a newer \
             driver, or the libraries of CUDA {}",
            of_driver / 1000,
            of_driver % 1000 / 10,
            of_driver / 1000
        ));
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn cuda(asked: Option<usize>, local_rank: usize) -> Result<Opened, DeviceError> {
    use cudarc::driver::result;
    let names = cuda_devices()?;
    let number = device_index("cuda", asked, local_rank, names.len())?;
    let reason = |reason: String| DeviceError::None { kind: "cuda", reason };
    // Without these headers, the first kernel would panic in a thread of CubeCL.
    let toolkit = cubecl::cuda::install::cuda_path();
    let headers = toolkit.unwrap_or_else(|| "/usr/local/cuda".into()).join("include/cuda_fp16.h");
    if !headers.exists() {
        let why = "kernels are compiled when they are first used, and need CUDA's headers: set CUDA_PATH";
        return Err(reason(format!("{} is not there; {why}", headers.display())));
    }
    check_driver().map_err(reason)?;
    super::context::enter(number)
        .map_err(|error| reason(format!("cuda:{number} cannot be used: {error}")))?;
    let uuid = result::device::get(number as i32).and_then(result::device::get_uuid);
    let uuid = uuid.map_err(|error| reason(format!("cuda:{number}: {error}")))?;
    Ok(Opened {
        device: Device::cuda(number),
        kind: DeviceKind::Cuda(number),
        name: format!("cuda:{number}, {}", names[number]),
        free_bytes: result::mem_get_info().ok().map(|(free, _)| free as u64),
        // The C header declares `char`, which is signed on some machines.
        id: uuid.bytes.map(|byte| byte as u8),
        fallback_error: None,
    })
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: Option<usize>, _: usize) -> Result<Opened, DeviceError> {
    Err(DeviceError::NotBuilt { kind: "cuda" })
}

#[cfg(feature = "wgpu")]
fn wgpu(asked: Option<usize>, local_rank: usize) -> Result<Opened, DeviceError> {
    use burn_tensor::DeviceType;
    let devices: Vec<Device> = Device::enumerate(DeviceType::Wgpu).into_vec();
    if devices.is_empty() {
        let reason = "no driver for Vulkan or Metal is installed, or it sees no GPU".into();
        return Err(DeviceError::None { kind: "wgpu", reason });
    }
    let number = device_index("wgpu", asked, local_rank, devices.len())?;
    let device = devices[number].clone();
    let name = device.identity().map_or_else(|| "a GPU".to_string(), |identity| identity.name);
    Ok(Opened {
        device,
        kind: DeviceKind::Wgpu,
        name: format!("wgpu:{number}, {name}"),
        free_bytes: None,
        id: [0; 16],
        fallback_error: None,
    })
}

#[cfg(not(feature = "wgpu"))]
fn wgpu(_: Option<usize>, _: usize) -> Result<Opened, DeviceError> {
    Err(DeviceError::NotBuilt { kind: "wgpu" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read() {
        let read = |text: &str| text.parse::<DeviceChoice>();
        assert_eq!(read("auto"), Ok(DeviceChoice::Auto));
        assert_eq!(read("cpu"), Ok(DeviceChoice::Cpu));
        assert_eq!(read("cuda"), Ok(DeviceChoice::Cuda(None)));
        assert_eq!(read("cuda:3"), Ok(DeviceChoice::Cuda(Some(3))));
        assert_eq!(read("wgpu:0"), Ok(DeviceChoice::Wgpu(Some(0))));
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "auto:1"] {
            assert!(read(text).unwrap_err().to_string().contains("cuda:1"), "{text}");
        }
    }

    #[test]
    fn what_is_not_there_is_said_and_auto_takes_what_is() {
        let opened = DeviceChoice::Auto.open(0).unwrap();
        // This test also runs on machines with a GPU, in builds that support it.
        if opened.kind == DeviceKind::Cpu {
            let error = DeviceChoice::Cuda(None).open(0).unwrap_err().to_string();
            assert!(error.contains("--features cuda") || error.contains("driver"), "{error}");
        }
        assert_eq!(DeviceChoice::Cpu.open(5).unwrap().name, "cpu");
    }
}
