//! Convolution of narrow groups of bf16 channels. Pairs of numbers are multiplied, in one
//! instruction for 16 output channels where the CPU has `vdpbf16ps`, with sums in f32: pairs of
//! channels of a window for the output, pairs of windows for the weights' gradient.
//!
//! ```text
//! y[i, o]     = Σ_t,c x[i, t, c] · W[t, c, o]             c in pairs
//! gW[t, c, o] = Σ_i x[i, t, c] · g[i, o]                  i in pairs of neighbors in a row
//! ```

use half::bf16;
use multiversion::{multiversion, target::match_target};

use super::part::Part;
use super::plane::{Place, Plane, Steps};
use crate::ops::conv::channels::Channels;
use crate::ops::conv::geometry::Geometry;
#[cfg(target_arch = "x86_64")]
use crate::ops::cpu_product::x86;
use crate::ops::cpu_product::{LaneSums, Lanes, N_LANES, pack_columns, pack_pair, plus_pair};
use crate::ops::gemm::Mat;
use crate::ops::number::Number;

/// Least number of pairs of windows whose products are summed in registers before they are added to
/// the gradient. Whole rows are summed; the last rows of an image may have fewer pairs.
const N_PAIRS: usize = 64;

/// Convolves `x` with the weights of all `parts`, each of which writes to some of the cells of `y`.
pub(super) fn convolve<W: Number>(x: &[bf16], parts: &[Part<'_, W>], channels: Channels, y: &mut [bf16]) {
    let Some(n_images) = parts.first().map(|part| part.geometry.n_images) else { return };
    let [c, o] = channels.per_group();
    let n_in = x.len() / n_images;
    let n_out = y.len() / n_images;
    let mut plane = Plane::new(parts.iter().map(|part| &part.geometry), c);
    let n_vectors = o.div_ceil(N_LANES);
    let mut weights: Vec<Vec<Lanes>> =
        parts.iter().map(|part| vec![Lanes::default(); part.geometry.n_taps() * c / 2 * n_vectors]).collect();
    for group in 0..channels.groups {
        let from = Place::input(channels, group);
        let to = Place::output(channels, group);
        for (part, weights) in parts.iter().zip(&mut weights) {
            let k = part.geometry.n_taps() * c;
            let packed = Mat::rows(&part.packed[group * k * o..(group + 1) * k * o], o);
            pack_columns(packed.t(), 0..o, 0..k, weights);
        }
        for (image, y) in x.chunks_exact(n_in).zip(y.chunks_exact_mut(n_out)) {
            plane.fill(image, from);
            for (part, weights) in parts.iter().zip(&weights) {
                let steps = plane.steps(&part.geometry);
                for (row, (place, y)) in part.rows(to, y).enumerate() {
                    windows_of_row(plane.row_start(row, &part.geometry), weights, steps, place, y);
                }
            }
        }
    }
}

/// Returns the gradient of packed weights, `[G, T·C, O]`, given the gradient of the output.
pub(super) fn weight_gradient(
    x: &[bf16],
    grad: &[bf16],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<f32> {
    let [c, o] = channels.per_group();
    let mut gw = vec![0.0; channels.groups * geometry.n_taps() * c * o];
    let n_in = x.len() / geometry.n_images;
    let n_out = grad.len() / geometry.n_images;
    let mut plane = Plane::new([geometry].into_iter(), c);
    let steps = plane.steps(geometry);
    let [n_rows, n_columns] = geometry.output;
    let covered = (n_columns - 1) * steps.window + geometry.kernel[1] * c;
    let mut cell_pairs = vec![0; plane.values.len()];
    let sizes = GradientSizes { n_rows, n_pairs: n_columns.div_ceil(2), o };
    let mut window_pairs = vec![Lanes::default(); sizes.n_rows * sizes.n_pairs * o.div_ceil(N_LANES)];
    for (group, gw) in gw.chunks_exact_mut(geometry.n_taps() * c * o).enumerate() {
        let from = Place::input(channels, group);
        let to = Place::output(channels, group);
        for (image, grad) in x.chunks_exact(n_in).zip(grad.chunks_exact(n_out)) {
            plane.fill(image, from);
            pair_cells(&plane.values, steps, covered, &mut cell_pairs);
            pair_windows(grad, n_columns, to, &mut window_pairs);
            add_outer_products(&cell_pairs, &window_pairs, steps, sizes, gw);
        }
    }
    gw
}

/// Sizes of the gradient of a group's output in an image.
#[derive(Clone, Copy)]
struct GradientSizes {
    /// Rows of the output.
    n_rows: usize,
    /// Pairs of windows of a row.
    n_pairs: usize,
    /// Output channels.
    o: usize,
}

/// Computes one row of the output, the group's channels at `place`. `x` starts at the first row of
/// its windows in the plane.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx512bf16",
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma",
    "x86_64+avx2+fma"
))]
fn windows_of_row(x: &[bf16], weights: &[Lanes], steps: Steps, place: Place, y: &mut [bf16]) {
    match_target! {
        "x86_64+avx512bf16" => {
            let plus_pair = |sums, pair, lanes: &_| x86::plus_pair(sums, pair, lanes);
            // Sides of maps are often multiples of 7; then no block overlaps another.
            match place.n_cells(y.len()) {
                n if n.is_multiple_of(7) => blocks_of_row::<7>(x, weights, steps, place, y, plus_pair),
                8.. => blocks_of_row::<8>(x, weights, steps, place, y, plus_pair),
                4.. => blocks_of_row::<4>(x, weights, steps, place, y, plus_pair),
                _ => blocks_of_row::<1>(x, weights, steps, place, y, plus_pair),
            }
        },
        "x86_64+fma" => row_by_multiply_adds(x, weights, steps, place, y, |a, b, c| a.mul_add(b, c)),
        _ => row_by_multiply_adds(x, weights, steps, place, y, |a, b, c| a * b + c),
    }
}

