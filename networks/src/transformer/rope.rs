//! Rotary positions on two axes (DINOv3: Siméoni et al. 2025).
//!
//! ```text
//! c = 2 (i + ½) / n - 1                   coordinate of row or column i of n, in -1..1
//! c ← (c + s) · j · r                     in training: shift s ~ U(±S), jitter j ~ logU(1/J, J) by axis, rescale r ~ logU(1/R, R)
//! θ_k = 2π c / base^(4k / D_h)            k = 0 .. D_h/4 - 1; a cell's angles are those of its row, then of its column
//! ```
//!
//! Shift, jitter and rescale are drawn for each block, step and size of views, as in the official
//! code, and are the same for all images of a batch.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use augment::ViewRng;
use kernels::ops::{Rotations, UNROTATED};

use crate::draws::{CoordinateDraw, CoordinateRule};
use crate::tokens::Tokens;

/// Rotary positions of a backbone's blocks.
#[derive(Debug)]
pub(crate) struct Rope {
    /// Base of the periods.
    base: f64,
    /// Channels of an attention head.
    d_head: usize,
    /// Changes of the coordinates in training.
    pub rule: CoordinateRule,
    /// Rotations without changes, by the grids of a stream; a run has a few.
    plain: Mutex<HashMap<Vec<[usize; 2]>, Arc<Rotations>>>,
}

/// Rotations of the tokens of a stream.
pub(crate) struct TokenRotation {
    /// Rotations of the cells of the grids of all groups, one after another.
    pub(crate) rotations: Arc<Rotations>,
    /// Row of the rotations of each token, or [`UNROTATED`].
    pub(crate) rows: Arc<[u32]>,
}

impl Rope {
    /// Creates the positions of heads of `d_head` channels, a multiple of four.
    pub(crate) fn new(base: f64, d_head: usize, rule: CoordinateRule) -> Self {
        Self { base, d_head, rule, plain: Mutex::default() }
    }

    /// Returns the rotations of `tokens`, of which prefix tokens have none. The coordinates of each
    /// group are changed by its draw, if there are any.
    pub(crate) fn rotation(&self, tokens: &Tokens, draws: Option<&[CoordinateDraw]>) -> TokenRotation {
        let grids: Vec<[usize; 2]> = tokens.groups.iter().map(|group| group.grid).collect();
        let mut rows = Vec::new();
        let mut first = 0;
        for group in &tokens.groups {
            group.for_each_cell(|cell| rows.push(cell.map_or(UNROTATED, |cell| first + cell as u32)));
            first += group.n_grid_cells() as u32;
        }
        TokenRotation { rotations: self.rotations(&grids, draws), rows: rows.into() }
    }

    /// Returns the rotations of the cells of `grids`, one grid after another.
    fn rotations(&self, grids: &[[usize; 2]], draws: Option<&[CoordinateDraw]>) -> Arc<Rotations> {
        if let Some(draws) = draws {
            return Arc::new(self.rotations_with(grids, draws));
        }
        // The map stays valid if a holder panics: an entry is inserted whole.
        let mut plain = self.plain.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let rotations = plain.entry(grids.to_vec()).or_insert_with(|| {
            Arc::new(self.rotations_with(grids, &vec![CoordinateDraw::default(); grids.len()]))
        });
        Arc::clone(rotations)
    }

    /// Computes the rotations of the cells of `grids`, one grid after another.
    fn rotations_with(&self, grids: &[[usize; 2]], draws: &[CoordinateDraw]) -> Rotations {
        let mut all = Rotations { cos: Vec::new(), sin: Vec::new() };
        for (grid, draw) in grids.iter().zip(draws) {
            let Rotations { cos, sin } = rotations(*grid, self.d_head, self.base, draw);
            all.cos.extend(cos);
            all.sin.extend(sin);
        }
        all
    }
}

/// Computes the rotations of the cells of a grid, row by row, for heads of `d_head` channels.
pub(crate) fn rotations(
    [rows, columns]: [usize; 2],
    d_head: usize,
    base: f64,
    draw: &CoordinateDraw,
) -> Rotations {
    let n_periods = d_head / 4;
    let n = rows * columns * 2 * n_periods;
    let mut cos = Vec::with_capacity(n);
    let mut sin = Vec::with_capacity(n);
    for row in 0..rows {
        for column in 0..columns {
            for coordinate in [draw.coordinate(0, row, rows), draw.coordinate(1, column, columns)] {
                for k in 0..n_periods {
                    let period = base.powf(2.0 * k as f64 / (d_head / 2) as f64);
                    let angle = std::f64::consts::TAU * coordinate / period;
                    cos.push(angle.cos() as f32);
                    sin.push(angle.sin() as f32);
                }
            }
        }
    }
    Rotations { cos, sin }
}

