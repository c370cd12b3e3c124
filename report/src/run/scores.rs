//! Scores of a run's checkpoints, from `evaluations.jsonl` and from the probe within the run.

use std::collections::BTreeMap;
use std::path::Path;

use eval::row::{ClassifierDetails, EVALUATIONS, EvaluationRow, MaskDetails};
use eval::{CLASSIFIER_METRICS, MEAN_IOU};
use pipeline::words::counted;
use serde::Serialize;
use serde_json::Value;

use super::jsonl;
use crate::ReportError;

/// A score after a number of steps.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Scored {
    pub(crate) step: u64,
    pub(crate) value: f64,
    /// Interval of the score, where it has one.
    pub(crate) interval: Option<[f64; 2]>,
}

/// Kind of a score: all that it depends on except the step. Numbers of one kind may be compared.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Kind {
    /// The test set.
    pub(crate) set: String,
    /// Number of its images, where it is known.
    pub(crate) test_images: Option<usize>,
    /// The training set; empty for measures that need none.
    pub(crate) train: String,
    /// Number of its images, where it is known.
    pub(crate) train_images: Option<usize>,
    pub(crate) metric: String,
    /// `accuracy`, `mAP`, `mIoU` or `F1`, in percent; empty for a measure that needs no labels.
    pub(crate) measure: &'static str,
    /// Name of the network in the run; empty for the network that is evaluated, such as the teacher
    /// if the method has one, so that runs of different methods can be compared.
    pub(crate) network: String,
    /// Transform of the images, in words.
    pub(crate) transform: String,
    /// Settings of the protocol that change the number.
    pub(crate) settings: String,
    pub(crate) seed: u64,
}

impl Kind {
    /// Describes measure, images and transform.
    fn short_name(&self) -> String {
        format!("{} on {}, {}", self.metric, self.set, self.transform)
    }

    /// Describes what [`Kind::short_name`] leaves out, after a comma: the training set, settings
    /// and a seed.
    fn details(&self) -> String {
        let mut details = self.fitted();
        if !self.settings.is_empty() {
            details.push_str(&format!(", {}", self.settings));
        }
        if self.seed != 0 {
            details.push_str(&format!(", seed {}", self.seed));
        }
        details
    }

    /// Describes the training set, after a comma; empty if there is none.
    pub(crate) fn fitted(&self) -> String {
        match self.train_images {
            Some(n) => format!(", fitted on {} of {}", counted(n as u64, "image"), self.train),
            None if self.train.is_empty() => String::new(),
            None => format!(", fitted on {}", self.train),
        }
    }
}

/// Confusion of classes in the evaluation of a kind at the step that is the result of the run, or
/// else in the newest.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Confusion {
    pub(crate) kind: Kind,
    pub(crate) step: u64,
    pub(crate) classes: Vec<String>,
    /// Accuracy of each class, in percent.
    pub(crate) by_class: Vec<Option<f64>>,
    /// Images by true and by predicted class, where there are few classes.
    pub(crate) matrix: Option<Vec<Vec<u64>>>,
    /// True class, predicted class and images of the most frequent confusions, where there are
    /// many.
    pub(crate) pairs: Option<Vec<(usize, usize, u64)>>,
}

impl Confusion {
    /// Returns true if all parts have the same classes. A file may hold anything, and the page uses
    /// class indices.
    fn is_consistent(&self) -> bool {
        let n = self.classes.len();
        self.by_class.len() == n
            && self
                .matrix
                .as_ref()
                .is_none_or(|matrix| matrix.len() == n && matrix.iter().all(|row| row.len() == n))
            && self.pairs.iter().flatten().all(|(label, predicted, _)| *label.max(predicted) < n)
    }
}

/// Evaluation of a classifier on a test set at the step that is the result of the run, or else the
/// newest.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ClassifierResult {
    pub(crate) kind: Kind,
    pub(crate) step: u64,
    /// Scores of the classes that have any, the lowest first, if images may have several classes:
    /// a confusion shows the others.
    pub(crate) by_class: Vec<ClassScore>,
    #[serde(flatten)]
    pub(crate) details: ClassifierDetails,
}

/// Score of a class, in percent.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ClassScore {
    pub(crate) class: String,
    pub(crate) value: f64,
}

