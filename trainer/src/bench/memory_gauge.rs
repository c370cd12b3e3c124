//! The memory in use, as the program that measures can tell.

/// Gauge of the memory in use.
pub trait MemoryGauge {
    /// Bytes that are allocated now.
    fn bytes(&self) -> usize;
    /// Largest number of bytes that were allocated since the last [`MemoryGauge::reset_peak`].
    fn peak_bytes(&self) -> usize;
    /// Restarts the measurement of the peak.
    fn reset_peak(&self);
}
