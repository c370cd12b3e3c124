//! Bootstrap intervals (Efron 1979): the variation of a score over other test sets of the same
//! size.

use augment::ViewRng;
use rayon::prelude::*;

/// Number of resampled test sets.
const DRAWS: u64 = 1000;

/// RNG domain of the resampling, distinct from all other streams.
const DOMAIN: u64 = 0x626f_6f74_0000_0000;

/// Returns the bounds of the middle 95 % of `value` over test sets of `n` images drawn with
/// replacement. `value` receives how often each image was drawn. The result is deterministic: the
/// draws depend on `n` only.
pub(crate) fn interval(n: usize, value: impl Fn(&[u32]) -> f64 + Sync) -> [f64; 2] {
    if n == 0 {
        return [0.0; 2];
    }
    let mut values: Vec<f64> = (0..DRAWS)
        .into_par_iter()
        .map(|draw: u64| {
            let mut rng = ViewRng::from_words([0, DOMAIN, draw, 0]);
            let mut counts = vec![0; n];
            for _ in 0..n {
                counts[rng.below(n as u32) as usize] += 1;
            }
            value(&counts)
        })
        .collect();
    values.sort_unstable_by(f64::total_cmp);
    [quantile(&values, 0.025), quantile(&values, 0.975)]
}

/// Returns the quantile `share`, in 0..=1, of values in ascending order.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

/// Returns the [`interval`] of the mean of `values`.
pub(crate) fn interval_of_mean(values: &[f64]) -> [f64; 2] {
    let n = values.len() as f64;
    interval(values.len(), |counts| {
        values.iter().zip(counts).map(|(value, count)| value * f64::from(*count)).sum::<f64>() / n
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The interval of the mean of 400 coin flips is about two standard deviations, 2 · 0.5 / 20,
    /// around a half.
    #[test]
    fn the_interval_of_coin_flips_is_that_of_the_normal_distribution() {
        let coins: Vec<f64> = (0..400).map(|i| f64::from(i % 2)).collect();
        let [low, high] = interval_of_mean(&coins);
        assert!((low - 0.451).abs() < 0.01 && (high - 0.549).abs() < 0.01, "{low} {high}");
        assert_eq!(interval_of_mean(&[3.0; 9]), [3.0, 3.0]);
    }
}
