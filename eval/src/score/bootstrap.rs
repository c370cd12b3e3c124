//! Intervals by the bootstrap (Efron 1979): how far a mean over a test set would move with another one of its size.

use augment::ViewRng;
use rayon::prelude::*;

/// Test sets that are drawn.
const DRAWS: u64 = 1000;

/// Keeps these draws apart from all other streams.
const DOMAIN: u64 = 0x626f_6f74_0000_0000;

/// The middle 95 % of the means of `values` drawn with replacement. The same for the same number of values and the same
/// values.
pub(crate) fn interval_of_mean(values: &[f64]) -> [f64; 2] {
    if values.is_empty() {
        return [0.0; 2];
    }
    let n = values.len() as u32;
    let mean_of_draw = |draw: u64| {
        let mut rng = ViewRng::from_words([0, DOMAIN, draw, 0]);
        let sum: f64 = (0..n).map(|_| values[rng.below(n) as usize]).sum();
        sum / f64::from(n)
    };
    let mut means: Vec<f64> = (0..DRAWS).into_par_iter().map(mean_of_draw).collect();
    means.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| means[((means.len() - 1) as f64 * share).round() as usize];
    [at(0.025), at(0.975)]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mean of 400 coins lies within two deviations, 2 · 0.5 / 20, of a half.
    #[test]
    fn coins_have_the_interval_of_the_normal_distribution() {
        let coins: Vec<f64> = (0..400).map(|i| f64::from(i % 2)).collect();
        let [low, high] = interval_of_mean(&coins);
        assert!((low - 0.451).abs() < 0.01 && (high - 0.549).abs() < 0.01, "{low} {high}");
        assert_eq!(interval_of_mean(&[3.0; 9]), [3.0, 3.0]);
    }
}
