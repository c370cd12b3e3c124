//! k-means by Lloyd's iterations.
//!
//! ```text
//! cell_i = argmin_j |x_i - c_j|²     c_j = mean of the rows of cell j
//!
//! until no center moves, or for n_iterations
//! ```
//!
//! Each rank compares its part of the rows; sums over ranks are exact ([`super::sums`]), so that
//! centers have the same bits on any number of threads and ranks.
//!
//! Variants that skip products by bounds on distances (Hamerly, Yinyang) are not implemented: an
//! iteration takes the time of its products, as in Faiss. Unlike comparisons of rows, k-means
//! cannot be divided into parts that run at different times, because each iteration starts from the
//! sums that all ranks found in the one before.

use std::ops::Range;

use kernels::rows::{NearestCenter, Rows, find_nearest_centers};
use ranks::communicator::Communicator;
use ranks::engine::Reduction;
use ranks::fixed::{FixedPoint, N_LIMBS};

use super::empty::refill;
use super::nearest::{STRIDE, find_nearest};
use super::seeds::choose_seeds;
use super::sums::ClusterSums;
use crate::CurateError;
use crate::centers::Centers;
use crate::draw::Draw;
use crate::progress::ClusterProgress;
use crate::rows::part_of_rank;
use pipeline::Progress;

/// Settings of k-means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KMeans {
    /// Number of clusters, K.
    pub n_clusters: usize,
    /// Largest number of iterations.
    pub n_iterations: usize,
    /// Seed of the first centers.
    pub seed: u64,
}

/// Result of k-means.
#[derive(Debug, Clone, PartialEq)]
pub struct Clustering {
    /// Centers, `[K, D]`; fewer than asked for if there are fewer different rows.
    pub centers: Centers,
    /// Nearest center of each row of this rank's part.
    pub nearest: Vec<NearestCenter>,
    /// Sum of squared distances of all rows to their centers.
    pub inertia: f64,
}

impl KMeans {
    /// Clusters `rows`, whose absolute values are at most `largest`; continues from `start`, if
    /// given. Every rank can read all rows, and compares its part of them.
    ///
    /// # Errors
    /// [`CurateError::NoClusters`], [`CurateError::TooManyClusters`] and [`CurateError::Ranks`].
    pub fn run(
        &self,
        rows: &dyn Rows,
        largest: f32,
        start: Option<Centers>,
        ranks: &Communicator,
        progress: &dyn ClusterProgress,
    ) -> Result<Clustering, CurateError> {
        let n = rows.len();
        let topology = ranks.topology();
        if self.n_clusters == 0 {
            return Err(CurateError::NoClusters);
        }
        if self.n_clusters > n {
            return Err(CurateError::TooManyClusters { n_clusters: self.n_clusters, n_rows: n });
        }
        let part = part_of_rank(n, topology.rank, topology.world_size);
        let mut nearest = vec![NearestCenter::NONE; part.len()];
        let mut centers = match start {
            Some(centers) => centers,
            None => {
                let draw = Draw::new(self.seed, "seeds of k-means");
                let values =
                    choose_seeds(rows, part.clone(), self.n_clusters, draw, ranks, &mut nearest, progress)?;
                Centers { values, ..Centers::default() }
            }
        };
        let n_left = self.n_iterations.saturating_sub(centers.n_iterations);
        progress.begin("k-means", (n_left * part.len()) as u64);
        while centers.n_iterations < self.n_iterations {
            let moved =
                iterate(rows, part.clone(), largest, &mut centers.values, &mut nearest, ranks, progress)?;
            centers.n_iterations += 1;
            progress.save(&centers);
            if !moved {
                break;
            }
        }
        progress.begin("distances", part.len() as u64);
        nearest.fill(NearestCenter::NONE);
        find_nearest(rows, part, &centers.values, 0, &mut nearest, Some(progress));
        let inertia = sum_of_distances(&nearest, ranks)?;
        Ok(Clustering { centers, nearest, inertia })
    }
}

