//! Clusters of an output folder: settings with their defaults, an estimate of their cost, and the
//! files from which a later call continues.

use std::path::{Path, PathBuf};
use std::time::Instant;

use kernels::rows::{NearestCenter, Rows, find_nearest_centers};
use pipeline::Progress;
use ranks::communicator::Communicator;
use serde_json::{Value, json};

use super::agreement::all_succeed;
use super::job::content_identity;
use super::progress::SavedProgress;
use super::saved::{read_centers, read_clusters, save_clusters};
use crate::clusters::{Centers, Hierarchy, HierarchySettings, LevelSettings, Resampling};
use crate::{CurateError, FeatureRows};

/// File of the clusters in an output folder.
pub(super) const FILE: &str = "clusters.safetensors";

/// File of the centers of a lowest level that is not complete.
pub(super) const UNFINISHED: &str = "clusters.part.safetensors";

/// Number of rows with which the speed of products is measured.
const MEASURED_ROWS: usize = 4096;

/// Number of centers with which the speed of products is measured.
const MEASURED_CENTERS: usize = 512;

/// Settings of clusters.
#[derive(Debug, Clone)]
pub struct ClusterSettings {
    /// Number of clusters of each level, the lowest level first; by default a fiftieth of the
    /// images, and a tenth of these.
    pub n_clusters: Vec<usize>,
    /// Number of clusters into which each cluster is split, by level; by default 1.
    pub n_splits: Vec<usize>,
    /// Number of rows nearest to each center from which centers are computed again, by level; by
    /// default half the mean size of a cluster.
    pub resample_rows: Vec<usize>,
    /// Number of times that centers are computed again.
    pub resample_times: usize,
    /// Output folder whose clusters are used instead, if given.
    pub saved_in: Option<PathBuf>,
    /// Settings of k-means.
    pub kmeans: KMeansSettings,
}

/// Settings of k-means that all levels have in common.
#[derive(Debug, Clone, Copy)]
pub struct KMeansSettings {
    /// Largest number of iterations.
    pub n_iterations: usize,
    /// Seed of centers and of random choices.
    pub seed: u64,
    /// Bytes of memory that may be used, without the features; any number if `None`.
    pub memory_bytes: Option<f64>,
}

/// Clusters that are about to be computed, and the longest time that they take.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterCost {
    /// Number of rows.
    pub n_rows: usize,
    /// Columns of a row.
    pub width: usize,
    /// Number of clusters of each level, the lowest first.
    pub n_clusters: Vec<usize>,
    /// Longest time, in seconds.
    pub seconds: f64,
    /// Floating-point operations per second of this machine.
    pub flops_per_s: f64,
}

/// Receiver of the progress of clusters, and of what is known before they are computed.
pub trait ClusterObserver: Progress {
    /// Receives the cost of clusters that are not saved yet. Only the first rank calls it.
    fn on_cost(&self, cost: &ClusterCost);

    /// Receives the centers from which clustering continues. Only the first rank calls it.
    fn on_continue(&self, centers: &Centers);
}

impl ClusterSettings {
    /// Returns the clusters of `rows`, computed or read from another folder. Computed clusters are
    /// saved in `folder`, from which a call that was stopped continues. All ranks call it.
    ///
    /// # Errors
    /// [`CurateError`].
    pub fn run(
        &self,
        rows: &FeatureRows,
        folder: &Path,
        ranks: &Communicator,
        observer: &dyn ClusterObserver,
    ) -> Result<Hierarchy, CurateError> {
        if let Some(folder) = &self.saved_in {
            return read_clusters(&folder.join(FILE), rows);
        }
        let levels = self.levels(rows.len())?;
        let KMeansSettings { n_iterations, seed, memory_bytes } = self.kmeans;
        let settings = HierarchySettings { levels, n_iterations, seed };
        cluster(&settings, rows, folder, memory_bytes, ranks, observer)
    }

    /// Returns the settings as part of the identity of a job.
    pub(super) fn identity(&self) -> Value {
        let saved = self.saved_in.as_ref().map(|folder| folder.join(FILE));
        json!({
            "clusters": self.n_clusters, "splits": self.n_splits, "resample_rows": self.resample_rows,
            "resample_times": self.resample_times,
            "clusters_of": content_identity(saved.as_deref()),
            "iterations": self.kmeans.n_iterations, "seed": self.kmeans.seed,
        })
    }

