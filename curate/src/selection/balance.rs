//! Hierarchical sampling (Vo et al. 2024, section 3.3): a number of rows is divided evenly among
//! the clusters of the highest level, the share of each evenly among its clusters, and so on.
//!
//! ```text
//! share of cluster j = min(size_j, b), with b so that the shares add up to what is to be divided
//! ```
//!
//! If b is a fraction, it is rounded down, and clusters with more rows are drawn that have one
//! more.

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
    let shares = divided(
        tree,
        |level, sizes, share, parent| {
            whole_shares(sizes, share as u64, draw.stream(level as u64).stream(parent))
                .into_iter()
                .map(|s| s as f64)
                .collect()
        },
        n as f64,
    );
    let members = tree.children(0);
    let mut chosen = Vec::with_capacity(n);
    for (mut rows, share) in members.into_iter().zip(shares) {
        let key = |row: &u32| match order {
            Order::Random => draw.stream(u64::MAX).uniform(u64::from(*row)),
            Order::Nearest(distances) => f64::from(distances[*row as usize]),
        };
        rows.sort_by(|a, b| key(a).total_cmp(&key(b)).then(a.cmp(b)));
        chosen.extend(rows.into_iter().take(share as usize));
    }
    chosen.sort_unstable();
    chosen
}

/// Returns the probability with which [`sample`] chooses each row, `[N]`, if `n` are chosen at
/// random: weights for a loader that shows rows more or less often instead.
pub fn weights(tree: &Tree, n: f64) -> Vec<f64> {
    let shares = divided(tree, |_, sizes, share, _| real_shares(sizes, share), n);
    let sizes = &tree.sizes()[0];
    tree.parents(0).iter().map(|parent| shares[*parent as usize] / sizes[*parent as usize] as f64).collect()
}

/// Divides `n` among the clusters of the lowest level, from the highest one down: `divide` is given
/// level, sizes of the clusters that share, what they share, and the number of their parent.
fn divided(tree: &Tree, divide: impl Fn(usize, &[u64], f64, u64) -> Vec<f64>, n: f64) -> Vec<f64> {
    let sizes = tree.sizes();
    let top = tree.n_levels() - 1;
    let mut shares = divide(top + 1, &sizes[top], n, 0);
    for level in (1..=top).rev() {
        let mut below = vec![0.0; tree.n_clusters(level - 1)];
        for (parent, children) in tree.children(level).iter().enumerate() {
            let sizes: Vec<u64> = children.iter().map(|child| sizes[level - 1][*child as usize]).collect();
            let parts = divide(level, &sizes, shares[parent], parent as u64);
            for (child, part) in children.iter().zip(parts) {
                below[*child as usize] = part;
            }
        }
        shares = below;
    }
    shares
}

/// Returns `min(size, b)` for each cluster, with the largest whole b whose sum is at most `n`; what
/// is left goes, one each, to clusters that have more than b, drawn at random.
fn whole_shares(sizes: &[u64], n: u64, draw: Draw) -> Vec<u64> {
    if sizes.iter().sum::<u64>() <= n {
        return sizes.to_vec();
    }
    let sum = |bound: u64| sizes.iter().map(|size| (*size).min(bound)).sum::<u64>();
    let mut low = 0;
    let mut high = sizes.iter().copied().max().unwrap_or(0);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if sum(middle) <= n { low = middle } else { high = middle }
    }
    let mut shares: Vec<u64> = sizes.iter().map(|size| (*size).min(low)).collect();
    let mut larger: Vec<usize> = (0..sizes.len()).filter(|cluster| sizes[*cluster] > low).collect();
    larger.sort_by_key(|cluster| (draw.bits(*cluster as u64), *cluster));
    for cluster in larger.into_iter().take((n - sum(low)) as usize) {
        shares[cluster] += 1;
    }
    shares
}

/// Returns `min(size, b)` for each cluster, with b so that the sum is `n`.
fn real_shares(sizes: &[u64], n: f64) -> Vec<f64> {
    let mut order: Vec<u64> = sizes.iter().copied().filter(|size| *size > 0).collect();
    order.sort_unstable();
    let mut left = n;
    let mut bound = f64::INFINITY;
    for (number, size) in order.iter().enumerate() {
        let n_clusters = (order.len() - number) as f64;
        if *size as f64 * n_clusters >= left {
            bound = left / n_clusters;
            break;
        }
        left -= *size as f64;
    }
    sizes.iter().map(|size| (*size as f64).min(bound)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Two levels: clusters of 90, 5 and 5 rows; the first two have one parent, the last one has
    /// the other.
    fn tree() -> Tree {
        let rows = [vec![0u32; 90], vec![1; 5], vec![2; 5]].concat();
        Tree::new(vec![rows, vec![0, 0, 1]], vec![3, 2])
    }

    fn counts(tree: &Tree, rows: &[u32]) -> Vec<usize> {
        let mut counts = vec![0; tree.n_clusters(0)];
        rows.iter().for_each(|row| counts[tree.parents(0)[*row as usize] as usize] += 1);
        counts
    }

    /// Half of ten for each cluster of the upper level; of the first, five for two clusters: one
    /// has three.
    #[test]
    fn shares_are_divided_from_the_top() {
        let rows = sample(&tree(), 10, Order::Random, 1);
        let counts = counts(&tree(), &rows);
        assert_eq!(rows.len(), 10);
        assert_eq!(counts[2], 5);
        assert_eq!(counts[0] + counts[1], 5);
        assert!(counts[0].abs_diff(counts[1]) == 1);
        assert!(rows.is_sorted());
    }

    #[test]
    fn small_clusters_give_all_they_have() {
        let rows = sample(&tree(), 40, Order::Random, 1);
        assert_eq!(counts(&tree(), &rows), [30, 5, 5]);
        assert_eq!(sample(&tree(), 1000, Order::Random, 1).len(), 100);
        assert_ne!(rows, sample(&tree(), 40, Order::Random, 2));
    }

    #[test]
    fn the_nearest_rows_come_first() {
        let distances: Vec<f32> = (0..100).map(|i| ((i + 50) % 100) as f32).collect();
        let rows = sample(&tree(), 10, Order::Nearest(&distances), 0);
        let of_first: Vec<u32> = rows.iter().copied().filter(|row| *row < 90).collect();
        assert!(of_first.iter().all(|row| (50..53).contains(row)), "{of_first:?}");
    }

    /// Weights are the mean over seeds of what is chosen.
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
        fn shares_add_up(sizes in proptest::collection::vec(0u64..40, 1..30), n in 0u64..900) {
            let all: u64 = sizes.iter().sum();
            let shares = whole_shares(&sizes, n, Draw::new(0, "test"));
            prop_assert_eq!(shares.iter().sum::<u64>(), n.min(all));
            prop_assert!(shares.iter().zip(&sizes).all(|(share, size)| share <= size));
            // No cluster has two less than another unless it has given all.
            let most = shares.iter().max().copied().unwrap_or(0);
            prop_assert!(shares.iter().zip(&sizes).all(|(share, size)| share + 1 >= most || share == size));
            let real = real_shares(&sizes, n as f64);
            prop_assert!((real.iter().sum::<f64>() - n.min(all) as f64).abs() < 1e-6);
        }
    }
}
