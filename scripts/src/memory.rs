//! The program's allocator, and how much memory is in use.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering};

use libmimalloc_sys::{mi_option_set_default, mi_option_t};
use mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc.h, which the crate has no name for: milliseconds until what was freed goes back
/// to the kernel, or -1 for never.
const PURGE_DELAY: mi_option_t = 15;

/// Counts bytes for `bench`: an atomic addition and a maximum an allocation.
#[global_allocator]
pub(crate) static MEMORY: Counting =
    Counting { allocator: MiMalloc, in_use: AtomicUsize::new(0), peak: AtomicUsize::new(0) };

/// Keeps freed memory for the rest of the run: the next step needs as much again, and every page that comes fresh from
/// the kernel has to be faulted in and cleared. To be called before there are threads. The environment's
/// `MIMALLOC_PURGE_DELAY` comes first.
pub(crate) fn keep_freed_memory() {
    // SAFETY: mimalloc's options are plain numbers, and no other thread runs yet.
    #[allow(unsafe_code)]
    unsafe {
        mi_option_set_default(PURGE_DELAY, -1);
    }
}

/// Mimalloc, and how much it has given.
pub(crate) struct Counting {
    allocator: MiMalloc,
    in_use: AtomicUsize,
    peak: AtomicUsize,
}

impl Counting {
    /// Bytes in use.
    pub(crate) fn in_use(&self) -> usize {
        self.in_use.load(Ordering::Relaxed)
    }

    /// The most bytes that were in use since the start or the last reset; while a block grows, old and new both count.
    pub(crate) fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    /// Forgets all peaks but what is in use now.
    pub(crate) fn reset_peak(&self) {
        self.peak.store(self.in_use(), Ordering::Relaxed);
    }

    fn taken(&self, n_bytes: usize) {
        let before = self.in_use.fetch_add(n_bytes, Ordering::Relaxed);
        self.peak.fetch_max(before + n_bytes, Ordering::Relaxed);
    }

    fn given_back(&self, n_bytes: usize) {
        self.in_use.fetch_sub(n_bytes, Ordering::Relaxed);
    }
}

// An allocator's interface is unsafe.
#[allow(unsafe_code)]
// SAFETY: every call is passed on to mimalloc as it came, and nothing is counted through the allocator itself.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those that mimalloc asks for.
        let memory = unsafe { self.allocator.alloc(layout) };
        if !memory.is_null() {
            self.taken(layout.size());
        }
        memory
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let memory = unsafe { self.allocator.alloc_zeroed(layout) };
        if !memory.is_null() {
            self.taken(layout.size());
        }
        memory
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`.
        unsafe { self.allocator.dealloc(memory, layout) };
        self.given_back(layout.size());
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, n_bytes: usize) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let moved = unsafe { self.allocator.realloc(memory, layout, n_bytes) };
        if !moved.is_null() {
            self.taken(n_bytes);
            self.given_back(layout.size());
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use libmimalloc_sys::mi_option_get;

    use super::*;

    /// A number of another option would be set without a word.
    #[test]
    fn the_option_is_the_one_that_is_meant() {
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