/// Evaluation of a network that labels pixels on a test set at the step that is the result of the
/// run, or else the newest.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct MaskResult {
    pub(crate) kind: Kind,
    pub(crate) step: u64,
    #[serde(flatten)]
    pub(crate) details: MaskDetails,
}

/// All scores of a run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Evaluations {
    /// Scores by kind, each in the order of the steps.
    pub(crate) scores: BTreeMap<Kind, Vec<Scored>>,
    pub(crate) confusions: Vec<Confusion>,
    /// Calibration and worst images of the classifier that the run trains, by test set.
    pub(crate) classifiers: Vec<ClassifierResult>,
    /// Worst images of the decoder that the run trains, by test set.
    pub(crate) masks: Vec<MaskResult>,
}

impl Evaluations {
    /// Reads the evaluations of the run in `workdir`, whose evaluated network is `evaluated`, and
    /// whose weights after `result_step` steps are its result. The last of several evaluations of
    /// one kind at one step counts.
    pub(crate) fn read(workdir: &Path, evaluated: &str, result_step: u64) -> Result<Self, ReportError> {
        let mut by_kind = BTreeMap::<Kind, BTreeMap<u64, (f64, EvaluationRow)>>::new();
        for row in jsonl::rows::<EvaluationRow>(&workdir.join(EVALUATIONS))? {
            let Some(step) = row.about.step else { continue };
            let Some((measure, value)) = row.number.measure_and_value() else { continue };
            by_kind.entry(kind_of(&row, measure, evaluated)).or_default().insert(step, (value, row));
        }
        let mut confusions = Vec::new();
        let mut classifiers = Vec::new();
        let mut masks = Vec::new();
        for (kind, rows) in &by_kind {
            let result_row = rows.get_key_value(&result_step);
            let Some((step, (_, row))) = result_row.or_else(|| rows.iter().next_back()) else { continue };
            // A file may hold anything; rows of earlier versions have no details.
            if CLASSIFIER_METRICS.contains(&kind.metric.as_str())
                && let Ok(details) = serde_json::from_value(row.details.clone())
            {
                let by_class = class_scores(row);
                classifiers.push(ClassifierResult { kind: kind.clone(), step: *step, by_class, details });
            }
            if kind.metric == MEAN_IOU
                && let Ok(details) = serde_json::from_value(row.details.clone())
            {
                masks.push(MaskResult { kind: kind.clone(), step: *step, details });
            }
            // Evaluations with several labels per image have no confusions.
            if row.confusion.is_none() && row.confused.as_ref().is_none_or(Vec::is_empty) {
                continue;
            }
            let Some(classes) = row.classes.clone() else { continue };
            let Some(by_class) = row.by_class.clone() else { continue };
            let confusion = Confusion {
                kind: kind.clone(),
                step: *step,
                classes,
                by_class,
                matrix: row.confusion.clone(),
                pairs: row.confused.clone(),
            };
            if confusion.is_consistent() {
                confusions.push(confusion);
            }
        }
        let mut scores = BTreeMap::new();
        for (kind, rows) in by_kind {
            let mut scored = Vec::with_capacity(rows.len());
            for (step, (value, row)) in rows {
                scored.push(Scored { step, value, interval: row.interval });
            }
            scores.insert(kind, scored);
        }
        Ok(Self { scores, confusions, classifiers, masks })
    }
}

/// Returns the scores of the classes of `row`, the lowest first, if its images may have several.
fn class_scores(row: &EvaluationRow) -> Vec<ClassScore> {
    if row.number.mean_average_precision.is_none() {
        return Vec::new();
    }
    let classes = row.classes.iter().flatten();
    let mut scores = Vec::new();
    for (class, value) in classes.zip(row.by_class.iter().flatten()) {
        if let Some(value) = value {
            scores.push(ClassScore { class: class.clone(), value: *value });
        }
    }
    scores.sort_by(|a, b| a.value.total_cmp(&b.value));
    scores
}

