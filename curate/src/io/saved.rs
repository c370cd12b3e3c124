//! Files of clusters and of unfinished ones. Both are safetensors with a checksum of their tensors
//! and of their description.

use std::collections::HashMap;
use std::path::Path;

use eval::features::file::encode_safetensors;
use kernels::rows::Rows;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensorError, SafeTensors};
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use crate::clusters::{Centers, Hierarchy, Tree};
use crate::{CurateError, FeatureRows, Metric};

/// Name of the checksum among a file's metadata.
const CHECKSUM: &str = "ocelli.checksum";

/// Name of the description of clusters among a file's metadata.
const CLUSTERS: &str = "ocelli.clusters";

/// Writes the centers of a lowest level that is not complete.
pub(super) fn save_centers(path: &Path, centers: &Centers, width: usize) -> std::io::Result<()> {
    let shape = vec![centers.values.len() / width.max(1), width];
    let view = TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(&centers.values))
        .map_err(std::io::Error::other)?;
    // Earlier versions look for `n_iterations`, and do not support resampling.
    let (name, number) = match centers.n_resamplings {
        0 => ("n_iterations", centers.n_iterations),
        n => ("n_resamplings", n),
    };
    let tensors = vec![("centers".to_string(), view)];
    let bytes = encode_with_checksum(tensors, name, number.to_string())?;
    pipeline::file::replace(path, &bytes)
}

/// Returns a file of `tensors`, with `text` as `name` among its metadata and a checksum of both.
fn encode_with_checksum(
    tensors: Vec<(String, TensorView<'_>)>,
    name: &str,
    text: String,
) -> std::io::Result<Vec<u8>> {
    let checksum = checksum(tensors.iter().map(|(name, view)| (name.as_str(), view)), name, &text);
    let metadata = HashMap::from([(name.to_string(), text), (CHECKSUM.to_string(), checksum)]);
    // The same clusters give the same bytes, whatever the order of the map.
    encode_safetensors(tensors, metadata)
}

/// Returns whether the checksum in `file` fits its tensors and `text`, which is `name` among its
/// metadata.
fn has_valid_checksum(
    file: &SafeTensors<'_>,
    metadata: &HashMap<String, String>,
    name: &str,
    text: &str,
) -> bool {
    let mut tensors = file.tensors();
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    let actual = checksum(tensors.iter().map(|(name, view)| (name.as_str(), view)), name, text);
    metadata.get(CHECKSUM) == Some(&actual)
}

/// Hashes tensors, in the order of their names, and a text.
fn checksum<'t>(
    tensors: impl Iterator<Item = (&'t str, &'t TensorView<'t>)>,
    name: &str,
    text: &str,
) -> String {
    let mut tensors: Vec<(&str, &TensorView<'_>)> = tensors.collect();
    tensors.sort_by_key(|(name, _)| *name);
    let mut hash = Xxh3::new();
    hash.update(format!("{name} {text}").as_bytes());
    for (name, view) in tensors {
        hash.update(format!("{name} {:?} {:?}", view.dtype(), view.shape()).as_bytes());
        hash.update(view.data());
    }
    format!("{:016x}", hash.digest())
}

/// Reads the centers of a lowest level that is not complete; `None` if there are none of this
/// width, or if they are damaged.
pub(super) fn read_centers(path: &Path, width: usize) -> Option<Centers> {
    let bytes = std::fs::read(path).ok()?;
    let (_, metadata) = SafeTensors::read_metadata(&bytes).ok()?;
    let texts = metadata.metadata().as_ref()?;
    let (n_iterations, n_resamplings) = match parse_number(texts, "n_resamplings") {
        Some(n_resamplings) => (0, n_resamplings),
        None => (parse_number(texts, "n_iterations")?, 0),
    };
    let file = SafeTensors::deserialize(&bytes).ok()?;
    let name = if n_resamplings == 0 { "n_iterations" } else { "n_resamplings" };
    if !has_valid_checksum(&file, texts, name, texts.get(name)?) {
        tracing::warn!("{} is damaged: recomputing its clusters", path.display());
        return None;
    }
    let tensor = file.tensor("centers").ok().filter(|tensor| tensor.shape().get(1) == Some(&width))?;
    Some(Centers { values: bytemuck::pod_collect_to_vec(tensor.data()), n_iterations, n_resamplings })
}

fn parse_number(metadata: &HashMap<String, String>, name: &str) -> Option<usize> {
    metadata.get(name)?.parse().ok()
}

/// Writes the clusters of `rows`: by level, counted from 1 at the bottom, `centers` `[K, D]` and
/// `parents` `[N]` or `[K below]`; and `distances` `[N]` of rows.
pub(super) fn save_clusters(path: &Path, clusters: &Hierarchy, rows: &FeatureRows) -> std::io::Result<()> {
    let mut tensors = Vec::new();
    for (level, centers) in clusters.centers.iter().enumerate() {
        let shape = vec![centers.len() / rows.width(), rows.width()];
        let view = TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(centers))
            .map_err(std::io::Error::other)?;
        tensors.push((format!("level{}.centers", level + 1), view));
        let parents = clusters.tree.parents(level);
        let view = TensorView::new(Dtype::U32, vec![parents.len()], bytemuck::cast_slice(parents))
            .map_err(std::io::Error::other)?;
        tensors.push((format!("level{}.parents", level + 1), view));
    }
    let distances = bytemuck::cast_slice(&clusters.distances);
    let view = TensorView::new(Dtype::F32, vec![clusters.distances.len()], distances)
        .map_err(std::io::Error::other)?;
    tensors.push(("distances".into(), view));
    let description = json!({
        "inertia": clusters.inertia,
        "metric": metric_name(rows),
        "rows": rows.len(),
        "features": hex_fingerprint(rows),
    });
    let bytes = encode_with_checksum(tensors, CLUSTERS, description.to_string())?;
    pipeline::file::replace(path, &bytes)
}

fn metric_name(rows: &FeatureRows) -> &'static str {
    match rows.metric() {
        Metric::Cosine => "cosine",
        Metric::Euclidean => "euclidean",
    }
}

