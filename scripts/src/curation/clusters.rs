//! Clusters: flags, an estimate of their cost, and the file that stores them.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use curate::FeatureRows;
use curate::clusters::{Centers, Hierarchy, HierarchySettings, LevelSettings, Resampling};
use kernels::rows::{NearestCenter, Rows, find_nearest_centers};
use ranks::communicator::Communicator;
use serde_json::{Value, json};

use super::content::content_identity;
use super::progress::Bars;
use super::ranks::all_succeed;
use super::saved::{read, read_centers, write};
use crate::console::say;
use crate::progress::format_duration;
use session::machine::available_bytes;

/// File of the clusters in an output folder.
pub(crate) const FILE: &str = "clusters.safetensors";

/// File of the centers of a lowest level that is not complete.
pub(super) const UNFINISHED: &str = "clusters.part.safetensors";

/// Number of rows with which the speed of products is measured.
const MEASURED_ROWS: usize = 4096;

/// Number of centers with which the speed of products is measured.
const MEASURED_CENTERS: usize = 512;

/// Flags of clusters.
#[derive(clap::Args)]
pub(crate) struct ClusterFlags {
    /// Clusters per level, lowest first, comma-separated [default: n/50,n/500 for n images].
    #[arg(long, value_delimiter = ',', value_name = "N")]
    clusters: Vec<usize>,
    /// Number of clusters to split each cluster into, per level, comma-separated; 1 does not split
    /// [default: 1].
    #[arg(long, value_delimiter = ',', value_name = "N")]
    splits: Vec<usize>,
    /// Resampling: recompute centers from this many rows nearest to each center, per level,
    /// comma-separated. It spreads centers more evenly than the images; 1 disables it [default:
    /// half the mean cluster size].
    #[arg(long, value_delimiter = ',', value_name = "N")]
    resample_rows: Vec<usize>,
    /// Number of resampling rounds.
    #[arg(long, default_value_t = 10, value_name = "N")]
    resample_times: usize,
    /// Reuse the clusters in this output folder of `ocelli curate`, computed from the same
    /// features.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["clusters", "splits", "resample_rows"])]
    clusters_of: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) limits: KMeansFlags,
}

/// Flags of k-means.
#[derive(clap::Args)]
pub(crate) struct KMeansFlags {
    /// Maximum number of k-means iterations.
    #[arg(long, default_value_t = 50, value_name = "N")]
    pub(crate) iterations: usize,
    /// Seed for centers and random choices.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Memory limit per process in GB, not counting features, which 32-bit .npy and .safetensors
    /// files leave on disk [default: all available memory; set it if several processes share a
    /// machine].
    #[arg(long, value_name = "GB", value_parser = gigabytes)]
    memory_gb: Option<f64>,
}

fn gigabytes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("expected a number of gigabytes above 0".into()),
    }
}

impl ClusterFlags {
    /// Returns the clusters of `rows`, as the flags and their defaults say, or those of another
    /// folder.
    pub(crate) fn run(
        &self,
        rows: &FeatureRows,
        out: &Path,
        ranks: &Communicator,
    ) -> anyhow::Result<Hierarchy> {
        if let Some(folder) = &self.clusters_of {
            return read(&folder.join(FILE), rows);
        }
        let levels = self.levels(rows.len())?;
        let settings =
            HierarchySettings { levels, n_iterations: self.limits.iterations, seed: self.limits.seed };
        run(&settings, rows, out, &self.limits, ranks)
    }

    /// Returns the settings as part of the identity of a job.
    pub(crate) fn identity(&self) -> Value {
        json!({
            "clusters": self.clusters, "splits": self.splits, "resample_rows": self.resample_rows,
            "resample_times": self.resample_times,
            "clusters_of": content_identity(self.clusters_of.as_ref().map(|folder| folder.join(FILE))),
            "iterations": self.limits.iterations, "seed": self.limits.seed,
        })
    }

