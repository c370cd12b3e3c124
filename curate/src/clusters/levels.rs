//! Hierarchical k-means (Vo et al. 2024): clusters of rows, clusters of their centers, and so on.
//!
//! ```text
//! C_1 = k-means of the rows      C_t = k-means of the centers C_{t-1}      each, if asked for, resampled or split
//! ```

use kernels::rows::Rows;
use ranks::communicator::Communicator;

use super::kmeans::KMeans;
use super::nearest::{Divided, divided, gathered};
use super::resampling::{Resampling, resample};
use super::split::split;
use super::tree::Tree;
use crate::centers::Centers;
use crate::progress::Unsaved;
use crate::{CurateError, Progress};

/// Settings of a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LevelSettings {
    /// Number of clusters, before they are split.
    pub n_clusters: usize,
    /// Number of clusters into which each is split; 1 leaves them whole.
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
    /// Sum of these distances.
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
    /// Divides `rows`, whose numbers are at most `largest`; `start` is the lowest level's state
    /// that [`Progress::save`] has been given.
    ///
    /// # Errors
    /// [`CurateError`].
    pub fn run(
        &self,
        rows: &dyn Rows,
        largest: f32,
        start: Option<Centers>,
        ranks: &Communicator,
        progress: &dyn Progress,
    ) -> Result<Hierarchy, CurateError> {
        self.check(rows.len())?;
        let mut centers = Vec::<Vec<f32>>::new();
        let mut parents = Vec::new();
        let mut start = start;
        let mut distances = Vec::new();
        let mut inertia = 0.0;
        for (number, level) in self.levels.iter().enumerate() {
            let below = centers.last().map(|values| Table { values, width: rows.width() });
            let seed = self.seed.wrapping_add(number as u64);
            let settings = KMeans { n_clusters: level.n_clusters, n_iterations: self.n_iterations, seed };
            let found = match &below {
                None => self.level(rows, largest, level, &settings, start.take(), ranks, progress)?,
                Some(below) => {
                    // Only the first level is saved: the others are of centers, and quick.
                    let quiet = Unsaved(progress);
                    self.level(below, largest, level, &settings, None, ranks, &quiet)?
                }
            };
            if number == 0 {
                distances = found.nearest.iter().map(|nearest| nearest.distance).collect();
                inertia = distances.iter().map(|distance| f64::from(*distance)).sum();
            }
            parents.push(found.nearest.iter().map(|nearest| nearest.cell).collect());
            centers.push(found.centers);
        }
        let n_clusters = centers.iter().map(|values| values.len() / rows.width()).collect();
        Ok(Hierarchy { centers, tree: Tree::new(parents, n_clusters), distances, inertia })
    }

    /// Checks that the levels fit `n_rows` rows.
    ///
    /// # Errors
    /// [`CurateError::NoClusters`], [`CurateError::TooManyClusters`] and [`CurateError::Levels`].
    pub fn check(&self, n_rows: usize) -> Result<(), CurateError> {
        if self.levels.is_empty()
            || self.levels.iter().any(|level| level.n_clusters == 0 || level.n_splits == 0)
        {
            return Err(CurateError::NoClusters);
        }
        let mut n_below = n_rows;
        for (number, level) in self.levels.iter().enumerate() {
            let n_clusters = level.n_clusters.saturating_mul(level.n_splits);
            if number == 0 && n_clusters > n_rows {
                return Err(CurateError::TooManyClusters { n_clusters, n_rows });
            }
            if number > 0 && n_clusters >= n_below {
                return Err(CurateError::Levels { level: number + 1, n_clusters, n_below });
            }
            n_below = n_clusters;
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of k-means, and the level's own settings")]
    fn level(
        &self,
        rows: &dyn Rows,
        largest: f32,
        level: &LevelSettings,
        settings: &KMeans,
        start: Option<Centers>,
        ranks: &Communicator,
        progress: &dyn Progress,
    ) -> Result<Divided, CurateError> {
        // A level may have found fewer clusters than it was asked for.
        let settings = KMeans { n_clusters: settings.n_clusters.min(rows.len()), ..settings.clone() };
        let n_resamplings = start.as_ref().map_or(0, |centers| centers.n_resamplings);
        let mut found = match start {
            Some(Centers { values, .. }) if n_resamplings > 0 => {
                Divided { nearest: divided(rows, &values, ranks, progress)?, centers: values }
            }
            start => {
                let clustering = settings.run(rows, largest, start, ranks, progress)?;
                let nearest = gathered(&clustering.nearest, ranks)?;
                Divided { centers: clustering.centers.values, nearest }
            }
        };
        let resampling = level.resampling;
        if resampling.n_rows > 1 {
            found = resample(rows, largest, &settings, resampling, found, n_resamplings, ranks, progress)?;
        }
        // What follows is not saved, and starts over.
        let progress = &Unsaved(progress);
        match level.n_splits {
            1 => Ok(found),
            n_splits => split(rows, largest, &settings, n_splits, &found, ranks, progress),
        }
    }
}

/// Centers as rows.
struct Table<'a> {
    values: &'a [f32],
    width: usize,
}

