//! What is done to a data set before it is learned from, one file a job.

pub(crate) mod dedup;
pub(crate) mod extract;
pub(crate) mod filter;
pub(crate) mod index;
pub(crate) mod regroup;
pub(crate) mod resize;
pub(crate) mod sheet;
pub(crate) mod stats;
pub(crate) mod verify;
