//! Masks in blocks, in some of the views.
//!
//! ```text
//! a share of the views of a batch is masked, each in about a part r of its cells
//! independent   each view with the probability of the share                                        r ~ U(a, b)
//! spread        the i-th of n shuffled views    r ~ U(a + (b - a) i / n, a + (b - a)(i + 1) / n)
//! exact         the i-th of n shuffled views    r = a + (b - a)(i + 1) / n       [a, b] the ratios of the rule
//! blocks of U(smallest, room) cells with sides in a ratio of 0.3 to 3.3 are placed until there is no room
//! ```
//!
//! BEiT places blocks in this way (Bao et al. 2022), iBOT draws ratios independently (Zhou et al.
//! 2022), and DINOv2 spreads them over a batch (Oquab et al. 2023). With exact counts, single cells
//! are masked after the blocks until the count is reached, as in DINOv3.

use augment::ViewRng;

use super::cells::MASK_DOMAIN;

/// Largest ratio of a block's sides.
const ELONGATION: f64 = 1.0 / 0.3;

/// Number of attempts to place a block.
const N_ATTEMPTS: usize = 10;

/// Masks in blocks, in some of the views.
///
/// A view may stay without masked cells: if it is not among the share of masked views, if its ratio
/// of the grid is less than one cell, and, unless the spread is [`Spread::Exact`], if no attempt to
/// place a block succeeds, as with large blocks on a small grid. Every view has masked cells if all
/// views are masked, the spread is exact and the smallest ratio is at least one cell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockMasks {
    /// Share of the views that are masked.
    pub masked_share: f64,
    /// Smallest and largest share of a masked view's cells.
    pub ratio: [f64; 2],
    /// Rule for the share of each view.
    pub spread: Spread,
    /// Number of consecutive images over whose views shares are spread; 0 for the whole batch.
    pub group: usize,
    /// Number of cells of the smallest block.
    pub smallest_block: SmallestBlock,
}

/// Rule for the share of a view's cells that is masked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// Each view draws for itself whether it is masked, and its share. Blocks may fall short of the
    /// share.
    Independent,
    /// Shares are spread evenly over the masked views of the batch. Blocks may fall short of them.
    Even,
    /// Shares are spread evenly over the masked views of the batch, and exactly as many cells are
    /// masked.
    Exact,
}

/// Size of the smallest block of masked cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SmallestBlock {
    /// Number of cells: DINOv2, DINOv3.
    Cells(usize),
    /// Square of a third of the grid's side: iBOT.
    ThirdOfSide,
}

impl SmallestBlock {
    /// Returns the number of cells on a grid.
    fn n_cells(self, [rows, columns]: [usize; 2]) -> usize {
        match self {
            Self::Cells(n) => n,
            Self::ThirdOfSide => (rows / 3 * (columns / 3)).max(1),
        }
    }
}

/// Sampler of the masks of a step.
pub(super) struct BlockSampler {
    rule: BlockMasks,
    seed: u64,
    step: u64,
    /// Number of views of an image.
    n_views: usize,
    grid: [usize; 2],
    /// Rank of each view of the global batch among the masked views of its group; `None` for a
    /// view without masks.
    ranks: Vec<Option<ViewRank>>,
}

/// Rank of a view in the random order of the masked views over which shares are spread.
#[derive(Debug, Clone, Copy)]
struct ViewRank {
    index: usize,
    /// Number of masked views in the order.
    n_masked: usize,
}

impl BlockMasks {
    /// Checks that shares lie in 0..=1, and ratios in ascending order.
    ///
    /// # Errors
    /// Description of the invalid rule.
    pub(super) fn validate(&self) -> Result<(), String> {
        let [low, high] = self.ratio;
        let are_shares = (0.0..=1.0).contains(&self.masked_share) && 0.0 <= low && low <= high && high <= 1.0;
        if are_shares && self.smallest_block != SmallestBlock::Cells(0) {
            Ok(())
        } else {
            Err(format!("masks: shares must lie in 0..=1 and blocks must have at least one cell: {self:?}"))
        }
    }

    /// Returns whether shares are spread over the views of a batch, so that all batches have about
    /// the same number of masked cells.
    pub(super) fn is_spread(&self) -> bool {
        self.spread != Spread::Independent
    }

    /// Returns the lower bound of part `index` of `n` equal parts of the range of ratios.
    fn lower_ratio(&self, index: usize, n: usize) -> f64 {
        let [low, high] = self.ratio;
        low + (high - low) * index as f64 / n as f64
    }
}