fn hex_fingerprint(rows: &FeatureRows) -> String {
    format!("{:016x}", rows.fingerprint())
}

/// Returns the error of a file of clusters that cannot be used.
fn damaged(path: &Path, source: Option<SafeTensorError>) -> CurateError {
    CurateError::DamagedClusters { path: path.to_path_buf(), source }
}

/// Returns the error of a file with clusters of other features, or by another distance.
fn other_clusters(path: &Path, reason: String) -> CurateError {
    CurateError::OtherClusters { path: path.to_path_buf(), reason }
}

/// Reads the clusters of `rows`, which must have been computed from the same features with the same
/// distance.
pub(super) fn read_clusters(path: &Path, rows: &FeatureRows) -> Result<Hierarchy, CurateError> {
    let bytes = std::fs::read(path).map_err(|error| CurateError::io("read", path, error))?;
    let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|error| damaged(path, Some(error)))?;
    let texts = metadata.metadata().as_ref().ok_or_else(|| damaged(path, None))?;
    let text = texts.get(CLUSTERS).ok_or_else(|| damaged(path, None))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| damaged(path, Some(error)))?;
    if !has_valid_checksum(&file, texts, CLUSTERS, text) {
        return Err(damaged(path, None));
    }
    let description: Value =
        serde_json::from_str(text).map_err(|error| damaged(path, Some(SafeTensorError::from(error))))?;
    let mut centers = Vec::new();
    let mut parents = Vec::new();
    let mut n_clusters = Vec::new();
    for level in 1.. {
        let Ok(tensor) = file.tensor(&format!("level{level}.centers")) else { break };
        let [k, width] = *tensor.shape() else { return Err(damaged(path, None)) };
        if width != rows.width() {
            let expected = rows.width();
            let reason = format!("centers of width {width}, but the features have width {expected}");
            return Err(other_clusters(path, reason));
        }
        centers.push(bytemuck::pod_collect_to_vec(tensor.data()));
        n_clusters.push(k);
        let tensor = file.tensor(&format!("level{level}.parents"));
        let tensor = tensor.map_err(|error| damaged(path, Some(error)))?;
        parents.push(bytemuck::pod_collect_to_vec::<u8, u32>(tensor.data()));
    }
    let mut is_tree = !n_clusters.is_empty();
    let mut n_children = rows.len();
    for (level_parents, n) in parents.iter().zip(&n_clusters) {
        is_tree &= level_parents.len() == n_children;
        is_tree &= level_parents.iter().all(|parent| (*parent as usize) < *n);
        n_children = *n;
    }
    if !is_tree {
        let n = parents.first().map_or(0, Vec::len);
        let reason = format!("clusters of {n} rows, but there are {} features", rows.len());
        return Err(other_clusters(path, reason));
    }
    if description["features"] != json!(hex_fingerprint(rows)) {
        return Err(other_clusters(path, "clusters computed from other features".into()));
    }
    let metric = metric_name(rows);
    if description["metric"] != json!(metric) {
        let reason = format!("clusters by {} distance, not {metric}", description["metric"]);
        return Err(other_clusters(path, reason));
    }
    let distances = file.tensor("distances").map_err(|error| damaged(path, Some(error)))?;
    let inertia = description["inertia"].as_f64().unwrap_or(f64::NAN);
    let distances: Vec<f32> = bytemuck::pod_collect_to_vec(distances.data());
    if distances.len() != rows.len() {
        return Err(damaged(path, None));
    }
    Ok(Hierarchy { centers, tree: Tree::new(parents, n_clusters), distances, inertia })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(values: &[f32; 4]) -> Vec<u8> {
        let view = TensorView::new(Dtype::F32, vec![2, 2], bytemuck::cast_slice(values)).unwrap();
        encode_with_checksum(vec![("centers".to_string(), view)], CLUSTERS, "{}".to_string()).unwrap()
    }

    /// Processes that write the same clusters write the same bytes, although each of them orders a
    /// map of metadata differently.
    #[test]
    fn the_same_clusters_are_the_same_bytes() {
        let values = [1.0, 2.0, 3.0, 4.0];
        let first = encode(&values);
        assert!((0..20).all(|_| encode(&values) == first));
    }
}
