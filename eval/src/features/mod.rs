//! Images into rows of numbers, kept for all that look at them. [`extract`] is the only file that runs a
//! network.

pub(crate) mod cache;
pub(crate) mod columns;
pub(crate) mod extract;
pub mod file;
mod mapped;
pub(crate) mod set;
pub(crate) mod table;
