//! Resampling (Vo et al. 2024, algorithm 1): k-means again on the rows nearest to each center.
//!
//! Centers follow the density of rows, so that frequent kinds of images have many. The rows nearest
//! to each center are spread more evenly, and so are the centers of these rows.

use kernels::rows::{NearestCenter, Rows};
use ranks::communicator::Communicator;

use super::kmeans::{Clustering, KMeans};
use super::nearest::{Assignment, assign_rows};
use super::sums::RowsByCluster;
use crate::CurateError;
use crate::centers::Centers;
use crate::draw::Draw;
use crate::progress::{ClusterProgress, Unsaved};
use crate::rows::SelectedRows;

/// Settings of resampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resampling {
    /// Number of times that the centers are recomputed.
    pub n_times: usize,
    /// Number of rows of each cluster, those nearest to its center.
    pub n_rows: usize,
}

/// Runs k-means again on the rows nearest to each center of `assignment`, and assigns all rows to
/// the new centers. Does this `resampling.n_times` times, less the `n_done` of an interrupted run,
/// and saves the centers each time. Absolute values of `rows` are at most `largest`.
pub(super) fn resample(
    rows: &dyn Rows,
    largest: f32,
    settings: &KMeans,
    resampling: Resampling,
    mut assignment: Assignment,
    n_done: usize,
    ranks: &Communicator,
    progress: &dyn ClusterProgress,
) -> Result<Assignment, CurateError> {
    for round in n_done..resampling.n_times {
        let chosen = nearest_of_each(&assignment.nearest, settings.n_clusters, resampling.n_rows);
        let sampled = SelectedRows::new(rows, &chosen);
        let seed = Draw::new(settings.seed, "resampling").bits(round as u64);
        let settings = KMeans { seed, n_clusters: settings.n_clusters.min(chosen.len()), ..settings.clone() };
        let Clustering { centers, .. } = settings.run(&sampled, largest, None, ranks, &Unsaved(progress))?;
        let centers = Centers { values: centers.values, n_iterations: 0, n_resamplings: round + 1 };
        progress.save(&centers);
        let nearest = assign_rows(rows, &centers.values, ranks, progress)?;
        assignment = Assignment { centers: centers.values, nearest };
    }
    Ok(assignment)
}

/// Returns up to `n_rows` rows of each cluster, those nearest to its center, in their order.
fn nearest_of_each(nearest: &[NearestCenter], n_clusters: usize, n_rows: usize) -> Vec<u32> {
    let clusters = RowsByCluster::new(nearest, n_clusters);
    let mut chosen = Vec::new();
    for cluster in 0..n_clusters {
        let mut members = clusters.rows_of(cluster).to_vec();
        members.sort_unstable_by(|a, b| {
            let distance = nearest[*a as usize].distance;
            let other_distance = nearest[*b as usize].distance;
            distance.total_cmp(&other_distance).then(a.cmp(b))
        });
        members.truncate(n_rows.max(1));
        chosen.extend(members);
    }
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_rows_of_each_cluster_are_chosen() {
        let mut nearest = vec![NearestCenter::NONE; 6];
        for (row, (cell, distance)) in
            [(1, 0.5), (0, 0.3), (1, 0.1), (1, 0.5), (0, 0.2)].into_iter().enumerate()
        {
            nearest[row] = NearestCenter { cell, distance };
        }
        assert_eq!(nearest_of_each(&nearest, 2, 1), [2, 4]);
        assert_eq!(nearest_of_each(&nearest, 2, 2), [0, 1, 2, 4]);
        assert_eq!(nearest_of_each(&nearest, 2, 9), [0, 1, 2, 3, 4]);
    }
}
