//! Branch-free `exp`, `erf`, sine and cosine that compile to vector instructions. They use no fused
//! multiply-add, so that every x86 host computes the same bits.

/// Returns `e^x` with a relative error of about 1e-7: 0 below -87.3, and at most e^88.
///
/// Cephes: `x = n ln 2 + r`, a polynomial of degree six in `r`, and `n` added to the exponent.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.3, 88.0);
    // The lowest bits of this sum are the integer. A cast from f32 would be three times as slow: it
    // has to saturate.
    let rounded = clamped * LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5.0e-1;
    let value = p * r * r + r + 1.0;
    let power = f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
    if x < -87.3 { 0.0 } else { value * power }
}

/// Returns the error function of `x` with an absolute error of about 4e-7: an odd rational
/// function, saturated beyond four.
#[inline(always)]
pub(super) fn erf(x: f32) -> f32 {
    let x = x.clamp(-4.0, 4.0);
    let x2 = x * x;
    let mut p = -2.726_142_3e-10;
    p = p * x2 + 2.770_681_4e-8;
    p = p * x2 - 2.101_024e-6;
    p = p * x2 - 5.692_506_4e-5;
    p = p * x2 - 7.349_906_3e-4;
    p = p * x2 - 2.954_6e-3;
    p = p * x2 - 1.609_603_3e-2;
    let mut q = -1.456_607_2e-5;
    q = q * x2 - 2.133_740_5e-4;
    q = q * x2 - 1.682_827e-3;
    q = q * x2 - 7.373_329e-3;
    q = q * x2 - 1.426_473_9e-2;
    x * p / q
}

/// Returns sine and cosine with an absolute error of about 2e-7, for angles up to a few thousand.
///
/// Cephes: `x = n π/2 + r` with π/2 in three parts, polynomials in `r`, and the quadrant from `n`.
#[inline(always)]
pub(super) fn sin_cos(x: f32) -> [f32; 2] {
    const ROUND: f32 = 12_582_912.0;
    const PARTS: [f32; 3] = [1.570_312_5, 4.837_513e-4, 7.549_79e-8];
    let rounded = x * std::f32::consts::FRAC_2_PI + ROUND;
    let n = rounded - ROUND;
    let r = x - n * PARTS[0] - n * PARTS[1] - n * PARTS[2];
    let z = r * r;
    let sin = ((-1.951_529_6e-4 * z + 8.332_161e-3) * z - 1.666_665_5e-1) * z * r + r;
    let cos = ((2.443_315_7e-5 * z - 1.388_731_6e-3) * z + 4.166_664_6e-2) * z * z - 0.5 * z + 1.0;
    let quadrant = rounded.to_bits() & 3;
    let (a, b) = if quadrant & 1 == 1 { (cos, sin) } else { (sin, cos) };
    let sin = if quadrant >= 2 { -a } else { a };
    let cos = if quadrant == 1 || quadrant == 2 { -b } else { b };
    [sin, cos]
}

/// Sums `values` in sixteen partial sums, an order that vectorizes.
#[inline(always)]
fn sum(values: impl ExactSizeIterator<Item = f32>) -> f32 {
    let mut totals = [0.0f32; 16];
    for (i, value) in values.enumerate() {
        totals[i % 16] += value;
    }
    totals.iter().sum()
}

/// Returns the sum of `f` over `row`, computed in sixteen lanes.
#[inline(always)]
pub(super) fn lane_sum(row: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut totals = [0.0f32; 16];
    let chunks = row.chunks_exact(16);
    let rest = sum(chunks.remainder().iter().map(|v| f(*v)));
    for chunk in chunks {
        for (total, value) in totals.iter_mut().zip(chunk) {
            *total += f(*value);
        }
    }
    totals.iter().sum::<f32>() + rest
}

/// Returns the dot product of two rows, computed in sixteen lanes.
#[inline(always)]
pub(super) fn lane_dot(a: &[f32], b: &[f32]) -> f32 {
    lane_sum_of_pairs(a, b, |a, b| a * b)
}

/// Returns the squared distance between two rows, computed in sixteen lanes.
#[inline(always)]
pub(super) fn lane_squared_distance(a: &[f32], b: &[f32]) -> f32 {
    lane_sum_of_pairs(a, b, |a, b| (a - b) * (a - b))
}

#[inline(always)]
fn lane_sum_of_pairs(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut totals = [0.0f32; 16];
    let a16 = a.chunks_exact(16);
    let b16 = b.chunks_exact(16);
    let rest = sum(a16.remainder().iter().zip(b16.remainder()).map(|(a, b)| f(*a, *b)));
    for (a, b) in a16.zip(b16) {
        for ((total, a), b) in totals.iter_mut().zip(a).zip(b) {
            *total += f(*a, *b);
        }
    }
    totals.iter().sum::<f32>() + rest
}

/// Returns the largest number of `row`, computed in sixteen lanes; negative infinity if it is
/// empty.
#[inline(always)]
pub(super) fn lane_max(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let chunks = row.chunks_exact(16);
    let rest = chunks.remainder().iter().fold(f32::NEG_INFINITY, |max, v| max.max(*v));
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = if *value > *lane { *value } else { *lane };
        }
    }
    lanes.iter().fold(rest, |max, v| max.max(*v))
}

/// Splits the rows of `out` over the threads of the current rayon pool. `body` is called with the
/// index of the first row of a part and the rows of the part; with one thread, or few rows, it is
/// called once with all rows.
pub(super) fn over_rows<T: Send>(out: &mut [T], row_len: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    use rayon::prelude::*;
    let n_threads = rayon::current_num_threads();
    let n_rows = out.len() / row_len.max(1);
    if n_threads == 1 || n_rows < 2 * n_threads {
        return body(0, out);
    }
    let rows = n_rows.div_ceil(n_threads);
    out.par_chunks_mut(rows * row_len).enumerate().for_each(|(i, chunk)| body(i * rows, chunk));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        for i in -8700..8800 {
            let x = i as f32 * 0.01;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 3e-7, "exp({x}): relative error {error}");
        }
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn sin_cos_is_accurate_over_its_range() {
        for i in -40_000..40_000 {
            let x = i as f32 * 0.05;
            let [sin, cos] = sin_cos(x);
            let sin_error = (f64::from(sin) - f64::from(x).sin()).abs();
            let cos_error = (f64::from(cos) - f64::from(x).cos()).abs();
            let error = sin_error.max(cos_error);
            assert!(error < 4e-7, "sin and cos of {x}: error {error}");
        }
    }

    /// Reference: the Maclaurin series in f64, which converges quickly enough below four.
    #[test]
    fn erf_is_accurate_over_its_range() {
        for i in -400..=400 {
            let x = i as f32 * 0.01;
            let error = (f64::from(erf(x)) - erf_series(f64::from(x))).abs();
            assert!(error < 6e-7, "erf({x}): error {error}");
        }
    }

    fn erf_series(x: f64) -> f64 {
        let mut term = x;
        let mut sum = x;
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    }
}
