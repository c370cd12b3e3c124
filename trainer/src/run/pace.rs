//! Rates of a run while it trains, the time that it has left, and the curve of its loss.
//!
//! ```text
//! left = steps left · median time of the newest steps + time of the probes left
//! ```
//!
//! The time of a step has no probes, pictures and checkpoints in it. A median is not moved by the
//! first step, which is slow, nor by one that waited.

use std::collections::VecDeque;

use serde_json::{Map, Value};

use super::job::Progress;

/// Number of points of the loss curve.
const CURVE_POINTS: usize = 24;

/// Number of the newest steps from which rates are computed.
const NEWEST_STEPS: usize = 32;

/// Rates and loss curve of a run, from the progress of every step.
#[derive(Debug, Clone, Default)]
pub struct Pace {
    /// Mean losses of intervals of equal length, the newest last.
    pub curve: VecDeque<f64>,
    /// Times of the newest steps, the newest last.
    newest: VecDeque<StepTimes>,
    /// Sum of the losses of the current interval.
    interval_sum: f64,
    /// Number of losses of the current interval.
    interval_len: u64,
}

/// Times of a step.
#[derive(Debug, Clone, Copy)]
struct StepTimes {
    step_s: f64,
    data_wait_ms: f64,
}

impl Pace {
    /// Updates the rates and the curve with the numbers of a step.
    pub fn update(&mut self, p: Progress) {
        if self.newest.len() == NEWEST_STEPS {
            self.newest.pop_front();
        }
        self.newest.push_back(StepTimes { step_s: p.step_s, data_wait_ms: p.data_wait_ms });
        if p.loss.is_finite() {
            self.interval_sum += p.loss;
            self.interval_len += 1;
        }
        let interval_steps = p.total_steps.div_ceil(CURVE_POINTS as u64).max(1);
        if self.interval_len >= interval_steps {
            self.curve.push_back(self.interval_sum / self.interval_len as f64);
            self.interval_sum = 0.0;
            self.interval_len = 0;
        }
        if self.curve.len() > CURVE_POINTS {
            self.curve.pop_front();
        }
    }

    /// Returns the median seconds of the newest steps; 0 before the first.
    pub fn step_s(&self) -> f64 {
        let mut times: Vec<f64> = self.newest.iter().map(|times| times.step_s).collect();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(0.0)
    }

    /// Returns the images per second of a run that takes steps of `batch_size` images.
    pub fn images_per_s(&self, batch_size: usize) -> f64 {
        let step_s = self.step_s();
        if step_s > 0.0 { batch_size as f64 / step_s } else { 0.0 }
    }

    /// Returns the milliseconds that the newest steps waited for a batch, on average.
    pub fn waiting_ms(&self) -> f64 {
        let sum: f64 = self.newest.iter().map(|times| times.data_wait_ms).sum();
        sum / self.newest.len().max(1) as f64
    }

    /// Returns the numbers of a step as fields of JSON. A loss that is not finite is null.
    pub fn to_json(&self, p: Progress) -> Map<String, Value> {
        let numbers = [
            ("step", p.step.into()),
            ("total_steps", p.total_steps.into()),
            ("loss", p.loss.into()),
            ("images_per_s", self.images_per_s(p.batch_size).into()),
            ("data_wait_ms", self.waiting_ms().into()),
            ("epoch", p.epoch.into()),
            ("seconds_left", self.seconds_left(p).into()),
        ];
        numbers.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
    }

