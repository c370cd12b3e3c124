//! The memory in use: on the CPU, the program that measures counts it; a GPU's allocator reports
//! it.

use burn_tensor::Device;

/// Gauge of the memory in use.
pub trait MemoryGauge {
    /// Bytes that are allocated now.
    fn bytes(&self) -> usize;
    /// Largest number of bytes that were allocated since the last [`MemoryGauge::reset_peak`].
    fn peak_bytes(&self) -> usize;
    /// Restarts the measurement of the peak.
    fn reset_peak(&self);
}

/// The allocator of a GPU, as far as it reports: bytes in use, and bytes reserved.
pub struct DevicePool<'a>(pub &'a Device);

impl MemoryGauge for DevicePool<'_> {
    fn bytes(&self) -> usize {
        self.0.memory_pool_usage().map_or(0, |usage| usage.bytes_in_use as usize)
    }

    fn peak_bytes(&self) -> usize {
        self.0.memory_pool_usage().map_or(0, |usage| usage.bytes_reserved as usize)
    }

    fn reset_peak(&self) {
        self.0.memory_cleanup();
    }
}
