//! Flags of clusters, of cells within which images are compared, and of their similarity.

use std::path::PathBuf;

use curate::io::{CellSettings, ClusterSettings, KMeansSettings};
use session::machine::available_bytes;

/// Flags of clusters.
#[derive(clap::Args)]
pub(crate) struct ClusterFlags {
    /// Clusters per level, lowest first, comma-separated [default: n/50,n/500 for n images].
    #[arg(long, value_delimiter = ',', value_name = "N")]
    clusters: Vec<usize>,
    /// Number of clusters to split each cluster into, per level, comma-separated; 1 does not split
    /// [default: 1].
    #[arg(long, value_delimiter = ',', value_name = "N", hide_short_help = true)]
    splits: Vec<usize>,
    /// Resampling: recompute centers from this many rows nearest to each center, per level,
    /// comma-separated. It spreads centers more evenly than the images; 1 disables it [default:
    /// half the mean cluster size].
    #[arg(long, value_delimiter = ',', value_name = "N", hide_short_help = true)]
    resample_rows: Vec<usize>,
    /// Number of resampling rounds.
    #[arg(long, default_value_t = 10, value_name = "N", hide_short_help = true)]
    resample_times: usize,
    /// Reuse the clusters in another output folder. It is one of `ocelli curate`, and its clusters
    /// were computed from the same features.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["clusters", "splits", "resample_rows"])]
    clusters_of: Option<PathBuf>,
    #[command(flatten)]
    limits: KMeansFlags,
}

impl ClusterFlags {
    /// Returns whether a flag says which clusters to make or to take.
    pub(crate) fn is_given(&self) -> bool {
        let is_made = !(self.clusters.is_empty() && self.splits.is_empty() && self.resample_rows.is_empty());
        is_made || self.clusters_of.is_some()
    }
}

/// Flags of k-means.
#[derive(clap::Args)]
pub(crate) struct KMeansFlags {
    /// Maximum number of k-means iterations.
    #[arg(long, default_value_t = 50, value_name = "N", hide_short_help = true)]
    iterations: usize,
    /// Seed for centers and random choices.
    #[arg(long, default_value_t = 0, hide_short_help = true)]
    seed: u64,
    /// Memory limit per process in GB, not counting features, which 32-bit .npy and .safetensors
    /// files leave on disk [default: all available memory; set it if several processes share a
    /// machine].
    #[arg(long, value_name = "GB", value_parser = gigabytes, hide_short_help = true)]
    memory_gb: Option<f64>,
}

/// Flags of cells.
#[derive(clap::Args)]
pub(crate) struct CellFlags {
    /// Number of k-means cells; only images in the same cell are compared. With 1, all pairs are
    /// compared [default: 1 for up to 50,000 images, otherwise one per 1,000 images].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    cells: Option<u32>,
    #[command(flatten)]
    limits: KMeansFlags,
}

/// Flag of the threshold.
#[derive(clap::Args)]
pub(crate) struct ThresholdFlag {
    /// Cosine similarity at or above which two images are too similar. The right value depends on
    /// the network and the images; if images are given (not only features), pairs.png shows pairs
    /// above and below it.
    #[arg(long, default_value_t = 0.95, value_name = "COSINE", value_parser = cosine)]
    pub(crate) threshold: f32,
}

fn cosine(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(value) if value > -1.0 && value <= 1.0 => Ok(value),
        _ => Err("expected a cosine similarity above -1 and at most 1".into()),
    }
}

fn gigabytes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("expected a number of gigabytes above 0".into()),
    }
}

impl ClusterFlags {
    pub(crate) fn settings(&self) -> ClusterSettings {
        ClusterSettings {
            n_clusters: self.clusters.clone(),
            n_splits: self.splits.clone(),
            resample_rows: self.resample_rows.clone(),
            resample_times: self.resample_times,
            saved_in: self.clusters_of.clone(),
            kmeans: self.limits.settings(),
        }
    }
}

impl CellFlags {
    pub(crate) fn settings(&self) -> CellSettings {
        CellSettings { n_cells: self.cells, kmeans: self.limits.settings() }
    }
}

impl KMeansFlags {
    fn settings(&self) -> KMeansSettings {
        let memory_bytes = self.memory_gb.map(|gb| gb * 1e9).or_else(available_bytes);
        KMeansSettings { n_iterations: self.iterations, seed: self.seed, memory_bytes }
    }
}
