//! k-means by Lloyd's iterations.
//!
//! ```text
//! cell_i = argmin_j |x_i - c_j|²     c_j = mean of the rows of cell j     until no center moves, or for n_iterations
//! ```
//!
//! Each rank compares its part of the rows; sums over ranks are exact ([`super::sums`]), so that
//! centers have the same bits on any number of threads and ranks.

use std::ops::Range;

use kernels::rows::{NearestCenter, Rows, find_nearest_centers};
use ranks::communicator::Communicator;
use ranks::engine::Reduction;
use ranks::fixed::{FixedPoint, N_LIMBS};

use super::empty::refill;
use super::nearest::{STRIDE, find_nearest};
use super::seeds::seeds;
use super::sums::ClusterSums;
use crate::centers::Centers;
use crate::draw::Draw;
use crate::rows::part_of_rank;
use crate::{CurateError, Progress};

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

/// Rows divided into clusters.
#[derive(Debug, Clone, PartialEq)]
pub struct Clustering {
    /// Centers, `[K, D]`: as many as asked for, or as there are different rows.
    pub centers: Centers,
    /// Nearest center of each row of this rank's part.
    pub nearest: Vec<NearestCenter>,
    /// Sum of squared distances of all rows to their centers.
    pub inertia: f64,
}

impl KMeans {
    /// Divides `rows`, whose numbers are at most `largest`, into clusters; goes on from `start` if
    /// there is one. Every rank can read all rows, and compares its part of them.
    ///
    /// # Errors
    /// [`CurateError::NoClusters`], [`CurateError::TooManyClusters`] and [`CurateError::Ranks`].
    pub fn run(
        &self,
        rows: &dyn Rows,
        largest: f32,
        start: Option<Centers>,
        ranks: &Communicator,
        progress: &dyn Progress,
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
                let values = seeds(rows, part.clone(), self.n_clusters, draw, ranks, &mut nearest, progress)?;
                Centers { values, ..Centers::default() }
            }
        };
        let n_left = self.n_iterations.saturating_sub(centers.n_iterations);
        progress.begins("k-means", (n_left * part.len()) as u64);
        while centers.n_iterations < self.n_iterations {
            let moved =
                iterate(rows, part.clone(), largest, &mut centers.values, &mut nearest, ranks, progress)?;
            centers.n_iterations += 1;
            progress.save(&centers);
            if !moved {
                break;
            }
        }
        progress.begins("distances", part.len() as u64);
        nearest.fill(NearestCenter::NONE);
        find_nearest(rows, part, &centers.values, 0, &mut nearest, Some(progress));
        let inertia = sum_of_distances(&nearest, ranks)?;
        Ok(Clustering { centers, nearest, inertia })
    }
}

