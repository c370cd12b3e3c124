//! x
pub mod backbone;
pub mod error;
pub mod head;
pub mod init;
pub mod loss;
pub mod method;
pub mod ops;
pub mod optim;
pub mod schedule;
pub mod shard;
pub mod step;
pub mod tape;
pub mod unit;
pub mod workers;
