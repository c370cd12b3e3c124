//! Smoothed rates of a run while it trains, and the curve of its loss.

use std::collections::VecDeque;
use std::time::Instant;

use serde_json::{Map, Value};

use super::job::Progress;

/// Number of points of the loss curve.
const CURVE_POINTS: usize = 24;

/// Rates and loss curve of a run, from the progress of every step.
#[derive(Debug, Clone)]
pub struct Pace {
    /// Images per second.
    pub images_per_s: f64,
    /// Milliseconds that a step waits for a batch.
    pub waiting_ms: f64,
    /// Mean losses of intervals of equal length, the newest last.
    pub curve: VecDeque<f64>,
    seconds_per_step: f64,
    last_step: Instant,
    /// Sum of the losses of the current interval.
    interval_sum: f64,
    /// Number of losses of the current interval.
    interval_len: u64,
}

impl Pace {
    /// Starts the clock of the first step.
    pub fn start() -> Self {
        Self {
            images_per_s: 0.0,
            waiting_ms: 0.0,
            curve: VecDeque::new(),
            seconds_per_step: 0.0,
            last_step: Instant::now(),
            interval_sum: 0.0,
            interval_len: 0,
        }
    }

    /// Updates the rates and the curve with the numbers of a step.
    pub fn update(&mut self, p: Progress) {
        self.images_per_s = smooth(self.images_per_s, p.images_per_s);
        self.waiting_ms = smooth(self.waiting_ms, p.data_wait_ms);
        self.seconds_per_step = smooth(self.seconds_per_step, self.last_step.elapsed().as_secs_f64());
        self.last_step = Instant::now();
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

    /// Returns the numbers of a step as fields of JSON. A loss that is not finite is null.
    pub fn to_json(&self, p: Progress) -> Map<String, Value> {
        let numbers = [
            ("step", p.step.into()),
            ("total_steps", p.total_steps.into()),
            ("loss", p.loss.into()),
            ("images_per_s", self.images_per_s.into()),
            ("data_wait_ms", self.waiting_ms.into()),
            ("epoch", p.epoch.into()),
            ("seconds_left", self.seconds_left(p).into()),
        ];
        numbers.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
    }

    /// Estimates the seconds that the remaining steps will take.
    pub fn seconds_left(&self, p: Progress) -> f64 {
        p.total_steps.saturating_sub(p.step) as f64 * self.seconds_per_step
    }
}

/// Returns an exponential moving average; the first value replaces an `average` of 0.
fn smooth(average: f64, value: f64) -> f64 {
    if average == 0.0 { value } else { 0.95 * average + 0.05 * value }
}
