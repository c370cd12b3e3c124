//! Buffers that a thread keeps from one product to the next.

use std::cell::Cell;

use burn_tensor::DType;

use super::tile::{Lanes, N_LANES, ROWS};

/// Numbers along k that are summed before a sum is written to memory: a panel of columns stays in the L2 cache.
pub(super) const DEPTH: usize = 2048;

/// Rows whose panels are packed at once, at most.
pub(super) const CHUNK_ROWS: usize = 256;

/// Bytes of the panels of columns that are packed at once, at most, unless one panel is larger.
pub(super) const PANEL_BYTES: usize = 4 << 20;

/// Bytes of the buffer that the `gemm` crate keeps on each thread: those of the L2 cache, 1 MiB on the CPUs measured.
const F32_BYTES: usize = 1 << 20;

// Panels of a thread's last product, whose memory the next one reuses.
thread_local! {
    pub(super) static ROW_PANELS: Cell<Vec<[u32; ROWS]>> = const { Cell::new(Vec::new()) };
    pub(super) static COLUMN_PANELS: Cell<Vec<Lanes>> = const { Cell::new(Vec::new()) };
}

/// Largest sizes among the products with a matrix of weights, and of the gradients of these weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LargestProduct {
    /// Rows of the matrix that is multiplied by weights.
    pub n_rows: usize,
    /// Rows or columns of a matrix of weights.
    pub widest: usize,
    /// Elements of a matrix of weights.
    pub n_weights: usize,
}

impl LargestProduct {
    /// Returns the larger of each size.
    pub fn max(self, other: Self) -> Self {
        Self {
            n_rows: self.n_rows.max(other.n_rows),
            widest: self.widest.max(other.widest),
            n_weights: self.n_weights.max(other.n_weights),
        }
    }

    /// Returns the most bytes that a thread keeps, after these products in `dtype`, for the next ones.
    pub fn kept_bytes(self, dtype: DType) -> usize {
        if dtype != DType::BF16 {
            return F32_BYTES;
        }
        // Gradients of weights are sums over all rows. Columns and rows are packed by panels, of which the last may be filled up.
        let depth = DEPTH.min(self.n_rows);
        let columns = self.n_weights.max(self.widest.next_multiple_of(N_LANES) * depth);
        PANEL_BYTES.min(2 * columns) + 2 * CHUNK_ROWS * depth
    }
}

/// Gives `panels` a length. Where it has too little memory it gets exactly as much as is needed; what it held need not stay.
pub(super) fn resize<T: Copy + Default>(panels: &mut Vec<T>, len: usize) {
    if panels.capacity() < len {
        // Freed first: a vector that grows holds both the old and the new memory.
        *panels = Vec::new();
        panels.reserve_exact(len);
    }
    panels.resize(len, T::default());
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::gemm::Mat;
    use crate::ops::product::{Start, product_into};

    /// Returns the bytes of this thread's panels.
    fn bytes_here() -> usize {
        let (rows, columns) = (ROW_PANELS.take(), COLUMN_PANELS.take());
        let bytes = rows.capacity() * size_of::<[u32; ROWS]>() + columns.capacity() * size_of::<Lanes>();
        ROW_PANELS.set(rows);
        COLUMN_PANELS.set(columns);
        bytes
    }

    /// Returns the bytes that a new thread keeps after a product of ones.
    fn kept_after(left: Mat<'_, bf16>, [m, k, n]: [usize; 3]) -> usize {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
        pool.install(|| {
            let (right, mut out) = (vec![bf16::ONE; k * n], vec![0.0f32; m * n]);
            product_into([m, k, n], 1.0, left, Mat::rows(&right, n), Start::Zero, &mut out, n);
            bytes_here()
        })
    }

    /// Panels of few columns, of many, and of more than are packed at once; rows that are packed, and rows that are read where they lie.
    #[test]
    fn a_thread_keeps_at_most_what_is_said() {
        for n in [70, 192, 1024, 1100] {
            let [m, k] = [CHUNK_ROWS + 1, DEPTH + 2];
            let ones = vec![bf16::ONE; m * k];
            let check = |kept: usize, sizes: LargestProduct| {
                let said = sizes.kept_bytes(DType::BF16);
                assert!(kept <= said && 2 * kept > said, "{kept} of {said} bytes, {sizes:?}");
            };
            let gradient = LargestProduct { n_rows: k, widest: n, n_weights: 0 };
            check(kept_after(Mat::rows(&ones, m).t(), [m, k, n]), gradient);
            let forward = LargestProduct { n_rows: 1, widest: n, n_weights: k * n.next_multiple_of(N_LANES) };
            check(kept_after(Mat::rows(&ones, k), [m, k, n]), forward);
        }
    }
}
