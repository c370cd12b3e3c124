//! Random numbers of units, drawn before the step: a pure function of (seed, step, unit, and more).
//!
//! Dropped branches are drawn by position in the global batch, group of views, branch and view, or
//! as an exact number among all views of the batch; changes of coordinates by group of views, so
//! that they are the same for all images.

use augment::ViewRng;

use crate::draws::{CoordinateDraw, DrawRules, Draws, DropCount, DropRule};
use crate::unit::Unit;

/// Domain that separates drop-path streams from all others.
const DROP_PATH_DOMAIN: u64 = 0x6472_6f70_0000_0000;

/// Domain that separates streams of exact numbers of dropped branches from all others.
const DROP_EXACT_DOMAIN: u64 = 0x6472_6578_0000_0000;

/// Domain that separates streams of coordinates from all others.
const COORDINATE_DOMAIN: u64 = 0x636f_6f72_6400_0000;

/// Source of the random numbers of a step.
pub struct UnitSampler {
    /// Seed of the run.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// Number of images in the global batch.
    pub batch_size: usize,
    /// Views per image of each group.
    pub n_views: Vec<usize>,
}

impl UnitSampler {
    /// Draws the random numbers that are the same for all images, for `unit`, unit `index` of its
    /// network.
    pub fn for_unit(&self, index: usize, unit: &dyn Unit) -> UnitDrawing<'_> {
        let DrawRules { drop: drop_rule, coordinates: rule } = unit.draw_rules();
        let mut coordinates = Vec::new();
        if rule.changes() {
            for group in 0..self.n_views.len() {
                let words = [self.seed, COORDINATE_DOMAIN ^ self.step, group as u64, index as u64];
                coordinates.push(rule.draw(&mut ViewRng::from_words(words)));
            }
        }
        let DropRule { share, count } = drop_rule;
        let mut exact_factors = Vec::new();
        if count == DropCount::Exact && share > 0.0 {
            for group in 0..self.n_views.len() {
                exact_factors.push([0, 1].map(|branch| self.exact_factors(index, group, branch, share)));
            }
        }
        UnitDrawing { sampler: self, index, coordinates, drop_rule, exact_factors }
    }

    /// Draws the factors of a branch of unit `index` for all views of `group` in the global batch:
    /// the given share of them is 0, but at least one is not.
    fn exact_factors(&self, index: usize, group: usize, branch: u64, share: f32) -> Vec<f32> {
        let n = self.batch_size * self.n_views[group];
        // To 1e-6, because f32 has no 0.3: of 120 views 84 are kept, as in f64.
        let n_kept = ((n as f64 * (1.0 - f64::from(share)) + n as f64 * 1e-6) as usize).max(1);
        let stream = (group as u64) << 1 | branch;
        let mut rng = ViewRng::from_words([self.seed, DROP_EXACT_DOMAIN ^ self.step, stream, index as u64]);
        let mut order: Vec<usize> = (0..n).collect();
        rng.shuffle(&mut order);
        let mut factors = vec![0.0; n];
        for view in &order[..n_kept] {
            factors[*view] = n as f32 / n_kept as f32;
        }
        factors
    }
}

/// The random numbers of one unit in one step.
pub struct UnitDrawing<'a> {
    sampler: &'a UnitSampler,
    /// Index of the unit in its network.
    index: usize,
    coordinates: Vec<CoordinateDraw>,
    drop_rule: DropRule,
    /// Factors of all views of the global batch, by group and branch; empty if the number of
    /// dropped views is random.
    exact_factors: Vec<[Vec<f32>; 2]>,
}

impl UnitDrawing<'_> {
    /// Returns the random numbers for the images at `positions` of the global batch.
    pub fn at(&self, positions: impl Iterator<Item = u64>) -> Draws {
        let drop_path = if self.drop_rule.share > 0.0 { self.drop_path(positions) } else { Vec::new() };
        Draws { coordinates: self.coordinates.clone(), drop_path }
    }

    /// Returns the factors of the unit's branches.
    fn drop_path(&self, positions: impl Iterator<Item = u64>) -> Vec<[Vec<f32>; 2]> {
        let UnitSampler { seed, step, n_views, .. } = self.sampler;
        let p = self.drop_rule.share;
        let mut all_factors = vec![[Vec::new(), Vec::new()]; n_views.len()];
        for position in positions {
            let words = [*seed, DROP_PATH_DOMAIN ^ *step, position, self.index as u64];
            let mut rng = ViewRng::from_words(words);
            for (group, branches) in all_factors.iter_mut().enumerate() {
                let n_views = n_views[group];
                for (branch, factors) in branches.iter_mut().enumerate() {
                    if let Some(exact_factors) = self.exact_factors.get(group) {
                        let first = position as usize * n_views;
                        factors.extend_from_slice(&exact_factors[branch][first..first + n_views]);
                        continue;
                    }
                    for _ in 0..n_views {
                        factors.push(if rng.chance(p) { 0.0 } else { 1.0 / (1.0 - p) });
                    }
                }
            }
        }
        all_factors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backbone::ModelConfig;

    /// Draws the factors of `unit` for the images of `parts`, by group and branch.
    fn draw_factors(unit: &dyn Unit, step: u64, parts: &[[u64; 2]]) -> [[Vec<f32>; 2]; 2] {
        let sampler = UnitSampler { seed: 1, step, batch_size: 24, n_views: vec![2, 5] };
        let drawing = sampler.for_unit(1, unit);
        let mut all_factors = [[vec![], vec![]], [vec![], vec![]]];
        for [start, end] in parts {
            let draws = drawing.at(*start..*end);
            for (group, branch) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                all_factors[group][branch].extend(draws.factors(group..group + 1, branch).unwrap());
            }
        }
        all_factors
    }

    /// Over any parts of the batch, exactly the share of each group's views is dropped, the others'
    /// factors make up for it, and branches and steps differ.
    #[test]
    fn exact_numbers_of_branches_are_dropped() {
        let text = "arch = 'vit'\nimage_px = 16\npatch_px = 8\nwidth = 8\ndepth = 2\nheads = 2\ndrop_path = 0.3\n\
                    drop_path_depth = 'uniform'\ndrop_path_count = 'exact'";
        let model: ModelConfig = toml::from_str(text).unwrap();
        let units = model.units(crate::backbone::Readout::Pooled);
        let unit = units[1].as_ref();
        let all_factors = draw_factors(unit, 3, &[[0, 24]]);
        assert_eq!(all_factors, draw_factors(unit, 3, &[[0, 5], [5, 6], [6, 24]]));
        assert!(all_factors != draw_factors(unit, 4, &[[0, 24]]) && all_factors[0][0] != all_factors[0][1]);
        for (group, n) in [(0, 48.0f32), (1, 120.0)] {
            for factors in &all_factors[group] {
                let kept: Vec<f32> = factors.iter().copied().filter(|factor| *factor != 0.0).collect();
                assert_eq!(kept.len(), (n as f64 * 0.7) as usize);
                assert!(kept.iter().all(|factor| *factor == n / kept.len() as f32));
            }
        }
    }
}
