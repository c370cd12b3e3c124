//! Rules for masks, and their sampling for a batch.

use super::blocks::{BlockMasks, BlockSampler};
use super::cells::MaskedCells;
use super::random::{RandomMasks, RandomSampler};
use super::targets::{TargetMasks, TargetSampler};

/// Number of images whose masks are drawn to count cells.
const N_COUNTED_IMAGES: usize = 1024;

/// Rule for the masks of the views of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaskRule {
    /// Index of the size of views.
    pub size: usize,
    /// Cells that are masked.
    pub kind: MaskKind,
}

/// A kind of masks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MaskKind {
    /// Blocks in some of the views: BEiT, iBOT, DINOv2, DINOv3.
    Blocks(BlockMasks),
    /// The same number of random cells in every view: MAE.
    Random(RandomMasks),
    /// Blocks of the same size in every view, seen from a larger block: I-JEPA.
    Targets(TargetMasks),
}

/// Numbers of cells of an image's views, counted in random masks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaskedCount {
    /// Mean number of masked cells over images.
    pub mean: f64,
    /// Standard deviation of the number of masked cells over images.
    pub deviation: f64,
    /// Whether all batches have about the same number of masked cells.
    pub is_spread: bool,
    /// Mean number of cells that a network sees from which masked cells are dropped.
    pub visible: f64,
}

/// Sampler of the masks of a step.
pub struct MaskSampler {
    /// Number of views of an image.
    n_views: usize,
    kind: KindSampler,
}

/// A sampler of one kind of masks.
enum KindSampler {
    Blocks(BlockSampler),
    Random(RandomSampler),
    Targets(TargetSampler),
}

impl MaskRule {
    /// Checks the settings of the kind.
    ///
    /// # Errors
    /// Description of the invalid rule.
    pub fn validate(&self) -> Result<(), String> {
        match self.kind {
            MaskKind::Blocks(masks) => masks.validate(),
            MaskKind::Random(masks) => masks.validate(),
            MaskKind::Targets(masks) => masks.validate(),
        }
    }

    /// Returns the number of blocks that the masked cells of a view form.
    pub fn n_blocks(&self) -> usize {
        match self.kind {
            MaskKind::Blocks(_) | MaskKind::Random(_) => 1,
            MaskKind::Targets(masks) => masks.n_targets,
        }
    }

    /// Counts the masked cells of an image's `n_views` views on a grid.
    pub fn count(self, n_views: usize, grid: [usize; 2]) -> MaskedCount {
        let n = N_COUNTED_IMAGES as f64;
        let rows = self.at(0, 0, N_COUNTED_IMAGES, n_views, grid).rows(0..N_COUNTED_IMAGES as u64);
        let views_by_image = rows.cells.chunks(n_views.max(1));
        let counts: Vec<f64> =
            views_by_image.map(|views| views.iter().map(Vec::len).sum::<usize>() as f64).collect();
        let mean = counts.iter().sum::<f64>() / n;
        let squares: f64 = counts.iter().map(|count| (count - mean).powi(2)).sum();
        let visible: usize = rows.visible_cells(grid[0] * grid[1]).iter().map(Vec::len).sum();
        let is_spread = match self.kind {
            MaskKind::Blocks(masks) => masks.is_spread(),
            MaskKind::Random(_) | MaskKind::Targets(_) => true,
        };
        MaskedCount { mean, deviation: (squares / n).sqrt(), is_spread, visible: visible as f64 / n }
    }

    /// Prepares the masks of `step` for `batch_size` images of `n_views` views each, on a grid of
    /// cells.
    pub fn at(
        self,
        seed: u64,
        step: u64,
        batch_size: usize,
        n_views: usize,
        grid: [usize; 2],
    ) -> MaskSampler {
        let kind = match self.kind {
            MaskKind::Blocks(masks) => {
                KindSampler::Blocks(BlockSampler::new(masks, seed, step, batch_size, n_views, grid))
            }
            MaskKind::Random(masks) => KindSampler::Random(RandomSampler::new(masks, seed, step, grid)),
            MaskKind::Targets(masks) => KindSampler::Targets(TargetSampler::new(masks, seed, step, grid)),
        };
        MaskSampler { n_views, kind }
    }
}

impl MaskedCount {
    /// Returns the ratio of a high number of masked cells in `n_images` of a batch of `batch_size`
    /// images to the mean number: two standard deviations above the mean, which one to five of a
    /// hundred random masks exceed.
    pub fn high_ratio(&self, n_images: f64, batch_size: f64) -> f64 {
        // Spread shares are sampled from those of the batch without replacement.
        let variance_factor = if self.is_spread { 1.0 - (n_images / batch_size).min(1.0) } else { 1.0 };
        if self.mean > 0.0 {
            1.0 + 2.0 * self.deviation / self.mean * (variance_factor / n_images).sqrt()
        } else {
            1.0
        }
    }
}

impl MaskSampler {
    /// Draws the masked cells of the views of the images at `positions` of the global batch.
    pub fn rows(&self, positions: impl Iterator<Item = u64>) -> MaskedCells {
        let mut rows = MaskedCells::default();
        for position in positions {
            for view in 0..self.n_views {
                match &self.kind {
                    KindSampler::Blocks(sampler) => rows.cells.push(sampler.cells(position, view)),
                    KindSampler::Random(sampler) => rows.cells.push(sampler.cells(position, view)),
                    KindSampler::Targets(sampler) => {
                        let mask = sampler.mask(position, view);
                        rows.n_blocks = sampler.n_blocks();
                        rows.cells.push(mask.targets);
                        rows.visible.get_or_insert_default().push(mask.context);
                    }
                }
            }
        }
        rows
    }
}