/// Moves each center to the mean of its rows; returns true if a center has moved.
fn iterate(
    rows: &dyn Rows,
    part: Range<usize>,
    largest: f32,
    centers: &mut Vec<f32>,
    nearest: &mut [NearestCenter],
    ranks: &Communicator,
    progress: &dyn Progress,
) -> Result<bool, CurateError> {
    let d = rows.width();
    let mut sums = ClusterSums::new(centers.len() / d, d, rows.len(), largest);
    nearest.fill(NearestCenter::NONE);
    for (index, nearest) in nearest.chunks_mut(STRIDE).enumerate() {
        let start = part.start + index * STRIDE;
        let range = start..start + nearest.len();
        find_nearest_centers(rows, range.clone(), centers, 0, nearest);
        sums.add(rows, range, nearest);
        progress.advance(nearest.len() as u64);
    }
    let counts = ranks.all_reduce("rows of clusters", sums.counts, Reduction::Sum)?;
    let values = ranks.all_reduce("sums of clusters", sums.values, Reduction::Sum)?;
    let mut means = centers.clone();
    for ((mean, sum), count) in means.chunks_exact_mut(d).zip(values.chunks_exact(d)).zip(&counts) {
        if *count > 0.0 {
            mean.iter_mut().zip(sum).for_each(|(mean, sum)| *mean = (sum / count) as f32);
        }
    }
    refill(rows, part, nearest, &counts, &mut means, ranks)?;
    let moved = means != *centers;
    *centers = means;
    Ok(moved)
}

