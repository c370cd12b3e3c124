//! Samples in a defined order: which sample is at which position, and the threads that read them.

pub(crate) mod cursor;
pub(crate) mod dataset;
mod epochs;
pub(crate) mod loader;
mod mix;
pub(crate) mod order;
mod permutation;
pub(crate) mod place;
pub(crate) mod quarantine;
pub(crate) mod sampling;
pub(crate) mod share;
pub mod stats;
mod weights;
