//! Ranks: the launcher of this process, its engine and its device.
pub(crate) mod compute;
pub(crate) mod launch;
pub(crate) mod machine;
pub(crate) mod start;
