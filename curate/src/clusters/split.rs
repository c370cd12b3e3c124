//! Clusters divided into smaller ones (Vo et al. 2024), where k-means with all of them at once
//! would cost too much: 100,000 clusters split into 100 each take a hundredth of the products of
//! ten million.

use kernels::rows::{NearestCenter, Rows};
use ranks::communicator::Communicator;
use rayon::prelude::*;

use super::kmeans::KMeans;
use super::nearest::Divided;
use super::sums::by_cluster;
use crate::draw::Draw;
use crate::rows::SelectedRows;
use crate::{CurateError, Progress, Silent};

/// Divides each cluster of `found` into `n_splits`, or as many as it has rows. Ranks divide the
/// clusters among themselves.
pub(super) fn split(
    rows: &dyn Rows,
    largest: f32,
    settings: &KMeans,
    n_splits: usize,
    found: &Divided,
    ranks: &Communicator,
    progress: &dyn Progress,
) -> Result<Divided, CurateError> {
    let d = rows.width();
    let n_clusters = found.centers.len() / d;
    let (starts, order) = by_cluster(&found.nearest, n_clusters);
    let topology = ranks.topology();
    let draw = Draw::new(settings.seed, "splits");
    progress.begins("splits", (n_clusters / topology.world_size) as u64);
    let own: Vec<usize> = (topology.rank..n_clusters).step_by(topology.world_size).collect();
    let done: Vec<Vec<u32>> = own
        .par_iter()
        .map(|cluster| -> Result<Vec<u32>, CurateError> {
            let members = &order[starts[*cluster]..starts[cluster + 1]];
            let settings = KMeans {
                n_clusters: n_splits.min(members.len()),
                n_iterations: settings.n_iterations,
                seed: draw.bits(*cluster as u64),
            };
            let words = match members.len() {
                0 => vec![0],
                _ => {
                    let part = SelectedRows::new(rows, members);
                    let clustering = settings.run(&part, largest, None, &Communicator::solo(), &Silent)?;
                    let centers = clustering.centers.values;
                    let pairs = clustering.nearest.iter();
                    let pairs = pairs.flat_map(|nearest| [nearest.cell, nearest.distance.to_bits()]);
                    let count = (centers.len() / d) as u32;
                    let centers = centers.iter().map(|value| value.to_bits());
                    std::iter::once(count).chain(centers).chain(pairs).collect()
                }
            };
            progress.advances(1);
            Ok(words)
        })
        .collect::<Result<_, _>>()?;
    let parts = ranks.gather_bytes("splits", bytemuck::cast_slice(&done.concat()).to_vec())?;
    let mut parts: Vec<std::vec::IntoIter<u32>> =
        parts.iter().map(|part| bytemuck::pod_collect_to_vec::<u8, u32>(part).into_iter()).collect();
    let mut all = Divided { centers: Vec::new(), nearest: vec![NearestCenter::NONE; found.nearest.len()] };
    for cluster in 0..n_clusters {
        let words = &mut parts[cluster % topology.world_size];
        let n = words.next().unwrap_or_default() as usize;
        let first = (all.centers.len() / d) as u32;
        all.centers.extend(words.take(n * d).map(f32::from_bits));
        for member in &order[starts[cluster]..starts[cluster + 1]] {
            let cell = words.next().unwrap_or_default();
            let distance = words.next().unwrap_or_default();
            all.nearest[*member as usize] =
                NearestCenter { cell: first + cell, distance: f32::from_bits(distance) };
        }
    }
    Ok(all)
}
