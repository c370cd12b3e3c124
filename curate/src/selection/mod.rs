//! Choice of the rows to keep, and of how often to show each.

mod balance;
mod cells;
mod duplicates;
mod outliers;
mod retrieval;

pub use balance::{Order, sample, weights};
pub use cells::Cells;
pub use duplicates::{Duplicates, NearestKept};
pub use outliers::mean_similarities;
pub use retrieval::{Retrieved, from_clusters, most_similar, nearest_images};