/// Moves each center to the mean of its rows; returns whether one has moved.
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
    for (number, nearest) in nearest.chunks_mut(STRIDE).enumerate() {
        let start = part.start + number * STRIDE;
        let range = start..start + nearest.len();
        find_nearest_centers(rows, range.clone(), centers, 0, nearest);
        sums.add(rows, range, nearest);
        progress.advances(nearest.len() as u64);
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

/// Returns the sum of all distances, whatever their order.
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
    use crate::{FeatureRows, Metric, Silent};

    fn rows(n: usize, d: usize, seed: u64) -> FeatureRows {
        let draw = Draw::new(seed, "test");
        let value = |i: usize| (draw.uniform(i as u64) - 0.5) as f32 + (i / d % 5) as f32;
        FeatureRows::new(d, vec![Arc::new((0..n * d).map(value).collect::<Vec<f32>>())], Metric::Euclidean)
            .unwrap()
    }

    fn run(rows: &FeatureRows, settings: &KMeans, ranks: &Communicator) -> Clustering {
        let largest = rows.largest(0..rows.len()).unwrap();
        settings.run(rows, largest, None, ranks, &Silent).unwrap()
    }

    /// Runs k-means on `world_size` ranks, as threads; joins the parts.
    fn on_ranks(rows: &FeatureRows, settings: &KMeans, world_size: usize) -> Clustering {
        let one = |engine: Local| {
            let topology =
                Topology { rank: engine.rank(), world_size, group_size: world_size, ..Topology::SINGLE_RANK };
            let config = CommunicatorConfig { topology, exact: true, deadline: Duration::from_secs(60) };
            let start = Box::new(move || Ok(Box::new(engine) as Box<dyn Engine>));
            run(rows, settings, &Communicator::start(config, start).unwrap())
        };
        let parts: Vec<Clustering> = std::thread::scope(|scope| {
            let one = &one;
            let threads: Vec<_> = LocalGroup::ranks(world_size)
                .into_iter()
                .map(|engine| scope.spawn(move || one(engine)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(
            parts.iter().all(|part| part.centers == parts[0].centers && part.inertia == parts[0].inertia)
        );
        let nearest = parts.iter().flat_map(|part| part.nearest.clone()).collect();
        Clustering { nearest, ..parts[0].clone() }
    }

    /// The same bits on any number of ranks and threads.
    #[test]
    fn ranks_and_threads_do_not_matter() {
        let rows = rows(3000, 17, 1);
        let settings = KMeans { n_clusters: 40, n_iterations: 6, seed: 3 };
        let alone = run(&rows, &settings, &Communicator::solo());
        for world_size in [1, 2, 3] {
            assert!(on_ranks(&rows, &settings, world_size) == alone, "{world_size} ranks");
        }
        for n_threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
            assert!(
                pool.install(|| run(&rows, &settings, &Communicator::solo())) == alone,
                "{n_threads} threads"
            );
        }
    }

    /// A run that goes on from saved centers ends with the bits of one that was not interrupted.
    #[test]
    fn saved_centers_continue() {
        let rows = rows(2000, 9, 2);
        let settings = |n_iterations| KMeans { n_clusters: 30, n_iterations, seed: 0 };
        let whole = run(&rows, &settings(7), &Communicator::solo());
        let half = run(&rows, &settings(3), &Communicator::solo());
        let largest = rows.largest(0..2000).unwrap();
        let rest =
            settings(7).run(&rows, largest, Some(half.centers), &Communicator::solo(), &Silent).unwrap();
        assert!(whole == rest);
    }

    /// Clusters that are far apart are found, every one: k-means++ puts a center into each.
    #[test]
    fn separate_clusters_are_found() {
        let values: Vec<f32> = (0..2 * 2000)
            .map(
                |i: usize| {
                    if i.is_multiple_of(2) { (i / 2 % 50) as f32 * 100.0 } else { (i / 100) as f32 * 0.01 }
                },
            )
            .collect();
        let rows = FeatureRows::new(2, vec![Arc::new(values)], Metric::Euclidean).unwrap();
        let found = run(&rows, &KMeans { n_clusters: 50, n_iterations: 50, seed: 1 }, &Communicator::solo());
        for (row, nearest) in found.nearest.iter().enumerate() {
            assert_eq!(nearest.cell, found.nearest[row % 50].cell, "row {row}");
        }
        let cells: BTreeSet<u32> = found.nearest.iter().map(|nearest| nearest.cell).collect();
        assert_eq!(cells.len(), 50);
        assert!(found.centers.n_iterations < 50, "it stops when no center moves");
    }

    #[test]
    fn fewer_different_rows_than_clusters_give_as_many_clusters() {
        let values: Vec<f32> = (0..600).map(|i| (i % 3) as f32).collect();
        let rows = FeatureRows::new(1, vec![Arc::new(values)], Metric::Euclidean).unwrap();
        let found = run(&rows, &KMeans { n_clusters: 9, n_iterations: 5, seed: 0 }, &Communicator::solo());
        assert_eq!((found.centers.values.len(), found.inertia), (3, 0.0));
    }

    #[test]
    fn impossible_numbers_are_refused() {
        let rows = rows(10, 2, 0);
        let refused = |n_clusters| {
            let settings = KMeans { n_clusters, n_iterations: 1, seed: 0 };
            settings.run(&rows, 1.0, None, &Communicator::solo(), &Silent).unwrap_err().to_string()
        };
        assert!(refused(11).contains("11 clusters of 10 rows"), "{}", refused(11));
        assert!(refused(0).contains("one positive number"), "{}", refused(0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// An iteration moves each center to the mean of its rows, as a loop in f64 does, and
        /// inertia never grows.
        #[test]
        fn iterations_are_lloyds(n in 50usize..400, d in 1usize..9, k in 1usize..20, seed in 0u64..99) {
            let rows = rows(n, d, seed);
            let mut before = run(&rows, &KMeans { n_clusters: k, n_iterations: 0, seed }, &Communicator::solo());
            let mut values = vec![0.0; n * d];
            rows.copy(0..n, &mut values);
            for n_iterations in 1..4 {
                let after = run(&rows, &KMeans { n_clusters: k, n_iterations, seed }, &Communicator::solo());
                prop_assert!(after.inertia <= before.inertia * (1.0 + 1e-5) + 1e-5);
                for (cell, center) in after.centers.values.chunks_exact(d).enumerate() {
                    let members: Vec<&[f32]> = values
                        .chunks_exact(d)
                        .zip(&before.nearest)
                        .filter(|(_, nearest)| nearest.cell as usize == cell)
                        .map(|(row, _)| row)
                        .collect();
                    if after.centers.n_iterations < n_iterations || members.is_empty() {
                        continue;
                    }
                    for (c, value) in center.iter().enumerate() {
                        let mean = members.iter().map(|row| f64::from(row[c])).sum::<f64>() / members.len() as f64;
                        prop_assert!((f64::from(*value) - mean).abs() < 1e-5, "{value} {mean}");
                    }
                }
                before = after;
            }
        }
    }
}