impl BlockSampler {
    /// Prepares the masks of `step` for `batch_size` images of `n_views` views each.
    pub(super) fn new(
        rule: BlockMasks,
        seed: u64,
        step: u64,
        batch_size: usize,
        n_views: usize,
        grid: [usize; 2],
    ) -> Self {
        let n = batch_size * n_views;
        let mut ranks = vec![None; n];
        if rule.is_spread() {
            let group_size = if rule.group == 0 { n } else { rule.group * n_views };
            for (group, views) in ranks.chunks_mut(group_size.max(1)).enumerate() {
                let n_masked = (views.len() as f64 * rule.masked_share) as usize;
                let mut shuffled: Vec<usize> = (0..views.len()).collect();
                let mut rng = ViewRng::from_words([seed, MASK_DOMAIN ^ step, u64::MAX, group as u64]);
                rng.shuffle(&mut shuffled);
                for (index, view) in shuffled.into_iter().take(n_masked).enumerate() {
                    views[view] = Some(ViewRank { index, n_masked });
                }
            }
        }
        Self { rule, seed, step, n_views, grid, ranks }
    }

    /// Draws the masked cells of one view.
    pub(super) fn cells(&self, position: u64, view: usize) -> Vec<usize> {
        let words = [self.seed, MASK_DOMAIN ^ self.step, position, view as u64];
        let mut rng = ViewRng::from_words(words);
        let Some(ratio) = self.ratio(position as usize * self.n_views + view, &mut rng) else {
            return Vec::new();
        };
        let n = self.grid[0] * self.grid[1];
        let target = (n as f64 * ratio) as usize;
        // The largest block, as DINOv2's code rounds it.
        let largest = (self.grid[0] / 2 * self.grid[1]) as f64;
        let mut is_masked = vec![false; n];
        let mut n_masked = 0;
        while n_masked < target {
            let room = ((target - n_masked) as f64).min(largest);
            let smallest = self.rule.smallest_block.n_cells(self.grid) as f64;
            match place_block(&mut rng, self.grid, smallest, room, &mut is_masked) {
                0 => break,
                n_new => n_masked += n_new,
            }
        }
        if self.rule.spread == Spread::Exact {
            let free: Vec<usize> = (0..n).filter(|cell| !is_masked[*cell]).collect();
            for cell in choose(&mut rng, free, target - n_masked) {
                is_masked[cell] = true;
            }
        }
        (0..n).filter(|cell| is_masked[*cell]).collect()
    }

    /// Draws the share of the cells of view `index` of the global batch that is masked; `None` for
    /// a view without masks.
    fn ratio(&self, index: usize, rng: &mut ViewRng) -> Option<f64> {
        if self.rule.spread == Spread::Independent {
            let [low, high] = self.rule.ratio;
            let is_masked = rng.chance(self.rule.masked_share as f32);
            return is_masked.then(|| rng.between(low, high));
        }
        let ViewRank { index, n_masked } = self.ranks[index]?;
        let upper = self.rule.lower_ratio(index + 1, n_masked);
        if self.rule.spread == Spread::Exact {
            return Some(upper);
        }
        Some(rng.between(self.rule.lower_ratio(index, n_masked), upper))
    }
}

/// Places a block with an area of `smallest` to `room` cells, of which at most `room` are new.
/// Returns the number of cells that it masks: 0 if all attempts fail.
fn place_block(
    rng: &mut ViewRng,
    [rows, columns]: [usize; 2],
    smallest: f64,
    room: f64,
    is_masked: &mut [bool],
) -> usize {
    for _ in 0..N_ATTEMPTS {
        let area = rng.between(smallest, room);
        let aspect = rng.between(-ELONGATION.ln(), ELONGATION.ln()).exp();
        let h = (area * aspect).sqrt().round() as usize;
        let w = (area / aspect).sqrt().round() as usize;
        if h == 0 || w == 0 || h >= rows || w >= columns {
            continue;
        }
        let top = rng.below((rows - h + 1) as u32) as usize;
        let left = rng.below((columns - w + 1) as u32) as usize;
        let cells = (top..top + h).flat_map(|row| (left..left + w).map(move |column| row * columns + column));
        let free: Vec<usize> = cells.filter(|cell| !is_masked[*cell]).collect();
        if !free.is_empty() && free.len() as f64 <= room {
            for cell in &free {
                is_masked[*cell] = true;
            }
            return free.len();
        }
    }
    0
}

