//! Communication between ranks: engines, the communication thread, and collectives over flat
//! buffers.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod buffer_pool;
pub mod collectives;
pub mod column_group;
pub mod communicator;
pub mod conformance;
pub mod deadline;
pub mod engine;
mod error;
pub mod fixed;
pub mod flight_recorder;
pub mod in_flight;
pub mod launch;
pub mod mesh;
pub mod ordered;
pub mod peers;
pub mod topology;
pub mod wire;

pub use error::EngineError;