    fn levels(&self, n_rows: usize) -> Result<Vec<LevelSettings>, CurateError> {
        let numbers = match self.n_clusters.as_slice() {
            [] => default_clusters(n_rows),
            given => given.to_vec(),
        };
        let resample_rows = level_values(&self.resample_rows, numbers.len(), "resample-rows")?;
        let splits = level_values(&self.n_splits, numbers.len(), "splits")?;
        let mut levels = Vec::new();
        let mut n_below = n_rows;
        for (level, n_clusters) in numbers.iter().enumerate() {
            let half = (n_below / (*n_clusters).max(1) / 2).max(1);
            let n_rows = resample_rows[level].unwrap_or(half);
            let n_splits = splits[level].unwrap_or(1);
            let resampling = Resampling { n_times: self.resample_times, n_rows };
            levels.push(LevelSettings { n_clusters: *n_clusters, n_splits, resampling });
            n_below = n_clusters.saturating_mul(n_splits);
        }
        Ok(levels)
    }
}

/// Returns the value of the setting `name` for each of `n_levels`; `None` for all if it is not
/// given.
fn level_values(
    given: &[usize],
    n_levels: usize,
    name: &'static str,
) -> Result<Vec<Option<usize>>, CurateError> {
    match given.len() {
        0 => Ok(vec![None; n_levels]),
        n if n == n_levels => Ok(given.iter().copied().map(Some).collect()),
        n_values => Err(CurateError::LevelValues { name, n_values, n_levels }),
    }
}

/// Returns the numbers of clusters for `n` rows: 50 rows in each of the lowest level, and ten of
/// these in each of the next.
fn default_clusters(n: usize) -> Vec<usize> {
    let lowest = (n / 50).clamp(2.min(n), n.max(1));
    match lowest / 10 {
        0 | 1 => vec![lowest],
        next => vec![lowest, next],
    }
}

/// Clusters `rows`, continues where an earlier call was stopped, and saves the clusters in
/// `folder`. All ranks call it.
pub(super) fn cluster(
    settings: &HierarchySettings,
    rows: &FeatureRows,
    folder: &Path,
    memory_bytes: Option<f64>,
    ranks: &Communicator,
    observer: &dyn ClusterObserver,
) -> Result<Hierarchy, CurateError> {
    let file = folder.join(FILE);
    let unfinished = folder.join(UNFINISHED);
    let is_first = ranks.topology().rank == 0;
    // The first rank decides, because other ranks may not see a new file yet.
    let exists = ranks.broadcast("clusters", vec![u8::from(file.exists())])? == [1];
    if exists {
        return all_succeed(ranks, read_clusters(&file, rows));
    }
    let largest = all_succeed(ranks, check(settings, rows, memory_bytes))?;
    let mut start = None;
    if is_first {
        observer.on_cost(&cost(settings, rows, ranks.topology().world_size));
        // The folder belongs to this job, and has no centers of another k-means.
        start = read_centers(&unfinished, rows.width());
        if let Some(centers) = &start {
            observer.on_continue(centers);
        }
    }
    let start = broadcast_centers(start, ranks)?;
    let progress = SavedProgress::new(observer, is_first.then(|| unfinished.clone()), rows.width());
    let clusters = settings.run(rows, largest, start, ranks, &progress)?;
    let written = if is_first {
        save_clusters(&file, &clusters, rows).map_err(|error| CurateError::io("write", &file, error))
    } else {
        Ok(())
    };
    all_succeed(ranks, written)?;
    if is_first {
        // A file that remains is not read once the clusters exist.
        let _ = std::fs::remove_file(&unfinished);
    }
    Ok(clusters)
}

/// Checks the settings, the rows and the memory; returns the largest absolute value of the rows.
fn check(
    settings: &HierarchySettings,
    rows: &FeatureRows,
    memory_bytes: Option<f64>,
) -> Result<f32, CurateError> {
    let largest = rows.largest(0..rows.len())?;
    settings.check(rows.len())?;
    check_memory(settings, rows, memory_bytes)?;
    Ok(largest)
}

