//! The device that a rank computes on, and the operations that take most of the training time.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod device;
#[cfg(feature = "cuda")]
pub mod native;
pub mod ops;
pub mod products;
pub mod rows;
