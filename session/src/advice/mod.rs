//! Choice of a recipe for a number of hours, by the images, the machine and the weights that are
//! given.

mod choice;
mod images;
mod speed;
mod table;

pub use choice::{Advice, Wish, advise};
pub use table::few_images_warning;
