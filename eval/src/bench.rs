//! Time of protocols on features of a given size, without images: on noise around a center for each
//! class, on which accuracy is above chance.

use std::sync::Arc;
use std::time::Instant;

use augment::ViewRng;
use pipeline::NoProgress;

use crate::EvalError;
use crate::features::columns::Columns;
use crate::features::set::FeatureSet;
use crate::features::table::Table;
use crate::protocol::Protocol;
use crate::protocol::task::Task;

/// Sizes of the features.
#[derive(Debug, Clone, Copy)]
pub struct NoiseSizes {
    /// Number of training rows.
    pub n_train: usize,
    /// Number of test rows.
    pub n_test: usize,
    /// Width of a class token.
    pub width: usize,
    /// Number of classes.
    pub n_classes: usize,
}

/// Features of noise, on which protocols are timed.
pub struct ProtocolBench {
    train: FeatureSet,
    test: FeatureSet,
    n_classes: usize,
}

/// Times of a protocol.
#[derive(Debug, Clone, PartialEq)]
pub struct ProtocolTimes {
    /// Seconds of each run, the shortest first.
    pub seconds: Vec<f64>,
    /// Best accuracy of the last run, in percent.
    pub accuracy: f64,
}

impl ProtocolBench {
    /// Draws features with all columns that `protocols` use.
    pub fn new(sizes: NoiseSizes, protocols: &[Protocol]) -> Self {
        let n_levels = protocols.iter().map(|protocol| protocol.needs().n_levels).max().unwrap_or(1);
        let needs_average = protocols.iter().any(|protocol| protocol.needs().average);
        let average = if needs_average { sizes.width } else { 0 };
        let columns = Columns { levels: vec![sizes.width; n_levels], average };
        Self {
            train: noise(sizes.n_train, sizes.n_classes, &columns, 0),
            test: noise(sizes.n_test, sizes.n_classes, &columns, 1),
            n_classes: sizes.n_classes,
        }
    }

    /// Runs `protocol` `repeats` times, at least once.
    ///
    /// # Errors
    /// Errors of the protocol.
    pub fn time(&self, protocol: &Protocol, repeats: u32) -> Result<ProtocolTimes, EvalError> {
        let task = Task {
            train: &self.train,
            test: &self.test,
            n_classes: self.n_classes,
            seed: 0,
            views: None,
            sets: None,
            progress: &NoProgress,
        };
        let mut seconds = Vec::new();
        let mut accuracy = 0.0;
        for _ in 0..repeats.max(1) {
            let start = Instant::now();
            let scored = protocol.score(&task)?;
            seconds.push(start.elapsed().as_secs_f64());
            accuracy = scored.iter().map(|scored| scored.outcome.value()).fold(0.0, f64::max);
        }
        seconds.sort_by(f64::total_cmp);
        Ok(ProtocolTimes { seconds, accuracy })
    }
}

/// Draws `n` rows of noise around a center for each class.
fn noise(n: usize, n_classes: usize, columns: &Columns, stream: u64) -> FeatureSet {
    let width = columns.width();
    let n_classes = n_classes.max(1);
    let mut rng = ViewRng::from_words([1, 0, 0, 0]);
    let centers: Vec<f32> = (0..n_classes * width).map(|_| rng.normal()).collect();
    let mut rng = ViewRng::from_words([2, stream, 0, 0]);
    let mut rows = Vec::with_capacity(n * width);
    for i in 0..n {
        let center = &centers[i % n_classes * width..][..width];
        rows.extend(center.iter().map(|center| center + 20.0 * (rng.uniform() - 0.5)));
    }
    let table = Table::new(columns.clone(), (0..n as u32).collect(), rows);
    FeatureSet::from_table(Arc::new(table), |image| Some((image % n_classes) as u32))
}
