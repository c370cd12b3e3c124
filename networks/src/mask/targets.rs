//! Target blocks and a context block in every view (I-JEPA: Assran et al. 2023).
//!
//! ```text
//! sizes, once per step     s ~ U(a, b) of the cells, sides √(s N ρ) and √(s N / ρ), ρ the aspect at the same place of its range
//! targets                  M blocks of one size at random places; they may overlap
//! context                  a block of another size at a random place, without the targets' cells
//! ```
//!
//! If the context would have too few cells, it is drawn again; after twenty draws, one target fewer
//! is kept out of it. As in the official code, a block never touches the last row and column unless
//! there is no other place. The contexts of a batch have different numbers of cells; the official
//! code cuts them to the smallest.

use augment::ViewRng;

use super::cells::MASK_DOMAIN;

/// Draws of a context after which one target fewer is kept out of it.
const N_DRAWS: usize = 20;

/// Target blocks and a context block in every view.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TargetMasks {
    /// Number of target blocks, M.
    pub n_targets: usize,
    /// Smallest and largest share of the cells in a target.
    pub target_scale: [f64; 2],
    /// Smallest and largest ratio of a target's sides.
    pub target_aspect: [f64; 2],
    /// Smallest and largest share of the cells in the context, whose sides are in the ratio of the
    /// grid's.
    pub context_scale: [f64; 2],
    /// Number of cells that the context has more than.
    pub min_context: usize,
}

impl TargetMasks {
    /// Checks that there are targets, and that ranges are ascending.
    ///
    /// # Errors
    /// Description of the invalid rule.
    pub(super) fn validate(self) -> Result<(), String> {
        let are_shares = [self.target_scale, self.context_scale]
            .iter()
            .all(|[low, high]| 0.0 < *low && low <= high && *high <= 1.0);
        let [low, high] = self.target_aspect;
        if self.n_targets > 0 && are_shares && low > 0.0 && low <= high && high <= 100.0 {
            Ok(())
        } else {
            Err(format!("masks: shares must be above 0 and at most 1, ranges ascending: {self:?}"))
        }
    }
}

impl TargetMasks {
    /// Returns the number of cells of the smallest context block on `grid`, before those of targets
    /// are left out.
    pub fn smallest_context(&self, grid: [usize; 2]) -> usize {
        let [rows, columns] = block_size(grid, 0.0, self.context_scale, [1.0, 1.0]);
        rows * columns
    }
}

/// The masks of one view.
pub(super) struct TargetMask {
    /// Cells of all targets, target after target.
    pub(super) targets: Vec<usize>,
    /// Cells of the context, in ascending order.
    pub(super) context: Vec<usize>,
}

/// Sampler of the masks of a step.
pub(super) struct TargetSampler {
    masks: TargetMasks,
    grid: [usize; 2],
    seed: u64,
    step: u64,
    /// Rows and columns of a target.
    target: [usize; 2],
    /// Rows and columns of the context block.
    context: [usize; 2],
}

/// Returns rows and columns of a block on `grid`, whose share and aspect are at `place` of their
/// ranges, in 0..1.
fn block_size(grid: [usize; 2], place: f64, scale: [f64; 2], aspect: [f64; 2]) -> [usize; 2] {
    let n_cells = (grid[0] * grid[1]) as f64;
    let area = (n_cells * (scale[0] + place * (scale[1] - scale[0]))).floor();
    let aspect = aspect[0] + place * (aspect[1] - aspect[0]);
    let rows = (area * aspect).sqrt().round_ties_even() as usize;
    let columns = (area / aspect).sqrt().round_ties_even() as usize;
    [rows.min(grid[0].saturating_sub(1)).max(1), columns.min(grid[1].saturating_sub(1)).max(1)]
}

impl TargetSampler {
    pub(super) fn new(masks: TargetMasks, seed: u64, step: u64, grid: [usize; 2]) -> Self {
        let mut rng = ViewRng::from_words([seed, MASK_DOMAIN ^ step, u64::MAX, 0]);
        let target = block_size(grid, rng.between(0.0, 1.0), masks.target_scale, masks.target_aspect);
        let context = block_size(grid, rng.between(0.0, 1.0), masks.context_scale, [1.0, 1.0]);
        Self { masks, grid, seed, step, target, context }
    }

    /// Returns the number of targets of a view.
    pub(super) fn n_blocks(&self) -> usize {
        self.masks.n_targets
    }

