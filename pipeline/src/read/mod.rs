//! Samples in a defined order: which sample stands at which position, and the threads that read them.

pub mod cursor;
pub mod dataset;
pub mod loader;
pub mod order;
pub mod quarantine;
pub mod share;
pub mod stats;
