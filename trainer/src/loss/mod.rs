//! Losses: pure functions of tensors.

pub mod dino;
