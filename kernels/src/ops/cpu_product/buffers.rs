//! Buffers that a thread keeps from one product to the next.

use std::cell::Cell;

use burn_tensor::DType;

use super::tile::{Lanes, N_LANES, ROWS};

/// Numbers along k that are summed before a sum is written to memory: a panel of columns stays in
/// the L2 cache.
pub(super) const DEPTH: usize = 2048;

/// Rows whose panels are packed at once, at most.
pub(super) const CHUNK_ROWS: usize = 256;

/// Bytes of the panels of columns that are packed at once, at most, unless one panel is larger.
pub(super) const PANEL_BYTES: usize = 4 << 20;

/// Bytes of the buffer that the `gemm` crate keeps on a thread that has computed a product in f32:
/// as many as the L2 cache has, 1 MiB on the CPUs measured.
const GEMM_BUFFER_BYTES: usize = 1 << 20;

// Panels of a thread's last product, whose memory the next one reuses.
thread_local! {
    pub(super) static ROW_PANELS: Cell<Vec<[u32; ROWS]>> = const { Cell::new(Vec::new()) };
    pub(super) static COLUMN_PANELS: Cell<Vec<Lanes>> = const { Cell::new(Vec::new()) };
}

/// Upper limits of the sizes of some products with weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProductLimits {
    /// Rows of a matrix that is multiplied by weights.
    pub n_rows: usize,
    /// Rows or columns of a matrix of weights.
    pub widest: usize,
    /// Elements of one parameter.
    pub n_weights: usize,
}

impl ProductLimits {
    /// Returns the larger of each limit.
    pub fn max(self, other: Self) -> Self {
        Self {
            n_rows: self.n_rows.max(other.n_rows),
            widest: self.widest.max(other.widest),
            n_weights: self.n_weights.max(other.n_weights),
        }
    }

    /// Estimates the number of bytes that a thread keeps after such products in `dtype`, and after
    /// those of gradients of the weights.
    pub fn kept_bytes(self, dtype: DType) -> usize {
        if dtype != DType::BF16 {
            return GEMM_BUFFER_BYTES;
        }
        // Products that are gradients of weights are sums over the rows. The last panel of columns
        // is filled up.
        let depth = DEPTH.min(self.n_rows);
        let columns = self.n_weights.max(self.widest.next_multiple_of(N_LANES) * depth);
        PANEL_BYTES.min(2 * columns) + 2 * CHUNK_ROWS * depth
    }
}

/// Sets the length of `panels`, whose elements are then overwritten. If its capacity is too small,
/// exactly the needed memory is allocated.
pub(super) fn resize_to_overwrite<T: Copy + Default>(panels: &mut Vec<T>, len: usize) {
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
    use rayon::{ThreadPool, ThreadPoolBuilder};

    use super::*;
    use crate::ops::cpu_product::{Start, product_into};
    use crate::ops::gemm::Mat;

    /// Returns the bytes of this thread's panels.
    fn panel_bytes() -> usize {
        let rows = ROW_PANELS.take();
        let columns = COLUMN_PANELS.take();
        let bytes = rows.capacity() * size_of::<[u32; ROWS]>() + columns.capacity() * size_of::<Lanes>();
        ROW_PANELS.set(rows);
        COLUMN_PANELS.set(columns);
        bytes
    }

    /// Returns the bytes that the thread of `pool` keeps after a product of ones.
    fn measure_kept_bytes(pool: &ThreadPool, left: Mat<'_, bf16>, [m, k, n]: [usize; 3]) -> usize {
        pool.install(|| {
            let right = vec![bf16::ONE; k * n];
            let mut out = vec![0.0f32; m * n];
            product_into([m, k, n], 1.0, left, Mat::rows(&right, n), Start::Zero, &mut out, n);
            panel_bytes()
        })
    }

    fn single_thread_pool() -> ThreadPool {
        ThreadPoolBuilder::new().num_threads(1).build().expect("a pool")
    }

    fn check_estimate(kept: usize, limits: ProductLimits) {
        let estimate = limits.kept_bytes(DType::BF16);
        assert!(kept <= estimate && 2 * kept > estimate, "{kept} of {estimate} bytes, {limits:?}");
    }

    /// Panels of few columns, of a few more, of many, and of more than are packed at once, one
    /// after another on a thread; rows with and without packing.
    #[test]
    fn kept_bytes_are_estimated_to_a_factor_of_two() {
        let pools = [single_thread_pool(), single_thread_pool()];
        for n in [70, 192, 208, 1024, 1100] {
            let m = CHUNK_ROWS + 1;
            let k = DEPTH + 2;
            let ones = vec![bf16::ONE; m * k];
            let gradient = ProductLimits { n_rows: k, widest: n, n_weights: 0 };
            check_estimate(measure_kept_bytes(&pools[0], Mat::rows(&ones, m).t(), [m, k, n]), gradient);
            let forward = ProductLimits { n_rows: 1, widest: n, n_weights: k * n.next_multiple_of(N_LANES) };
            check_estimate(measure_kept_bytes(&pools[1], Mat::rows(&ones, k), [m, k, n]), forward);
        }
    }
}