/// Chooses `n` of `cells` at random.
fn choose(rng: &mut ViewRng, mut cells: Vec<usize>, n: usize) -> Vec<usize> {
    for i in 0..n.min(cells.len()) {
        let other = i + rng.below((cells.len() - i) as u32) as usize;
        cells.swap(i, other);
    }
    cells.truncate(n);
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{MaskKind, MaskRule, MaskedCells};
    use proptest::prelude::*;

    fn masks(spread: Spread) -> BlockMasks {
        BlockMasks {
            masked_share: 0.5,
            ratio: [0.1, 0.5],
            spread,
            group: 0,
            smallest_block: SmallestBlock::Cells(4),
        }
    }

    fn rule(spread: Spread) -> MaskRule {
        MaskRule { size: 0, kind: MaskKind::Blocks(masks(spread)) }
    }

    /// Draws the masks of 512 images with two views each, over which shares are spread exactly in
    /// groups of `group` images.
    fn draw_in_groups(group: usize) -> MaskedCells {
        let kind = MaskKind::Blocks(BlockMasks { group, ..masks(Spread::Exact) });
        MaskRule { size: 0, kind }.at(3, 5, 512, 2, [40, 40]).rows(0..512)
    }

    /// With exact shares, which are the upper bounds of their parts, smaller groups of views have
    /// more masked cells: n masked views have (1 + 2 / 3n) times the cells of very many views, for
    /// ratios between 0.1 and 0.5.
    #[test]
    fn shares_are_spread_within_each_group_of_images() {
        let n_batch_cells = draw_in_groups(0).n() as f64;
        for (group, factor) in
            [(64, 1.0 + 2.0 / 3.0 / 64.0), (16, 1.0 + 2.0 / 3.0 / 16.0), (8, 1.0 + 2.0 / 3.0 / 8.0)]
        {
            let rows = draw_in_groups(group);
            for views in rows.cells.chunks(2 * group) {
                let n_masked_views = views.iter().filter(|cells| !cells.is_empty()).count();
                assert_eq!(n_masked_views, group, "half of the views");
            }
            let ratio = rows.n() as f64 / n_batch_cells;
            // The whole batch has 512 masked views.
            let expected = factor / (1.0 + 2.0 / 3.0 / 512.0);
            assert!((ratio - expected).abs() < 1e-3, "{group}: {ratio}, not {expected}");
        }
    }

    fn spread() -> impl Strategy<Value = Spread> {
        prop_oneof![Just(Spread::Independent), Just(Spread::Even), Just(Spread::Exact)]
    }

    proptest! {
        /// No more views and cells are masked than the rule allows, and the masks of an image do
        /// not depend on the images that are drawn with it.
        #[test]
        fn masks_obey_their_rule(
            seed: u64,
            step in 0u64..100,
            batch in 1usize..20,
            side in 3usize..15,
            spread in spread(),
        ) {
            let sampler = rule(spread).at(seed, step, batch, 2, [side; 2]);
            let all = sampler.rows(0..batch as u64);
            let masked: Vec<&Vec<usize>> = all.cells.iter().filter(|cells| !cells.is_empty()).collect();
            prop_assert!(spread == Spread::Independent || masked.len() <= batch);
            let n = side * side;
            for cells in &masked {
                prop_assert!(cells.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(cells.iter().all(|cell| *cell < n));
                prop_assert!(cells.len() as f64 <= 0.5 * n as f64);
            }
            if spread == Spread::Exact {
                let mut counts: Vec<usize> = all.cells.iter().map(Vec::len).collect();
                counts.sort_unstable();
                let mut expected = vec![0; batch];
                for i in 0..batch {
                    let ratio = 0.1 + (0.5 - 0.1) * (i + 1) as f64 / batch as f64;
                    expected.push((n as f64 * ratio) as usize);
                }
                prop_assert_eq!(counts, expected);
            }
            for position in 0..batch as u64 {
                let rows = sampler.rows(std::iter::once(position));
                prop_assert_eq!(&rows.cells[..], &all.cells[2 * position as usize..][..2]);
            }
        }
    }

    /// Half of the views are masked, and close to 30 % of their cells on average.
    #[test]
    fn the_masked_share_is_close_to_the_rule() {
        for spread in [Spread::Independent, Spread::Even, Spread::Exact] {
            let rule = rule(spread);
            let n: usize = (0..20).map(|step| rule.at(1, step, 16, 2, [14, 14]).rows(0..16).n()).sum();
            let mean = rule.count(2, [14, 14]).mean;
            let share = n as f64 / (20.0 * 16.0 * mean);
            assert!((0.95..=1.05).contains(&share), "{spread:?}: {share}");
            // The mean of the ratios; blocks fall short of it.
            let relative_mean = mean / (2.0 * 196.0 * 0.5 * 0.3);
            let least = if spread == Spread::Exact { 0.98 } else { 0.88 };
            assert!((least..=1.02).contains(&relative_mean), "{spread:?}: {relative_mean}");
        }
    }

    /// One to five of a hundred random masks have more cells than the high number, for a part of a
    /// batch as well as for whole batches.
    #[test]
    fn few_random_masks_exceed_the_high_number() {
        for (spread, n_images) in
            [(Spread::Independent, 32), (Spread::Independent, 8), (Spread::Even, 8), (Spread::Exact, 16)]
        {
            let rule = rule(spread);
            let count = rule.count(2, [8, 8]);
            let high = count.mean * n_images as f64 * count.high_ratio(n_images as f64, 32.0);
            let n_masked = (0..2000).map(|step| rule.at(1, step, 32, 2, [8, 8]).rows(0..n_images).n() as f64);
            let n_above = n_masked.filter(|n_masked| *n_masked > high).count();
            assert!((20..=110).contains(&n_above), "{spread:?}, {n_images} images: {n_above} of 2000");
        }
        assert_eq!(rule(Spread::Even).count(2, [8, 8]).high_ratio(32.0, 32.0), 1.0);
        let kind = MaskKind::Blocks(BlockMasks { masked_share: 0.0, ..masks(Spread::Even) });
        assert_eq!(MaskRule { size: 0, kind }.count(2, [8, 8]).high_ratio(8.0, 32.0), 1.0);
    }
}
