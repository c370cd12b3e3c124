//! Retrieval of images that are similar to given ones, as DINOv2 built LVD-142M (Oquab et al. 2023,
//! section 3): the nearest images of each query if there are many queries, images of the queries'
//! clusters if there are few.

use std::collections::BTreeMap;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use kernels::rows::{CANDIDATE_BLOCK_ROWS, NearestCenter, Rows, find_nearest_centers, nearest_rows};
use ranks::communicator::Communicator;
use ranks::topology::Topology;

use crate::CurateError;
use crate::draw::Draw;
use crate::rows::{SelectedRows, part_in_blocks};
use pipeline::Progress;

/// Number of rows of a block. Rows that are compared in whole blocks have the same similarities,
/// bit by bit, as when all rows are compared at once.
pub const BLOCK_ROWS: usize = CANDIDATE_BLOCK_ROWS;

/// Number of queries whose neighbors are searched before progress is reported.
const STRIDE: usize = 4096;

/// A retrieved row.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Retrieved {
    /// Index of the row.
    pub row: u32,
    /// Index of the query.
    pub query: u32,
    /// Cosine similarity of the two.
    pub similarity: f32,
}

/// Returns the rows that are among the `k` most similar ones of some query, in their order, each
/// with the query that is most similar to it: the first of several that are equally similar. Rows
/// and queries have unit length. Each rank compares its part of the rows.
///
/// # Errors
/// [`CurateError::Widths`] and [`CurateError::Ranks`].
pub fn nearest_images(
    rows: &dyn Rows,
    queries: &dyn Rows,
    k: usize,
    ranks: &Communicator,
    progress: &dyn Progress,
) -> Result<Vec<Retrieved>, CurateError> {
    let Topology { rank, world_size, .. } = ranks.topology();
    let part = part_in_blocks(rows.len(), BLOCK_ROWS, rank, world_size);
    let mut nearest = Nearest::default();
    nearest_in_part(rows, part, queries, k, progress, |local| {
        nearest.add(nearest_of_queries(gather_retrieved(&local, ranks)?, k));
        Ok(())
    })?;
    Ok(nearest.into_rows())
}

/// Returns the `k` most similar rows of each query among the rows of `blocks`, a range of the
/// [`n_blocks`] blocks of all rows. The results of all blocks, passed to [`join_nearest`], give the
/// result of [`nearest_images`].
///
/// # Errors
/// [`CurateError::Widths`].
pub fn nearest_in_blocks(
    rows: &dyn Rows,
    blocks: Range<usize>,
    queries: &dyn Rows,
    k: usize,
    progress: &dyn Progress,
) -> Result<Vec<Retrieved>, CurateError> {
    let mut retrieved = Vec::new();
    nearest_in_part(rows, rows_of_blocks(rows.len(), blocks), queries, k, progress, |batch| {
        retrieved.extend(batch);
        Ok(())
    })?;
    Ok(retrieved)
}

/// Returns the result of [`nearest_images`], given the results of [`nearest_in_blocks`] for all
/// blocks.
pub fn join_nearest(retrieved: Vec<Retrieved>, k: usize) -> Vec<Retrieved> {
    let mut nearest = Nearest::default();
    nearest.add(nearest_of_queries(retrieved, k));
    nearest.into_rows()
}

/// Returns the most similar of `others` for each of `rows`, which both have unit length; `query` is
/// the index of the other row. Each rank compares its part of the rows.
///
/// # Errors
/// [`CurateError::Widths`] and [`CurateError::Ranks`].
pub fn most_similar(
    rows: &dyn Rows,
    others: &dyn Rows,
    ranks: &Communicator,
    progress: &dyn Progress,
) -> Result<Vec<Retrieved>, CurateError> {
    let Topology { rank, world_size, .. } = ranks.topology();
    let part = part_in_blocks(rows.len(), BLOCK_ROWS, rank, world_size);
    gather_retrieved(&most_similar_in_part(rows, part, others, progress)?, ranks)
}

