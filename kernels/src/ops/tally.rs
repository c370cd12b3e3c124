//! Record of the matrix products that are computed, for benchmarks that time products of the same
//! shapes alone.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The shape of a product and the memory layout of its matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Product {
    /// Rows of the first matrix, columns of the first, columns of the second: `[m, k] · [k, n]`.
    pub mkn: [usize; 3],
    /// Whether the first and the second matrix are stored in column-major order.
    pub transposed: [bool; 2],
    /// Whether the product is added to a row or to the previous output.
    pub adds: bool,
    /// Whether the matrices are rounded to bf16.
    pub bf16: bool,
    /// Threads that may take part.
    pub n_threads: usize,
}

/// Whether products are recorded. One benchmark at a time records them, on all threads.
static RECORDING: AtomicBool = AtomicBool::new(false);
static RECORDED: Mutex<BTreeMap<Product, u64>> = Mutex::new(BTreeMap::new());

/// Records a product if a benchmark has asked for it.
pub(super) fn record(product: impl FnOnce() -> Product) {
    if RECORDING.load(Ordering::Relaxed) {
        let mut recorded = RECORDED.lock().unwrap_or_else(PoisonError::into_inner);
        *recorded.entry(product()).or_default() += 1;
    }
}

/// Runs `f`; returns its result, and the products computed while it ran with their counts.
pub fn products_of<R>(f: impl FnOnce() -> R) -> (R, BTreeMap<Product, u64>) {
    RECORDED.lock().unwrap_or_else(PoisonError::into_inner).clear();
    RECORDING.store(true, Ordering::Relaxed);
    let result = f();
    RECORDING.store(false, Ordering::Relaxed);
    (result, std::mem::take(&mut *RECORDED.lock().unwrap_or_else(PoisonError::into_inner)))
}
