//! Random numbers of units, drawn before the step: a pure function of (seed, step, unit, and more).
//!
//! Stochastic depth (Huang et al. 2016) is drawn by position in the global batch, group of views, branch and view; changes of
//! coordinates by group of views, so that they are the same for all images.

use augment::ViewRng;

use crate::unit::{Draws, Unit};

/// Domain that separates drop-path streams from all others.
const DROP_PATH_DOMAIN: u64 = 0x6472_6f70_0000_0000;

/// Domain that separates streams of coordinates from all others.
const COORDINATE_DOMAIN: u64 = 0x636f_6f72_6400_0000;

/// Source of the random numbers of a step.
pub struct UnitSampler {
    /// Seed of the run.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// Views per image of each group.
    pub n_views: Vec<usize>,
}

impl UnitSampler {
    /// Draws the random numbers of `unit`, number `number` of its network, for the images at `positions` of the global batch.
    pub fn draw(&self, number: usize, unit: &dyn Unit, positions: impl Iterator<Item = u64>) -> Draws {
        let mut draws = Draws::default();
        let rule = unit.coordinate_rule();
        if rule.changes() {
            let of_group = |group: usize| {
                let words = [self.seed, COORDINATE_DOMAIN ^ self.step, group as u64, number as u64];
                rule.draw(&mut ViewRng::from_words(words))
            };
            draws.coordinates = (0..self.n_views.len()).map(of_group).collect();
        }
        let p = unit.drop_path();
        if p > 0.0 {
            draws.drop_path = self.drop_path(number, p, positions);
        }
        draws
    }

    /// Draws the factors of the branches of unit `number`, which are dropped with probability `p`.
    fn drop_path(&self, number: usize, p: f32, positions: impl Iterator<Item = u64>) -> Vec<[Vec<f32>; 2]> {
        let mut drawn = vec![[Vec::new(), Vec::new()]; self.n_views.len()];
        for position in positions {
            let words = [self.seed, DROP_PATH_DOMAIN ^ self.step, position, number as u64];
            let mut rng = ViewRng::from_words(words);
            for (n_views, branches) in self.n_views.iter().zip(&mut drawn) {
                for factors in branches {
                    let factor = |_| if rng.chance(p) { 0.0 } else { 1.0 / (1.0 - p) };
                    factors.extend((0..*n_views).map(factor));
                }
            }
        }
        drawn
    }
}
