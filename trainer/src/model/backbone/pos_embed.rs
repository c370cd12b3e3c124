//! Position embeddings for another grid: bicubic interpolation as a matrix.
//!
//! The weights are PyTorch's `interpolate(mode="bicubic", align_corners=False)` (a = -0.75, edges
//! clamped, no antialiasing). As a matrix product they are differentiable and cost nothing.

/// Row-major `[to_h · to_w, from · from]` such that `matrix · embedding` resamples a square grid. `offset` is added
/// to the number of cells wanted when the scale is computed, and to nothing else.
pub(super) fn matrix(from: usize, [to_h, to_w]: [usize; 2], offset: f64) -> Vec<f32> {
    let (rows, cols) = (axis(from, to_h, offset), axis(from, to_w, offset));
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

/// Row-major `[to, from]` weights along one axis.
fn axis(from: usize, to: usize, offset: f64) -> Vec<f64> {
    let mut weights = vec![0.0; to * from];
    let scale = from as f64 / (to as f64 + offset);
    for (i, row) in weights.chunks_exact_mut(from).enumerate() {
        let source = (i as f64 + 0.5) * scale - 0.5;
        let floor = source.floor();
        for tap in -1..=2 {
            let at = (floor as isize + tap).clamp(0, from as isize - 1) as usize;
            row[at] += cubic(source - floor - tap as f64);
        }
    }
    weights
}

/// Keys' cubic convolution kernel with a = -0.75.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.75;
    let x = x.abs();
    if x <= 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_grid_is_the_identity() {
        let identity = matrix(3, [3, 3], 0.0);
        for (i, value) in identity.iter().enumerate() {
            let expected = if i / 9 == i % 9 { 1.0 } else { 0.0 };
            assert!((value - expected).abs() < 1e-12, "{i}: {value}");
        }
    }

    /// `torch.nn.functional.interpolate(torch.arange(4.)[None, None, :, None].expand(1, 1, 4, 4)`
    /// `.contiguous(), size=(2, 2), mode="bicubic")` gives rows 0.40625 and 2.59375.
    #[test]
    fn it_equals_pytorch() {
        let weights = axis(4, 2, 0.0);
        let values: Vec<f64> = weights
            .chunks_exact(4)
            .map(|row| row.iter().enumerate().map(|(i, w)| w * i as f64).sum())
            .collect();
        assert!((values[0] - 0.40625).abs() < 1e-12 && (values[1] - 2.59375).abs() < 1e-12, "{values:?}");
    }
}
