//! How ranks talk: engines, the communication thread, and collectives over flat buffers.

pub(crate) mod buffer_pool;
pub(crate) mod collectives;
pub mod communicator;
pub(crate) mod deadline;
pub mod engine;
pub(crate) mod fixed;
pub(crate) mod flight_recorder;
pub mod mesh;
pub(crate) mod ordered;
pub(crate) mod peers;
pub(crate) mod prefetch;
pub mod topology;
pub mod wire;