    /// Estimates the seconds that the remaining steps and probes will take.
    pub fn seconds_left(&self, p: Progress) -> f64 {
        let steps_left = p.total_steps.saturating_sub(p.step);
        steps_left as f64 * self.step_s() + p.probes_left_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times of a simulated run, which is scored every `probe_every` steps and after the last.
    struct Times {
        steps_s: Vec<f64>,
        probe_every: usize,
        probe_s: f64,
    }

    impl Times {
        /// Returns how often probes run after more than `done` steps.
        fn probes_after(&self, done: usize) -> u64 {
            let total = self.steps_s.len();
            let due =
                (done + 1..=total).filter(|step| step.is_multiple_of(self.probe_every) || *step == total);
            due.count() as u64
        }

        /// Follows the first `done` steps; returns the seconds that are left as estimated when step
        /// `done` ends, and as they are.
        fn estimated_and_true(&self, pace: &mut Pace, has_probed: bool, done: usize) -> (f64, f64) {
            let total = self.steps_s.len();
            let mut estimate = 0.0;
            // The time of a probe is known once one has run.
            let mut probe_s = if has_probed { self.probe_s } else { 0.0 };
            for step in 1..=done {
                let p = Progress {
                    step: step as u64,
                    total_steps: total as u64,
                    loss: 1.0,
                    batch_size: 64,
                    step_s: self.steps_s[step - 1],
                    data_wait_ms: 0.0,
                    epoch: 0.0,
                    probes_left_s: self.probes_after(step - 1) as f64 * probe_s,
                };
                pace.update(p);
                estimate = pace.seconds_left(p);
                if self.probes_after(step - 1) > self.probes_after(step) {
                    probe_s = self.probe_s;
                }
            }
            let steps_s: f64 = self.steps_s[done..].iter().sum();
            (estimate, steps_s + self.probes_after(done - 1) as f64 * self.probe_s)
        }
    }

    /// Returns the times of `n` steps of about `step_s`: the first is slow, every eighth waits, and
    /// the others differ by a tenth.
    fn uneven_steps(n: usize, step_s: f64) -> Vec<f64> {
        let mut steps_s = Vec::with_capacity(n);
        for step in 0..n {
            steps_s.push(match step {
                0 => 3.0 * step_s,
                step if step % 8 == 4 => 1.5 * step_s,
                step => step_s * (0.95 + 0.05 * (step % 3) as f64),
            });
        }
        steps_s
    }

    fn assert_within_15_percent(times: &Times, has_probed: bool, done: usize) {
        let (estimated, left) = times.estimated_and_true(&mut Pace::default(), has_probed, done);
        assert!((estimated - left).abs() < 0.15 * left, "after {done} steps: {estimated} of {left} s");
    }

    /// A run of 24 steps whose probes take as long as 22 steps: the first, before the first step,
    /// once made a run of ten minutes look like two hours.
    #[test]
    fn a_slow_probe_is_no_part_of_a_step() {
        for done in [10, 11, 12, 13, 20, 24] {
            let times = Times { steps_s: uneven_steps(24, 27.0), probe_every: 6, probe_s: 600.0 };
            assert_within_15_percent(&times, true, done);
        }
    }

    /// Without a probe before the first step, probes count from the first one on.
    #[test]
    fn probes_count_once_one_has_run() {
        let times = Times { steps_s: uneven_steps(1000, 0.3), probe_every: 100, probe_s: 60.0 };
        for done in [101, 500, 999, 1000] {
            assert_within_15_percent(&times, false, done);
        }
        let (estimated, _) = times.estimated_and_true(&mut Pace::default(), false, 99);
        assert!((estimated - 901.0 * 0.3).abs() < 0.15 * 901.0 * 0.3, "steps alone: {estimated}");
    }

    /// After ten steps of a long run, and when the speed changes.
    #[test]
    fn steps_alone_are_estimated_from_the_newest() {
        let far = Times { steps_s: uneven_steps(5000, 0.3), probe_every: 5000, probe_s: 0.0 };
        assert_within_15_percent(&far, false, 10);
        let mut steps_s = uneven_steps(100, 1.0);
        steps_s.extend(uneven_steps(900, 2.0));
        let faster_first = Times { steps_s, probe_every: 1000, probe_s: 0.0 };
        assert_within_15_percent(&faster_first, false, 140);
    }

    #[test]
    fn rates_are_those_of_the_newest_steps() {
        let mut pace = Pace::default();
        assert_eq!((pace.step_s(), pace.images_per_s(8), pace.waiting_ms()), (0.0, 0.0, 0.0));
        for step in 1..=100 {
            let is_first = step == 1;
            pace.update(Progress {
                step,
                total_steps: 100,
                loss: step as f64,
                batch_size: 8,
                step_s: if is_first { 50.0 } else { 0.5 },
                data_wait_ms: if is_first { 9000.0 } else { 3.0 },
                epoch: 0.0,
                probes_left_s: 0.0,
            });
        }
        assert_eq!((pace.step_s(), pace.images_per_s(8), pace.waiting_ms()), (0.5, 16.0, 3.0));
        assert_eq!(pace.curve.front(), Some(&3.0), "the mean of the first five losses");
        assert_eq!(pace.curve.len(), 20);
    }
}
