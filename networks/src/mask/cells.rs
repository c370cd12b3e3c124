//! The masked cells of sequences.

/// Domain that separates the streams of masks from all others.
pub(super) const MASK_DOMAIN: u64 = 0x6d61_736b_0000_0000;

/// What a network sees of masked cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Masking {
    /// Their patches, as without masks.
    #[default]
    Shown,
    /// A token for masked patches in their place.
    Replaced,
    /// Nothing: sequences have tokens of the visible cells only.
    Dropped,
}

/// Masked cells of the views of some images, in the order of their sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskedCells {
    /// Masked cells of each sequence, in ascending order within each block.
    pub cells: Vec<Vec<usize>>,
    /// Number of blocks of equal size that the masked cells of a sequence form, one after another.
    /// Blocks may overlap.
    pub n_blocks: usize,
    /// Cells of each sequence that a network sees from which masked cells are dropped, in ascending
    /// order; absent if it sees all others.
    pub visible: Option<Vec<Vec<usize>>>,
}

impl Default for MaskedCells {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

impl MaskedCells {
    /// Creates masked cells in one block per sequence; all others are visible.
    pub fn new(cells: Vec<Vec<usize>>) -> Self {
        Self { cells, n_blocks: 1, visible: None }
    }

    /// Returns the number of masked cells of all sequences.
    pub fn n(&self) -> usize {
        self.cells.iter().map(Vec::len).sum()
    }

    /// Returns the index of each masked cell in concatenated sequences of `n_prefix` + `n_cells`
    /// tokens; the first token if no cell is masked, because a tensor needs a row.
    pub fn tokens(&self, n_prefix: usize, n_cells: usize) -> Vec<usize> {
        let mut tokens = Vec::with_capacity(self.n().max(1));
        for (sequence, cells) in self.cells.iter().enumerate() {
            let first = sequence * (n_prefix + n_cells) + n_prefix;
            tokens.extend(cells.iter().map(|cell| first + cell));
        }
        if tokens.is_empty() {
            tokens.push(0);
        }
        tokens
    }

    /// Returns the weight of each masked cell, in the order of [`MaskedCells::tokens`]: the inverse
    /// of the number of masked cells of its sequence.
    pub fn weights(&self) -> Vec<f32> {
        self.cells.iter().flat_map(|cells| vec![1.0 / cells.len() as f32; cells.len()]).collect()
    }

    /// Returns the cells of each sequence that a network sees from which masked cells are dropped,
    /// of grids of `n_cells`.
    pub fn visible_cells(&self, n_cells: usize) -> Vec<Vec<usize>> {
        if let Some(visible) = &self.visible {
            return visible.clone();
        }
        let mut visible = Vec::with_capacity(self.cells.len());
        for cells in &self.cells {
            let mut is_masked = vec![false; n_cells];
            for cell in cells {
                is_masked[*cell] = true;
            }
            visible.push((0..n_cells).filter(|cell| !is_masked[*cell]).collect());
        }
        visible
    }

    /// Concatenates the rows of several groups of sequences, drawn by one rule.
    pub fn concat<'a>(parts: impl IntoIterator<Item = &'a MaskedCells>) -> MaskedCells {
        let mut all = MaskedCells::default();
        for part in parts {
            all.n_blocks = part.n_blocks;
            all.cells.extend(part.cells.iter().cloned());
            if let Some(visible) = &part.visible {
                all.visible.get_or_insert_default().extend(visible.iter().cloned());
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_numbered_over_sequences() {
        let rows = MaskedCells::new(vec![vec![0, 3], vec![], vec![2]]);
        assert_eq!(rows.tokens(1, 4), [1, 4, 13]);
        assert_eq!(rows.weights(), [0.5, 0.5, 1.0]);
        assert_eq!(rows.visible_cells(4), [vec![1, 2], vec![0, 1, 2, 3], vec![0, 1, 3]]);
        let none = MaskedCells::new(vec![vec![], vec![]]);
        assert_eq!((none.tokens(1, 4), none.weights(), none.n()), (vec![0], vec![], 0));
        assert_eq!(MaskedCells::concat([&rows, &none]).cells.len(), 5);
    }

    #[test]
    fn listed_visible_cells_are_concatenated() {
        let part = MaskedCells { cells: vec![vec![0, 1]], n_blocks: 2, visible: Some(vec![vec![3]]) };
        let both = MaskedCells::concat([&part, &part]);
        assert_eq!((both.n_blocks, both.visible_cells(4)), (2, vec![vec![3], vec![3]]));
    }
}