/// Returns the result of [`most_similar`] for the rows of `blocks` alone, a range of the
/// [`n_blocks`] blocks of all rows.
///
/// # Errors
/// [`CurateError::Widths`].
pub fn most_similar_in_blocks(
    rows: &dyn Rows,
    blocks: Range<usize>,
    others: &dyn Rows,
    progress: &dyn Progress,
) -> Result<Vec<Retrieved>, CurateError> {
    most_similar_in_part(rows, rows_of_blocks(rows.len(), blocks), others, progress)
}

/// Returns up to `n` random rows per query of each cluster that contains queries, in their order,
/// each with the most similar query of its cluster. `centers` are the centers of the clusters, and
/// `clusters` holds the cluster of each row.
///
/// # Errors
/// [`CurateError::Widths`].
pub fn from_clusters(
    rows: &dyn Rows,
    queries: &dyn Rows,
    centers: &[f32],
    clusters: &[u32],
    n: usize,
    seed: u64,
) -> Result<Vec<Retrieved>, CurateError> {
    check_widths(rows, queries)?;
    let mut nearest = vec![NearestCenter::NONE; queries.len()];
    find_nearest_centers(queries, 0..queries.len(), centers, 0, &mut nearest);
    let mut cluster_queries: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (query, nearest) in (0u32..).zip(&nearest) {
        cluster_queries.entry(nearest.cell).or_default().push(query);
    }
    let mut members: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (row, cluster) in (0u32..).zip(clusters) {
        if cluster_queries.contains_key(cluster) {
            members.entry(*cluster).or_default().push(row);
        }
    }
    let draw = Draw::new(seed, "retrieval from clusters");
    let mut retrieved = Vec::new();
    for (cluster, mut chosen) in members {
        let query_numbers = &cluster_queries[&cluster];
        chosen.sort_by_key(|row| (draw.bits(u64::from(*row)), *row));
        chosen.truncate(n.saturating_mul(query_numbers.len()));
        chosen.sort_unstable();
        let chosen_rows = SelectedRows::new(rows, &chosen);
        let neighbors = nearest_rows(&SelectedRows::new(queries, query_numbers), &chosen_rows, 1, false);
        for (row, neighbors) in chosen.iter().zip(neighbors) {
            let Some((i, similarity)) = neighbors.first() else { continue };
            let query = query_numbers[*i as usize];
            retrieved.push(Retrieved { row: *row, query, similarity: *similarity });
        }
    }
    retrieved.sort_by_key(|retrieved| retrieved.row);
    Ok(retrieved)
}

/// Returns the number of blocks of `n_rows` rows; the last one may be shorter.
pub fn n_blocks(n_rows: usize) -> usize {
    n_rows.div_ceil(BLOCK_ROWS)
}

/// Returns the rows, of `n_rows`, that are in `blocks`.
pub fn rows_of_blocks(n_rows: usize, blocks: Range<usize>) -> Range<usize> {
    let start = (blocks.start * BLOCK_ROWS).min(n_rows);
    let end = (blocks.end * BLOCK_ROWS).min(n_rows);
    start..end
}

/// Rows that were retrieved so far, each with its most similar query.
#[derive(Default)]
struct Nearest {
    by_row: BTreeMap<u32, Retrieved>,
}

impl Nearest {
    /// Adds rows that were retrieved for further queries, in the order of the queries: of equally
    /// similar queries, the first is kept.
    fn add(&mut self, rows: Vec<Retrieved>) {
        for retrieved in rows {
            let entry = self.by_row.entry(retrieved.row).or_insert(retrieved);
            if retrieved.similarity > entry.similarity {
                *entry = retrieved;
            }
        }
    }

    fn into_rows(self) -> Vec<Retrieved> {
        self.by_row.into_values().collect()
    }
}

