//! Choice of the device that a rank computes on.

use std::str::FromStr;

use burn_tensor::Device;

/// A device as it is written by users: `auto`, `cpu`, `cuda`, `cuda:1`, `wgpu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The local rank's NVIDIA GPU if this build supports CUDA and finds one, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU: the one with this index, or, if `None`, the local rank's.
    Cuda(Option<usize>),
    /// A GPU over Vulkan, Metal or WebGPU: the one with this index, or, if `None`, the local
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
    /// The NVIDIA GPU with this index.
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
    #[error("there is no {kind}:{index}: {n_devices} are available, counted from 0")]
    TooFew {
        /// The kind.
        kind: &'static str,
        /// Index that was asked for.
        index: usize,
        /// Number of devices.
        n_devices: usize,
    },
}

impl FromStr for DeviceChoice {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let (kind, index) = match text.split_once(':') {
            Some((kind, index)) => {
                let index = index.parse().map_err(|_| DeviceError::Unknown { text: text.into() })?;
                (kind, Some(index))
            }
            None => (text, None),
        };
        match (kind, index) {
            ("auto", None) => Ok(Self::Auto),
            ("cpu", None) => Ok(Self::Cpu),
            ("cuda", index) => Ok(Self::Cuda(index)),
            ("wgpu", index) => Ok(Self::Wgpu(index)),
            _ => Err(DeviceError::Unknown { text: text.into() }),
        }
    }
}