/// [`windows_of_row`] by f32 multiply-adds: four windows at a time, whose sums fit the registers of
/// AVX2.
#[inline(always)]
fn row_by_multiply_adds(
    x: &[bf16],
    weights: &[Lanes],
    steps: Steps,
    place: Place,
    y: &mut [bf16],
    multiply_add: impl Fn(f32, f32, f32) -> f32 + Copy,
) {
    let plus_pair = |sums, pair, lanes: &_| plus_pair(sums, pair, lanes, multiply_add);
    match place.n_cells(y.len()) {
        4.. => blocks_of_row::<4>(x, weights, steps, place, y, plus_pair),
        _ => blocks_of_row::<1>(x, weights, steps, place, y, plus_pair),
    }
}

/// [`windows_of_row`], `N` windows at a time; a row must have at least `N`. The last block overlaps
/// the one before it.
#[inline(always)]
fn blocks_of_row<const N: usize>(
    x: &[bf16],
    weights: &[Lanes],
    steps: Steps,
    place: Place,
    y: &mut [bf16],
    plus_pair: impl Fn(LaneSums, u32, &Lanes) -> LaneSums + Copy,
) {
    let n = place.n_cells(y.len());
    let n_vectors = place.len.div_ceil(N_LANES);
    for first in (0..place.len).step_by(N_LANES) {
        let weights = &weights[first / N_LANES..];
        for start in (0..n).step_by(N) {
            let start = start.min(n - N);
            let sums = block::<N>(&x[start * steps.window..], weights, n_vectors, steps, plus_pair);
            for (window, sums) in sums.into_iter().enumerate() {
                let y = &mut y[(start + window) * place.all + place.first..][first..place.len];
                // A constant length compiles to one vector store.
                match y.first_chunk_mut::<N_LANES>() {
                    Some(y) => store(&sums, y),
                    None => store(&sums, y),
                }
            }
        }
    }
}

/// Writes the first `y.len()` sums to `y`, rounded.
#[inline(always)]
fn store(sums: &LaneSums, y: &mut [bf16]) {
    for (y, sum) in y.iter_mut().zip(sums) {
        *y = bf16::nearest(*sum);
    }
}

/// Returns the sums of `N` consecutive windows, for the first of `n_vectors` vectors of output
/// channels.
#[inline(always)]
fn block<const N: usize>(
    x: &[bf16],
    weights: &[Lanes],
    n_vectors: usize,
    steps: Steps,
    plus_pair: impl Fn(LaneSums, u32, &Lanes) -> LaneSums,
) -> [LaneSums; N] {
    let [kh, kw] = steps.kernel;
    let mut totals = [[0.0; N_LANES]; N];
    // A row of the kernel is one contiguous run of a plane's row.
    let n_pairs = kw * steps.width / 2;
    for ky in 0..kh {
        let weights = &weights[ky * n_pairs * n_vectors..];
        let runs: [&[[bf16; 2]]; N] =
            std::array::from_fn(|i| &x[ky * steps.row + i * steps.window..].as_chunks().0[..n_pairs]);
        for p in 0..n_pairs {
            let lanes = &weights[p * n_vectors];
            for (totals, run) in totals.iter_mut().zip(runs) {
                *totals = plus_pair(*totals, bytemuck::cast(run[p]), lanes);
            }
        }
    }
    totals
}

