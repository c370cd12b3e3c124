//! Losses: pure functions of tensors.

pub mod dino;
pub mod koleo;
