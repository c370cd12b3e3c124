//! Durations, and schedules: pure functions from the step to values that change during training.

use std::f64::consts::PI;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Schedule with warm-up and decay: linear from `start` to `peak` over `warmup_steps`, then to
/// `end` at `total_steps` with the given `shape`.
///
/// Step 0 has `start`, and the last step is one step short of `end`. With [`Shape::Cosine`] the
/// last step of the warm-up has `peak` already, as in DINO and SwAV; with the other shapes it is
/// one step short of it, as in VISSL.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Value of step 0.
    pub start: f64,
    /// Value after the warm-up.
    pub peak: f64,
    /// Value that is reached at `total_steps`.
    pub end: f64,
    /// Number of steps of the warm-up.
    pub warmup_steps: u64,
    /// Number of steps of the run.
    pub total_steps: u64,
    /// Shape of the decay after the warm-up.
    pub shape: Shape,
}

/// Shape of a schedule after its warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shape {
    /// Half a cosine over the steps after the warm-up.
    Cosine,
    /// Half a cosine over the steps after the warm-up, the first of which has `peak`: MoCo v3.
    HalfCosine,
    /// Half a cosine over all steps, the first of which the warm-up replaces: VISSL's composition
    /// of a linear schedule with a cosine of `interval_scaling: fixed`.
    CosineOfRun,
    /// Constant, with a linear decay over the last steps.
    Constant {
        /// Number of steps of the decay.
        cooldown_steps: u64,
    },
}

impl Schedule {
    /// Creates a cosine from `from` to `to` without warm-up.
    pub fn cosine(from: f64, to: f64, total_steps: u64) -> Self {
        Self { start: from, peak: from, end: to, warmup_steps: 0, total_steps, shape: Shape::Cosine }
    }

    /// Creates a straight line from `from` to `to` without warm-up.
    pub fn linear(from: f64, to: f64, total_steps: u64) -> Self {
        let shape = Shape::Constant { cooldown_steps: total_steps };
        Self { start: from, peak: from, end: to, warmup_steps: 0, total_steps, shape }
    }

    /// Returns the value at `step`.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            let last = match self.shape {
                Shape::HalfCosine | Shape::CosineOfRun | Shape::Constant { .. } => self.warmup_steps,
                // numpy's linspace, which includes its end.
                Shape::Cosine => (self.warmup_steps - 1).max(1),
            };
            return self.start + (self.peak - self.start) * step as f64 / last as f64;
        }
        match self.shape {
            Shape::Cosine | Shape::HalfCosine => {
                let decay_steps = self.total_steps.saturating_sub(self.warmup_steps);
                self.half_cosine(fraction(step - self.warmup_steps, decay_steps))
            }
            Shape::CosineOfRun => self.half_cosine(fraction(step, self.total_steps)),
            Shape::Constant { cooldown_steps } => {
                let first = self.total_steps.saturating_sub(cooldown_steps);
                self.peak + (self.end - self.peak) * fraction(step.saturating_sub(first), cooldown_steps)
            }
        }
    }

    /// Returns the value of half a cosine from `peak` to `end` at `progress`, from 0 to 1.
    fn half_cosine(&self, progress: f64) -> f64 {
        self.end + 0.5 * (self.peak - self.end) * (1.0 + (PI * progress).cos())
    }
}

/// Returns `steps` as a fraction of `total`, at most 1.
fn fraction(steps: u64, total: u64) -> f64 {
    (steps as f64 / total.max(1) as f64).min(1.0)
}

/// Linear ramp from `from` to `to` over `ramp_steps`, constant afterwards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ramp {
    /// Value of step 0.
    pub from: f64,
    /// Value at `ramp_steps` and afterwards.
    pub to: f64,
    /// Number of steps of the ramp.
    pub ramp_steps: u64,
}

impl Ramp {
    /// Returns the value at `step`.
    pub(crate) fn at(&self, step: u64) -> f64 {
        if step >= self.ramp_steps {
            return self.to;
        }
        self.from + (self.to - self.from) * step as f64 / self.ramp_steps as f64
    }
}

/// Scheduled values of one step that do not depend on the method.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScheduledValues {
    /// Index of the step.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
}

/// Schedules of a run that do not depend on the method.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedules {
    /// Learning rate.
    pub lr: Schedule,
    /// Weight decay.
    pub weight_decay: Schedule,
}

impl Schedules {
    /// Returns the values of `step`.
    pub fn at(&self, step: u64) -> ScheduledValues {
        ScheduledValues { step, lr: self.lr.at(step), weight_decay: self.weight_decay.at(step) }
    }
}

