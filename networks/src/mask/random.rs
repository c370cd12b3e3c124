//! Random cells, the same number in every view (MAE: He et al. 2022).
//!
//! ```text
//! all cells are shuffled; the first ⌊(1 - r) N⌋ are visible, the others masked
//! ```

use augment::ViewRng;

use super::cells::MASK_DOMAIN;

/// Random cells, the same number in every view.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomMasks {
    /// Share of a view's cells that is masked.
    pub ratio: f64,
}

impl RandomMasks {
    /// Checks that some cells are masked, and some visible.
    ///
    /// # Errors
    /// Description of the invalid rule.
    pub(super) fn validate(self) -> Result<(), String> {
        if self.ratio > 0.0 && self.ratio < 1.0 {
            Ok(())
        } else {
            Err(format!("masks: the masked share {} must be above 0 and below 1", self.ratio))
        }
    }
}

/// Sampler of the masks of a step.
pub(super) struct RandomSampler {
    n_cells: usize,
    n_visible: usize,
    seed: u64,
    step: u64,
}

impl RandomSampler {
    pub(super) fn new(masks: RandomMasks, seed: u64, step: u64, grid: [usize; 2]) -> Self {
        let n_cells = grid[0] * grid[1];
        let n_visible = (n_cells as f64 * (1.0 - masks.ratio)) as usize;
        // At least one cell is seen, and one is predicted.
        let n_visible = n_visible.max(1).min(n_cells.saturating_sub(1));
        Self { n_cells, n_visible, seed, step }
    }

    /// Draws the masked cells of one view.
    pub(super) fn cells(&self, position: u64, view: usize) -> Vec<usize> {
        let words = [self.seed, MASK_DOMAIN ^ self.step, position, view as u64];
        let mut cells: Vec<usize> = (0..self.n_cells).collect();
        ViewRng::from_words(words).shuffle(&mut cells);
        let mut masked = cells.split_off(self.n_visible);
        masked.sort_unstable();
        masked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{MaskKind, MaskRule};

    #[test]
    fn every_view_has_the_same_number_of_random_cells() {
        let rule = MaskRule { size: 0, kind: MaskKind::Random(RandomMasks { ratio: 0.75 }) };
        let rows = rule.at(1, 2, 64, 1, [14, 14]).rows(0..64);
        let mut n_masked_of_cell = vec![0; 196];
        for (cells, visible) in rows.cells.iter().zip(rows.visible_cells(196)) {
            assert_eq!((cells.len(), visible.len()), (147, 49));
            assert!(cells.windows(2).all(|pair| pair[0] < pair[1]));
            cells.iter().for_each(|cell| n_masked_of_cell[*cell] += 1);
        }
        assert!(n_masked_of_cell.iter().all(|n| (30..=64).contains(n)), "{n_masked_of_cell:?}");
        assert_ne!(rows.cells[0], rows.cells[1]);
        let count = rule.count(1, [14, 14]);
        assert_eq!((count.mean, count.deviation, count.visible), (147.0, 0.0, 49.0));
        for ratio in [1e-9, 0.999_999] {
            let rule = MaskRule { size: 0, kind: MaskKind::Random(RandomMasks { ratio }) };
            let n = rule.at(1, 2, 1, 1, [2, 2]).rows(0..1).n();
            assert_eq!(n, if ratio < 0.5 { 1 } else { 3 });
        }
    }
}
