//! Rows of `evaluations.jsonl`: one number each, with everything that it depends on, so that
//! numbers are compared only where they may be. The file only grows: several processes may append
//! to it.

use std::io::Write;
use std::path::Path;

use augment::Transform;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_64;

use crate::EvalError;
use crate::statistics::calibration::Calibration;

/// Name of the file of a run's evaluations.
pub const EVALUATIONS: &str = "evaluations.jsonl";

/// Longest settings within a name, in bytes; longer ones are replaced by their hash.
const LONGEST_SETTINGS: usize = 40;

/// Settings that the name of a metric contains.
const SETTINGS_IN_METRIC: [&str; 2] = ["k", "shots"];

/// One number with everything that it depends on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvaluationRow {
    /// Name of the number, unique among all protocols and measures: `knn_20`.
    pub metric: String,
    /// The number.
    #[serde(flatten)]
    pub number: Number,
    /// Bounds of the middle 95 % of resampled test sets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<[f64; 2]>,
    /// Value of the number for each class, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by_class: Option<Vec<Option<f64>>>,
    /// Name of the protocol; absent for a measure that needs no labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// Description of the protocol, and of what its number can be compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol_in_words: Option<String>,
    /// Settings of the protocol.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub settings: Map<String, Value>,
    /// Values that the protocol has chosen, and the images on which it has chosen them; of a
    /// classifier, [`ClassifierDetails`], of a network with a decoder of pixels, [`MaskDetails`].
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub details: Value,
    /// Seed of orders, initial weights and random draws.
    #[serde(default)]
    pub seed: u64,
    /// The training set; absent for a measure that needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub train: Option<ImageSetInfo>,
    /// The test set.
    pub test: ImageSetInfo,
    /// The network and its transform of images.
    pub about: NetworkInfo,
    /// Names of the classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<Vec<String>>,
    /// Images or pixels by true class, a row each, and by predicted class, where there are few
    /// classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confusion: Option<Vec<Vec<u64>>>,
    /// True class, predicted class and images of the most frequent confusions, where there are many
    /// classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confused: Option<Vec<(usize, usize, u64)>>,
    /// Name of the watcher that scored the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watch: Option<String>,
}

/// A number under the name of its measure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Number {
    /// Share of the images that were classified correctly, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Mean average precision over classes, in percent.
    #[serde(default, rename = "mAP", skip_serializing_if = "Option::is_none")]
    pub mean_average_precision: Option<f64>,
    /// Mean intersection over union of classes, in percent.
    #[serde(default, rename = "mIoU", skip_serializing_if = "Option::is_none")]
    pub mean_intersection_over_union: Option<f64>,
    /// F1 of the classes that images are said to have, in percent.
    #[serde(default, rename = "F1", skip_serializing_if = "Option::is_none")]
    pub f1: Option<f64>,
    /// Share of the views whose nearest view is of the same image, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<f64>,
    /// Value of a measure that needs no labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
}

/// Details of the row of a classifier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClassifierDetails {
    /// Mean cross-entropy of the probabilities with the classes of the images, in nats; absent in
    /// rows of older releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Probabilities of predictions beside the shares of them that are right.
    pub calibration: Calibration,
    /// Images of the test set with the largest losses, the largest first.
    pub worst: Vec<WorstImage>,
}

/// An image on which a classifier has a large loss.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorstImage {
    /// Shard of the image; absent for a single file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<String>,
    /// Key of the image in its shard, or its name.
    pub key: String,
    /// Name of its class; of several, all names with commas between them.
    pub class: String,
    /// Name of the predicted class, or of all that are predicted.
    pub predicted: String,
    /// Largest probability of a class, in percent: that of the predicted class, if there is one.
    pub probability: f64,
    /// Cross-entropy of the probabilities with the class of the image, in nats; of several, the
    /// mean over all classes.
    pub loss: f64,
}

/// Details of the row of a network that labels pixels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MaskDetails {
    /// Images of the test set with the smallest shares of right pixels, the smallest first.
    pub worst_masks: Vec<WorstMask>,
}

/// An image of which few pixels are labeled correctly.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorstMask {
    /// Shard of the image; absent for a single file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<String>,
    /// Key of the image in its shard, or its name.
    pub key: String,
    /// Share of its pixels that count whose predicted class is right, in percent.
    pub accuracy: f64,
}

