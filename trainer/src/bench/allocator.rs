//! An allocator that counts the memory in use: mimalloc, with one atomic addition and one maximum
//! per allocation.
//!
//! mimalloc is told to keep what was freed, because a step needs as much again as the last one;
//! blocks of more than 2 GiB come from the operating system each time. With glibc's allocator,
//! which returns freed memory, page faults made a step of RegNetY-800MF take a third more time.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use libmimalloc_sys::{mi_option_set_default, mi_option_t};
use mimalloc::MiMalloc;

use super::memory_gauge::MemoryGauge;

/// `mi_option_purge_delay` of mimalloc.h, which the crate does not name: milliseconds until freed
/// memory is returned to the kernel, or -1 for never.
const PURGE_DELAY: mi_option_t = 15;

/// Keeps freed memory for the rest of the run: the next step needs as much again, and every fresh
/// page from the kernel has to be faulted in and cleared. Must be called before any thread is
/// started. The environment's `MIMALLOC_PURGE_DELAY` has precedence.
pub fn keep_freed_memory() {
    // SAFETY: mimalloc's options are plain numbers, and no other thread runs yet.
    #[allow(unsafe_code)]
    unsafe {
        mi_option_set_default(PURGE_DELAY, -1);
    }
}

/// Mimalloc with a count of the allocated bytes.
pub struct Counting {
    allocator: MiMalloc,
    in_use: AtomicUsize,
    peak: AtomicUsize,
    /// Bytes of the last failed request for memory; 0 if there is none.
    missing_bytes: AtomicUsize,
    /// Flag that is set while the last failed request has not been met, if anyone watches it.
    exhausted: OnceLock<Arc<AtomicBool>>,
}

impl Counting {
    /// Creates the allocator.
    #[allow(clippy::new_without_default)]
    pub const fn new() -> Self {
        Self {
            allocator: MiMalloc,
            in_use: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            missing_bytes: AtomicUsize::new(0),
            exhausted: OnceLock::new(),
        }
    }

    /// Returns a flag that is set while the last failed request for memory has not been met:
    /// SIGABRT follows, unless the caller handles the failure.
    pub fn exhausted(&self) -> Arc<AtomicBool> {
        Arc::clone(self.exhausted.get_or_init(Arc::default))
    }

    /// Records whether `n_bytes` were allocated. If they were not, SIGABRT follows, unless the
    /// caller handles the failure: then a later allocation of that size resets the record.
    fn record(&self, n_bytes: usize, is_missing: bool) {
        let missing = self.missing_bytes.load(Ordering::Relaxed);
        if !is_missing && (missing == 0 || n_bytes < missing) {
            return;
        }
        self.missing_bytes.store(if is_missing { n_bytes } else { 0 }, Ordering::Relaxed);
        if let Some(exhausted) = self.exhausted.get() {
            exhausted.store(is_missing, Ordering::Relaxed);
        }
    }

    /// Counts the allocated `memory` of `n_bytes`, unless it is null; returns it.
    fn count_allocated(&self, memory: *mut u8, n_bytes: usize) -> *mut u8 {
        self.record(n_bytes, memory.is_null());
        if !memory.is_null() {
            let before = self.in_use.fetch_add(n_bytes, Ordering::Relaxed);
            self.peak.fetch_max(before + n_bytes, Ordering::Relaxed);
        }
        memory
    }

    /// Counts `n_bytes` that were freed.
    fn count_freed(&self, n_bytes: usize) {
        self.in_use.fetch_sub(n_bytes, Ordering::Relaxed);
    }
}

impl MemoryGauge for Counting {
    fn bytes(&self) -> usize {
        self.in_use.load(Ordering::Relaxed)
    }

    /// Returns the peak since the start or the last reset; while a block grows, old and new both
    /// count.
    fn peak_bytes(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    fn reset_peak(&self) {
        self.peak.store(self.bytes(), Ordering::Relaxed);
    }
}

// An allocator's interface is unsafe.
#[allow(unsafe_code)]
// SAFETY: every call is passed to mimalloc unchanged, and counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which mimalloc requires.
        let memory = unsafe { self.allocator.alloc(layout) };
        self.count_allocated(memory, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let memory = unsafe { self.allocator.alloc_zeroed(layout) };
        self.count_allocated(memory, layout.size())
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`.
        unsafe { self.allocator.dealloc(memory, layout) };
        self.count_freed(layout.size());
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, n_bytes: usize) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let moved = unsafe { self.allocator.realloc(memory, layout, n_bytes) };
        self.count_allocated(moved, n_bytes);
        if !moved.is_null() {
            self.count_freed(layout.size());
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use libmimalloc_sys::mi_option_get;

    use super::*;

    /// The number of another option would be set silently.
    #[test]
    fn the_number_of_the_option_is_that_of_the_purge_delay() {
        if std::env::var_os("MIMALLOC_PURGE_DELAY").is_some() {
            return;
        }
        const DEFAULT_MS: i64 = 1000;
        // SAFETY: reads a number.
        #[allow(unsafe_code)]
        let value = unsafe { mi_option_get(PURGE_DELAY) };
        assert_eq!(value, DEFAULT_MS);
    }

    /// A request that fails sets the flag, and one of that size that is met resets it.
    #[test]
    fn a_failed_request_is_recorded_until_it_is_met() {
        let memory = Counting::new();
        let exhausted = memory.exhausted();
        memory.record(100, true);
        memory.record(99, false);
        assert!(exhausted.load(Ordering::Relaxed));
        memory.record(100, false);
        assert!(!exhausted.load(Ordering::Relaxed));
    }
}