    /// Draws the masks of one view.
    pub(super) fn mask(&self, position: u64, view: usize) -> TargetMask {
        let mut rng = ViewRng::from_words([self.seed, MASK_DOMAIN ^ self.step, position, view as u64]);
        let mut targets = Vec::with_capacity(self.masks.n_targets);
        for _ in 0..self.masks.n_targets {
            targets.push(self.place(self.target, &mut rng));
        }
        let mut n_excluded = targets.len();
        let context = loop {
            let context = self.draw_context(&targets[..n_excluded], &mut rng);
            match context {
                Some(context) => break context,
                // The whole block, however small, when no target is kept out of it.
                None if n_excluded == 0 => break self.place(self.context, &mut rng),
                None => n_excluded -= 1,
            }
        };
        TargetMask { targets: targets.concat(), context }
    }

    /// Draws a context without the cells of `excluded` targets; `None` if it has too few cells in
    /// every draw.
    fn draw_context(&self, excluded: &[Vec<usize>], rng: &mut ViewRng) -> Option<Vec<usize>> {
        for _ in 0..N_DRAWS {
            let mut context = self.place(self.context, rng);
            context.retain(|cell| !excluded.iter().any(|target| target.contains(cell)));
            if context.len() > self.masks.min_context {
                return Some(context);
            }
        }
        None
    }

    /// Returns the cells of a block of `size` at a random place, in ascending order.
    fn place(&self, size: [usize; 2], rng: &mut ViewRng) -> Vec<usize> {
        let [rows, columns] = self.grid;
        let top = rng.below((rows - size[0]).max(1) as u32) as usize;
        let left = rng.below((columns - size[1]).max(1) as u32) as usize;
        let mut cells = Vec::with_capacity(size[0] * size[1]);
        for row in top..top + size[0] {
            cells.extend((left..left + size[1]).map(|column| row * columns + column));
        }
        cells
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{MaskKind, MaskRule};

    const MASKS: TargetMasks = TargetMasks {
        n_targets: 4,
        target_scale: [0.15, 0.2],
        target_aspect: [0.75, 1.5],
        context_scale: [0.85, 1.0],
        min_context: 10,
    };

    /// Targets have the published sizes, and a context has no cell of a target.
    #[test]
    fn contexts_leave_out_the_targets() {
        let rule = MaskRule { size: 0, kind: MaskKind::Targets(MASKS) };
        for step in 0..50 {
            let rows = rule.at(3, step, 8, 1, [14, 14]).rows(0..8);
            let n = rows.cells[0].len() / 4;
            assert!((24..=42).contains(&n), "{n} cells of 196");
            for (targets, context) in rows.cells.iter().zip(rows.visible_cells(196)) {
                assert_eq!(targets.len(), 4 * n);
                assert!(context.len() > 10 && context.windows(2).all(|pair| pair[0] < pair[1]));
                assert!(context.iter().all(|cell| *cell < 196 && !targets.contains(cell)));
                for target in targets.chunks(n) {
                    assert!(target.windows(2).all(|pair| pair[0] < pair[1]));
                }
            }
        }
        let count = rule.count(1, [14, 14]);
        assert!((96.0..170.0).contains(&count.mean) && (50.0..110.0).contains(&count.visible), "{count:?}");
    }

    /// On a small grid there may be no context beside all targets.
    #[test]
    fn targets_are_seen_where_there_is_no_other_context() {
        for side in [2, 3, 4] {
            let rule = MaskRule { size: 0, kind: MaskKind::Targets(MASKS) };
            let rows = rule.at(3, 1, 16, 1, [side, side]).rows(0..16);
            assert!(rows.visible_cells(side * side).iter().all(|context| !context.is_empty()));
            assert!(rows.cells.iter().all(|cells| !cells.is_empty()));
        }
    }

    /// Sizes by the official formula: `round(sqrt(int(196 * 0.175) * 1.125))` and so on.
    #[test]
    fn block_sizes_are_the_official_ones() {
        assert_eq!(block_size([14, 14], 0.5, [0.15, 0.2], [0.75, 1.5]), [6, 5]);
        assert_eq!(block_size([14, 14], 0.0, [0.15, 0.2], [0.75, 1.5]), [5, 6]);
        assert_eq!(block_size([14, 14], 1.0, [0.85, 1.0], [1.0, 1.0]), [13, 13]);
    }
}
