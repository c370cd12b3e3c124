//! Initial values from a counter RNG: element `i` of parameter `name` is a pure function of
//! (seed, name, i), so that any slice can be computed without the rest, on any number of ranks.

use augment::ViewRng;
use xxhash_rust::xxh3::xxh3_64;

use crate::params::Init;

/// Elements that share one address of the counter RNG.
const CHUNK: usize = 1024;

/// Fills `out` with elements `first..first + out.len()` of parameter `name`.
pub fn fill(init: Init, seed: u64, name: &str, first: usize, out: &mut [f32]) {
    match init {
        Init::Constant(value) => return out.fill(value),
        Init::SinCos { side, n_before, width } => {
            for (value, i) in out.iter_mut().zip(first..) {
                *value = sin_cos(side, width, (i / width).checked_sub(n_before), i % width);
            }
            return;
        }
        Init::Normal(_) | Init::TruncNormal(_) | Init::Uniform(_) => {}
    }
    let name = xxh3_64(name.as_bytes());
    let mut chunk = [0.0; CHUNK];
    let end = first + out.len();
    for index in first / CHUNK..end.div_ceil(CHUNK) {
        let mut rng = ViewRng::from_words([seed, name, index as u64, INIT_DOMAIN]);
        chunk.fill_with(|| draw(init, &mut rng));
        let from = first.max(index * CHUNK);
        let to = end.min((index + 1) * CHUNK);
        out[from - first..to - first].copy_from_slice(&chunk[from - index * CHUNK..to - index * CHUNK]);
    }
}

/// Domain that separates these streams from those of views, whose addresses are small numbers.
const INIT_DOMAIN: u64 = 0x696e_6974_0000_0000;

/// Returns channel `channel` of the embedding of cell `cell` of a grid; zero without a cell.
///
/// ```text
/// [sin(row ω), cos(row ω), sin(column ω), cos(column ω)]      a quarter of D each
/// ω_k = 10000^(-k / (D/4))
/// ```
fn sin_cos(side: usize, width: usize, cell: Option<usize>, channel: usize) -> f32 {
    let Some(cell) = cell else { return 0.0 };
    let quarter = width / 4;
    let frequency = 1e4_f64.powf(-((channel % quarter) as f64) / quarter as f64);
    let row = (cell / side) as f64;
    let column = (cell % side) as f64;
    let value = match channel / quarter {
        0 => (row * frequency).sin(),
        1 => (row * frequency).cos(),
        2 => (column * frequency).sin(),
        _ => (column * frequency).cos(),
    };
    value as f32
}

fn draw(init: Init, rng: &mut ViewRng) -> f32 {
    match init {
        Init::Constant(value) => value,
        // Filled before anything is drawn.
        Init::SinCos { .. } => 0.0,
        Init::Uniform(bound) => rng.between(f64::from(-bound), f64::from(bound)) as f32,
        Init::Normal(std) => rng.normal() * std,
        Init::TruncNormal(std) => loop {
            // timm truncates at ±2 in absolute terms, which for small deviations truncates nothing.
            let value = rng.normal() * std;
            if value.abs() <= 2.0 {
                return value;
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_equal_their_range_of_the_full_parameter(
            first in 0usize..3000,
            len in 0usize..3000,
            seed: u64,
        ) {
            let init = Init::TruncNormal(0.02);
            let mut full = vec![0.0; 6000];
            fill(init, seed, "blocks.0.w", 0, &mut full);
            let mut slice = vec![0.0; len];
            fill(init, seed, "blocks.0.w", first, &mut slice);
            prop_assert_eq!(&slice, &full[first..first + len]);
        }
    }

    #[test]
    fn weights_have_the_given_deviation_and_depend_on_the_name() {
        let mut a = vec![0.0f32; 20_000];
        let mut b = vec![0.0; 20_000];
        fill(Init::TruncNormal(0.02), 1, "a", 0, &mut a);
        fill(Init::TruncNormal(0.02), 1, "b", 0, &mut b);
        let std = (a.iter().map(|v| v * v).sum::<f32>() / a.len() as f32).sqrt();
        assert!((std - 0.02).abs() < 5e-4, "{std}");
        assert_ne!(a, b);
    }
}
