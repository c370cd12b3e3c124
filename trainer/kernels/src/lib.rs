//! The device that a rank computes on, and the operations that training spends its time in.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod device;
pub mod ops;
