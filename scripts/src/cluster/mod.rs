//! Ranks: the launcher of this process, its engine and its device.
pub(crate) mod compute;
#[cfg(feature = "mpi")]
pub(crate) mod mpi_settings;
