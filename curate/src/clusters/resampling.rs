//! Resampling (Vo et al. 2024, algorithm 1): k-means again on the rows nearest to each center.
//!
//! Centers follow the density of rows, so that frequent kinds of images have many. The rows nearest
//! to each center are spread more evenly, and so are the centers of these rows.

use kernels::rows::{NearestCenter, Rows};
use ranks::communicator::Communicator;

use super::kmeans::{Clustering, KMeans};
use super::nearest::{Divided, divided};
use super::sums::by_cluster;
use crate::centers::Centers;
use crate::draw::Draw;
use crate::progress::Unsaved;
use crate::rows::SelectedRows;
use crate::{CurateError, Progress};

/// How often, and by how many rows of each cluster, centers are computed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resampling {
    /// Number of times.
    pub n_times: usize,
    /// Number of rows of each cluster, those nearest to its center.
    pub n_rows: usize,
}

/// Computes centers again on the rows nearest to them, as often as `resampling` says, of which
/// `n_done` times are done; `found` holds the centers and the nearest one of each row so far. Saves
/// the centers each time.
#[expect(clippy::too_many_arguments, reason = "the arguments of k-means, and what was found so far")]
pub(super) fn resample(
    rows: &dyn Rows,
    largest: f32,
    settings: &KMeans,
    resampling: Resampling,
    mut found: Divided,
    n_done: usize,
    ranks: &Communicator,
    progress: &dyn Progress,
) -> Result<Divided, CurateError> {
    for time in n_done..resampling.n_times {
        let chosen = nearest_of_each(&found.nearest, settings.n_clusters, resampling.n_rows);
        let sampled = SelectedRows::new(rows, &chosen);
        let seed = Draw::new(settings.seed, "resampling").bits(time as u64);
        let settings = KMeans { seed, n_clusters: settings.n_clusters.min(chosen.len()), ..settings.clone() };
        let Clustering { centers, .. } = settings.run(&sampled, largest, None, ranks, &Unsaved(progress))?;
        let centers = Centers { values: centers.values, n_iterations: 0, n_resamplings: time + 1 };
        progress.save(&centers);
        found =
            Divided { nearest: divided(rows, &centers.values, ranks, progress)?, centers: centers.values };
    }
    Ok(found)
}

/// Returns up to `n_rows` rows of each cluster, those nearest to its center, in their order.
fn nearest_of_each(nearest: &[NearestCenter], n_clusters: usize, n_rows: usize) -> Vec<u32> {
    let (starts, mut order) = by_cluster(nearest, n_clusters);
    let mut chosen = Vec::new();
    for ends in starts.windows(2) {
        let members = &mut order[ends[0]..ends[1]];
        let distance = |row: &u32| nearest[*row as usize].distance;
        members.sort_unstable_by(|a, b| distance(a).total_cmp(&distance(b)).then(a.cmp(b)));
        chosen.extend(members.iter().take(n_rows.max(1)));
    }
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_rows_of_each_cluster_are_chosen() {
        let row = |cell, distance| NearestCenter { cell, distance };
        let nearest = [row(1, 0.5), row(0, 0.3), row(1, 0.1), row(1, 0.5), row(0, 0.2), NearestCenter::NONE];
        assert_eq!(nearest_of_each(&nearest, 2, 1), [2, 4]);
        assert_eq!(nearest_of_each(&nearest, 2, 2), [0, 1, 2, 4]);
        assert_eq!(nearest_of_each(&nearest, 2, 9), [0, 1, 2, 3, 4]);
    }
}
