//! Sends runs to MLflow.

mod server;
mod tracker;

pub use tracker::{Delivery, Tracker};
