//! The memory in use on the device that is measured.

use kernels::device::{Device, DeviceKind, Opened};
use trainer::bench::memory_gauge::MemoryGauge;

use crate::memory::MEMORY;

/// Returns the gauge of `device`: on the CPU, that of the program's allocator.
pub(super) fn gauge(device: &Opened) -> Box<dyn MemoryGauge + '_> {
    match device.kind {
        DeviceKind::Cpu => Box::new(Heap),
        DeviceKind::Cuda(_) | DeviceKind::Wgpu => Box::new(Pool(&device.device)),
    }
}

/// The program's own allocator.
struct Heap;

impl MemoryGauge for Heap {
    fn bytes(&self) -> usize {
        MEMORY.in_use()
    }

    fn peak_bytes(&self) -> usize {
        MEMORY.peak()
    }

    fn reset_peak(&self) {
        MEMORY.reset_peak();
    }
}

/// The allocator of a GPU, as far as it reports: bytes in use, and bytes reserved.
struct Pool<'a>(&'a Device);

impl MemoryGauge for Pool<'_> {
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
