//! The program's allocator, which counts the memory in use.
//!
//! mimalloc is told to keep what was freed, because a step needs as much again as the last one;
//! blocks of more than 2 GiB come from the operating system each time. With glibc's allocator,
//! which returns freed memory, page faults made a step of RegNetY-800MF take a third more time.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use libmimalloc_sys::{mi_option_set_default, mi_option_t};
use mimalloc::MiMalloc;
use signal_hook::consts::SIGABRT;
use trainer::bench::memory_gauge::MemoryGauge;

/// `mi_option_purge_delay` of mimalloc.h, which the crate does not name: milliseconds until freed
/// memory is returned to the kernel, or -1 for never.
const PURGE_DELAY: mi_option_t = 15;

/// Allocator of the program, which counts bytes for `bench`: one atomic addition and one maximum
/// per allocation.
#[global_allocator]
pub(crate) static MEMORY: Counting =
    Counting { allocator: MiMalloc, in_use: AtomicUsize::new(0), peak: AtomicUsize::new(0) };

/// Keeps freed memory for the rest of the run: the next step needs as much again, and every fresh
/// page from the kernel has to be faulted in and cleared. Must be called before any thread is
/// started. The environment's `MIMALLOC_PURGE_DELAY` has precedence.
pub(crate) fn keep_freed_memory() {
    // SAFETY: mimalloc's options are plain numbers, and no other thread runs yet.
    #[allow(unsafe_code)]
    unsafe {
        mi_option_set_default(PURGE_DELAY, -1);
    }
}

/// Flag that is set while the last failed request for memory has not been met.
static EXHAUSTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Bytes of the last failed request for memory; 0 if there is none.
static MISSING_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Makes the program exit with `code` if it runs out of memory. Without this it ends by SIGABRT,
/// which shells report as 134: the code of ranks that may be restarted.
pub(crate) fn end_when_exhausted(code: u8) -> std::io::Result<()> {
    let exhausted = EXHAUSTED.get_or_init(Arc::default);
    signal_hook::flag::register_conditional_shutdown(SIGABRT, code.into(), Arc::clone(exhausted))?;
    Ok(())
}

/// Records whether `n_bytes` were allocated. If they were not, SIGABRT follows, unless the caller
/// handles the failure: then a later allocation of that size resets the record.
fn record(n_bytes: usize, is_missing: bool) {
    let missing = MISSING_BYTES.load(Ordering::Relaxed);
    if !is_missing && (missing == 0 || n_bytes < missing) {
        return;
    }
    MISSING_BYTES.store(if is_missing { n_bytes } else { 0 }, Ordering::Relaxed);
    if let Some(exhausted) = EXHAUSTED.get() {
        exhausted.store(is_missing, Ordering::Relaxed);
    }
}

/// Mimalloc with a count of the allocated bytes.
pub(crate) struct Counting {
    allocator: MiMalloc,
    in_use: AtomicUsize,
    peak: AtomicUsize,
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

impl Counting {
    /// Counts the allocated `memory` of `n_bytes`, unless it is null; returns it.
    fn count_allocated(&self, memory: *mut u8, n_bytes: usize) -> *mut u8 {
        record(n_bytes, memory.is_null());
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
}