impl DeviceChoice {
    /// Opens the device for the process with rank `local_rank` on its machine. Several ranks may
    /// share a device.
    ///
    /// # Errors
    /// [`DeviceError`]; never for [`DeviceChoice::Auto`], which falls back to the CPU with the
    /// error in `fallback_error`.
    pub fn open(self, local_rank: usize) -> Result<Opened, DeviceError> {
        match self {
            Self::Auto => match cuda(None, local_rank) {
                Ok(opened) => Ok(opened),
                Err(error) => Ok(Opened { fallback_error: Some(error), ..Opened::cpu() }),
            },
            Self::Cpu => Ok(Opened::cpu()),
            Self::Cuda(index) => cuda(index, local_rank),
            Self::Wgpu(index) => wgpu(index, local_rank),
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

/// Returns the device index for the process with rank `local_rank`: `requested`, else round-robin
/// over `n_devices`.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn device_index(
    kind: &'static str,
    requested: Option<usize>,
    local_rank: usize,
    n_devices: usize,
) -> Result<usize, DeviceError> {
    match requested {
        Some(index) if index >= n_devices => Err(DeviceError::TooFew { kind, index, n_devices }),
        Some(index) => Ok(index),
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
    // SAFETY: tries to load the driver's library, whose initializers are trusted.
    #[allow(unsafe_code)]
    let has_driver = unsafe { sys::is_culib_present() };
    if !has_driver {
        return Err(no_cuda("libcuda.so, which comes with NVIDIA's driver, cannot be loaded".into()));
    }
    result::init().map_err(driver_error)?;
    let n_devices = result::device::get_count().map_err(driver_error)?;
    if n_devices == 0 {
        return Err(no_cuda("the driver is installed but sees no GPU; is CUDA_VISIBLE_DEVICES set?".into()));
    }
    let mut names = Vec::with_capacity(n_devices as usize);
    for index in 0..n_devices {
        let device = result::device::get(index).map_err(driver_error)?;
        names.push(result::device::get_name(device).map_err(driver_error)?);
    }
    Ok(names)
}

#[cfg(feature = "cuda")]
fn no_cuda(reason: String) -> DeviceError {
    DeviceError::None { kind: "cuda", reason }
}

#[cfg(feature = "cuda")]
fn driver_error(error: cudarc::driver::result::DriverError) -> DeviceError {
    no_cuda(format!("NVIDIA's driver says: {error}"))
}

/// Fails, because this build has no CUDA support.
///
/// # Errors
/// [`DeviceError::NotBuilt`].
#[cfg(not(feature = "cuda"))]
pub fn cuda_devices() -> Result<Vec<String>, DeviceError> {
    Err(DeviceError::NotBuilt { kind: "cuda" })
}

/// Checks that the driver supports the compiler's version of CUDA: older drivers do not load its
/// programs.
///
/// # Errors
/// One line with both versions.
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
fn check_driver() -> Result<(), String> {
    use cudarc::{driver, nvrtc};
    let mut driver_version = 0;
    // SAFETY: writes to a local that outlives the call.
    let status = unsafe { driver::sys::cuDriverGetVersion(&mut driver_version) };
    // SAFETY: tries to load the compiler's library, whose initializers are trusted.
    let has_compiler = unsafe { nvrtc::sys::is_culib_present() };
    if status != driver::sys::CUresult::CUDA_SUCCESS || !has_compiler {
        // Their first use reports the error with more detail.
        return Ok(());
    }
    let mut major = 0;
    let mut minor = 0;
    // SAFETY: writes to locals that outlive the call.
    unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    if driver_version / 1000 < major {
        return Err(format!(
            "NVIDIA's driver supports CUDA {}.{}, but libnvrtc.so, which compiles kernels, is of CUDA \
             {major}.{minor}: install a newer driver, or the libraries of CUDA {}",
            driver_version / 1000,
            driver_version % 1000 / 10,
            driver_version / 1000
        ));
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn cuda(requested: Option<usize>, local_rank: usize) -> Result<Opened, DeviceError> {
    use cudarc::driver::result;
    let names = cuda_devices()?;
    let index = device_index("cuda", requested, local_rank, names.len())?;
    // Without these headers, the first kernel would panic in a thread of CubeCL.
    let toolkit = cubecl::cuda::install::cuda_path();
    let headers = toolkit.unwrap_or_else(|| "/usr/local/cuda".into()).join("include/cuda_fp16.h");
    if !headers.exists() {
        let why = "kernels are compiled when they are first used, and need CUDA's headers: set CUDA_PATH";
        return Err(no_cuda(format!("{} is missing; {why}", headers.display())));
    }
    check_driver().map_err(no_cuda)?;
    super::context::enter(index).map_err(|error| no_cuda(format!("cuda:{index} cannot be used: {error}")))?;
    let uuid = result::device::get(index as i32).and_then(result::device::get_uuid);
    let uuid = uuid.map_err(|error| no_cuda(format!("cuda:{index}: {error}")))?;
    Ok(Opened {
        device: Device::cuda(index),
        kind: DeviceKind::Cuda(index),
        name: format!("cuda:{index}, {}", names[index]),
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
fn wgpu(requested: Option<usize>, local_rank: usize) -> Result<Opened, DeviceError> {
    use burn_tensor::DeviceType;
    let devices: Vec<Device> = Device::enumerate(DeviceType::Wgpu).into_vec();
    if devices.is_empty() {
        let reason = "no driver for Vulkan or Metal is installed, or it sees no GPU".into();
        return Err(DeviceError::None { kind: "wgpu", reason });
    }
    let index = device_index("wgpu", requested, local_rank, devices.len())?;
    let device = devices[index].clone();
    let name = device.identity().map_or_else(|| "a GPU".to_string(), |identity| identity.name);
    Ok(Opened {
        device,
        kind: DeviceKind::Wgpu,
        name: format!("wgpu:{index}, {name}"),
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
    fn device_names_are_parsed() {
        assert_eq!(DeviceChoice::from_str("auto"), Ok(DeviceChoice::Auto));
        assert_eq!(DeviceChoice::from_str("cpu"), Ok(DeviceChoice::Cpu));
        assert_eq!(DeviceChoice::from_str("cuda"), Ok(DeviceChoice::Cuda(None)));
        assert_eq!(DeviceChoice::from_str("cuda:3"), Ok(DeviceChoice::Cuda(Some(3))));
        assert_eq!(DeviceChoice::from_str("wgpu:0"), Ok(DeviceChoice::Wgpu(Some(0))));
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "auto:1"] {
            assert_eq!(text.parse::<DeviceChoice>(), Err(DeviceError::Unknown { text: text.into() }));
        }
    }

    #[test]
    fn missing_devices_are_reported_and_auto_falls_back_to_the_cpu() {
        let opened = DeviceChoice::Auto.open(0).unwrap();
        // This test also runs on machines with a GPU, in builds that support it.
        if opened.kind == DeviceKind::Cpu {
            let error = DeviceChoice::Cuda(None).open(0).unwrap_err();
            assert!(
                matches!(
                    error,
                    DeviceError::NotBuilt { kind: "cuda" } | DeviceError::None { kind: "cuda", .. }
                ),
                "{error}"
            );
        }
        assert_eq!(DeviceChoice::Cpu.open(5).unwrap().name, "cpu");
    }
}
