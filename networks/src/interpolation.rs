//! Resampling of square grids: bicubic interpolation as a matrix.
//!
//! The weights are PyTorch's `interpolate(mode="bicubic", align_corners=False)` (a = -0.75) for the
//! size of the target, with `antialias=True` or without. As a matrix product they are
//! differentiable and cheap.

/// Rule for bicubic resampling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Resampling {
    /// Offset added to the new number of cells along a side, only in the computation of the scale.
    pub offset: f64,
    /// Widens the kernel if the new grid has fewer cells.
    pub antialias: bool,
}

/// Returns a row-major matrix `[to_h · to_w, from · from]` such that `matrix · embedding` resamples
/// a square grid.
pub fn matrix(from: usize, [to_h, to_w]: [usize; 2], resampling: Resampling) -> Vec<f32> {
    let rows = axis(from, to_h, resampling);
    let cols = axis(from, to_w, resampling);
    let mut out = vec![0.0; to_h * to_w * from * from];
    for (y, row) in rows.chunks_exact(from).enumerate() {
        for (x, col) in cols.chunks_exact(from).enumerate() {
            let target = &mut out[(y * to_w + x) * from * from..][..from * from];
            for (target, row) in target.chunks_exact_mut(from).zip(row) {
                for (target, col) in target.iter_mut().zip(col) {
                    *target = (row * col) as f32;
                }
            }
        }
    }
    out
}

/// Returns row-major `[to, from]` weights along one axis.
fn axis(from: usize, to: usize, Resampling { offset, antialias }: Resampling) -> Vec<f64> {
    let mut weights = vec![0.0; to * from];
    let scale = from as f64 / (to as f64 + offset);
    for (i, row) in weights.chunks_exact_mut(from).enumerate() {
        let center = (i as f64 + 0.5) * scale;
        if antialias { antialiased(row, center, scale.max(1.0)) } else { four_taps(row, center - 0.5) }
    }
    weights
}

/// Computes weights of the four cells around `source`; cells beyond the edge count as the edge.
fn four_taps(row: &mut [f64], source: f64) {
    let floor = source.floor();
    for tap in -1..=2 {
        let at = (floor as isize + tap).clamp(0, row.len() as isize - 1) as usize;
        row[at] += cubic(source - floor - tap as f64, -0.75);
    }
}

/// Computes weights within two cells of `center`, widened by `scale`, with sum one; cells beyond
/// the edge are left out.
fn antialiased(row: &mut [f64], center: f64, scale: f64) {
    let first = (center - 2.0 * scale + 0.5).max(0.0) as usize;
    let end = ((center + 2.0 * scale + 0.5) as usize).min(row.len());
    for (at, weight) in row.iter_mut().enumerate().take(end).skip(first) {
        *weight = cubic((at as f64 - center + 0.5) / scale, -0.5);
    }
    let sum: f64 = row.iter().sum();
    row.iter_mut().for_each(|weight| *weight /= sum);
}

/// Keys' cubic convolution kernel.
fn cubic(x: f64, a: f64) -> f64 {
    let x = x.abs();
    if x <= 1.0 {
        ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Resampling = Resampling { offset: 0.0, antialias: false };

    #[test]
    fn resampling_to_the_same_grid_is_the_identity() {
        let identity = matrix(3, [3, 3], PLAIN);
        for (i, value) in identity.iter().enumerate() {
            let expected = if i / 9 == i % 9 { 1.0 } else { 0.0 };
            assert!((value - expected).abs() < 1e-12, "{i}: {value}");
        }
    }

    /// `torch.nn.functional.interpolate(torch.arange(4.)[None, None, :, None].expand(1, 1, 4, 4)`
    /// `.contiguous(), size=(2, 2), mode="bicubic")` gives rows 0.40625 and 2.59375.
    #[test]
    fn weights_equal_those_of_pytorch() {
        let weights = axis(4, 2, PLAIN);
        let values: Vec<f64> = weights
            .chunks_exact(4)
            .map(|row| row.iter().enumerate().map(|(i, w)| w * i as f64).sum())
            .collect();
        assert!((values[0] - 0.40625).abs() < 1e-12 && (values[1] - 2.59375).abs() < 1e-12, "{values:?}");
    }

    /// `interpolate(x, size=(n, n), mode="bicubic", antialias=True)` with the squares of 0 to 4
    /// along both sides.
    #[test]
    fn antialiased_weights_equal_those_of_pytorch() {
        let expected_values: [(usize, &[f64]); 2] = [
            (3, &[0.169231, 4.195349, 13.338458]),
            (8, &[-0.071956, 0.243749, 1.128906, 2.847656, 5.347656, 8.628906, 13.488183, 16.503689]),
        ];
        for (to, expected) in expected_values {
            let weights = axis(5, to, Resampling { offset: 0.0, antialias: true });
            for (row, expected) in weights.chunks_exact(5).zip(expected) {
                let value: f64 = row.iter().enumerate().map(|(i, w)| w * (i * i) as f64).sum();
                assert!((value - expected).abs() < 1e-5, "{value} instead of {expected}");
            }
        }
    }
}