impl CoordinateDraw {
    /// Returns the changed coordinate of row or column `i` of `n`; `axis` is 0 for rows.
    fn coordinate(&self, axis: usize, i: usize, n: usize) -> f64 {
        let plain = 2.0 * (i as f64 + 0.5) / n as f64 - 1.0;
        (plain + f64::from(self.shift[axis])) * f64::from(self.factor[axis])
    }
}

/// Draws a factor between 1 / `largest` and `largest`, uniformly on a logarithmic scale.
fn draw_factor(largest: f32, rng: &mut ViewRng) -> f32 {
    let log = f64::from(largest).ln();
    rng.between(-log, log).exp() as f32
}

impl CoordinateRule {
    /// Returns whether coordinates are changed in training.
    pub fn changes(&self) -> bool {
        self.shift.is_some() || self.jitter.is_some() || self.rescale.is_some()
    }

    /// Checks the bounds of every value.
    ///
    /// # Errors
    /// A message with the key and what is wrong with it.
    pub(crate) fn validate(&self) -> Result<(), String> {
        if self.shift.is_some_and(|shift| !(0.0..=10.0).contains(&shift)) {
            return Err("model.rope_shift must lie in 0..=10".into());
        }
        for (key, factor) in [("rope_jitter", self.jitter), ("rope_rescale", self.rescale)] {
            if let Some(factor) = factor.filter(|factor| !(1.0..=100.0).contains(factor)) {
                return Err(format!("model.{key} {factor} must lie in 1..=100"));
            }
        }
        Ok(())
    }

    /// Draws a change of the coordinates.
    pub(crate) fn draw(&self, rng: &mut ViewRng) -> CoordinateDraw {
        let mut draw = CoordinateDraw::default();
        if let Some(shift) = self.shift.map(f64::from) {
            draw.shift = [0, 1].map(|_| rng.between(-shift, shift) as f32);
        }
        if let Some(jitter) = self.jitter {
            draw.factor = [0, 1].map(|_| draw_factor(jitter, rng));
        }
        if let Some(rescale) = self.rescale {
            let factor = draw_factor(rescale, rng);
            draw.factor = draw.factor.map(|jitter| jitter * factor);
        }
        draw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `RopePositionEmbedding` of DINOv3's formulas in f64: the first cell of 2 × 3, heads of eight
    /// channels.
    #[test]
    fn angles_are_those_of_row_and_column() {
        let rotations = rotations([2, 3], 8, 100.0, &CoordinateDraw::default());
        assert_eq!((rotations.cos.len(), rotations.sin.len()), (24, 24));
        let tau = std::f64::consts::TAU;
        // Periods 1 and 10; coordinates -1/2 and -2/3.
        let angles = [tau * -0.5, tau * -0.05, tau * -2.0 / 3.0, tau * -2.0 / 30.0];
        for (i, angle) in angles.iter().enumerate() {
            assert!((f64::from(rotations.cos[i]) - angle.cos()).abs() < 1e-6, "{i}");
            assert!((f64::from(rotations.sin[i]) - angle.sin()).abs() < 1e-6, "{i}");
        }
    }

    #[test]
    fn drawn_coordinates_lie_within_the_rule() {
        let rule = CoordinateRule { shift: Some(0.2), jitter: Some(1.5), rescale: Some(2.0) };
        let mut rng = ViewRng::from_words([1, 2, 3, 4]);
        let mut factors = Vec::new();
        for _ in 0..200 {
            let draw = rule.draw(&mut rng);
            assert!(draw.shift.iter().all(|shift| shift.abs() <= 0.2));
            assert!(draw.factor.iter().all(|factor| (1.0 / 3.0..=3.0).contains(factor)));
            factors.extend(draw.factor);
        }
        assert!(factors.iter().any(|f| *f > 1.4) && factors.iter().any(|f| *f < 0.7));
        assert_eq!(CoordinateRule::default().draw(&mut rng), CoordinateDraw::default());
    }
}
