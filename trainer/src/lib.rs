//! Views into weights: networks, methods, the unit-by-unit step, optimizer, checkpoints, telemetry.
//!
//! This crate knows nothing of command lines or of evaluation, which it calls through [`network::probe`].

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod bench;
pub mod checkpoint;
pub mod comm;
#[cfg(test)]
mod conformance;
pub mod device;
pub(crate) mod error;
pub mod estimate;
#[cfg(test)]
mod golden;
pub(crate) mod method;
pub(crate) mod model;
pub mod network;
pub(crate) mod ops;
pub(crate) mod optim;
pub mod recipe;
pub mod run;
pub(crate) mod schedule;
pub mod step;

pub use error::TrainError;
pub use model::backbone::kinds::*;
pub use model::patches::Normalization;
pub use model::tensor::NamedTensor;
pub use network::Network;
pub use ops::gemm::{Element, Mat, gemm};
pub use recipe::Recipe;
pub use recipe::plan::Plan;