/// Returns the sum of all distances, which does not depend on their order.
fn sum_of_distances(nearest: &[NearestCenter], ranks: &Communicator) -> Result<f64, CurateError> {
    let mut sum = FixedPoint::default();
    nearest.iter().for_each(|nearest| sum.add(f64::from(nearest.distance)));
    let mut limbs = ranks.all_reduce("inertia", sum.limbs().to_vec(), Reduction::Sum)?;
    limbs.truncate(N_LIMBS);
    Ok(FixedPoint::from_limbs(&limbs))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::time::Duration;

    use proptest::prelude::*;
    use ranks::communicator::CommunicatorConfig;
    use ranks::engine::{Engine, Local, LocalGroup};
    use ranks::topology::Topology;

    use super::*;
    use crate::{FeatureRows, Metric};
    use pipeline::NoProgress;

    fn rows(n: usize, d: usize, seed: u64) -> FeatureRows {
        let draw = Draw::new(seed, "test");
        let mut values: Vec<f32> = Vec::with_capacity(n * d);
        for i in 0..n * d {
            values.push((draw.uniform(i as u64) - 0.5) as f32 + (i / d % 5) as f32);
        }
        FeatureRows::new(d, vec![Arc::new(values)], Metric::Euclidean).unwrap()
    }

    fn run(rows: &FeatureRows, settings: &KMeans, ranks: &Communicator) -> Clustering {
        let largest = rows.largest(0..rows.len()).unwrap();
        settings.run(rows, largest, None, ranks, &NoProgress).unwrap()
    }

    /// Runs k-means on `world_size` ranks, as threads; joins the parts.
    fn on_ranks(rows: &FeatureRows, settings: &KMeans, world_size: usize) -> Clustering {
        let parts: Vec<Clustering> = std::thread::scope(|scope| {
            let threads: Vec<_> = LocalGroup::ranks(world_size)
                .into_iter()
                .map(|engine| scope.spawn(move || run(rows, settings, &start(engine, world_size))))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for part in &parts {
            assert!(part.centers == parts[0].centers && part.inertia == parts[0].inertia);
        }
        let nearest = parts.iter().flat_map(|part| part.nearest.clone()).collect();
        Clustering { nearest, ..parts[0].clone() }
    }

    /// Starts the communicator of a rank.
    fn start(engine: Local, world_size: usize) -> Communicator {
        let topology =
            Topology { rank: engine.rank(), world_size, group_size: world_size, ..Topology::SINGLE_RANK };
        let config = CommunicatorConfig { topology, exact: true, deadline: Duration::from_secs(60) };
        let engine = Box::new(move || Ok(Box::new(engine) as Box<dyn Engine>));
        Communicator::start(config, engine).unwrap()
    }

    #[test]
    fn any_number_of_ranks_and_threads_gives_the_same_bits() {
        let rows = rows(3000, 17, 1);
        let settings = KMeans { n_clusters: 40, n_iterations: 6, seed: 3 };
        let expected = run(&rows, &settings, &Communicator::solo());
        for world_size in [1, 2, 3] {
            assert!(on_ranks(&rows, &settings, world_size) == expected, "{world_size} ranks");
        }
        for n_threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
            let clustering = pool.install(|| run(&rows, &settings, &Communicator::solo()));
            assert!(clustering == expected, "{n_threads} threads");
        }
    }

    #[test]
    fn resuming_from_saved_centers_gives_the_same_bits() {
        let rows = rows(2000, 9, 2);
        let settings = KMeans { n_clusters: 30, n_iterations: 7, seed: 0 };
        let interrupted_settings = KMeans { n_iterations: 3, ..settings.clone() };
        let uninterrupted = run(&rows, &settings, &Communicator::solo());
        let interrupted = run(&rows, &interrupted_settings, &Communicator::solo());
        let largest = rows.largest(0..2000).unwrap();
        let resumed = settings
            .run(&rows, largest, Some(interrupted.centers), &Communicator::solo(), &NoProgress)
            .unwrap();
        assert!(uninterrupted == resumed);
    }

    /// k-means++ puts a center into each of several clusters that are far apart.
    #[test]
    fn all_separate_clusters_are_found() {
        let mut values: Vec<f32> = Vec::new();
        for row in 0..2000 {
            values.extend([(row % 50) as f32 * 100.0, ((2 * row + 1) / 100) as f32 * 0.01]);
        }
        let rows = FeatureRows::new(2, vec![Arc::new(values)], Metric::Euclidean).unwrap();
        let settings = KMeans { n_clusters: 50, n_iterations: 50, seed: 1 };
        let clustering = run(&rows, &settings, &Communicator::solo());
        for (row, nearest) in clustering.nearest.iter().enumerate() {
            assert_eq!(nearest.cell, clustering.nearest[row % 50].cell, "row {row}");
        }
        let cells: BTreeSet<u32> = clustering.nearest.iter().map(|nearest| nearest.cell).collect();
        assert_eq!(cells.len(), 50);
        assert!(clustering.centers.n_iterations < 50, "it stops when no center moves");
    }

    #[test]
    fn fewer_different_rows_than_clusters_give_as_many_clusters() {
        let values: Vec<f32> = (0..600).map(|i| (i % 3) as f32).collect();
        let rows = FeatureRows::new(1, vec![Arc::new(values)], Metric::Euclidean).unwrap();
        let settings = KMeans { n_clusters: 9, n_iterations: 5, seed: 0 };
        let clustering = run(&rows, &settings, &Communicator::solo());
        assert_eq!(clustering.centers.values.len(), 3);
        assert_eq!(clustering.inertia, 0.0);
    }

    #[test]
    fn impossible_numbers_are_refused() {
        let rows = rows(10, 2, 0);
        for (n_clusters, message) in [(11, "11 clusters for 10 rows"), (0, "one positive number")] {
            let settings = KMeans { n_clusters, n_iterations: 1, seed: 0 };
            let error = settings.run(&rows, 1.0, None, &Communicator::solo(), &NoProgress).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// An iteration moves each center to the mean of its rows, as computed in f64, and inertia
        /// never grows.
        #[test]
        fn centers_are_means_and_inertia_does_not_grow(
            n in 50usize..400,
            d in 1usize..9,
            k in 1usize..20,
            seed in 0u64..99,
        ) {
            let rows = rows(n, d, seed);
            let settings = KMeans { n_clusters: k, n_iterations: 0, seed };
            let mut before = run(&rows, &settings, &Communicator::solo());
            let mut values = vec![0.0; n * d];
            rows.copy(0..n, &mut values);
            for n_iterations in 1..4 {
                let settings = KMeans { n_clusters: k, n_iterations, seed };
                let after = run(&rows, &settings, &Communicator::solo());
                prop_assert!(after.inertia <= before.inertia * (1.0 + 1e-5) + 1e-5);
                for (cell, center) in after.centers.values.chunks_exact(d).enumerate() {
                    let mut members: Vec<&[f32]> = Vec::new();
                    for (row, nearest) in values.chunks_exact(d).zip(&before.nearest) {
                        if nearest.cell as usize == cell {
                            members.push(row);
                        }
                    }
                    if after.centers.n_iterations < n_iterations || members.is_empty() {
                        continue;
                    }
                    for (c, value) in center.iter().enumerate() {
                        let sum: f64 = members.iter().map(|row| f64::from(row[c])).sum();
                        let mean = sum / members.len() as f64;
                        prop_assert!((f64::from(*value) - mean).abs() < 1e-5, "{value} {mean}");
                    }
                }
                before = after;
            }
        }
    }
}
