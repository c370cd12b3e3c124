//! What people look at, as PNG files.

pub mod histogram;
pub mod report;
pub(crate) mod sheet;