/// Returns the scores of the network `network` of the run in `workdir` after `step` steps.
///
/// # Errors
/// [`ReportError`] when the run's evaluations cannot be read.
pub fn scores_at(workdir: &Path, network: &str, step: u64) -> Result<Vec<ScoreAt>, ReportError> {
    let evaluations = Evaluations::read(workdir, network, step)?;
    let mut found: Vec<(&Kind, &Scored)> = Vec::new();
    for (kind, scored) in &evaluations.scores {
        let at_step = scored.iter().find(|scored| scored.step == step);
        if let Some(scored) = at_step.filter(|_| kind.network.is_empty()) {
            found.push((kind, scored));
        }
    }
    let mut scores = Vec::new();
    for (kind, scored) in &found {
        let mut name = kind.short_name();
        if found.iter().filter(|(other, _)| other.short_name() == name).count() > 1 {
            name.push_str(&kind.details());
        }
        scores.push(ScoreAt { name, value: scored.value, interval: scored.interval });
    }
    Ok(scores)
}

/// A score at a step.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreAt {
    /// Measure and images, and what else tells it from the other scores at the step.
    pub name: String,
    /// The number.
    pub value: f64,
    /// Its interval, where it has one.
    pub interval: Option<[f64; 2]>,
}

/// A score of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedScore {
    /// Name in trackers: see [`EvaluationRow::score_name`].
    pub name: String,
    /// Number of steps taken.
    pub step: u64,
    /// The number.
    pub value: f64,
}

/// Returns the scores of the run in `workdir`, whose evaluated network is `evaluated`, in the order
/// in which they were made.
///
/// # Errors
/// [`ReportError`] when the run's evaluations cannot be read.
pub fn named_scores(workdir: &Path, evaluated: &str) -> Result<Vec<NamedScore>, ReportError> {
    let mut scores = Vec::new();
    for row in jsonl::rows::<EvaluationRow>(&workdir.join(EVALUATIONS))? {
        let (Some(step), Some(value)) = (row.about.step, row.number.value()) else { continue };
        scores.push(NamedScore { name: row.score_name(evaluated), step, value });
    }
    Ok(scores)
}

/// Returns the kind of `row`, whose number has the measure `measure`, in a run whose evaluated
/// network is `evaluated`.
fn kind_of(row: &EvaluationRow, measure: &'static str, evaluated: &str) -> Kind {
    let settings = row.other_settings();
    Kind {
        set: row.test.set.clone(),
        test_images: row.test.images,
        train: row.train.as_ref().map_or_else(String::new, |train| train.set.clone()),
        train_images: row.train.as_ref().and_then(|train| train.images),
        metric: row.metric.clone(),
        measure,
        network: if row.about.network == evaluated { String::new() } else { row.about.network.clone() },
        transform: row.about.transform_in_words.clone().unwrap_or_default(),
        settings: if settings.is_empty() { String::new() } else { Value::Object(settings).to_string() },
        seed: row.seed,
    }
}

