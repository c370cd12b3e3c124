//! Hierarchical sampling (Vo et al. 2024, section 3.3): a number of rows is divided evenly among
//! the clusters of the highest level, the share of each evenly among its clusters, and so on.
//!
//! ```text
//! share of cluster j = min(size_j, b), with b such that the shares add up to the number of rows
//! ```
//!
//! If b is not an integer, it is rounded down, and the remaining rows are given, one each, to
//! clusters drawn among those with more than b rows.

use crate::clusters::Tree;
use crate::draw::Draw;

/// Order in which the rows of a cluster are taken.
#[derive(Debug, Clone, Copy)]
pub enum Order<'a> {
    /// At random.
    Random,
    /// By their squared distance to the center, `[N]`, the smallest first.
    Nearest(&'a [f32]),
}

/// Chooses `n` rows of `tree`, or all if there are fewer. Returns them in their order.
pub fn sample(tree: &Tree, n: usize, order: Order<'_>, seed: u64) -> Vec<u32> {
    let draw = Draw::new(seed, "hierarchical sampling");
    let shares = divide_shares(
        tree,
        |level, sizes, share, parent| {
            let shares = integer_shares(sizes, share as u64, draw.stream(level as u64).stream(parent));
            shares.into_iter().map(|share| share as f64).collect()
        },
        n as f64,
    );
    let members = tree.children(0);
    let mut chosen = Vec::with_capacity(n);
    for (mut rows, share) in members.into_iter().zip(shares) {
        rows.sort_by(|a, b| {
            let key = sort_key(*a, order, draw);
            key.total_cmp(&sort_key(*b, order, draw)).then(a.cmp(b))
        });
        chosen.extend(rows.into_iter().take(share as usize));
    }
    chosen.sort_unstable();
    chosen
}

/// Returns the key by which rows of a cluster are sorted.
fn sort_key(row: u32, order: Order<'_>, draw: Draw) -> f64 {
    match order {
        Order::Random => draw.stream(u64::MAX).uniform(u64::from(row)),
        Order::Nearest(distances) => f64::from(distances[row as usize]),
    }
}

/// Returns the probability with which [`sample`] chooses each row, `[N]`, if `n` are chosen at
/// random: the weights of rows for a loader that shows some rows more often than others.
pub fn weights(tree: &Tree, n: f64) -> Vec<f64> {
    let shares = divide_shares(tree, |_, sizes, share, _| real_shares(sizes, share), n);
    let sizes = &tree.sizes()[0];
    tree.parents(0).iter().map(|parent| shares[*parent as usize] / sizes[*parent as usize] as f64).collect()
}

/// Divides `n` among the clusters of the lowest level, beginning with the highest one. The
/// arguments of `divide` are a level, the sizes of clusters of the level below with the same
/// parent, the share of the parent, and its number; it returns the share of each cluster.
fn divide_shares(tree: &Tree, divide: impl Fn(usize, &[u64], f64, u64) -> Vec<f64>, n: f64) -> Vec<f64> {
    let sizes = tree.sizes();
    let top = tree.n_levels() - 1;
    let mut shares = divide(top + 1, &sizes[top], n, 0);
    for level in (1..=top).rev() {
        let mut child_shares = vec![0.0; tree.n_clusters(level - 1)];
        for (parent, children) in tree.children(level).iter().enumerate() {
            let sizes: Vec<u64> = children.iter().map(|child| sizes[level - 1][*child as usize]).collect();
            let parts = divide(level, &sizes, shares[parent], parent as u64);
            for (child, part) in children.iter().zip(parts) {
                child_shares[*child as usize] = part;
            }
        }
        shares = child_shares;
    }
    shares
}

/// Returns `min(size, b)` for each cluster, with the largest integer b such that the sum is at most
/// `n`; the rest is added, one each, to clusters with more than b rows, drawn at random.
fn integer_shares(sizes: &[u64], n: u64, draw: Draw) -> Vec<u64> {
    if sizes.iter().sum::<u64>() <= n {
        return sizes.to_vec();
    }
    let mut low = 0;
    let mut high = sizes.iter().copied().max().unwrap_or(0);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if bounded_sum(sizes, middle) <= n { low = middle } else { high = middle }
    }
    let mut shares: Vec<u64> = sizes.iter().map(|size| (*size).min(low)).collect();
    let mut larger: Vec<usize> = (0..sizes.len()).filter(|cluster| sizes[*cluster] > low).collect();
    larger.sort_by_key(|cluster| (draw.bits(*cluster as u64), *cluster));
    for cluster in larger.into_iter().take((n - bounded_sum(sizes, low)) as usize) {
        shares[cluster] += 1;
    }
    shares
}

