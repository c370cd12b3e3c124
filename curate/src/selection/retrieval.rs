//! Retrieval of images like given ones, as DINOv2 built LVD-142M (Oquab et al. 2023, section 3):
//! the nearest images of each query where queries are many, images out of the queries' clusters
//! where they are few.

use std::collections::BTreeMap;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use kernels::rows::{CANDIDATE_BLOCK_ROWS, NearestCenter, Rows, find_nearest_centers, nearest_rows};
use ranks::communicator::Communicator;
use ranks::topology::Topology;

use crate::draw::Draw;
use crate::rows::{SelectedRows, part_in_blocks};
use crate::{CurateError, Progress};

/// Number of rows of a block. Rows that are compared in whole blocks have the same similarities,
/// bit by bit, as when all rows are compared at once.
pub const BLOCK_ROWS: usize = CANDIDATE_BLOCK_ROWS;

/// Number of queries that are searched for before progress is told.
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
    nearest_in_part(rows, part, queries, k, progress, |own| {
        nearest.add(nearest_of_queries(of_all_ranks(&own, ranks)?, k));
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
    let mut found = Vec::new();
    nearest_in_part(rows, rows_of_blocks(rows.len(), blocks), queries, k, progress, |own| {
        found.extend(own);
        Ok(())
    })?;
    Ok(found)
}

/// Returns the result of [`nearest_images`], given the results of [`nearest_in_blocks`] for all
/// blocks.
pub fn join_nearest(found: Vec<Retrieved>, k: usize) -> Vec<Retrieved> {
    let mut nearest = Nearest::default();
    nearest.add(nearest_of_queries(found, k));
    nearest.into_rows()
}

/// Returns the most similar of `others` for each of `rows`, which both have unit length; `query` is
/// the number of the other row. Each rank compares its part of the rows.
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
    of_all_ranks(&most_similar_in_part(rows, part, others, progress)?, ranks)
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

/// Returns up to `n` random rows of each cluster that holds a query, for each query in it, in their
/// order, each with the most similar query of its cluster. `centers` are those of the clusters, and
/// `clusters` holds the one of each row.
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
    let mut queries_of: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (query, nearest) in (0u32..).zip(&nearest) {
        queries_of.entry(nearest.cell).or_default().push(query);
    }
    let mut members: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (row, cluster) in (0u32..).zip(clusters).filter(|(_, cluster)| queries_of.contains_key(cluster)) {
        members.entry(*cluster).or_default().push(row);
    }
    let draw = Draw::new(seed, "retrieval from clusters");
    let mut retrieved = Vec::new();
    for (cluster, mut rows_of) in members {
        let own = &queries_of[&cluster];
        rows_of.sort_by_key(|row| (draw.bits(u64::from(*row)), *row));
        rows_of.truncate(n.saturating_mul(own.len()));
        rows_of.sort_unstable();
        let chosen = SelectedRows::new(rows, &rows_of);
        let near = nearest_rows(&SelectedRows::new(queries, own), &chosen, 1, false);
        for (row, near) in rows_of.iter().zip(near) {
            let Some((query, similarity)) = near.first() else { continue };
            retrieved.push(Retrieved { row: *row, query: own[*query as usize], similarity: *similarity });
        }
    }
    retrieved.sort_by_key(|one| one.row);
    Ok(retrieved)
}

/// Returns the number of blocks that `n_rows` rows make; the last one may be shorter.
pub fn n_blocks(n_rows: usize) -> usize {
    n_rows.div_ceil(BLOCK_ROWS)
}

/// Returns the rows, of `n_rows`, that are in `blocks`.
pub fn rows_of_blocks(n_rows: usize, blocks: Range<usize>) -> Range<usize> {
    let start = |block: usize| (block * BLOCK_ROWS).min(n_rows);
    start(blocks.start)..start(blocks.end)
}

/// Rows that were retrieved so far, each with its most similar query.
#[derive(Default)]
struct Nearest {
    by_row: BTreeMap<u32, Retrieved>,
}

