//! Which matrix products are computed, for benchmarks that multiply matrices of the same shapes alone.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The shape of a product, and how its matrices lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Product {
    /// Rows of the first matrix, columns of the first, columns of the second: `[m, k] · [k, n]`.
    pub mkn: [usize; 3],
    /// Whether the first and the second are read by columns.
    pub transposed: [bool; 2],
    /// Whether it is added to what is there.
    pub adds: bool,
    /// Whether it is of numbers rounded to bf16.
    pub bf16: bool,
    /// Threads that may take part.
    pub n_threads: usize,
}

/// Products are noted while this is set. One benchmark at a time has them noted, whatever threads its step runs on.
static NOTING: AtomicBool = AtomicBool::new(false);
static NOTED: Mutex<BTreeMap<Product, u64>> = Mutex::new(BTreeMap::new());

/// Notes a product, if somebody asks for it.
pub(super) fn note(product: impl FnOnce() -> Product) {
    if NOTING.load(Ordering::Relaxed) {
        let mut noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
        *noted.entry(product()).or_default() += 1;
    }
}

/// The products of `f` and how often each is computed.
pub fn products_of<R>(f: impl FnOnce() -> R) -> (R, BTreeMap<Product, u64>) {
    NOTED.lock().unwrap_or_else(PoisonError::into_inner).clear();
    NOTING.store(true, Ordering::Relaxed);
    let result = f();
    NOTING.store(false, Ordering::Relaxed);
    (result, std::mem::take(&mut *NOTED.lock().unwrap_or_else(PoisonError::into_inner)))
}
