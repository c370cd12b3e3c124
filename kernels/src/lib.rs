//! The device that a rank computes on, and the operations that take most of the training time.
//!
//! `unsafe` is used for calls into `gemm`, after bounds are asserted, and, with the feature `cuda`,
//! for calls into NVIDIA's libraries.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod device;
#[cfg(feature = "cuda")]
pub mod native;
pub mod ops;
pub mod product_kernels;
pub mod rows;
