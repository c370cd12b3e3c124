//! NVIDIA's own libraries and launches on the stream that CubeCL computes on.

pub(crate) mod cublaslt;
pub(crate) mod stream;
