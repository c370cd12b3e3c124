//! Charts and sheets of images, as PNG files.

pub mod histogram;
pub mod report;
pub(crate) mod sheet;
