//! Calibration of a classifier: whether predictions with a probability of 80 % are right in 80 % of
//! the cases.
//!
//! ```text
//! ECE = Σ_m |B_m| / n · |accuracy(B_m) - confidence(B_m)|          the expected calibration error
//! B_m          images whose predicted class has a probability in ((m - 1) / M, m / M], M = 15
//! accuracy     share of the images of a bin whose prediction is right
//! confidence   mean probability of the predictions of a bin
//! ```
//!
//! Where images may have several classes, each pair of an image and a class is a prediction, that
//! the image has the class: of those with a probability of 10 %, 10 % should be right.
//!
//! Source: Guo, Pleiss, Sun, Weinberger 2017, "On Calibration of Modern Neural Networks", equations
//! 2 and 3, with their 15 bins of equal width.

use serde::{Deserialize, Serialize};

/// Number of bins of equal width.
const N_BINS: usize = 15;

/// Probabilities of predictions beside the shares of them that are right.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Expected calibration error, in percent; 0 if every bin has its accuracy as its confidence.
    pub ece: f64,
    /// The bins, by ascending probability.
    pub bins: Vec<CalibrationBin>,
}

/// Predictions with probabilities of one bin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CalibrationBin {
    /// Number of predictions.
    pub n: u64,
    /// Mean probability in percent; `None` without predictions.
    pub confidence: Option<f64>,
    /// Share of right predictions in percent; `None` without predictions.
    pub accuracy: Option<f64>,
}

impl Calibration {
    /// Computes the calibration of `predictions`: the probability of each in percent, and whether
    /// it is right.
    pub(crate) fn new(predictions: impl IntoIterator<Item = (f64, bool)>) -> Self {
        let mut sums = [BinSums::default(); N_BINS];
        let mut n_all = 0.0;
        for (probability, is_right) in predictions {
            let bin = &mut sums[bin_of(probability)];
            bin.n += 1;
            bin.n_right += u64::from(is_right);
            bin.probability += probability;
            n_all += 1.0;
        }
        let mut ece = 0.0;
        let mut bins = Vec::with_capacity(N_BINS);
        for BinSums { n, n_right, probability } in sums {
            if n == 0 {
                bins.push(CalibrationBin::default());
                continue;
            }
            let confidence = probability / n as f64;
            let accuracy = 100.0 * n_right as f64 / n as f64;
            ece += n as f64 / n_all * (accuracy - confidence).abs();
            bins.push(CalibrationBin { n, confidence: Some(confidence), accuracy: Some(accuracy) });
        }
        Self { ece, bins }
    }
}

/// Sums over the predictions of a bin.
#[derive(Debug, Clone, Copy, Default)]
struct BinSums {
    n: u64,
    n_right: u64,
    /// Sum of the probabilities, in percent.
    probability: f64,
}

/// Returns the bin of a probability in percent. The upper bound of a bin belongs to it.
fn bin_of(probability: f64) -> usize {
    let upper = (probability * N_BINS as f64 / 100.0).ceil();
    (upper as usize).clamp(1, N_BINS) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bounds of bins belong to the lower bin: 40 % is the end of the sixth of fifteen.
    #[test]
    fn bins_have_equal_widths() {
        let probabilities = [0.0, 1.0, 6.7, 40.0, 40.1, 93.3, 93.4, 100.0];
        assert_eq!(probabilities.map(bin_of), [0, 0, 1, 5, 6, 13, 14, 14]);
    }

    /// ECE = 2/4 · |50 - 96| + 1/4 · |100 - 50| + 1/4 · |0 - 40| = 23 + 12.5 + 10.
    #[test]
    fn the_error_is_the_mean_distance_of_accuracy_and_confidence() {
        let calibration = Calibration::new([(95.0, true), (97.0, false), (50.0, true), (40.0, false)]);
        assert!((calibration.ece - 45.5).abs() < 1e-12, "{calibration:?}");
        assert_eq!(calibration.bins.len(), N_BINS);
        let expected = [(5, 1, 40.0, 0.0), (7, 1, 50.0, 100.0), (14, 2, 96.0, 50.0)];
        for (bin, n, confidence, accuracy) in expected {
            let expected = CalibrationBin { n, confidence: Some(confidence), accuracy: Some(accuracy) };
            assert_eq!(calibration.bins[bin], expected, "bin {bin}");
        }
        assert_eq!(calibration.bins.iter().filter(|bin| bin.n == 0).count(), N_BINS - 3);
    }

    /// Three of four predictions with 75 % are right; nothing is said about no predictions.
    #[test]
    fn calibrated_predictions_have_no_error() {
        let calibrated = Calibration::new([(75.0, true), (75.0, true), (75.0, false), (75.0, true)]);
        assert_eq!(calibrated.ece, 0.0);
        let empty = Calibration::new([]);
        assert_eq!(empty.ece, 0.0);
        assert!(empty.bins.iter().all(|bin| *bin == CalibrationBin::default()));
    }
}
