//! Weights into numbers and pictures: features, k-NN, linear probe, report.
//!
//! [`features`] is the only module that sees a network; [`knn`] and [`linear`] see rows of numbers.
//! [`probe`] puts them together, for the verb and for a run that wants to know how it is doing.

pub mod error;
pub mod features;
pub mod histogram;
pub mod knn;
pub mod linear;
pub mod picture;
pub mod probe;
pub mod report;

pub use error::EvalError;
pub use features::{FeatureSet, ImageSet};
pub use probe::{ProbeScores, Split};
