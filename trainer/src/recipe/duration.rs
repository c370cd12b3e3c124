//! Lengths of a run and of its phases.

use serde::{Deserialize, Serialize};

/// A length in the unit that suits: `{ epochs = 10 }`, `{ steps = 500 }`, `{ samples = 1e6 }` or
/// `{ percent = 5 }` of the run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Duration {
    /// Updates.
    Steps(u64),
    /// Passes over the data.
    Epochs(f64),
    /// Images.
    Samples(f64),
    /// Of the run's length.
    Percent(f64),
}

impl Duration {
    /// In steps, rounded to the nearest; `total_steps` is `None` for the run's own length.
    ///
    /// # Errors
    /// What makes no sense, in words.
    pub fn steps(&self, n_samples: u64, batch_size: usize, total_steps: Option<u64>) -> Result<u64, String> {
        let batch = batch_size as f64;
        let steps = match *self {
            Self::Steps(steps) => steps as f64,
            Self::Epochs(epochs) => epochs * n_samples as f64 / batch,
            Self::Samples(samples) => samples / batch,
            Self::Percent(percent) => match total_steps {
                Some(total) => total as f64 * percent / 100.0,
                None => return Err("the length of the run cannot be a percentage of itself".into()),
            },
        };
        if !(0.0..1e15).contains(&steps) {
            return Err(format!("{self:?} is {steps} steps"));
        }
        Ok(steps.round() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_turn_into_steps() {
        let steps = |d: Duration| d.steps(10_000, 100, Some(1000));
        assert_eq!(steps(Duration::Epochs(2.5)), Ok(250));
        assert_eq!(steps(Duration::Samples(1e4)), Ok(100));
        assert_eq!(steps(Duration::Percent(10.0)), Ok(100));
        assert!(Duration::Percent(1.0).steps(1, 1, None).is_err());
        assert!(Duration::Epochs(-1.0).steps(1, 1, None).is_err());
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
