//! How ranks talk: engines, the communication thread, and collectives over flat buffers.

pub mod buffer_pool;
pub(crate) mod collectives;
pub mod communicator;
pub mod deadline;
pub mod engine;
pub mod fixed;
pub mod flight_recorder;
pub mod mesh;
pub mod ordered;
pub mod peers;
pub mod prefetch;
pub mod topology;
pub mod wire;
