//! Settings that would save time or memory, or make a run fit: `method.prototype_group`, where
//! ranks divide prototypes among them, and `run.max_unit_parameters`, which makes smaller units.

use super::divided::DividedModel;
use super::memory;
use super::planner::{CandidateEstimate, Planner};

/// Share of a step's time, or of a rank's peak with as many kept graphs, that must be saved.
const LEAST_SAVING: f64 = 0.02;

/// Largest group of ranks that divide prototypes which is considered: larger ones save little more.
pub(super) const LARGEST_GROUP: usize = 64;

/// Value of a setting, and a candidate's estimates with it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Advice {
    /// The value.
    pub value: usize,
    /// Seconds of a step.
    pub step_s: f64,
    /// Peak of a rank's memory.
    pub peak_bytes: f64,
    /// Whether a rank has the memory.
    pub fits: bool,
}

impl Planner<'_> {
    /// Returns the `method.prototype_group` that saves most of a step of `estimate`'s candidate, or
    /// makes it fit; `None` if none does, or prototypes are divided already.
    pub fn prototype_group_advice(&self, estimate: &CandidateEstimate) -> Option<Advice> {
        if self.model.n_parts() > 1 {
            return None;
        }
        let placement = &estimate.candidate.placement;
        let mut options = Vec::new();
        for value in (2..=LARGEST_GROUP.min(placement.group_size)).filter(|size| size.is_power_of_two()) {
            if let Some(divided) = self.model.divided(value, placement.group_size) {
                let memory = memory(&divided, placement);
                options.push(Advice {
                    value,
                    step_s: self.hardware.step(&divided, placement).step_s,
                    peak_bytes: memory.peak_bytes(),
                    fits: memory.needed_bytes() <= self.hardware.memory_bytes,
                });
            }
        }
        let best =
            options.into_iter().min_by(|a, b| b.fits.cmp(&a.fits).then(a.step_s.total_cmp(&b.step_s)))?;
        let saves_time = is_saved(best.step_s, estimate.time.step_s);
        let is_worthwhile = (best.fits && !estimate.candidate.fits) || saves_time;
        is_worthwhile.then_some(best)
    }

    /// Returns the `run.max_unit_parameters` of `divided` if it saves time or memory in
    /// `estimate`'s candidate, or makes it fit; `None` if it saves nothing, or does not fit.
    pub fn max_unit_parameters_advice(
        &self,
        estimate: &CandidateEstimate,
        divided: &DividedModel,
    ) -> Option<Advice> {
        let candidate = &estimate.candidate;
        let planner = Planner { model: &divided.model, ..*self };
        let candidates = planner.candidates(candidate.placement.world_size, candidate.placement.rank_batch);
        let divided_candidate = candidates.into_iter().find(|other| other.mode() == candidate.mode())?;
        let advice = Advice {
            value: divided.max_unit_parameters,
            step_s: self.hardware.step(&divided.model, &divided_candidate.placement).step_s,
            peak_bytes: divided_candidate.memory.peak_bytes(),
            fits: divided_candidate.fits,
        };
        let saves_time = is_saved(advice.step_s, estimate.time.step_s);
        let saves_memory = candidate.placement.keep == 0
            && divided_candidate.placement.keep == 0
            && is_saved(advice.peak_bytes, candidate.memory.peak_bytes());
        let is_worthwhile = advice.fits && (!candidate.fits || saves_time || saves_memory);
        is_worthwhile.then_some(advice)
    }
}

/// Returns whether `now` is less than `before` by a share that is worth advice.
fn is_saved(now: f64, before: f64) -> bool {
    now < (1.0 - LEAST_SAVING) * before
}
