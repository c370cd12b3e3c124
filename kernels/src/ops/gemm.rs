//! Matrix products of strided slices. This is the only module that calls the `gemm` crate.

use super::tally::{self, Product};
use super::threads::product_threads;

/// A matrix inside a slice, described by its strides.
#[derive(Debug, Clone, Copy)]
pub struct Mat<'a, T = f32> {
    /// Slice that starts with the matrix's first element.
    pub data: &'a [T],
    /// Distance between neighboring rows, in elements.
    pub row_stride: usize,
    /// Distance between neighboring columns, in elements.
    pub col_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Returns a matrix of contiguous rows, `row_stride` apart.
    pub fn rows(data: &'a [T], row_stride: usize) -> Self {
        Self { data, row_stride, col_stride: 1 }
    }

    /// Returns the transposed matrix, without moving elements.
    pub fn t(self) -> Self {
        Self { data: self.data, row_stride: self.col_stride, col_stride: self.row_stride }
    }
}

/// An element type of matrices.
pub trait Element: sealed::Float {}

impl Element for f32 {}
impl Element for f64 {}

mod sealed {
    /// The types used here that the `gemm` crate multiplies.
    pub trait Float: Copy + PartialEq + Default + 'static {}

    impl Float for f32 {}
    impl Float for f64 {}
}

/// Returns `scale · a · b`, `[m, n]`, for `a` of `[m, k]` and `b` of `[k, n]`. Threads are as in
/// [`gemm`](fn@gemm).
///
/// # Panics
/// If a matrix does not lie inside its slice.
pub(crate) fn product<T: Element>([m, k, n]: [usize; 3], scale: T, a: Mat<'_, T>, b: Mat<'_, T>) -> Vec<T> {
    let mut out = Vec::with_capacity(m * n);
    if m > 0 && n > 0 {
        assert_in_bounds([m, k, n], a, b);
        // SAFETY: the matrices lie inside their slices, and there is room for `m` rows of `n`. The
        // product writes all of them and reads none (`tests::old_output_is_not_read`), so they are
        // initialized when the length is set. Zeroing them first would take two to three percent of
        // a step.
        #[allow(unsafe_code)]
        unsafe {
            call([m, k, n], scale, a, b, T::default(), out.as_mut_ptr(), n);
            out.set_len(m * n);
        }
    }
    out
}

/// Computes `out = keep · out + scale · a · b` for `a` of `[m, k]` and `b` of `[k, n]`; rows of
/// `out` are `out_stride` apart. A large product runs on the threads of the current rayon pool.
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
    assert_in_bounds([m, k, n], a, b);
    assert!(n <= out_stride && (m - 1) * out_stride + n <= out.len(), "the output lies inside its slice");
    // SAFETY: the asserts bound every element that strides and sizes can reach, and `out` is a
    // unique borrow.
    #[allow(unsafe_code)]
    unsafe {
        call([m, k, n], scale, a, b, keep, out.as_mut_ptr(), out_stride);
    }
}

/// Asserts that both matrices of a product lie inside their slices.
fn assert_in_bounds<T>([m, k, n]: [usize; 3], a: Mat<'_, T>, b: Mat<'_, T>) {
    assert!(fits(m, k, &a) && fits(k, n, &b), "matrices lie inside their slices");
}

/// Returns true if a matrix with these numbers of rows and columns lies inside its slice.
fn fits<T>(rows: usize, cols: usize, mat: &Mat<'_, T>) -> bool {
    rows == 0 || cols == 0 || (rows - 1) * mat.row_stride + (cols - 1) * mat.col_stride < mat.data.len()
}

/// Calls the `gemm` crate. If `keep` is zero, `out` is only written.
///
/// # Safety
/// The matrices lie inside their slices, and `out` points to `m` rows of `n` elements, `out_stride`
/// apart, which nothing else accesses.
#[allow(unsafe_code)]
unsafe fn call<T: Element>(
    [m, k, n]: [usize; 3],
    scale: T,
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    keep: T,
    out: *mut T,
    out_stride: usize,
) {
    #[cfg(feature = "testing")]
    count::add(2.0 * (m * k * n) as f64);
    tally::record(|| Product {
        mkn: [m, k, n],
        transposed: [a.col_stride > 1, b.col_stride > 1],
        adds: keep != T::default(),
        bf16: false,
        n_threads: product_threads(),
    });
    let parallelism = match product_threads() {
        1 => gemm::Parallelism::None,
        _ => gemm::Parallelism::Rayon(0),
    };
    // SAFETY: as the caller promises, and `Element` is sealed around types that gemm accepts.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out,
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

/// Counter of the floating-point operations of the matrix products and convolutions of a thread,
/// for tests of cost estimates.
#[cfg(feature = "testing")]
pub mod count {
    use std::cell::Cell;

    thread_local! {
        static FLOPS: Cell<f64> = const { Cell::new(0.0) };
    }

    pub(in crate::ops) fn add(flops: f64) {
        FLOPS.set(FLOPS.get() + flops);
    }

    /// Runs `f`, and returns the number of floating-point operations of its matrix products and
    /// convolutions; other operations are not counted.
    pub fn flops_of<R>(f: impl FnOnce() -> R) -> f64 {
        let before = FLOPS.get();
        f();
        FLOPS.get() - before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Sizes cover every path of the library: vectors, outer products, small and large products,
    /// and widths that do not fill a vector register.
    #[test]
    fn old_output_is_not_read() {
        let data: Vec<f32> = (0..130 * 130).map(|i| (i as f32 * 0.7).sin()).collect();
        let sides = [1, 2, 3, 7, 16, 17, 65, 130];
        for m in sides {
            for k in [0, 1, 2, 3, 16, 65, 130] {
                for n in sides {
                    check_output(&data, [m, k, n]);
                }
            }
        }
    }

    fn check_output(data: &[f32], [m, k, n]: [usize; 3]) {
        for left in [Mat::rows(data, k), Mat::rows(data, m).t()] {
            for right in [Mat::rows(data, n), Mat::rows(data, k).t()] {
                let mut out = vec![f32::NAN; m * n];
                gemm([m, k, n], 1.0, left, right, 0.0, &mut out, n);
                assert!(out.iter().all(|value| value.is_finite()), "[{m}, {k}] · [{k}, {n}]");
                assert_eq!(out, product([m, k, n], 1.0, left, right));
            }
        }
    }

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
