//! The resume point of the data path.

/// Index of the next global batch. Nothing else is needed to resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, PartialOrd, Ord)]
pub struct Cursor(pub u64);
