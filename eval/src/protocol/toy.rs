//! A protocol for tests: the accuracy of a constant prediction.

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::task::{Scored, Task};
use super::{Needs, Rules};
use crate::EvalError;
use crate::statistics::Predictions;
use crate::statistics::outcome::Outcome;

/// The protocol's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Toy {
    /// Class that is always predicted, counted from 1.
    pub answer: u32,
}

impl Default for Toy {
    fn default() -> Self {
        Self { answer: 1 }
    }
}

impl Rules for Toy {
    fn needs(&self) -> Needs {
        Needs::VECTORS
    }

    fn in_words(&self, numbers: &[Scored], is_published: bool) -> String {
        format!("{} numbers; published: {is_published}", numbers.len())
    }

    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        let labels = &task.test.labels;
        let classified = Predictions::new(vec![self.answer - 1; labels.len()], labels, task.n_classes);
        let outcome = Outcome::Predictions(classified);
        Ok(vec![Scored { metric: "toy".into(), outcome, details: json!({}), counts: None }])
    }
}

#[cfg(test)]
mod tests {
    use super::super::registry::Protocol;
    use super::*;
    use crate::features::set::FeatureSet;
    use pipeline::NoProgress;

    /// The toy is found by name, configured by key, described and scored like all other protocols.
    #[test]
    fn a_registered_protocol_needs_no_other_code() {
        let toy = Protocol::named("toy").expect("a protocol").with("answer", &json!(2)).expect("a setting");
        assert_eq!(toy.in_words(&[]), "0 numbers; published: false");
        let test = FeatureSet::from_rows(1, vec![0.0, 1.0, 2.0, 3.0], vec![0, 1, 1, 1]);
        let train = FeatureSet::empty();
        let task = Task {
            train: &train,
            test: &test,
            n_classes: 2,
            seed: 0,
            views: None,
            sets: None,
            progress: &NoProgress,
        };
        let scored = toy.score(&task).expect("numbers");
        assert_eq!(scored[0].outcome.value(), 75.0);
    }
}
