//! Training, from views to weights: methods, the unit-by-unit step, optimizer, checkpoints,
//! telemetry.
//!
//! Command lines and evaluation are outside this crate, which calls evaluation through
//! [`networks::probe`].

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod bench;
pub mod checkpoint;
#[cfg(test)]
mod conformance;
pub mod cost;
pub(crate) mod error;
pub mod estimate;
#[cfg(test)]
mod golden;
pub(crate) mod method;
pub(crate) mod optim;
pub mod recipe;
pub mod run;
pub(crate) mod schedule;
pub mod step;

pub use error::TrainError;
pub use recipe::Recipe;
pub use recipe::plan::Plan;
pub use recipe::resolve::{resolve, with_steps};
pub use schedule::Length;
