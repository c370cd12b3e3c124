//! How much memory is in use.

use peak_alloc::PeakAlloc;

/// Counts bytes, for `metrics.jsonl` and `bench shard`: two atomic additions an allocation.
#[global_allocator]
pub(crate) static MEMORY: PeakAlloc = PeakAlloc;
