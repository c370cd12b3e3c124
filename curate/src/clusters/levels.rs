//! Hierarchical k-means (Vo et al. 2024): clusters of rows, clusters of their centers, and so on.
//!
//! ```text
//! C_1 = k-means of the rows    C_t = k-means of the centers C_{t-1}    optionally resampled, split
//! ```

use kernels::rows::Rows;
use ranks::communicator::Communicator;

use super::kmeans::KMeans;
use super::nearest::{Assignment, assign_rows, gather_nearest};
use super::resampling::{Resampling, resample};
use super::split::split;
use super::tree::Tree;
use crate::CurateError;
use crate::centers::Centers;
use crate::progress::{ClusterProgress, Unsaved};

/// Settings of a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LevelSettings {
    /// Number of clusters, before they are split.
    pub n_clusters: usize,
    /// Number of clusters into which each is split; 1 if they are not split.
    pub n_splits: usize,
    /// Resampling of the centers, before they are split.
    pub resampling: Resampling,
}

/// Clusters of all levels.
#[derive(Debug, Clone, PartialEq)]
pub struct Hierarchy {
    /// Centers of each level, `[K_t, D]`, the lowest level first.
    pub centers: Vec<Vec<f32>>,
    /// The cluster of every row, and of every cluster.
    pub tree: Tree,
    /// Squared distance of each row to the center of its cluster.
    pub distances: Vec<f32>,
    /// Sum of the distances.
    pub inertia: f64,
}

/// Settings of hierarchical k-means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HierarchySettings {
    /// Settings of each level, the lowest level first.
    pub levels: Vec<LevelSettings>,
    /// Largest number of iterations of k-means.
    pub n_iterations: usize,
    /// Seed of all levels.
    pub seed: u64,
}

impl HierarchySettings {
    /// Clusters `rows`, whose absolute values are at most `largest`; `start` is a state of the
    /// lowest level passed to [`ClusterProgress::save`] by an earlier run.
    ///
    /// # Errors
    /// [`CurateError`].
    pub fn run(
        &self,
        rows: &dyn Rows,
        largest: f32,
        start: Option<Centers>,
        ranks: &Communicator,
        progress: &dyn ClusterProgress,
    ) -> Result<Hierarchy, CurateError> {
        self.check(rows.len())?;
        let mut centers = Vec::<Vec<f32>>::new();
        let mut parents = Vec::new();
        let mut start = start;
        let mut distances = Vec::new();
        let mut inertia = 0.0;
        for (index, level) in self.levels.iter().enumerate() {
            let lower = centers.last().map(|values| CenterRows { values, width: rows.width() });
            let seed = self.seed.wrapping_add(index as u64);
            let settings = KMeans { n_clusters: level.n_clusters, n_iterations: self.n_iterations, seed };
            let assignment = match &lower {
                None => self.run_level(rows, largest, level, &settings, start.take(), ranks, progress)?,
                Some(lower) => {
                    // Only the lowest level is saved: the others cluster centers, which is fast.
                    let unsaved = Unsaved(progress);
                    self.run_level(lower, largest, level, &settings, None, ranks, &unsaved)?
                }
            };
            if index == 0 {
                distances = assignment.nearest.iter().map(|nearest| nearest.distance).collect();
                inertia = distances.iter().map(|distance| f64::from(*distance)).sum();
            }
            parents.push(assignment.nearest.iter().map(|nearest| nearest.cell).collect());
            centers.push(assignment.centers);
        }
        let n_clusters = centers.iter().map(|values| values.len() / rows.width()).collect();
        Ok(Hierarchy { centers, tree: Tree::new(parents, n_clusters), distances, inertia })
    }

    /// Checks that the levels fit `n_rows` rows.
    ///
    /// # Errors
    /// [`CurateError::NoClusters`], [`CurateError::TooManyClusters`] and [`CurateError::Levels`].
    pub fn check(&self, n_rows: usize) -> Result<(), CurateError> {
        let has_zero = self.levels.iter().any(|level| level.n_clusters == 0 || level.n_splits == 0);
        if self.levels.is_empty() || has_zero {
            return Err(CurateError::NoClusters);
        }
        let mut n_below = n_rows;
        for (index, level) in self.levels.iter().enumerate() {
            let n_clusters = level.n_clusters.saturating_mul(level.n_splits);
            if index == 0 && n_clusters > n_rows {
                return Err(CurateError::TooManyClusters { n_clusters, n_rows });
            }
            if index > 0 && n_clusters >= n_below {
                return Err(CurateError::Levels { level: index + 1, n_clusters, n_below });
            }
            n_below = n_clusters;
        }
        Ok(())
    }