/// Returns the sum of `min(size, bound)` over clusters.
fn bounded_sum(sizes: &[u64], bound: u64) -> u64 {
    sizes.iter().map(|size| (*size).min(bound)).sum()
}

/// Returns `min(size, b)` for each cluster, with b such that the sum is `n`.
fn real_shares(sizes: &[u64], n: f64) -> Vec<f64> {
    let mut order: Vec<u64> = sizes.iter().copied().filter(|size| *size > 0).collect();
    order.sort_unstable();
    let mut rest = n;
    let mut bound = f64::INFINITY;
    for (index, size) in order.iter().enumerate() {
        let n_clusters = (order.len() - index) as f64;
        if *size as f64 * n_clusters >= rest {
            bound = rest / n_clusters;
            break;
        }
        rest -= *size as f64;
    }
    sizes.iter().map(|size| (*size as f64).min(bound)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns a tree of two levels: clusters of 90, 5 and 5 rows, of which the first two have the
    /// same parent.
    fn tree() -> Tree {
        let rows = [vec![0u32; 90], vec![1; 5], vec![2; 5]].concat();
        Tree::new(vec![rows, vec![0, 0, 1]], vec![3, 2])
    }

    fn counts(tree: &Tree, rows: &[u32]) -> Vec<usize> {
        let mut counts = vec![0; tree.n_clusters(0)];
        rows.iter().for_each(|row| counts[tree.parents(0)[*row as usize] as usize] += 1);
        counts
    }

    /// Each cluster of the upper level has five of ten rows; the first divides its five between two
    /// clusters.
    #[test]
    fn shares_are_divided_from_the_highest_level() {
        let rows = sample(&tree(), 10, Order::Random, 1);
        let counts = counts(&tree(), &rows);
        assert_eq!(rows.len(), 10);
        assert_eq!(counts[2], 5);
        assert_eq!(counts[0] + counts[1], 5);
        assert!(counts[0].abs_diff(counts[1]) == 1);
        assert!(rows.is_sorted());
    }

    #[test]
    fn all_rows_of_small_clusters_are_chosen() {
        let rows = sample(&tree(), 40, Order::Random, 1);
        assert_eq!(counts(&tree(), &rows), [30, 5, 5]);
        assert_eq!(sample(&tree(), 1000, Order::Random, 1).len(), 100);
        assert_ne!(rows, sample(&tree(), 40, Order::Random, 2));
    }

    #[test]
    fn the_nearest_rows_are_chosen_first() {
        let distances: Vec<f32> = (0..100).map(|i| ((i + 50) % 100) as f32).collect();
        let rows = sample(&tree(), 10, Order::Nearest(&distances), 0);
        let first_cluster: Vec<u32> = rows.iter().copied().filter(|row| *row < 90).collect();
        assert!(first_cluster.iter().all(|row| (50..53).contains(row)), "{first_cluster:?}");
    }

    /// Weights are the frequencies, over seeds, with which rows are chosen.
    #[test]
    fn weights_are_probabilities() {
        let tree = tree();
        let weights = weights(&tree, 13.0);
        assert!((weights.iter().sum::<f64>() - 13.0).abs() < 1e-9);
        let mut seen = vec![0.0; 100];
        for seed in 0..4000 {
            sample(&tree, 13, Order::Random, seed).iter().for_each(|row| seen[*row as usize] += 1.0 / 4000.0);
        }
        for (seen, weight) in seen.iter().zip(&weights) {
            assert!((seen - weight).abs() < 0.04, "{seen} {weight}");
        }
    }

    proptest! {
        #[test]
        fn shares_add_up_to_the_number_of_rows(
            sizes in proptest::collection::vec(0u64..40, 1..30),
            n in 0u64..900,
        ) {
            let all: u64 = sizes.iter().sum();
            let shares = integer_shares(&sizes, n, Draw::new(0, "test"));
            prop_assert_eq!(shares.iter().sum::<u64>(), n.min(all));
            prop_assert!(shares.iter().zip(&sizes).all(|(share, size)| share <= size));
            // No share is smaller than another by two or more unless it is the whole cluster.
            let most = shares.iter().max().copied().unwrap_or(0);
            prop_assert!(shares.iter().zip(&sizes).all(|(share, size)| share + 1 >= most || share == size));
            let real = real_shares(&sizes, n as f64);
            prop_assert!((real.iter().sum::<f64>() - n.min(all) as f64).abs() < 1e-6);
        }
    }
}
