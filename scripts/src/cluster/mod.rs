//! Ranks: who started this process, what it talks over, and what it computes on.

pub(crate) mod compute;
pub(crate) mod launch;
pub(crate) mod machine;
pub(crate) mod start;