/// Finds the `k` most similar rows of each query among the rows `part`, and passes them to `take`,
/// some queries at a time.
fn nearest_in_part(
    rows: &dyn Rows,
    part: Range<usize>,
    queries: &dyn Rows,
    k: usize,
    progress: &dyn Progress,
    mut take: impl FnMut(Vec<Retrieved>) -> Result<(), CurateError>,
) -> Result<(), CurateError> {
    check_widths(rows, queries)?;
    let part: Vec<u32> = (part.start as u32..part.end as u32).collect();
    let rows = SelectedRows::new(rows, &part);
    progress.begin("neighbors", queries.len() as u64);
    let indices: Vec<u32> = (0..queries.len() as u32).collect();
    for block in indices.chunks(STRIDE) {
        let neighbors = nearest_rows(&rows, &SelectedRows::new(queries, block), k, false);
        let mut retrieved = Vec::new();
        for (query, neighbors) in block.iter().zip(neighbors) {
            for (row, similarity) in neighbors {
                retrieved.push(Retrieved { row: part[row as usize], query: *query, similarity });
            }
        }
        take(retrieved)?;
        progress.advance(block.len() as u64);
    }
    Ok(())
}

/// Finds the most similar of `others` for each of the rows `part`.
fn most_similar_in_part(
    rows: &dyn Rows,
    part: Range<usize>,
    others: &dyn Rows,
    progress: &dyn Progress,
) -> Result<Vec<Retrieved>, CurateError> {
    check_widths(others, rows)?;
    progress.begin("neighbors", part.len() as u64);
    let mut retrieved = Vec::with_capacity(part.len());
    let indices: Vec<u32> = (part.start as u32..part.end as u32).collect();
    for block in indices.chunks(STRIDE) {
        let neighbors = nearest_rows(others, &SelectedRows::new(rows, block), 1, false);
        for (row, neighbors) in block.iter().zip(neighbors) {
            if let Some(&(query, similarity)) = neighbors.first() {
                retrieved.push(Retrieved { row: *row, query, similarity });
            }
        }
        progress.advance(block.len() as u64);
    }
    Ok(retrieved)
}

/// Returns the `k` most similar rows of each query, those with the lowest indices where several are
/// equally similar, in the order of the queries.
fn nearest_of_queries(mut retrieved: Vec<Retrieved>, k: usize) -> Vec<Retrieved> {
    retrieved.sort_unstable_by(|a, b| {
        a.query.cmp(&b.query).then(b.similarity.total_cmp(&a.similarity)).then(a.row.cmp(&b.row))
    });
    let by_query = retrieved.chunk_by(|a, b| a.query == b.query);
    by_query.flat_map(|rows| rows.iter().take(k)).copied().collect()
}

/// Gathers the rows that all ranks have retrieved, in the order of the ranks.
fn gather_retrieved(local: &[Retrieved], ranks: &Communicator) -> Result<Vec<Retrieved>, CurateError> {
    let parts = ranks.gather_bytes("similarities", bytemuck::cast_slice(local).to_vec())?;
    let mut all = Vec::with_capacity(parts.iter().map(|part| part.len() / size_of::<Retrieved>()).sum());
    for part in parts {
        all.extend(bytemuck::pod_collect_to_vec::<u8, Retrieved>(&part));
    }
    Ok(all)
}