/// A set of images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ImageSetInfo {
    /// Name of the set.
    pub set: String,
    /// Number of images that were used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<usize>,
}

/// A network and its transform of images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NetworkInfo {
    /// Steps that the network has taken; absent for weights that belong to no run.
    pub step: Option<u64>,
    /// Name of the network within its run.
    pub network: String,
    /// Resize and crop of images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transform: Option<Transform>,
    /// The transform in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transform_in_words: Option<String>,
    /// Checkpoint, weights, model and other known facts.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl EvaluationRow {
    /// Returns the settings of the protocol that the name of the metric does not contain.
    pub fn other_settings(&self) -> Map<String, Value> {
        let mut settings = self.settings.clone();
        settings.retain(|setting, _| !SETTINGS_IN_METRIC.contains(&setting.as_str()));
        settings
    }

    /// Returns the name of the score in trackers, in a run whose evaluated network is `evaluated`.
    /// Scores that may not be compared have different names: besides the metric, the test set, the
    /// network and the side of the images (and the short side before the crop, unless that is 8/7
    /// of it), a name contains the training set, its number of images, and the settings of the
    /// protocol, what is looked for first coming first. Names differ from those of the run's probe.
    pub fn score_name(&self, evaluated: &str) -> String {
        let network = if self.about.network == evaluated { "evaluated" } else { &self.about.network };
        let size = match self.about.transform {
            None => "0px".to_string(),
            Some(transform) if transform == Transform::new(transform.size_px) => {
                format!("{}px", transform.size_px)
            }
            Some(Transform { resize_px, size_px }) => format!("{size_px}px-of-{resize_px}px"),
        };
        let mut name = format!("eval/{}/{}/{network}/{size}", self.metric, self.test.set);
        if let Some(train) = self.train.as_ref().filter(|train| !train.set.is_empty()) {
            name += &format!("/{}", train.set);
            name += &train.images.map_or_else(String::new, |images| format!("-{images}"));
        }
        let mut settings: Vec<String> = Vec::new();
        for (key, value) in self.other_settings() {
            if !value.is_null() && value != false {
                settings.push(format!("{key}-{value}"));
            }
        }
        if self.seed != 0 {
            settings.push(format!("seed-{}", self.seed));
        }
        let settings = settings.join("-");
        match settings.len() {
            0 => name,
            len if len <= LONGEST_SETTINGS && !settings.contains(['[', '"', '{']) => {
                format!("{name}/{settings}")
            }
            _ => format!("{name}/settings-{:08x}", xxh3_64(settings.as_bytes()) >> 32),
        }
    }
}

/// Appends `rows` to the evaluations of the run in `workdir`.
///
/// # Errors
/// [`EvalError::Io`].
pub fn append(workdir: &Path, rows: &[EvaluationRow]) -> Result<(), EvalError> {
    let path = workdir.join(EVALUATIONS);
    let mut lines = String::new();
    for row in rows {
        let line = serde_json::to_string(row).map_err(|error| EvalError::io("write", &path, error.into()))?;
        lines += &line;
        lines.push('\n');
    }
    let file = pipeline::file::open_append(&path);
    let written = file.and_then(|mut file| file.write_all(lines.as_bytes()));
    written.map_err(|source| EvalError::io("write", &path, source))
}

impl Number {
    /// Creates the number `value` of the measure `measure`: `accuracy`, `mAP`, `mIoU`, `F1`,
    /// `found`, or another one that needs no labels.
    pub fn new(measure: &str, value: f64) -> Self {
        let number = Self::default();
        match measure {
            "accuracy" => Self { accuracy: Some(value), ..number },
            "mAP" => Self { mean_average_precision: Some(value), ..number },
            "mIoU" => Self { mean_intersection_over_union: Some(value), ..number },
            "F1" => Self { f1: Some(value), ..number },
            "found" => Self { found: Some(value), ..number },
            _ => Self { value: Some(value), ..number },
        }
    }

    /// Returns the value of the measure, whichever it is.
    pub fn value(&self) -> Option<f64> {
        self.measure_and_value().map(|(_, value)| value)
    }

