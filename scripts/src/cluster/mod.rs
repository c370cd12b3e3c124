//! Ranks: the launcher of this process, its engine and its device.
pub(crate) mod compute;
pub(crate) mod launch;
pub(crate) mod machine;
#[cfg(feature = "mpi")]
pub(crate) mod mpi_settings;
pub(crate) mod start;