/// A length of time in one of four units: `{ epochs = 10 }`, `{ steps = 500 }`, `{ samples = 1e6 }`
/// or `{ percent = 5 }` of the run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Duration {
    /// Number of steps.
    Steps(u64),
    /// Number of passes over the data.
    Epochs(f64),
    /// Number of images.
    Samples(f64),
    /// Percent of the run's length.
    Percent(f64),
}

impl Duration {
    /// Returns the duration in steps of a run of `total_steps`, rounded to the nearest.
    ///
    /// # Errors
    /// A message if the duration is invalid.
    pub fn steps(&self, n_samples: u64, batch_size: usize, total_steps: u64) -> Result<u64, String> {
        let batch = batch_size as f64;
        let steps = match *self {
            Self::Steps(steps) => steps as f64,
            Self::Epochs(epochs) => epochs * n_samples as f64 / batch,
            Self::Samples(samples) => samples / batch,
            Self::Percent(percent) => total_steps as f64 * percent / 100.0,
        };
        rounded(steps).ok_or_else(|| format!("{self:?} is {steps} steps"))
    }
}

/// Returns a number of steps, rounded to the nearest; `None` if it is negative or absurd.
fn rounded(steps: f64) -> Option<u64> {
    (0.0..1e15).contains(&steps).then_some(steps.round() as u64)
}

/// Length of a run: `{ epochs = 10 }`, `{ steps = 500 }`, `{ samples = 1e6 }` or `{ minutes = 30
/// }`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Length {
    /// Number of steps.
    Steps(u64),
    /// Number of passes over the data.
    Epochs(f64),
    /// Number of images.
    Samples(f64),
    /// Minutes from the start of the program to its end, which are measured in steps before the run
    /// begins.
    Minutes(f64),
}

impl Length {
    /// Returns a length of `hours`, in minutes without digits that only rounding adds.
    pub fn from_hours(hours: f64) -> Self {
        Self::Minutes((60e6 * hours).round() / 1e6)
    }

    /// Returns the length in steps, rounded to the nearest; `None` for minutes, whose steps depend
    /// on the machine.
    ///
    /// # Errors
    /// A message if the length is invalid.
    pub fn steps(&self, n_samples: u64, batch_size: usize) -> Result<Option<u64>, String> {
        let batch = batch_size as f64;
        let steps = match *self {
            Self::Steps(steps) => steps as f64,
            Self::Epochs(epochs) => epochs * n_samples as f64 / batch,
            Self::Samples(samples) => samples / batch,
            Self::Minutes(minutes) if minutes > 0.0 && minutes < MOST_MINUTES => return Ok(None),
            Self::Minutes(minutes) => {
                return Err(format!("{minutes} minutes: expected more than 0 and fewer than {MOST_MINUTES}"));
            }
        };
        match rounded(steps) {
            Some(steps) => Ok(Some(steps)),
            None => Err(format!("{self:?} is {steps} steps")),
        }
    }

    /// Returns the minutes, if the length is in minutes.
    pub fn minutes(&self) -> Option<f64> {
        match self {
            Self::Minutes(minutes) => Some(*minutes),
            Self::Steps(_) | Self::Epochs(_) | Self::Samples(_) => None,
        }
    }
}

/// Longest run in minutes: a hundred years.
const MOST_MINUTES: f64 = 5e7;

/// Length of a run, from which durations in epochs or percent are computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunLength {
    /// Number of samples of the data set.
    pub n_samples: u64,
    /// Number of images of a step.
    pub batch_size: usize,
    /// Number of steps of the run.
    pub total_steps: u64,
}