/// Pairs each number of a plane with that of the same channel in the next window's cell. The
/// partner is zero beyond the first `covered` numbers of a row, those that windows cover: the
/// partner of the last of an odd number of windows is multiplied by zero, and infinities that no
/// window covers must not reach the sum.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn pair_cells(plane: &[bf16], steps: Steps, covered: usize, pairs: &mut [u32]) {
    for (row, pairs) in plane.chunks_exact(steps.row).zip(pairs.chunks_exact_mut(steps.row)) {
        let next = row[..covered].get(steps.window..).unwrap_or_default();
        let (pairs, last_pairs) = pairs.split_at_mut(next.len());
        for ((pair, x), y) in pairs.iter_mut().zip(row).zip(next) {
            *pair = pack_pair(*x, *y);
        }
        for (pair, x) in last_pairs.iter_mut().zip(&row[next.len()..]) {
            *pair = pack_pair(*x, bf16::ZERO);
        }
    }
}

/// Pairs the gradients of windows that are neighbors in a row of `n_columns` windows, with the
/// group's output channels in lanes. The partner of the last of an odd number of windows is zero,
/// as are the missing channels of a vector.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn pair_windows(grad: &[bf16], n_columns: usize, place: Place, pairs: &mut [Lanes]) {
    let mut pairs = pairs.iter_mut();
    for row in grad.chunks_exact(n_columns * place.all) {
        for cells in row.chunks(2 * place.all) {
            let mut cells = cells.chunks_exact(place.all).map(|cell| &cell[place.first..][..place.len]);
            let x = cells.next().unwrap_or_default();
            let y = cells.next().unwrap_or_default();
            for first in (0..place.len).step_by(N_LANES) {
                let x = lanes(x.get(first..).unwrap_or_default());
                let y = lanes(y.get(first..).unwrap_or_default());
                if let Some(pairs) = pairs.next() {
                    *pairs = std::array::from_fn(|l| pack_pair(x[l], y[l]));
                }
            }
        }
    }
}

/// Returns the first [`N_LANES`] numbers of `values`, with zeros for missing ones.
#[inline(always)]
fn lanes(values: &[bf16]) -> [bf16; N_LANES] {
    match values.first_chunk() {
        Some(lanes) => *lanes,
        None => std::array::from_fn(|l| values.get(l).copied().unwrap_or_default()),
    }
}

/// Adds to `gw` the sums of products of pairs of cells, `x`, and pairs of windows' gradients,
/// `grad`.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx512bf16",
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma",
    "x86_64+avx2+fma"
))]
fn add_outer_products(x: &[u32], grad: &[Lanes], steps: Steps, sizes: GradientSizes, gw: &mut [f32]) {
    match_target! {
        "x86_64+avx512bf16" => {
            let plus_pair = |sums, pair, lanes: &_| x86::plus_pair(sums, pair, lanes);
            if steps.width.is_multiple_of(16) {
                add_rows::<16>(x, grad, steps, sizes, gw, plus_pair)
            } else {
                add_rows::<8>(x, grad, steps, sizes, gw, plus_pair)
            }
        },
        "x86_64+fma" => add_rows::<4>(x, grad, steps, sizes, gw, |sums, pair, lanes: &_| {
            plus_pair(sums, pair, lanes, |a, b, c| a.mul_add(b, c))
        }),
        _ => add_rows::<4>(x, grad, steps, sizes, gw, |sums, pair, lanes: &_| {
            plus_pair(sums, pair, lanes, |a, b, c| a * b + c)
        }),
    }
}

