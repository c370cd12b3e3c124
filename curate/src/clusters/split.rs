//! Division of clusters into smaller ones (Vo et al. 2024), where k-means with all of them at once
//! would cost too much: 100,000 clusters split into 100 each take a hundredth of the products of
//! ten million clusters.

use kernels::rows::{NearestCenter, Rows};
use ranks::communicator::Communicator;
use rayon::prelude::*;

use super::kmeans::KMeans;
use super::nearest::Assignment;
use super::sums::RowsByCluster;
use crate::CurateError;
use crate::draw::Draw;
use crate::rows::SelectedRows;
use pipeline::{NoProgress, Progress};

/// Splits each cluster of `assignment` into `n_splits`, or as many as it has rows. Each rank splits
/// a part of the clusters.
pub(super) fn split(
    rows: &dyn Rows,
    largest: f32,
    settings: &KMeans,
    n_splits: usize,
    assignment: &Assignment,
    ranks: &Communicator,
    progress: &dyn Progress,
) -> Result<Assignment, CurateError> {
    let d = rows.width();
    let n_clusters = assignment.centers.len() / d;
    let clusters = RowsByCluster::new(&assignment.nearest, n_clusters);
    let topology = ranks.topology();
    let draw = Draw::new(settings.seed, "splits");
    progress.begin("splits", (n_clusters / topology.world_size) as u64);
    let local: Vec<usize> = (topology.rank..n_clusters).step_by(topology.world_size).collect();
    let messages: Vec<Vec<u32>> = local
        .par_iter()
        .map(|cluster| -> Result<Vec<u32>, CurateError> {
            let members = clusters.rows_of(*cluster);
            let settings = KMeans {
                n_clusters: n_splits.min(members.len()),
                n_iterations: settings.n_iterations,
                seed: draw.bits(*cluster as u64),
            };
            let message = split_cluster(rows, members, largest, &settings)?;
            progress.advance(1);
            Ok(message)
        })
        .collect::<Result<_, _>>()?;
    let parts = ranks.gather_bytes("splits", bytemuck::cast_slice(&messages.concat()).to_vec())?;
    let mut parts: Vec<std::vec::IntoIter<u32>> =
        parts.iter().map(|part| bytemuck::pod_collect_to_vec::<u8, u32>(part).into_iter()).collect();
    let nearest = vec![NearestCenter::NONE; assignment.nearest.len()];
    let mut all = Assignment { centers: Vec::new(), nearest };
    for cluster in 0..n_clusters {
        let words = &mut parts[cluster % topology.world_size];
        let n = words.next().unwrap_or_default() as usize;
        let first = (all.centers.len() / d) as u32;
        all.centers.extend(words.take(n * d).map(f32::from_bits));
        for member in clusters.rows_of(cluster) {
            let cell = words.next().unwrap_or_default();
            let distance = words.next().unwrap_or_default();
            all.nearest[*member as usize] =
                NearestCenter { cell: first + cell, distance: f32::from_bits(distance) };
        }
    }
    Ok(all)
}

/// Divides rows `members` into clusters. Returns the message for other ranks: the number of
/// clusters, the centers, and for each row its cluster and distance, all as 32 bits.
fn split_cluster(
    rows: &dyn Rows,
    members: &[u32],
    largest: f32,
    settings: &KMeans,
) -> Result<Vec<u32>, CurateError> {
    if members.is_empty() {
        return Ok(vec![0]);
    }
    let part = SelectedRows::new(rows, members);
    let clustering = settings.run(&part, largest, None, &Communicator::solo(), &NoProgress)?;
    let centers = clustering.centers.values;
    let mut message = vec![(centers.len() / rows.width()) as u32];
    message.extend(centers.iter().map(|value| value.to_bits()));
    for nearest in &clustering.nearest {
        message.extend([nearest.cell, nearest.distance.to_bits()]);
    }
    Ok(message)
}