/// Returns the centers that rank 0 has read.
fn broadcast_centers(start: Option<Centers>, ranks: &Communicator) -> Result<Option<Centers>, CurateError> {
    let Centers { values, n_iterations, n_resamplings } = start.unwrap_or_default();
    let numbers = [n_iterations as u64, n_resamplings as u64];
    let bytes = [bytemuck::bytes_of(&numbers), bytemuck::cast_slice(&values)].concat();
    let bytes = ranks.broadcast("saved centers", bytes)?;
    let (numbers, values) = bytes.split_at(size_of_val(&numbers));
    let [n_iterations, n_resamplings] = bytemuck::pod_read_unaligned::<[u64; 2]>(numbers).map(|n| n as usize);
    let values: Vec<f32> = bytemuck::pod_collect_to_vec(values);
    Ok((!values.is_empty()).then_some(Centers { values, n_iterations, n_resamplings }))
}

/// Refuses clusters that need more memory than `memory_bytes`.
fn check_memory(
    settings: &HierarchySettings,
    rows: &FeatureRows,
    memory_bytes: Option<f64>,
) -> Result<(), CurateError> {
    let n_clusters = settings.levels.iter().map(|level| level.n_clusters).max().unwrap_or(0);
    let n = rows.len() as f64;
    let d = rows.width() as f64;
    let k = n_clusters as f64;
    // Split centers are gathered from all ranks as bytes: five copies at a time.
    let mut k_all = 0.0;
    for level in &settings.levels {
        let n_copies = if level.n_splits > 1 { 5.0 } else { 1.0 };
        k_all += level.n_clusters as f64 * level.n_splits as f64 * n_copies;
    }
    // Centers before and after an iteration, sums over this rank and over all in f64; cells and
    // distances of all rows, twice.
    let needed = k * d * (2.0 * 4.0 + 2.0 * 8.0) + k_all * d * 4.0 + n * 2.0 * 8.0;
    match memory_bytes {
        Some(limit) if needed > limit => Err(CurateError::Memory {
            n_clusters,
            n_rows: rows.len(),
            width: rows.width(),
            needed_gb: needed / 1e9,
            limit_gb: limit / 1e9,
        }),
        _ => Ok(()),
    }
}

/// Returns the sizes, and the longest time that the clusters take at the speed of this machine.
fn cost(settings: &HierarchySettings, rows: &FeatureRows, n_ranks: usize) -> ClusterCost {
    let products = max_dot_products(settings, rows.len() as f64);
    let flops = 2.0 * products * rows.width() as f64 / n_ranks as f64;
    let flops_per_s = flops_per_second(rows);
    let n_clusters =
        settings.levels.iter().map(|level| level.n_clusters.saturating_mul(level.n_splits)).collect();
    let n_rows = rows.len();
    ClusterCost { n_rows, width: rows.width(), n_clusters, seconds: flops / flops_per_s, flops_per_s }
}

/// Returns an upper bound on the row-center dot products over all levels.
fn max_dot_products(settings: &HierarchySettings, n_rows: f64) -> f64 {
    let mut n = n_rows;
    let mut sum = 0.0;
    let iterations = settings.n_iterations as f64;
    for level in &settings.levels {
        let k = level.n_clusters as f64;
        // Seeds and the last distances cost an iteration each.
        sum += n * k * (iterations + 2.0);
        let sampled = (level.resampling.n_rows as f64 * k).min(n);
        if level.resampling.n_rows > 1 {
            sum += level.resampling.n_times as f64 * (sampled * k * (iterations + 2.0) + n * k);
        }
        if level.n_splits > 1 {
            sum += n * level.n_splits as f64 * (iterations + 2.0);
        }
        n = k * level.n_splits as f64;
    }
    sum
}

/// Returns the floating-point operations per second of comparing some of `rows` with some centers.
fn flops_per_second(rows: &FeatureRows) -> f64 {
    let n = rows.len().min(MEASURED_ROWS);
    let k = rows.len().min(MEASURED_CENTERS);
    let mut centers = vec![0.0; k * rows.width()];
    rows.copy(0..k, &mut centers);
    let mut nearest = vec![NearestCenter::NONE; n];
    // The first call starts threads and reads the rows.
    find_nearest_centers(rows, 0..n, &centers, 0, &mut nearest);
    let start = Instant::now();
    find_nearest_centers(rows, 0..n, &centers, 0, &mut nearest);
    2.0 * (n * k * rows.width()) as f64 / start.elapsed().as_secs_f64().max(1e-9)
}
