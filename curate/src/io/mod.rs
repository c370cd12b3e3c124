//! Curation of data sets in files: features and images are read, and lists, clusters and shards are
//! written to an output folder.
//!
//! Each verb is a struct of settings, such as [`Balance`]. Its `job` identifies it: with it
//! [`OutputSettings::claim`] takes the output folder, in which a call that was stopped continues.
//! Its `run` computes the choice of images, and [`OutputFolder`] writes it.

mod agreement;
mod balance;
mod cells;
mod clusters;
mod comparison;
mod groups;
mod input;
mod job;
mod lists;
mod map;
mod match_images;
mod near_duplicates;
mod outliers;
mod output;
mod pairs;
mod progress;
mod quality;
mod remove;
mod retrieve;
mod saved;

pub use balance::{Balance, Balanced, LevelSizes};
pub use cells::CellSettings;
pub use clusters::{ClusterCost, ClusterObserver, ClusterSettings, KMeansSettings};
pub use comparison::Comparison;
pub use input::{Input, read_features};
pub use job::Job;
pub use lists::{Columns, LIST, six_digits};
pub use map::{Map, MappedCluster, MappedLevel};
pub use near_duplicates::{FoundDuplicates, NearDuplicates};
pub use outliers::{FoundOutliers, Outliers};
pub use output::{MAP, OUTLIERS, OutputFolder, OutputSettings, PAIRS};
pub use pairs::ImagePair;
pub use quality::{Quality, qualities};
pub use remove::{Removal, removal_columns};
pub use retrieve::{Retrieval, RetrievedImages};
