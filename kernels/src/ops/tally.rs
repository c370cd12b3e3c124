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
    /// Column-major storage of the first and the second matrix.
    pub transposed: [bool; 2],
    /// Adds the product to a row or to the output.
    pub adds: bool,
    /// Rounds the matrices to bf16.
    pub bf16: bool,
    /// Threads that may take part.
    pub n_threads: usize,
}

/// Switch that records products. One benchmark at a time records them, whichever threads its step
/// runs on.
static RECORDING: AtomicBool = AtomicBool::new(false);
static RECORDED: Mutex<BTreeMap<Product, u64>> = Mutex::new(BTreeMap::new());

/// Records a product, if a benchmark asks for it.
pub(super) fn note(product: impl FnOnce() -> Product) {
    if RECORDING.load(Ordering::Relaxed) {
        let mut noted = RECORDED.lock().unwrap_or_else(PoisonError::into_inner);
        *noted.entry(product()).or_default() += 1;
    }
}

/// Runs `f`; returns its result, and the products computed meanwhile with their counts.
pub fn products_of<R>(f: impl FnOnce() -> R) -> (R, BTreeMap<Product, u64>) {
    RECORDED.lock().unwrap_or_else(PoisonError::into_inner).clear();
    RECORDING.store(true, Ordering::Relaxed);
    let result = f();
    RECORDING.store(false, Ordering::Relaxed);
    (result, std::mem::take(&mut *RECORDED.lock().unwrap_or_else(PoisonError::into_inner)))
}
