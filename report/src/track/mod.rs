//! Sending of runs to a tracking server.

mod server;
mod tracker;

pub use tracker::{Delivery, Tracker};
