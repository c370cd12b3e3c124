//! Samples in a defined order: which sample is at which position, and the threads that read them.

pub(crate) mod cursor;
pub(crate) mod dataset;
pub(crate) mod loader;
pub(crate) mod order;
pub(crate) mod quarantine;
pub(crate) mod share;
pub mod stats;