impl Nearest {
    /// Adds rows that were retrieved for further queries, in the order of the queries: of equally
    /// similar ones, the first is kept.
    fn add(&mut self, found: Vec<Retrieved>) {
        for one in found {
            let entry = self.by_row.entry(one.row).or_insert(one);
            if one.similarity > entry.similarity {
                *entry = one;
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
    progress.begins("neighbors", queries.len() as u64);
    let numbers: Vec<u32> = (0..queries.len() as u32).collect();
    for block in numbers.chunks(STRIDE) {
        let found = nearest_rows(&rows, &SelectedRows::new(queries, block), k, false);
        let of_query = |(query, near): (&u32, Vec<(u32, f32)>)| -> Vec<Retrieved> {
            near.into_iter()
                .map(|(row, similarity)| Retrieved { row: part[row as usize], query: *query, similarity })
                .collect()
        };
        take(block.iter().zip(found).flat_map(of_query).collect())?;
        progress.advances(block.len() as u64);
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
    progress.begins("neighbors", part.len() as u64);
    let mut found = Vec::with_capacity(part.len());
    let numbers: Vec<u32> = (part.start as u32..part.end as u32).collect();
    for block in numbers.chunks(STRIDE) {
        let near = nearest_rows(others, &SelectedRows::new(rows, block), 1, false);
        found.extend(block.iter().zip(near).filter_map(|(row, near)| {
            let (query, similarity) = *near.first()?;
            Some(Retrieved { row: *row, query, similarity })
        }));
        progress.advances(block.len() as u64);
    }
    Ok(found)
}

/// Returns the `k` most similar rows of each query, those with the lowest numbers where several are
/// equally similar, in the order of the queries.
fn nearest_of_queries(mut found: Vec<Retrieved>, k: usize) -> Vec<Retrieved> {
    found.sort_unstable_by(|a, b| {
        a.query.cmp(&b.query).then(b.similarity.total_cmp(&a.similarity)).then(a.row.cmp(&b.row))
    });
    found.chunk_by(|a, b| a.query == b.query).flat_map(|of_query| of_query.iter().take(k)).copied().collect()
}

/// Returns what all ranks have found, in the order of the ranks.
fn of_all_ranks(own: &[Retrieved], ranks: &Communicator) -> Result<Vec<Retrieved>, CurateError> {
    let parts = ranks.gather_bytes("similarities", bytemuck::cast_slice(own).to_vec())?;
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
    use crate::{FeatureRows, Metric, Silent};

    fn rows(width: usize, values: &[f32]) -> FeatureRows {
        FeatureRows::new(width, vec![Arc::new(values.to_vec())], Metric::Cosine).unwrap()
    }

    #[test]
    fn a_row_near_two_queries_is_retrieved_once_for_the_nearer_one() {
        let all = rows(2, &[1.0, 0.0, 1.0, 0.2, 0.0, 1.0, -1.0, 0.0]);
        let queries = rows(2, &[1.0, -0.1, 1.0, 0.3]);
        let found = nearest_images(&all, &queries, 2, &Communicator::solo(), &Silent).unwrap();
        let pairs: Vec<(u32, u32)> = found.iter().map(|one| (one.row, one.query)).collect();
        assert_eq!(pairs, [(0, 0), (1, 1)]);
        let other = rows(1, &[1.0]);
        let error = nearest_images(&all, &other, 2, &Communicator::solo(), &Silent).unwrap_err().to_string();
        assert!(error.contains("rows of 1") && error.contains("rows of 2"), "{error}");
    }

    /// Blocks in any division give what all rows give, with equally similar rows in different
    /// blocks, and more images asked for than a block has.
    #[test]
    fn blocks_are_joined() {
        let draw = Draw::new(0, "test");
        let values: Vec<f32> = (0..2 * 2500).map(|i| draw.uniform(i % 4200) as f32 - 0.5).collect();
        let all = rows(2, &values);
        // More than are searched for at once.
        let queries = rows(2, &values.iter().cycle().take(2 * 4500).copied().collect::<Vec<_>>());
        assert_blocks_are_joined(&all, &queries, &[1, 7]);
        // Enough columns for sums whose rounding depends on the rows that are multiplied together.
        const D: usize = 600;
        let values: Vec<f32> = (0..D * 2060).map(|i| draw.uniform(i as u64) as f32 - 0.5).collect();
        let all = rows(D, &values);
        let queries = rows(D, &values[D * 2000..]);
        assert_blocks_are_joined(&all, &queries, &[1, 7, 1500]);
    }

    fn assert_blocks_are_joined(all: &FeatureRows, queries: &FeatureRows, counts: &[usize]) {
        let solo = Communicator::solo();
        for k in counts {
            let whole = nearest_images(all, queries, *k, &solo, &Silent).unwrap();
            for divisions in [&[0, 1, 3][..], &[0, 0, 2, 2, 3], &[0, 1, 2, 3]] {
                let of_blocks =
                    |blocks: Range<usize>| nearest_in_blocks(all, blocks, queries, *k, &Silent).unwrap();
                let found = divisions.windows(2).flat_map(|ends| of_blocks(ends[0]..ends[1])).collect();
                assert_eq!(join_nearest(found, *k), whole, "{k} {divisions:?}");
            }
        }
        let whole = most_similar(all, queries, &solo, &Silent).unwrap();
        let found =
            [0..2, 2..2, 2..3].map(|blocks| most_similar_in_blocks(all, blocks, queries, &Silent).unwrap());
        assert_eq!(found.concat(), whole);
    }

    #[test]
    fn the_last_block_may_be_shorter() {
        assert_eq!((n_blocks(2500), rows_of_blocks(2500, 2..3)), (3, 2048..2500));
        assert_eq!((n_blocks(2048), rows_of_blocks(2048, 1..2)), (2, 1024..2048));
    }

    #[test]
    fn clusters_of_queries_give_as_many_rows_as_asked_for() {
        let all = rows(2, &[1.0, 0.0, 1.0, 0.1, 1.0, 0.2, 0.0, 1.0, 0.1, 1.0]);
        let centers = [1.0, 0.1, 0.05, 1.0];
        let found = from_clusters(&all, &rows(2, &[1.0, 0.05]), &centers, &[0, 0, 0, 1, 1], 2, 0).unwrap();
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|one| one.row < 3 && one.query == 0), "{found:?}");
    }
}
