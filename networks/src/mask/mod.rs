//! Masks of patches, drawn before the step: a pure function of (seed, step, position in the global
//! batch, view).

mod blocks;
mod cells;
mod random;
mod rule;
mod targets;

pub use blocks::{BlockMasks, SmallestBlock, Spread};
pub use cells::{MaskedCells, Masking};
pub use random::RandomMasks;
pub use rule::{MaskKind, MaskRule, MaskSampler, MaskedCount};
pub use targets::TargetMasks;