fn check_widths(rows: &dyn Rows, queries: &dyn Rows) -> Result<(), CurateError> {
    if rows.width() == queries.width() {
        Ok(())
    } else {
        Err(CurateError::Widths { width: queries.width(), other: rows.width() })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{FeatureRows, Metric};
    use pipeline::NoProgress;

    fn rows(width: usize, values: &[f32]) -> FeatureRows {
        FeatureRows::new(width, vec![Arc::new(values.to_vec())], Metric::Cosine).unwrap()
    }

    #[test]
    fn a_row_near_two_queries_is_retrieved_once_for_the_nearer_one() {
        let all = rows(2, &[1.0, 0.0, 1.0, 0.2, 0.0, 1.0, -1.0, 0.0]);
        let queries = rows(2, &[1.0, -0.1, 1.0, 0.3]);
        let retrieved = nearest_images(&all, &queries, 2, &Communicator::solo(), &NoProgress).unwrap();
        let pairs: Vec<(u32, u32)> =
            retrieved.iter().map(|retrieved| (retrieved.row, retrieved.query)).collect();
        assert_eq!(pairs, [(0, 0), (1, 1)]);
        let other = rows(1, &[1.0]);
        let error =
            nearest_images(&all, &other, 2, &Communicator::solo(), &NoProgress).unwrap_err().to_string();
        assert!(error.contains("rows of 1") && error.contains("rows of 2"), "{error}");
    }

    /// The joined results of blocks, divided in any way, equal the result of all rows, also with
    /// equally similar rows in different blocks, and with more images per query than a block has.
    #[test]
    fn joined_blocks_equal_all_rows() {
        let draw = Draw::new(0, "test");
        let values: Vec<f32> = (0..2 * 2500).map(|i| draw.uniform(i % 4200) as f32 - 0.5).collect();
        let all = rows(2, &values);
        // More queries than a stride.
        let queries = rows(2, &values.iter().cycle().take(2 * 4500).copied().collect::<Vec<_>>());
        assert_joined_blocks_equal_all_rows(&all, &queries, &[1, 7]);
        // Enough columns for sums whose rounding depends on the rows that are multiplied together.
        const D: usize = 600;
        let values: Vec<f32> = (0..D * 2060).map(|i| draw.uniform(i as u64) as f32 - 0.5).collect();
        let all = rows(D, &values);
        let queries = rows(D, &values[D * 2000..]);
        assert_joined_blocks_equal_all_rows(&all, &queries, &[1, 7, 1500]);
    }

    fn assert_joined_blocks_equal_all_rows(all: &FeatureRows, queries: &FeatureRows, counts: &[usize]) {
        let solo = Communicator::solo();
        for k in counts {
            let expected = nearest_images(all, queries, *k, &solo, &NoProgress).unwrap();
            for divisions in [&[0, 1, 3][..], &[0, 0, 2, 2, 3], &[0, 1, 2, 3]] {
                let mut retrieved = Vec::new();
                for ends in divisions.windows(2) {
                    let blocks = ends[0]..ends[1];
                    retrieved.extend(nearest_in_blocks(all, blocks, queries, *k, &NoProgress).unwrap());
                }
                assert_eq!(join_nearest(retrieved, *k), expected, "{k} {divisions:?}");
            }
        }
        let expected = most_similar(all, queries, &solo, &NoProgress).unwrap();
        let parts = [0..2, 2..2, 2..3]
            .map(|blocks| most_similar_in_blocks(all, blocks, queries, &NoProgress).unwrap());
        assert_eq!(parts.concat(), expected);
    }

    #[test]
    fn the_last_block_may_be_shorter() {
        assert_eq!((n_blocks(2500), rows_of_blocks(2500, 2..3)), (3, 2048..2500));
        assert_eq!((n_blocks(2048), rows_of_blocks(2048, 1..2)), (2, 1024..2048));
    }

    #[test]
    fn clusters_of_queries_give_the_requested_number_of_rows() {
        let all = rows(2, &[1.0, 0.0, 1.0, 0.1, 1.0, 0.2, 0.0, 1.0, 0.1, 1.0]);
        let centers = [1.0, 0.1, 0.05, 1.0];
        let queries = rows(2, &[1.0, 0.05]);
        let retrieved = from_clusters(&all, &queries, &centers, &[0, 0, 0, 1, 1], 2, 0).unwrap();
        assert_eq!(retrieved.len(), 2);
        assert!(retrieved.iter().all(|retrieved| retrieved.row < 3 && retrieved.query == 0), "{retrieved:?}");
    }
}
