//! Principal components of rows: the directions along which they vary most.

use kernels::ops::gemm::{Mat, gemm};

/// Number of iterations, far more than colors need.
const ROUNDS: usize = 60;

/// Number of directions.
const N: usize = 3;

/// Returns the coordinates of `rows`, `[n, d]`, along the three principal components of all rows,
/// `[n, 3]`, each scaled so that its middle 96 % fill 0 to 1.
///
/// Orthogonal iteration: `W ← orthonormal(Xᵀ X W)`, `[d, 3]`.
pub(super) fn coordinates(rows: &[f32], d: usize) -> Vec<[f32; N]> {
    let n = rows.len() / d;
    let mut mean = vec![0.0f64; d];
    for row in rows.chunks_exact(d) {
        for (sum, value) in mean.iter_mut().zip(row) {
            *sum += f64::from(*value);
        }
    }
    let centered: Vec<f32> = rows
        .chunks_exact(d)
        .flat_map(|row| row.iter().zip(&mean).map(|(v, m)| (f64::from(*v) - m / n as f64) as f32))
        .collect();
    // Any initial value that is not orthogonal to the result works; this one depends on the sizes
    // alone.
    let mut w: Vec<f32> = (0..d * N).map(|i| ((i * 7919 + 13) % 101) as f32 / 50.0 - 1.0).collect();
    let mut projections = vec![0.0f32; n * N];
    for _ in 0..ROUNDS {
        orthonormalize(&mut w);
        gemm([n, d, N], 1.0, Mat::rows(&centered, d), Mat::rows(&w, N), 0.0, &mut projections, N);
        gemm([d, n, N], 1.0, Mat::rows(&centered, d).t(), Mat::rows(&projections, N), 0.0, &mut w, N);
    }
    orthonormalize(&mut w);
    gemm([n, d, N], 1.0, Mat::rows(&centered, d), Mat::rows(&w, N), 0.0, &mut projections, N);
    let ranges: Vec<[f32; 2]> = (0..N).map(|c| middle_range(projections.iter().skip(c).step_by(N))).collect();
    projections
        .chunks_exact(N)
        .map(|row| {
            std::array::from_fn(|c| {
                let [low, high] = ranges[c];
                // Equal rows are gray.
                if high > low { ((row[c] - low) / (high - low)).clamp(0.0, 1.0) } else { 0.5 }
            })
        })
        .collect()
}

/// Orthonormalizes the columns of `[d, 3]` by the Gram-Schmidt process.
fn orthonormalize(w: &mut [f32]) {
    for c in 0..N {
        for before in 0..c {
            let dot: f32 = w.chunks_exact(N).map(|row| row[c] * row[before]).sum();
            for row in w.chunks_exact_mut(N) {
                row[c] -= dot * row[before];
            }
        }
        let norm = w.chunks_exact(N).map(|row| row[c] * row[c]).sum::<f32>().sqrt().max(1e-20);
        for row in w.chunks_exact_mut(N) {
            row[c] /= norm;
        }
    }
}

/// Returns the bounds of the middle 96 % of `values`.
fn middle_range<'a>(values: impl Iterator<Item = &'a f32>) -> [f32; 2] {
    let mut sorted: Vec<f32> = values.copied().collect();
    sorted.sort_unstable_by(f32::total_cmp);
    [quantile(&sorted, 0.02), quantile(&sorted, 0.98)]
}

/// Returns the nearest value to the quantile `share`; zero if there are no values.
fn quantile(sorted: &[f32], share: f32) -> f32 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f32 * share).round() as usize).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offset of row `i` of `n` along an axis.
    fn offset(i: usize, axis: usize, n: usize) -> f32 {
        ((i * [7, 31, 57][axis]) % n) as f32 / n as f32 - 0.5
    }

    /// Rows that vary by 100, 10 and 1 along three rotated axes: each coordinate follows its own
    /// axis.
    #[test]
    fn each_coordinate_follows_the_axis_of_its_rank() {
        let n = 200;
        let d = 5;
        let axes = [[0.6, 0.8, 0.0, 0.0, 0.0], [-0.8, 0.6, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]];
        let scale = [100.0, 10.0, 1.0];
        let mut rows: Vec<f32> = Vec::with_capacity(n * d);
        for i in 0..n {
            for column in 0..d {
                let mut sum = 0.0;
                for (index, axis) in axes.iter().enumerate() {
                    sum += scale[index] * offset(i, index, n) * axis[column];
                }
                rows.push(sum + 3.0);
            }
        }
        let coordinates = coordinates(&rows, d);
        for axis in 0..3 {
            let mean = coordinates.iter().map(|row| row[axis]).sum::<f32>() / n as f32;
            let mut ab = 0.0f32;
            let mut aa = 0.0f32;
            let mut bb = 0.0f32;
            for (i, row) in coordinates.iter().enumerate() {
                let a = row[axis] - mean;
                let b = offset(i, axis, n);
                ab += a * b;
                aa += a * a;
                bb += b * b;
            }
            assert!((ab / (aa * bb).sqrt()).abs() > 0.97, "axis {axis}: {}", ab / (aa * bb).sqrt());
        }
        assert!(coordinates.iter().flatten().all(|v| (0.0..=1.0).contains(v)));
    }

    #[test]
    fn equal_rows_are_gray() {
        assert_eq!(coordinates(&[2.0; 12], 4), vec![[0.5; 3]; 3]);
    }
}
