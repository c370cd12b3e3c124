//! Stochastic depth (Huang et al. 2016), drawn before the step: a pure function of (seed, step, unit,
//! position in the global batch, group of views, branch, view).

use augment::ViewRng;

use crate::unit::Draws;

/// Domain that separates drop-path streams from all others.
const DROP_PATH_DOMAIN: u64 = 0x6472_6f70_0000_0000;

/// Source of the random numbers of a step.
pub struct DropPathSampler {
    /// Seed of the run.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// Views per image of each group.
    pub n_views: Vec<usize>,
}

impl DropPathSampler {
    /// Draws the factors of unit `unit`, whose branches are dropped with probability `p`, for the images at
    /// `positions` of the global batch.
    pub fn draw(&self, unit: usize, p: f32, positions: impl Iterator<Item = u64>) -> Draws {
        let mut draws = Draws::default();
        if p == 0.0 {
            return draws;
        }
        draws.drop_path = vec![[Vec::new(), Vec::new()]; self.n_views.len()];
        for position in positions {
            let words = [self.seed, DROP_PATH_DOMAIN ^ self.step, position, unit as u64];
            let mut rng = ViewRng::from_words(words);
            for (n_views, branches) in self.n_views.iter().zip(&mut draws.drop_path) {
                for factors in branches {
                    let factor = |_| if rng.chance(p) { 0.0 } else { 1.0 / (1.0 - p) };
                    factors.extend((0..*n_views).map(factor));
                }
            }
        }
        draws
    }
}
