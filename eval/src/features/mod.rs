//! Features of images: extraction, cache, and files in other programs' formats. [`extract`] is the
//! only file of this folder that runs a network.

pub(crate) mod cache;
pub(crate) mod columns;
pub(crate) mod extract;
pub mod file;
mod mapped;
pub(crate) mod set;
pub(crate) mod table;