impl RunLength {
    /// Returns `duration` in steps; `key` names it in messages.
    ///
    /// # Errors
    /// A message with the key and the reason if the duration is invalid.
    pub fn steps(&self, key: &str, duration: &Duration) -> Result<u64, String> {
        let steps = duration.steps(self.n_samples, self.batch_size, self.total_steps);
        steps.map_err(|reason| format!("{key}: {reason}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of `cosine_scheduler(base_value=1, final_value=0.1, epochs=1, niter_per_ep=10,
    /// warmup_epochs=0.4)` of the DINO repository, computed with numpy.
    #[test]
    fn cosine_equals_the_reference() {
        let shape = Shape::Cosine;
        let schedule = Schedule { start: 0.0, peak: 1.0, end: 0.1, warmup_steps: 4, total_steps: 10, shape };
        let expected = [
            0.0,
            1.0 / 3.0,
            2.0 / 3.0,
            1.0,
            1.0,
            0.939_711_431_702_997_5,
            0.775,
            0.55,
            0.325_000_000_000_000_1,
            0.160_288_568_297_002_58,
        ];
        for (step, expected) in expected.iter().enumerate() {
            assert!((schedule.at(step as u64) - expected).abs() < 1e-12, "step {step}");
        }
    }

    /// Values of fvcore's composition of a linear schedule over 0.4 of the run with a cosine,
    /// `interval_scaling` rescaled and fixed, as VISSL's configurations have it.
    #[test]
    fn cosine_of_the_run_equals_the_reference() {
        let shape = Shape::CosineOfRun;
        let schedule = Schedule { start: 0.1, peak: 1.0, end: 0.1, warmup_steps: 4, total_steps: 10, shape };
        let expected = [
            0.1,
            0.325,
            0.55,
            0.775,
            0.689_057_647_468_726,
            0.55,
            0.410_942_352_531_274,
            0.285_496_636_468_387,
            0.185_942_352_531_274,
            0.122_024_567_667_181,
        ];
        for (step, expected) in expected.iter().enumerate() {
            assert!((schedule.at(step as u64) - expected).abs() < 1e-12, "step {step}");
        }
    }

    /// `adjust_learning_rate` of MoCo v3's code, a rate of 1 over 4 of 10 steps of warm-up.
    #[test]
    fn half_cosine_equals_the_reference() {
        let shape = Shape::HalfCosine;
        let schedule = Schedule { start: 0.0, peak: 1.0, end: 0.0, warmup_steps: 4, total_steps: 10, shape };
        let expected =
            [0.0, 0.25, 0.5, 0.75, 1.0, 0.933_012_701_892_219_3, 0.75, 0.5, 0.25, 0.066_987_298_107_780_7];
        for (step, expected) in expected.iter().enumerate() {
            assert!((schedule.at(step as u64) - expected).abs() < 1e-12, "step {step}");
        }
    }

    #[test]
    fn constant_rate_decays_in_the_last_steps() {
        let shape = Shape::Constant { cooldown_steps: 4 };
        let schedule = Schedule { start: 0.5, peak: 1.0, end: 0.0, warmup_steps: 2, total_steps: 10, shape };
        let values: Vec<f64> = (0..12).map(|step| schedule.at(step)).collect();
        assert_eq!(values, [0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    }

    #[test]
    fn schedules_are_constant_after_their_last_step() {
        let cosine = Schedule::cosine(0.996, 1.0, 100);
        assert_eq!(cosine.at(0), 0.996);
        assert_eq!(cosine.at(100), 1.0);
        assert_eq!(cosine.at(1000), 1.0);
        let ramp = Ramp { from: 0.04, to: 0.07, ramp_steps: 3 };
        assert_eq!((ramp.at(0), ramp.at(3), ramp.at(9)), (0.04, 0.07, 0.07));
    }

    /// Returns `duration` in steps of 100 images, in a run of 1000 steps over 10,000 samples.
    fn steps(duration: Duration) -> Result<u64, String> {
        duration.steps(10_000, 100, 1000)
    }

    #[test]
    fn durations_are_converted_to_steps() {
        assert_eq!(steps(Duration::Epochs(2.5)), Ok(250));
        assert_eq!(steps(Duration::Samples(1e4)), Ok(100));
        assert_eq!(steps(Duration::Percent(10.0)), Ok(100));
        assert!(Duration::Epochs(-1.0).steps(1, 1, 1).is_err());
    }

    #[test]
    fn hours_are_whole_minutes_where_they_can_be() {
        assert_eq!(Length::from_hours(8.0), Length::Minutes(480.0));
        assert_eq!(Length::from_hours(0.57), Length::Minutes(34.2));
    }

    #[test]
    fn lengths_are_converted_to_steps_except_minutes() {
        assert_eq!(Length::Epochs(2.5).steps(10_000, 100), Ok(Some(250)));
        assert_eq!(Length::Samples(1e4).steps(10_000, 100), Ok(Some(100)));
        assert_eq!(Length::Minutes(0.5).steps(10_000, 100), Ok(None));
        for invalid in
            [Length::Epochs(-1.0), Length::Minutes(0.0), Length::Minutes(f64::NAN), Length::Minutes(1e9)]
        {
            assert!(invalid.steps(10_000, 100).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn a_duration_has_one_unit() {
        #[derive(Deserialize, Debug)]
        struct Wrap {
            #[allow(dead_code)]
            d: Duration,
        }
        assert!(toml::from_str::<Wrap>("d = { epochs = 1, steps = 2 }").is_err());
        assert!(toml::from_str::<Wrap>("d = { epochs = 1 }").is_ok());
    }
}
