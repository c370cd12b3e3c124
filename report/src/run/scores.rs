//! Scores of a run's checkpoints, from `evaluations.jsonl` and from the probe within the run.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::jsonl;
use crate::ReportError;

/// The file of a run's evaluations.
pub const EVALUATIONS: &str = "evaluations.jsonl";

/// A row of the file, as far as a report shows it.
#[derive(Debug, Clone, Deserialize)]
struct Row {
    metric: String,
    #[serde(alias = "value", alias = "mAP", alias = "mIoU")]
    accuracy: f64,
    interval: Option<[f64; 2]>,
    #[serde(default)]
    settings: Value,
    test: Set,
    about: About,
    classes: Option<Vec<String>>,
    by_class: Option<Vec<Option<f64>>>,
    confusion: Option<Vec<Vec<u64>>>,
    confused: Option<Vec<(usize, usize, u64)>>,
}

#[derive(Debug, Clone, Deserialize)]
struct Set {
    set: String,
}

#[derive(Debug, Clone, Deserialize)]
struct About {
    step: Option<u64>,
    network: String,
    transform_in_words: Option<String>,
}

/// A score at a count of steps taken.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Scored {
    pub(crate) step: u64,
    pub(crate) value: f64,
    /// Its interval, where it has one.
    pub(crate) interval: Option<[f64; 2]>,
}

/// What is scored, and how: numbers of one kind may be compared.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Kind {
    /// The test set, or that it is the probe within the run.
    pub(crate) set: String,
    pub(crate) metric: String,
    /// Which network of the run.
    pub(crate) network: String,
    /// How images are seen.
    pub(crate) transform: String,
    /// Settings of the protocol.
    pub(crate) settings: String,
}

/// Which classes were taken for which, in the newest evaluation of a kind.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Confusion {
    pub(crate) kind: Kind,
    pub(crate) step: u64,
    pub(crate) classes: Vec<String>,
    /// Accuracy of each class, in percent.
    pub(crate) by_class: Vec<Option<f64>>,
    /// Images by true and by predicted class, where there are few classes.
    pub(crate) matrix: Option<Vec<Vec<u64>>>,
    /// True class, predicted class and images of the most frequent confusions, where there are many.
    pub(crate) pairs: Option<Vec<(usize, usize, u64)>>,
}

/// All scores of a run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Evaluations {
    /// By kind, each in the order of the steps.
    pub(crate) scores: BTreeMap<Kind, Vec<Scored>>,
    pub(crate) confusions: Vec<Confusion>,
}

impl Evaluations {
    /// Those of the run in `workdir`. Of several evaluations of one kind at one step the last one counts.
    pub(crate) fn read(workdir: &Path) -> Result<Self, ReportError> {
        let mut by_kind = BTreeMap::<Kind, BTreeMap<u64, Row>>::new();
        for row in jsonl::rows::<Row>(&workdir.join(EVALUATIONS))? {
            let Some(step) = row.about.step else { continue };
            by_kind.entry(row.kind()).or_default().insert(step, row);
        }
        let confusion = |(kind, rows): (&Kind, &BTreeMap<u64, Row>)| {
            let (step, row) = rows.iter().next_back()?;
            Some(Confusion {
                kind: kind.clone(),
                step: *step,
                classes: row.classes.clone()?,
                by_class: row.by_class.clone()?,
                matrix: row.confusion.clone(),
                pairs: row.confused.clone(),
            })
        };
        let confusions = by_kind.iter().filter_map(confusion).collect();
        let scored = |(step, row): (u64, Row)| Scored { step, value: row.accuracy, interval: row.interval };
        let scores = by_kind.into_iter().map(|(kind, rows)| (kind, rows.into_iter().map(scored).collect()));
        Ok(Self { scores: scores.collect(), confusions })
    }
}

impl Row {
    fn kind(&self) -> Kind {
        Kind {
            set: self.test.set.clone(),
            metric: self.metric.clone(),
            network: self.about.network.clone(),
            transform: self.about.transform_in_words.clone().unwrap_or_default(),
            settings: match &self.settings {
                Value::Null => String::new(),
                settings => settings.to_string(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_told_apart_by_all_that_they_depend_on() {
        let folder = tempfile::tempdir().unwrap();
        let row = |set: &str, px: u32, step: u64, value: f64| {
            serde_json::json!({
                "metric": "knn_20", "accuracy": value, "interval": [value - 1.0, value + 1.0], "settings": { "k": [20] },
                "test": { "set": set, "images": 9 }, "classes": ["a", "b"], "by_class": [50.0, null],
                "confusion": [[1, 1], [0, 0]],
                "about": { "step": step, "network": "teacher", "transform_in_words": format!("CenterCrop({px})") },
            })
            .to_string()
        };
        let rows = [
            row("cifar", 32, 100, 40.0),
            row("cifar", 32, 200, 41.0),
            row("cifar", 32, 200, 42.0),
            row("cifar", 64, 200, 50.0),
            row("other", 32, 200, 20.0),
            r#"{"error":"gone","about":{"step":300}}"#.into(),
        ];
        std::fs::write(folder.path().join(EVALUATIONS), rows.join("\n")).unwrap();
        let found = Evaluations::read(folder.path()).unwrap();
        let values: Vec<Vec<(u64, f64)>> = found
            .scores
            .values()
            .map(|rows| rows.iter().map(|row| (row.step, row.value)).collect())
            .collect();
        assert_eq!(values, [vec![(100, 40.0), (200, 42.0)], vec![(200, 50.0)], vec![(200, 20.0)]]);
        assert_eq!(found.confusions.len(), 3);
        assert_eq!(found.confusions[0].by_class, [Some(50.0), None]);
    }
}
