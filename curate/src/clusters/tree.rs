//! A tree of clusters: rows are its leaves.

/// The cluster of every row, the cluster of every cluster, and so on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// By level, the lowest first: the cluster of each row, or of each cluster of the level below.
    parents: Vec<Vec<u32>>,
    /// Number of clusters of each level.
    n_clusters: Vec<usize>,
}

impl Tree {
    /// Creates a tree from the parents of rows and of clusters, the lowest level first, and the
    /// number of clusters of each level.
    ///
    /// # Panics
    /// If a level has another number of children than the one below has clusters, or a parent does
    /// not exist.
    pub fn new(parents: Vec<Vec<u32>>, n_clusters: Vec<usize>) -> Self {
        assert!(!parents.is_empty() && parents.len() == n_clusters.len(), "one number per level");
        for (level, (parents, n)) in parents.iter().zip(&n_clusters).enumerate() {
            assert!(level == 0 || parents.len() == n_clusters[level - 1], "a parent for each cluster");
            assert!(parents.iter().all(|parent| (*parent as usize) < *n), "parents exist");
        }
        Self { parents, n_clusters }
    }

    /// Returns the number of levels of clusters.
    pub fn n_levels(&self) -> usize {
        self.parents.len()
    }

    /// Returns the number of rows.
    pub fn n_rows(&self) -> usize {
        self.parents[0].len()
    }

    /// Returns the number of clusters of `level`, counted from 0 at the bottom.
    pub fn n_clusters(&self, level: usize) -> usize {
        self.n_clusters[level]
    }

    /// Returns the cluster of each row (`level` 0), or of each cluster of the level below.
    pub fn parents(&self, level: usize) -> &[u32] {
        &self.parents[level]
    }

    /// Returns the clusters of a row, the lowest level first.
    pub fn clusters_of(&self, row: usize) -> Vec<u32> {
        let mut cluster = row as u32;
        let mut clusters = Vec::with_capacity(self.n_levels());
        for parents in &self.parents {
            cluster = parents[cluster as usize];
            clusters.push(cluster);
        }
        clusters
    }

    /// Returns the numbers of rows of the clusters of each level, the lowest first.
    pub fn sizes(&self) -> Vec<Vec<u64>> {
        let mut child_sizes = vec![1u64; self.n_rows()];
        let mut all = Vec::with_capacity(self.n_levels());
        for (parents, n) in self.parents.iter().zip(&self.n_clusters) {
            let mut sizes = vec![0; *n];
            for (parent, size) in parents.iter().zip(&child_sizes) {
                sizes[*parent as usize] += size;
            }
            child_sizes.clone_from(&sizes);
            all.push(sizes);
        }
        all
    }

    /// Returns the children of each cluster of `level`, in their order.
    pub fn children(&self, level: usize) -> Vec<Vec<u32>> {
        let mut children = vec![Vec::new(); self.n_clusters[level]];
        for (child, parent) in (0u32..).zip(&self.parents[level]) {
            children[*parent as usize].push(child);
        }
        children
    }
}
