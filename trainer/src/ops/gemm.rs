//! Matrix products on strided slices: the one place that calls the `gemm` crate.

use super::tally::{self, Product};

/// A matrix inside a slice, by the distance between rows and between columns.
#[derive(Debug, Clone, Copy)]
pub struct Mat<'a, T = f32> {
    /// Where its elements lie, the first one first.
    pub data: &'a [T],
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Elements from one column to the next.
    pub col_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Rows one after another, `row_stride` apart.
    pub fn rows(data: &'a [T], row_stride: usize) -> Self {
        Self { data, row_stride, col_stride: 1 }
    }

    /// The transposed matrix; nothing moves.
    pub fn t(self) -> Self {
        Self { data: self.data, row_stride: self.col_stride, col_stride: self.row_stride }
    }
}

/// What matrices are made of.
pub trait Element: sealed::Float {}

impl Element for f32 {}
impl Element for f64 {}

mod sealed {
    /// The types that the `gemm` crate multiplies, of those that are used here.
    pub trait Float: Copy + PartialEq + Default + 'static {}

    impl Float for f32 {}
    impl Float for f64 {}
}

/// `out = keep · out + scale · a · b` for `a` of `[m, k]` and `b` of `[k, n]`; rows of `out` are
/// `out_stride` apart. Threads are those of the rayon pool that calls, if the product is large.
///
/// # Panics
/// If a matrix does not lie inside its slice.
pub fn gemm<T: Element>(
    [m, k, n]: [usize; 3],
    scale: T,
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    keep: T,
    out: &mut [T],
    out_stride: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    #[cfg(test)]
    count::add(2.0 * (m * k * n) as f64);
    let fits = |rows: usize, cols: usize, mat: &Mat<'_, T>| {
        rows == 0 || cols == 0 || (rows - 1) * mat.row_stride + (cols - 1) * mat.col_stride < mat.data.len()
    };
    assert!(fits(m, k, &a) && fits(k, n, &b), "matrices lie inside their slices");
    assert!(n <= out_stride && (m - 1) * out_stride + n <= out.len(), "the output lies inside its slice");
    tally::note(|| Product {
        mkn: [m, k, n],
        transposed: [a.col_stride > 1, b.col_stride > 1],
        adds: keep != T::default(),
        n_threads: rayon::current_num_threads(),
    });
    let parallelism = match rayon::current_num_threads() {
        1 => gemm::Parallelism::None,
        _ => gemm::Parallelism::Rayon(0),
    };
    // SAFETY: the asserts above bound every element that strides and sizes can reach, `out` is a
    // unique borrow, and `Element` is sealed around types that gemm accepts.
    #[allow(unsafe_code)]
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            out_stride as isize,
            keep != T::default(),
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            keep,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Counts the operations of this thread's products, for the tests of costs.
#[cfg(test)]
pub(crate) mod count {
    use std::cell::Cell;

    thread_local! {
        static FLOPS: Cell<f64> = const { Cell::new(0.0) };
    }

    pub(super) fn add(flops: f64) {
        FLOPS.set(FLOPS.get() + flops);
    }

    /// The operations of the products in `f`.
    pub(crate) fn flops_of<R>(f: impl FnOnce() -> R) -> f64 {
        let before = FLOPS.get();
        f();
        FLOPS.get() - before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn products_equal_three_loops(m in 1usize..9, k in 1usize..9, n in 1usize..9, keep in 0u8..2) {
            let a: Vec<f32> = (0..m * k).map(|i| (i as f32 * 0.7).sin()).collect();
            let b_t: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.3).cos()).collect();
            let mut out = vec![1.0; m * n];
            let keep = f32::from(keep);
            gemm([m, k, n], 2.0, Mat::rows(&a, k), Mat::rows(&b_t, k).t(), keep, &mut out, n);
            for i in 0..m {
                for j in 0..n {
                    let sum: f32 = (0..k).map(|l| a[i * k + l] * b_t[j * k + l]).sum();
                    prop_assert!((out[i * n + j] - (keep + 2.0 * sum)).abs() < 1e-4);
                }
            }
        }
    }
}
