//! Flags of commands that write shards.

pub(crate) mod limits;