/// [`add_outer_products`], `N` input channels at a time.
#[inline(always)]
fn add_rows<const N: usize>(
    x: &[u32],
    grad: &[Lanes],
    steps: Steps,
    sizes: GradientSizes,
    gw: &mut [f32],
    plus_pair: impl Fn(LaneSums, u32, &Lanes) -> LaneSums,
) {
    let GradientSizes { n_rows, n_pairs, o } = sizes;
    let [kh, kw] = steps.kernel;
    let n_vectors = o.div_ceil(N_LANES);
    // Distance between the first windows of neighboring rows of the output.
    let down = steps.window / steps.width * steps.row;
    let rows_at_once = N_PAIRS.div_ceil(n_pairs);
    for rows in (0..n_rows).step_by(rows_at_once).map(|first| first..n_rows.min(first + rows_at_once)) {
        for (ky, kx) in (0..kh).flat_map(|ky| (0..kw).map(move |kx| (ky, kx))) {
            for (first, vector) in
                (0..steps.width).step_by(N).flat_map(|c| (0..n_vectors).map(move |vector| (c, vector)))
            {
                let mut totals = [[0.0; N_LANES]; N];
                for row in rows.clone() {
                    let x = &x[row * down + ky * steps.row + kx * steps.width + first..];
                    let grad = grad[row * n_pairs * n_vectors..].iter().skip(vector).step_by(n_vectors);
                    for (x, lanes) in x.chunks(2 * steps.window).zip(grad.take(n_pairs)) {
                        for (totals, pair) in totals.iter_mut().zip(&x[..N]) {
                            *totals = plus_pair(*totals, *pair, lanes);
                        }
                    }
                }
                let lanes = vector * N_LANES..o.min((vector + 1) * N_LANES);
                let gw = gw[((ky * kw + kx) * steps.width + first) * o..].chunks_mut(o);
                for (gw, totals) in gw.zip(&totals) {
                    gw[lanes.clone()].iter_mut().zip(totals).for_each(|(gw, total)| *gw += total);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, frequency: f32) -> Vec<bf16> {
        (0..n).map(|i| bf16::nearest((i as f32 * frequency).sin())).collect()
    }

    /// Results without AVX512-BF16 or without fused multiply-add have the same bits as those with
    /// them, for rows of every length and groups with an incomplete vector.
    #[test]
    fn all_instruction_sets_give_the_same_bits() {
        for width in 1..20 {
            let [c, o] = [[8, 24], [16, 16], [24, 8]][width % 3];
            let geometry = Geometry::new(1, [3, width], [3, 3], 1 + width % 2, 1);
            let plane: Plane<bf16> = Plane::new([&geometry].into_iter(), c);
            let steps = plane.steps(&geometry);
            let [n_rows, n] = geometry.output;
            let place = Place { all: o + 8, first: 8, len: o };
            let x = numbers(plane.values.len(), 0.7);
            let mut weights = vec![Lanes::default(); 9 * c / 2 * o.div_ceil(N_LANES)];
            pack_columns(Mat::rows(&numbers(9 * c * o, 0.3), o).t(), 0..o, 0..9 * c, &mut weights);
            let mut chosen = vec![bf16::ZERO; n * place.all];
            windows_of_row(&x, &weights, steps, place, &mut chosen);

            let mut cell_pairs = vec![0; x.len()];
            pair_cells(&x, steps, steps.row, &mut cell_pairs);
            let sizes = GradientSizes { n_rows, n_pairs: n.div_ceil(2), o };
            let mut window_pairs = vec![Lanes::default(); sizes.n_rows * sizes.n_pairs * o.div_ceil(N_LANES)];
            pair_windows(&numbers(n_rows * n * place.all, 0.9), n, place, &mut window_pairs);
            let mut chosen_gradient = vec![0.0; 9 * c * o];
            add_outer_products(&cell_pairs, &window_pairs, steps, sizes, &mut chosen_gradient);

            for fused in [true, false] {
                let multiply_add: fn(f32, f32, f32) -> f32 =
                    if fused { f32::mul_add } else { |a, b, c| a * b + c };
                let mut y = vec![bf16::ZERO; n * place.all];
                row_by_multiply_adds(&x, &weights, steps, place, &mut y, multiply_add);
                assert!(y == chosen, "rows of {width}, fused: {fused}");
                assert!(y.chunks(place.all).all(|cell| cell[..8].iter().all(|y| *y == bf16::ZERO)));
                let mut gradient = vec![0.0; 9 * c * o];
                add_rows::<4>(
                    &cell_pairs,
                    &window_pairs,
                    steps,
                    sizes,
                    &mut gradient,
                    |sums, pair, lanes: &_| plus_pair(sums, pair, lanes, multiply_add),
                );
                assert!(gradient == chosen_gradient, "rows of {width}, fused: {fused}");
            }
            assert!(chosen_gradient.iter().any(|sum| *sum != 0.0));
        }
    }

    /// An infinity in a column that no window covers does not reach the gradient of an odd number
    /// of windows.
    #[test]
    fn numbers_that_no_window_covers_do_not_change_the_gradient() {
        let geometry = Geometry::new(1, [3, 3], [2, 2], 2, 0);
        let channels = Channels { input: 16, output: 16, groups: 2 };
        let mut x = numbers(9 * 16, 0.7);
        let grad = numbers(16, 0.9);
        let expected = weight_gradient(&x, &grad, channels, &geometry);
        for row in x.chunks_exact_mut(3 * 16) {
            row[2 * 16..].fill(bf16::INFINITY);
        }
        assert_eq!(weight_gradient(&x, &grad, channels, &geometry), expected);
        assert!(expected.iter().all(|sum| sum.is_finite()) && expected.iter().any(|sum| *sum != 0.0));
    }
}
