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
pub mod error;
pub mod estimate;
pub mod method;
pub mod model;
pub mod network;
pub mod ops;
pub mod optim;
pub mod recipe;
pub mod run;
pub mod schedule;
pub mod step;

pub use error::TrainError;
pub use network::Network;
pub use recipe::Recipe;
pub use recipe::plan::Plan;