impl Rows for Table<'_> {
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
    use crate::{FeatureRows, Metric, Silent};

    /// Twelve points of 40 rows each, in three groups of four.
    fn rows() -> FeatureRows {
        let values: Vec<f32> = (0..480)
            .flat_map(|i: usize| {
                let group = i % 3;
                let point = i / 3 % 4;
                [group as f32 * 100.0, point as f32 * 5.0 + (i / 12) as f32 * 0.001]
            })
            .collect();
        FeatureRows::new(2, vec![Arc::new(values)], Metric::Euclidean).unwrap()
    }

    fn settings(levels: &[[usize; 2]], n_rows: usize) -> HierarchySettings {
        let resampling = Resampling { n_times: 2, n_rows };
        HierarchySettings {
            levels: levels
                .iter()
                .map(|[n_clusters, n_splits]| LevelSettings {
                    n_clusters: *n_clusters,
                    n_splits: *n_splits,
                    resampling,
                })
                .collect(),
            n_iterations: 20,
            seed: 5,
        }
    }

    fn run(settings: &HierarchySettings) -> Result<Hierarchy, CurateError> {
        settings.run(&rows(), 300.0, None, &Communicator::solo(), &Silent)
    }

    /// Points become clusters and groups clusters of clusters, at once or by splitting the groups,
    /// resampled or not.
    #[test]
    fn clusters_of_clusters_are_groups() {
        for (levels, n_rows) in [([[12, 1], [3, 1]], 1), ([[12, 1], [3, 1]], 10), ([[3, 4], [3, 1]], 1)] {
            let found = run(&settings(&levels, n_rows)).unwrap();
            assert_eq!(found.tree.sizes(), [vec![40; 12], vec![160; 3]]);
            let parents = found.tree.parents(0);
            for row in 0..480 {
                assert_eq!(parents[row], parents[row % 12]);
                let upper = |row: usize| found.tree.parents(1)[parents[row] as usize];
                assert_eq!(upper(row), upper(row % 3));
            }
            assert!(found.inertia < 1.0, "{}", found.inertia);
        }
    }

    /// Receiver that keeps all that is saved.
    #[derive(Default)]
    struct Saved(Mutex<Vec<Centers>>);

    impl Progress for Saved {
        fn begins(&self, _: &str, _: u64) {}

        fn advances(&self, _: u64) {}

        fn save(&self, centers: &Centers) {
            self.0.lock().unwrap().push(centers.clone());
        }
    }

    /// From whatever was saved last, a computation ends with the bits of one that was not
    /// interrupted.
    #[test]
    fn everything_that_is_saved_continues() {
        let saved = Saved::default();
        let settings = settings(&[[7, 2], [3, 1]], 30);
        let solo = Communicator::solo();
        let whole = settings.run(&rows(), 300.0, None, &solo, &saved).unwrap();
        let saved = saved.0.into_inner().unwrap();
        assert_eq!(saved.iter().map(|centers| centers.n_resamplings).max(), Some(2));
        assert!(saved.iter().filter(|centers| centers.n_resamplings == 0).count() > 1);
        for centers in saved {
            let again = settings.run(&rows(), 300.0, Some(centers.clone()), &solo, &Silent).unwrap();
            assert!(again == whole, "{} iterations, {} times", centers.n_iterations, centers.n_resamplings);
        }
    }

    #[test]
    fn impossible_levels_are_refused() {
        let refused = |levels: &[[usize; 2]]| run(&settings(levels, 1)).unwrap_err().to_string();
        assert!(refused(&[]).contains("one positive number per level"));
        assert!(refused(&[[20, 30]]).contains("600 clusters of 480 rows"));
        assert!(refused(&[[12, 1], [12, 1]]).contains("level 2 has 12 clusters of 12 clusters"));
    }
}
