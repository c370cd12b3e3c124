//! Charts and sheets of images, as PNG files.

mod canvas;
pub mod histogram;
mod masks;
pub mod sheets;
pub(crate) mod tiles;
pub mod workdir;
