//! NVIDIA's libraries, and kernels in CUDA C++, on CubeCL's stream.

pub(crate) mod attention;
pub(crate) mod cublaslt;
mod module;
pub(crate) mod stream;
pub mod update;