    fn levels(&self, n_rows: usize) -> anyhow::Result<Vec<LevelSettings>> {
        let numbers = match self.clusters.as_slice() {
            [] => default_clusters(n_rows),
            given => given.to_vec(),
        };
        let resample_rows = level_values(&self.resample_rows, numbers.len(), "resample-rows")?;
        let splits = level_values(&self.splits, numbers.len(), "splits")?;
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

/// Returns the value of the flag `name` for each of `n_levels`; `None` for all if it is not given.
fn level_values(given: &[usize], n_levels: usize, name: &str) -> anyhow::Result<Vec<Option<usize>>> {
    match given.len() {
        0 => Ok(vec![None; n_levels]),
        n if n == n_levels => Ok(given.iter().copied().map(Some).collect()),
        n => bail!("--{name} has {n} numbers for {n_levels} levels: pass one per level"),
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

/// Clusters `rows`, continues where an earlier call was stopped, and saves the clusters in `out`.
/// All ranks call it.
pub(crate) fn run(
    settings: &HierarchySettings,
    rows: &FeatureRows,
    out: &Path,
    flags: &KMeansFlags,
    ranks: &Communicator,
) -> anyhow::Result<Hierarchy> {
    let file = out.join(FILE);
    let unfinished = out.join(UNFINISHED);
    let is_first = ranks.topology().rank == 0;
    // The first rank decides, because other ranks may not see a new file yet.
    let exists = ranks.broadcast("clusters", vec![u8::from(file.exists())])? == [1];
    if exists {
        return all_succeed(ranks, read(&file, rows));
    }
    let largest = all_succeed(ranks, check(settings, rows, flags))?;
    let mut start = None;
    if is_first {
        print_cost(settings, rows, ranks.topology().world_size);
        // The folder belongs to this job, and has no centers of another k-means.
        start = read_centers(&unfinished, rows.width());
        if let Some(centers) = &start {
            say(match centers.n_resamplings {
                0 => format!("continuing after iteration {} of k-means", centers.n_iterations),
                n => format!("continuing after resampling {n}"),
            });
        }
    }
    let start = broadcast_centers(start, ranks)?;
    let bars = Bars::saving_to(unfinished.clone(), rows.width(), ranks);
    let clusters = settings.run(rows, largest, start, ranks, &bars)?;
    drop(bars);
    let written = if is_first {
        write(&file, &clusters, rows).with_context(|| format!("cannot write {}", file.display()))
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
fn check(settings: &HierarchySettings, rows: &FeatureRows, flags: &KMeansFlags) -> anyhow::Result<f32> {
    let largest = rows.largest(0..rows.len())?;
    settings.check(rows.len())?;
    check_memory(settings, rows, flags)?;
    Ok(largest)
}

/// Returns the centers that rank 0 has read.
fn broadcast_centers(start: Option<Centers>, ranks: &Communicator) -> anyhow::Result<Option<Centers>> {
    let Centers { values, n_iterations, n_resamplings } = start.unwrap_or_default();
    let numbers = [n_iterations as u64, n_resamplings as u64];
    let bytes = [bytemuck::bytes_of(&numbers), bytemuck::cast_slice(&values)].concat();
    let bytes = ranks.broadcast("saved centers", bytes)?;
    let (numbers, values) = bytes.split_at(size_of_val(&numbers));
    let [n_iterations, n_resamplings] = bytemuck::pod_read_unaligned::<[u64; 2]>(numbers).map(|n| n as usize);
    let values: Vec<f32> = bytemuck::pod_collect_to_vec(values);
    Ok((!values.is_empty()).then_some(Centers { values, n_iterations, n_resamplings }))
}

/// Refuses clusters that need more memory than is available, or than the flag allows.
fn check_memory(settings: &HierarchySettings, rows: &FeatureRows, flags: &KMeansFlags) -> anyhow::Result<()> {
    let n = rows.len() as f64;
    let d = rows.width() as f64;
    let k = settings.levels.iter().map(|level| level.n_clusters as f64).fold(0.0, f64::max);
    // Split centers are gathered from all ranks as bytes: five copies at a time.
    let mut k_all = 0.0;
    for level in &settings.levels {
        let n_copies = if level.n_splits > 1 { 5.0 } else { 1.0 };
        k_all += level.n_clusters as f64 * level.n_splits as f64 * n_copies;
    }
    // Centers before and after an iteration, sums over this rank and over all in f64; cells and
    // distances of all rows, twice.
    let needed = k * d * (2.0 * 4.0 + 2.0 * 8.0) + k_all * d * 4.0 + n * 2.0 * 8.0;
    let limit = flags.memory_gb.map(|gb| gb * 1e9).or_else(available_bytes);
    match limit {
        Some(limit) if needed > limit => bail!(
            "{} clusters of {} rows of width {} need about {:.1} GB of memory, but only {:.1} GB may be \
             used: use fewer clusters, and split them with --splits",
            k,
            rows.len(),
            rows.width(),
            needed / 1e9,
            limit / 1e9
        ),
        _ => Ok(()),
    }
}

/// Prints the sizes, and the longest time that the clusters take at the speed of this machine.
fn print_cost(settings: &HierarchySettings, rows: &FeatureRows, n_ranks: usize) {
    let products = n_products(settings, rows.len() as f64);
    let flops = 2.0 * products * rows.width() as f64 / n_ranks as f64;
    let per_s = flops_per_second(rows);
    let numbers: Vec<String> = settings
        .levels
        .iter()
        .map(|level| (level.n_clusters.saturating_mul(level.n_splits)).to_string())
        .collect();
    let numbers = numbers.join(", ");
    let n = rows.len();
    let d = rows.width();
    let seconds = flops / per_s;
    let duration = if seconds < 2.0 {
        String::new()
    } else {
        format!(": takes at most {} at this machine's {:.0} GFLOP/s", format_duration(seconds), per_s / 1e9)
    };
    say(format!("{n} x {d} features into {numbers} clusters{duration}"));
}

/// Returns the largest number of products of a row and a center that all levels need.
fn n_products(settings: &HierarchySettings, n_rows: f64) -> f64 {
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
