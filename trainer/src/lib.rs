//! Views into weights: backbones, methods, the unit-by-unit step, optimizer, checkpoints, telemetry.
//!
//! A recipe ([`config`]) resolves into a [`plan`]; [`run`](mod@run) reads batches ([`data`]) and takes
//! steps ([`step`]). A network is a list of [`unit`]s whose parameters live in flat buffers
//! ([`shard`]); [`tape`] takes one unit forwards and backwards. [`method`] says what is learned.
//!
//! This crate knows nothing of command lines or of evaluation, which it calls through [`probe`].

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod backbone;
pub mod bench;
pub mod bench_shard;
pub mod checkpoint;
pub mod compare;
pub mod config;
pub mod data;
pub mod device;
mod drop_path;
pub mod error;
pub mod estimate;
pub mod fault;
pub mod fixed;
pub mod head;
pub mod health;
pub mod init;
pub mod input;
pub mod loss;
pub mod method;
pub mod network;
mod numbers;
pub mod ops;
pub mod optim;
mod passes;
pub mod peers;
pub mod phases;
pub mod plan;
pub mod probe;
mod row;
pub mod run;
mod safetensors;
pub mod schedule;
pub mod shard;
mod slices;
pub mod step;
mod straggler;
pub mod tape;
pub mod telemetry;
pub mod unit;
pub mod watch;
mod workdir;
pub mod workers;

pub use config::Recipe;
pub use error::TrainError;
pub use network::Network;
pub use plan::Plan;
