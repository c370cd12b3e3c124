//! Charts and sheets of images, as PNG files.

mod canvas;
pub mod histogram;
pub mod sheets;
mod tiles;
pub mod workdir;
