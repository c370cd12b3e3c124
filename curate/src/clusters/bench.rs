//! Time of k-means.

use std::sync::Arc;
use std::time::Instant;

use augment::ViewRng;
use kernels::rows::Rows;
use pipeline::NoProgress;
use ranks::communicator::Communicator;

use super::kmeans::KMeans;
use crate::CurateError;
use crate::rows::{FeatureRows, Metric};

/// Times of k-means: medians.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KMeansBench {
    /// Seconds of seeding and of the last distances, without iterations.
    pub seeds_s: f64,
    /// Seconds of everything.
    pub seconds: f64,
    /// Inertia of the last run.
    pub inertia: f64,
}

/// Clusters `rows` `repeats` times, at least once, into `n_clusters` in `n_iterations`.
///
/// # Errors
/// As [`KMeans::run`], and [`CurateError::NotFinite`].
pub fn time_kmeans(
    rows: &FeatureRows,
    n_clusters: usize,
    n_iterations: usize,
    repeats: u32,
) -> Result<KMeansBench, CurateError> {
    let largest = rows.largest(0..rows.len())?;
    let mut seeds_s = Vec::new();
    let mut seconds = Vec::new();
    let mut inertia = 0.0;
    for _ in 0..repeats.max(1) {
        let seeding = KMeans { n_clusters, n_iterations: 0, seed: 0 };
        let start = Instant::now();
        seeding.run(rows, largest, None, &Communicator::solo(), &NoProgress)?;
        seeds_s.push(start.elapsed().as_secs_f64());
        let clustering = KMeans { n_iterations, ..seeding };
        let start = Instant::now();
        let clusters = clustering.run(rows, largest, None, &Communicator::solo(), &NoProgress)?;
        seconds.push(start.elapsed().as_secs_f64());
        inertia = clusters.inertia;
    }
    Ok(KMeansBench { seeds_s: median(seeds_s), seconds: median(seconds), inertia })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Draws `n` rows of noise of `width` around `n_centers` centers.
///
/// # Errors
/// [`CurateError::Shape`] if `width` is 0.
pub fn noise_rows(n: usize, width: usize, n_centers: usize) -> Result<FeatureRows, CurateError> {
    let n_centers = n_centers.max(1);
    let mut rng = ViewRng::from_words([1, 0, 0, 0]);
    let centers: Vec<f32> = (0..n_centers * width).map(|_| rng.normal()).collect();
    let mut rng = ViewRng::from_words([2, 0, 0, 0]);
    let mut values = Vec::with_capacity(n * width);
    for i in 0..n {
        let center = &centers[i % n_centers * width..][..width];
        values.extend(center.iter().map(|center| center + 4.0 * (rng.uniform() - 0.5)));
    }
    FeatureRows::new(width, vec![Arc::new(values)], Metric::Cosine)
}
