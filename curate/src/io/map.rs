//! Maps of clusters: which clusters are drawn, and which of their images.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::path::PathBuf;

use kernels::rows::Rows;
use prep::parts::Work;
use prep::samples::KeyList;
use rayon::prelude::*;
use serde_json::json;

use super::clusters::ClusterSettings;
use super::input::Input;
use super::job::{Job, content_identity};
use crate::CurateError;
use crate::clusters::Hierarchy;

/// Number of classes that are named for a cluster.
const N_CLASSES: usize = 4;

/// Largest number of sizes that are drawn.
const MAX_BARS: usize = 200;

/// Settings of a map.
#[derive(Debug, Clone)]
pub struct Map {
    /// List of kept images.
    pub kept: Option<PathBuf>,
    /// Level of the clusters that are drawn, counted from 1 at the bottom; by default the highest.
    pub level: Option<u32>,
    /// Largest number of clusters that are drawn: half of them the largest, half the smallest.
    pub max_clusters: usize,
    /// Largest number of images of a cluster that are drawn.
    pub max_images: usize,
    /// Settings of clusters.
    pub clusters: ClusterSettings,
}

/// Clusters of a level that are drawn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedLevel {
    /// Number of the level, counted from 1 at the bottom.
    pub level: usize,
    /// Number of clusters of each level, the lowest first.
    pub n_clusters: Vec<usize>,
    /// Sizes of clusters of the level, spread evenly over all, the largest first: all images, and
    /// those that are kept.
    pub sizes: Vec<[usize; 2]>,
    /// The clusters, the largest first.
    pub clusters: Vec<MappedCluster>,
}

/// A cluster that is drawn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedCluster {
    /// Index of the cluster in its level.
    pub index: u32,
    /// Number of its images.
    pub n_images: usize,
    /// Number of its images that are kept.
    pub n_kept: Option<usize>,
    /// The most frequent classes of its images, with their numbers of images.
    pub classes: Vec<(String, usize)>,
    /// Rows of the images that are drawn, spread over their distances from the center.
    pub rows: Vec<usize>,
}

impl Map {
    /// Returns the job of the map.
    pub fn job(&self) -> Job {
        let settings = json!({
            "kept": content_identity(self.kept.as_deref()), "level": self.level,
            "max_clusters": self.max_clusters, "max_images": self.max_images,
            "clusters": self.clusters.identity(),
        });
        Job { verb: "map", settings, work: Work::Whole }
    }

    /// Reads which images of `input` are kept, if there is a list: a line is a key, or shard, tab
    /// and key.
    ///
    /// # Errors
    /// [`CurateError::NoneListed`], and [`CurateError::Prep`] if the list cannot be read.
    pub fn read_kept(&self, input: &Input) -> Result<Option<Vec<bool>>, CurateError> {
        let Some(path) = &self.kept else { return Ok(None) };
        let list = KeyList::read(path)?;
        let mut kept = Vec::with_capacity(input.names.len());
        for name in &input.names {
            kept.push(list.names(name.shard.as_deref(), &name.key));
        }
        if !kept.contains(&true) {
            return Err(CurateError::NoneListed { path: path.clone() });
        }
        Ok(Some(kept))
    }

    /// Chooses the clusters of the level that are drawn, and images of each of them.
    ///
    /// # Errors
    /// [`CurateError::NoLevel`].
    pub fn choose(
        &self,
        input: &Input,
        clusters: &Hierarchy,
        kept: Option<&[bool]>,
    ) -> Result<MappedLevel, CurateError> {
        let tree = &clusters.tree;
        let n_levels = tree.n_levels();
        let level = self.level.map_or(n_levels, |level| level as usize);
        if level > n_levels {
            return Err(CurateError::NoLevel { level, n_levels });
        }
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); tree.n_clusters(level - 1)];
        for row in 0..input.rows.len() {
            members[tree.clusters_of(row)[level - 1] as usize].push(row);
        }
        let mut order: Vec<usize> = (0..members.len()).collect();
        order.sort_by_key(|cluster| (Reverse(members[*cluster].len()), *cluster));
        let mut sizes = Vec::new();
        for cluster in &order {
            let rows = &members[*cluster];
            sizes.push([rows.len(), count_kept(rows, kept).unwrap_or(rows.len())]);
        }
        if order.len() > self.max_clusters {
            let first = self.max_clusters.div_ceil(2);
            let last = self.max_clusters / 2;
            order.drain(first..order.len() - last);
        }
        let mapped = order
            .par_iter()
            .map(|index| self.choose_rows(input, clusters, kept, *index, &members[*index]))
            .collect();
        let n_clusters = (0..n_levels).map(|level| tree.n_clusters(level)).collect();
        Ok(MappedLevel { level, n_clusters, sizes: spread(&sizes), clusters: mapped })
    }

    /// Returns cluster `index` with the most frequent classes of its `rows`, and with rows that are
    /// spread over the distances from their centers.
    fn choose_rows(
        &self,
        input: &Input,
        clusters: &Hierarchy,
        kept: Option<&[bool]>,
        index: usize,
        rows: &[usize],
    ) -> MappedCluster {
        let mut sorted = rows.to_vec();
        sorted.sort_by(|a, b| clusters.distances[*a].total_cmp(&clusters.distances[*b]).then(a.cmp(b)));
        let n = self.max_images.min(sorted.len());
        let drawn = (0..n).map(|i| sorted[i * sorted.len() / n]).collect();
        let mut counts: HashMap<&str, usize> = HashMap::new();
        for class in rows.iter().filter_map(|row| input.names[*row].class.as_deref()) {
            *counts.entry(class).or_default() += 1;
        }
        let mut classes: Vec<(String, usize)> =
            counts.into_iter().map(|(name, n)| (name.to_string(), n)).collect();
        classes.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        classes.truncate(N_CLASSES);
        let n_kept = count_kept(rows, kept);
        MappedCluster { index: index as u32, n_images: rows.len(), n_kept, classes, rows: drawn }
    }
}

/// Returns the number of `rows` that are kept, if `kept` is given.
fn count_kept(rows: &[usize], kept: Option<&[bool]>) -> Option<usize> {
    kept.map(|kept| rows.iter().filter(|row| kept[**row]).count())
}

/// Returns sizes that are spread evenly over `sizes`, at most as many as a page has room for bars.
fn spread(sizes: &[[usize; 2]]) -> Vec<[usize; 2]> {
    let n = sizes.len().min(MAX_BARS);
    (0..n).map(|i| sizes[i * sizes.len() / n]).collect()
}