    /// Clusters `rows` into the clusters of one level.
    fn run_level(
        &self,
        rows: &dyn Rows,
        largest: f32,
        level: &LevelSettings,
        settings: &KMeans,
        start: Option<Centers>,
        ranks: &Communicator,
        progress: &dyn ClusterProgress,
    ) -> Result<Assignment, CurateError> {
        // The level below may have fewer clusters than its settings say.
        let settings = KMeans { n_clusters: settings.n_clusters.min(rows.len()), ..settings.clone() };
        let n_resamplings = start.as_ref().map_or(0, |centers| centers.n_resamplings);
        let mut assignment = match start {
            Some(Centers { values, .. }) if n_resamplings > 0 => {
                Assignment { nearest: assign_rows(rows, &values, ranks, progress)?, centers: values }
            }
            start => {
                let clustering = settings.run(rows, largest, start, ranks, progress)?;
                let nearest = gather_nearest(&clustering.nearest, ranks)?;
                Assignment { centers: clustering.centers.values, nearest }
            }
        };
        let resampling = level.resampling;
        if resampling.n_rows > 1 {
            assignment =
                resample(rows, largest, &settings, resampling, assignment, n_resamplings, ranks, progress)?;
        }
        if level.n_splits == 1 {
            return Ok(assignment);
        }
        // Splits are not saved: a resumed run computes them again.
        let unsaved = Unsaved(progress);
        split(rows, largest, &settings, level.n_splits, &assignment, ranks, &unsaved)
    }
}

/// Centers as rows.
struct CenterRows<'a> {
    values: &'a [f32],
    width: usize,
}

impl Rows for CenterRows<'_> {
    fn len(&self) -> usize {
        self.values.len() / self.width
    }

    fn width(&self) -> usize {
        self.width
    }

    fn copy(&self, range: std::ops::Range<usize>, out: &mut [f32]) {
        out.copy_from_slice(&self.values[range.start * self.width..range.end * self.width]);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::{FeatureRows, Metric};
    use pipeline::{NoProgress, Progress};

    /// Twelve points of 40 rows each, in three groups of four.
    fn rows() -> FeatureRows {
        let mut values: Vec<f32> = Vec::new();
        for i in 0..480 {
            let group = i % 3;
            let point = i / 3 % 4;
            values.extend([group as f32 * 100.0, point as f32 * 5.0 + (i / 12) as f32 * 0.001]);
        }
        FeatureRows::new(2, vec![Arc::new(values)], Metric::Euclidean).unwrap()
    }

    /// Returns settings with the `(n_clusters, n_splits)` of each level.
    fn settings(levels: &[(usize, usize)], n_rows: usize) -> HierarchySettings {
        let resampling = Resampling { n_times: 2, n_rows };
        let levels =
            levels.iter().map(|&(n_clusters, n_splits)| LevelSettings { n_clusters, n_splits, resampling });
        HierarchySettings { levels: levels.collect(), n_iterations: 20, seed: 5 }
    }

    fn run(settings: &HierarchySettings) -> Result<Hierarchy, CurateError> {
        settings.run(&rows(), 300.0, None, &Communicator::solo(), &NoProgress)
    }

    /// Points become clusters, and groups become clusters of clusters, with and without splitting
    /// and resampling.
    #[test]
    fn clusters_of_clusters_are_groups() {
        let cases = [([(12, 1), (3, 1)], 1), ([(12, 1), (3, 1)], 10), ([(3, 4), (3, 1)], 1)];
        for (levels, n_rows) in cases {
            let hierarchy = run(&settings(&levels, n_rows)).unwrap();
            assert_eq!(hierarchy.tree.sizes(), [vec![40; 12], vec![160; 3]]);
            let groups = hierarchy.tree.parents(1);
            let parents = hierarchy.tree.parents(0);
            for row in 0..480 {
                assert_eq!(parents[row], parents[row % 12]);
                assert_eq!(groups[parents[row] as usize], groups[parents[row % 3] as usize]);
            }
            assert!(hierarchy.inertia < 1.0, "{}", hierarchy.inertia);
        }
    }

    /// Receiver that keeps all saved centers.
    #[derive(Default)]
    struct Saved(Mutex<Vec<Centers>>);

    impl Progress for Saved {
        fn begin(&self, _: &str, _: u64) {}

        fn advance(&self, _: u64) {}
    }

    impl ClusterProgress for Saved {
        fn save(&self, centers: &Centers) {
            self.0.lock().unwrap().push(centers.clone());
        }
    }

    #[test]
    fn resuming_from_any_saved_state_gives_the_same_bits() {
        let saved = Saved::default();
        let settings = settings(&[(7, 2), (3, 1)], 30);
        let solo = Communicator::solo();
        let uninterrupted = settings.run(&rows(), 300.0, None, &solo, &saved).unwrap();
        let saved = saved.0.into_inner().unwrap();
        assert_eq!(saved.iter().map(|centers| centers.n_resamplings).max(), Some(2));
        assert!(saved.iter().filter(|centers| centers.n_resamplings == 0).count() > 1);
        for centers in saved {
            let resumed = settings.run(&rows(), 300.0, Some(centers.clone()), &solo, &NoProgress).unwrap();
            let Centers { n_iterations, n_resamplings, .. } = centers;
            assert!(resumed == uninterrupted, "{n_iterations} iterations, {n_resamplings} times");
        }
    }

    #[test]
    fn impossible_levels_are_refused() {
        for (levels, message) in [
            (vec![], "one positive number per level"),
            (vec![(20, 30)], "600 clusters for 480 rows"),
            (vec![(12, 1), (12, 1)], "level 2 has 12 clusters for 12 clusters"),
        ] {
            let error = run(&settings(&levels, 1)).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