    /// Returns the name of the measure, empty for one that needs no labels, and its value; `None`
    /// if there is no value.
    pub fn measure_and_value(&self) -> Option<(&'static str, f64)> {
        let all = [
            ("accuracy", self.accuracy),
            ("mAP", self.mean_average_precision),
            ("mIoU", self.mean_intersection_over_union),
            ("F1", self.f1),
            ("found", self.found),
            ("", self.value),
        ];
        all.into_iter().find_map(|(measure, value)| Some((measure, value?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows are read as they were written, and older rows with fewer keys are read as well.
    #[test]
    fn rows_are_read_as_they_were_written() {
        let about =
            serde_json::json!({ "step": 3, "network": "base", "checkpoint": "runs/a", "transform": null });
        let row = EvaluationRow {
            metric: "knn_20".into(),
            number: Number::new("accuracy", 43.5),
            interval: Some([41.0, 46.0]),
            by_class: Some(vec![Some(50.0), None]),
            protocol: Some("knn".into()),
            protocol_in_words: Some("as DINO".into()),
            settings: Map::from_iter([("k".into(), serde_json::json!([20]))]),
            details: serde_json::json!({ "k": 20 }),
            seed: 1,
            train: Some(ImageSetInfo { set: "cifar/train".into(), images: Some(10) }),
            test: ImageSetInfo { set: "cifar/test".into(), images: Some(5) },
            about: serde_json::from_value(about).unwrap(),
            classes: Some(vec!["cat".into(), "dog".into()]),
            confusion: Some(vec![vec![1, 2], vec![0, 2]]),
            confused: None,
            watch: None,
        };
        let text = serde_json::to_string(&row).unwrap();
        assert!(text.contains("\"accuracy\":43.5") && text.contains("\"checkpoint\":\"runs/a\""), "{text}");
        assert_eq!(serde_json::from_str::<EvaluationRow>(&text).unwrap(), row);
        let old =
            r#"{"metric":"rankme","value":7.5,"test":{"set":"a"},"about":{"step":1,"network":"student"}}"#;
        let old: EvaluationRow = serde_json::from_str(old).unwrap();
        assert_eq!(old.number.measure_and_value(), Some(("", 7.5)));
        for measure in ["accuracy", "mAP", "mIoU", "F1"] {
            assert_eq!(Number::new(measure, 2.0).measure_and_value(), Some((measure, 2.0)));
        }
        assert_eq!(Number::new("rankme", 2.0).measure_and_value(), Some(("", 2.0)));
    }

    fn knn_row(network: &str, images: usize, settings: Value, seed: u64) -> EvaluationRow {
        serde_json::from_value(serde_json::json!({
            "metric": "knn_20", "accuracy": 40.0, "settings": settings, "seed": seed,
            "train": { "set": "cifar/train", "images": images }, "test": { "set": "cifar/test", "images": 9 },
            "about": { "step": 3, "network": network, "transform": { "resize_px": 37, "size_px": 32 } },
        }))
        .unwrap()
    }

    /// Scores that may not be compared have different names in trackers; the evaluated networks of
    /// two methods have the same name.
    #[test]
    fn tracker_names_depend_on_training_set_and_settings() {
        let knn = serde_json::json!({ "k": [20], "leave_one_out": false, "temperature": 0.07 });
        let name = knn_row("teacher", 5000, knn.clone(), 0).score_name("teacher");
        assert_eq!(name, "eval/knn_20/cifar/test/evaluated/32px/cifar/train-5000/temperature-0.07");
        assert_eq!(name, knn_row("student", 5000, knn.clone(), 0).score_name("student"));
        let others = [
            knn_row("student", 5000, knn.clone(), 0),
            knn_row("teacher", 40_000, knn.clone(), 0),
            knn_row("teacher", 5000, knn.clone(), 1),
            knn_row("teacher", 5000, serde_json::json!({ "temperature": 0.1 }), 0),
            knn_row("teacher", 5000, serde_json::json!({ "rates": [0.1, 0.2] }), 0),
            knn_row("teacher", 5000, serde_json::json!({ "rates": [0.1, 0.3] }), 0),
        ];
        let mut names: Vec<String> = others.iter().map(|row| row.score_name("teacher")).collect();
        let mut resized = knn_row("teacher", 5000, knn, 0);
        resized.about.transform = Some(Transform { resize_px: 32, size_px: 32 });
        let resized = resized.score_name("teacher");
        assert!(resized.starts_with("eval/knn_20/cifar/test/evaluated/32px-of-32px/"), "{resized}");
        names.push(name);
        names.push(resized);
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 8, "{names:?}");
    }
}
