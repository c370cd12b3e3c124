//! The resume point of the data path.

/// One integer: the next global batch. Resuming is setting it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, PartialOrd, Ord)]
pub struct Cursor(pub u64);
