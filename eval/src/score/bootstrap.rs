//! Intervals by the bootstrap (Efron 1979): how far a mean over a test set would move with another one of its size.

use augment::ViewRng;
use rayon::prelude::*;

/// Test sets that are drawn.
const DRAWS: u64 = 1000;

/// Keeps these draws apart from all other streams.
const DOMAIN: u64 = 0x626f_6f74_0000_0000;

/// The middle 95 % of `value` over test sets of `n` images drawn with replacement, given how often each was drawn. The same
/// for the same number of images and the same value.
pub(crate) fn interval(n: usize, value: impl Fn(&[u32]) -> f64 + Sync) -> [f64; 2] {
    if n == 0 {
        return [0.0; 2];
    }
    let of_draw = |draw: u64| {
        let mut rng = ViewRng::from_words([0, DOMAIN, draw, 0]);
        let mut counts = vec![0; n];
        (0..n).for_each(|_| counts[rng.below(n as u32) as usize] += 1);
        value(&counts)
    };
    let mut values: Vec<f64> = (0..DRAWS).into_par_iter().map(of_draw).collect();
    values.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| values[((values.len() - 1) as f64 * share).round() as usize];
    [at(0.025), at(0.975)]
}

/// The same of the mean of `values`.
pub(crate) fn interval_of_mean(values: &[f64]) -> [f64; 2] {
    let n = values.len() as f64;
    interval(values.len(), |counts| {
        values.iter().zip(counts).map(|(value, count)| value * f64::from(*count)).sum::<f64>() / n
    })
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
