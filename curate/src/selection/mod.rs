//! Selection of the rows to keep, and of how often to show each.

mod balance;
mod cells;
mod duplicates;
mod outliers;
mod retrieval;

pub use balance::{Order, sample, weights};
pub use cells::Cells;
pub use duplicates::{ComparedWith, Duplicates, NearestKept};
pub use outliers::mean_similarities;
pub use retrieval::{
    BLOCK_ROWS, Retrieved, from_clusters, join_nearest, most_similar, most_similar_in_blocks, n_blocks,
    nearest_images, nearest_in_blocks, rows_of_blocks,
};
