//! Units of what is printed.

/// Bytes of a gigabyte.
pub(super) const GB: f64 = 1e9;

/// Seconds of an hour.
pub(super) const HOUR_S: f64 = 3600.0;