/// Returns the first, the best and the last of `n` scores: `18.5 → 48.4 → 47.9`; one number if
/// there is one score.
pub(super) fn course(n: usize, first: f64, best: f64, last: f64) -> String {
    if n == 1 { format!("{last:.1}") } else { format!("{first:.1} → {best:.1} → {last:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(set: &str, px: u32, step: u64, value: f64) -> String {
        serde_json::json!({
            "metric": "knn_20", "accuracy": value, "interval": [value - 1.0, value + 1.0],
            "settings": { "k": [20] },
            "test": { "set": set, "images": 9 }, "classes": ["a", "b"], "by_class": [50.0, null],
            "confusion": [[1, 1], [0, 0]],
            "about": { "step": step, "network": "teacher",
            "transform_in_words": format!("CenterCrop({px})") },
        })
        .to_string()
    }

    /// Details of another shape, as of other protocols or in a damaged file, are none.
    #[test]
    fn details_of_classifiers_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let bin = serde_json::json!({ "n": 2, "confidence": 96.0, "accuracy": 50.0 });
        let worst = serde_json::json!({
            "shard": "a.tar", "key": "7", "class": "cat", "predicted": "dog",
            "probability": 97.0, "loss": 3.5,
        });
        let whole = serde_json::json!({ "calibration": { "ece": 46.0, "bins": [bin] }, "worst": [worst] });
        for (details, n_expected) in
            [(whole, 1), (serde_json::json!({ "k": 20 }), 0), (serde_json::json!({ "calibration": 3 }), 0)]
        {
            let row = serde_json::json!({
                "metric": "top1", "accuracy": 50.0, "details": details, "test": { "set": "val" },
                "about": { "step": 60, "network": "network" },
            });
            std::fs::write(folder.path().join(EVALUATIONS), row.to_string()).unwrap();
            let evaluations = Evaluations::read(folder.path(), "network", 90).unwrap();
            assert_eq!((evaluations.scores.len(), evaluations.classifiers.len()), (1, n_expected), "{row}");
            for classifier in &evaluations.classifiers {
                assert_eq!((classifier.step, classifier.details.calibration.ece), (60, 46.0));
                assert_eq!(classifier.details.worst[0].predicted, "dog");
            }
        }
    }

    /// Of a classifier of several classes per image, which has no confusion, the page has the
    /// scores of the classes, without those that no image has.
    #[test]
    fn classes_are_listed_by_their_scores() {
        let folder = tempfile::tempdir().unwrap();
        let details = serde_json::json!({ "calibration": { "ece": 3.0, "bins": [] }, "worst": [] });
        let row = serde_json::json!({
            "metric": "mAP", "mAP": 60.0, "details": details, "test": { "set": "val" },
            "classes": ["cat", "dog", "owl"], "by_class": [80.0, null, 40.0],
            "about": { "step": 60, "network": "network" },
        });
        std::fs::write(folder.path().join(EVALUATIONS), row.to_string()).unwrap();
        let evaluations = Evaluations::read(folder.path(), "network", 60).unwrap();
        assert_eq!((evaluations.confusions.len(), evaluations.classifiers.len()), (0, 1));
        let owl = ClassScore { class: "owl".into(), value: 40.0 };
        let cat = ClassScore { class: "cat".into(), value: 80.0 };
        assert_eq!(evaluations.classifiers[0].by_class, [owl, cat]);
    }

    #[test]
    fn scores_are_grouped_by_kind() {
        let folder = tempfile::tempdir().unwrap();
        let rows = [
            line("cifar", 32, 100, 40.0),
            line("cifar", 32, 200, 41.0),
            line("cifar", 32, 200, 42.0),
            line("cifar", 64, 200, 50.0),
            line("other", 32, 200, 20.0),
            r#"{"error":"gone","about":{"step":300}}"#.into(),
            r#"{"metric":"knn_5","mAP":61.0,"interval":[60.0,62.0],"settings":{"k":[5]},"test":{"set":"voc"},"classes":["a"],
                "by_class":[61.0],"confusion":null,"about":{"step":200,"network":"teacher"}}"#
                .replace('\n', ""),
        ];
        std::fs::write(folder.path().join(EVALUATIONS), rows.join("\n")).unwrap();
        let evaluations = Evaluations::read(folder.path(), "teacher", 300).unwrap();
        let values: Vec<Vec<(u64, f64)>> = evaluations
            .scores
            .values()
            .map(|rows| rows.iter().map(|row| (row.step, row.value)).collect())
            .collect();
        assert_eq!(
            values,
            [vec![(100, 40.0), (200, 42.0)], vec![(200, 50.0)], vec![(200, 20.0)], vec![(200, 61.0)]]
        );
        assert_eq!(evaluations.confusions.len(), 3, "several classes an image confuse none");
        assert_eq!(evaluations.scores.keys().next_back().map(|kind| kind.measure), Some("mAP"));
        assert_eq!(evaluations.confusions[0].by_class, [Some(50.0), None]);
        for (result_step, expected) in [(100, 100), (200, 200), (300, 200)] {
            let evaluations = Evaluations::read(folder.path(), "teacher", result_step).unwrap();
            assert_eq!(evaluations.confusions[0].step, expected, "of the result, or else the newest");
        }
        // Rows whose parts are of different classes would stop the page's script.
        for (part, short) in
            [("[50.0,null]", "[50.0]"), ("[[1,1],[0,0]]", "[[1,1],[0]]"), ("[\"a\",\"b\"]", "[\"a\"]")]
        {
            let damaged = line("cifar", 32, 300, 42.0).replace(part, short);
            std::fs::write(folder.path().join(EVALUATIONS), damaged).unwrap();
            let evaluations = Evaluations::read(folder.path(), "teacher", 300).unwrap();
            assert_eq!((evaluations.scores.len(), evaluations.confusions.len()), (1, 0), "{part}");
        }
    }
}
