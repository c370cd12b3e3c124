//! NVIDIA's own libraries, and kernels in CUDA C++, on the stream that CubeCL computes on.

pub(crate) mod cublaslt;
mod module;
pub(crate) mod stream;
pub mod update;
