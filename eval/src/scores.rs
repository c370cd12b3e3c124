//! Scores and measures as rows of `evaluations.jsonl`, and as JSON for other programs. `statistics`
//! computes the numbers, `row` defines a row and writes it.

use serde_json::{Map, Value, json};

use crate::classifier::{Classified, F1, MEAN_AVERAGE_PRECISION, TOP_1, class_names};
use crate::images::ImageSet;
use crate::measure::Measures;
use crate::probe::{ProtocolScores, Scores, Split};
use crate::protocol::task::Scored;
use crate::row::{
    ClassifierDetails, EvaluationRow, ImageSetInfo, MaskDetails, NetworkInfo, Number, WorstImage, WorstMask,
};
use crate::segmenter::{MEAN_IOU, PIXEL_ACCURACY, Segmented};
use crate::statistics::outcome::Outcome;

/// Largest number of classes whose whole confusion matrix is in the JSON.
const MAX_CONFUSED: usize = 100;

/// Largest number of classes whose whole confusion matrix is kept with a score; with more classes,
/// only the most frequent confusions are kept.
const MAX_KEPT_CONFUSED: usize = 20;

/// Number of confusions that are kept if there are more classes.
const N_KEPT_PAIRS: usize = 30;

/// Names of the scores of what a run trains beside its backbone: a classifier or a decoder.
pub const OWN_METRICS: [&str; 5] = [TOP_1, MEAN_AVERAGE_PRECISION, MEAN_IOU, F1, PIXEL_ACCURACY];

/// Names of those among [`OWN_METRICS`] that runs are compared by.
pub const MAIN_METRICS: [&str; 3] = [TOP_1, MEAN_AVERAGE_PRECISION, MEAN_IOU];

/// Description of the score of a classifier.
pub const CLASSIFIER_IN_WORDS: &str = "the classifier that the run trains, on one crop of each image";

/// Description of the scores of a decoder of pixels.
const DECODER_IN_WORDS: &str =
    "the decoder that the run trains, on whole images as squares, without sliding windows or flips";

/// Returns all scores, by the names of the networks, with their settings as JSON; `about` describes
/// the first network.
pub fn to_json(table: &[(String, Scores)], split: &Split, about: &NetworkInfo) -> Value {
    let mut networks = Map::new();
    for (name, scores) in table {
        networks.insert(name.replace(' ', "_"), numbers(scores, split.seed));
    }
    let Some((_, first)) = table.first() else { return Value::Null };
    json!({
        "about": about,
        "train": { "set": split.train.name, "images": first.n_train },
        "test": { "set": split.test.name, "images": first.n_test },
        "undecodable": first.n_bad,
        "classes": split.test.classes(),
        "networks": networks,
    })
}

/// Returns the measures of `images` as JSON; `about` describes the network.
pub fn measures_to_json(measures: &Measures, images: &ImageSet, about: &NetworkInfo) -> Value {
    let values: Map<String, Value> =
        measures.iter().map(|(name, value, _)| ((*name).to_string(), json!(value))).collect();
    json!({ "about": about, "test": { "set": images.name }, "measures": values })
}

/// Returns one row per score, with everything that it depends on; `about` describes the network.
pub fn rows(scores: &Scores, split: &Split, about: &NetworkInfo) -> Vec<EvaluationRow> {
    scores
        .numbers()
        .map(|(protocol_scores, scored)| {
            let protocol = &protocol_scores.protocol;
            let outcome = &scored.outcome;
            let about = NetworkInfo {
                transform: Some(protocol_scores.transform),
                transform_in_words: Some(protocol_scores.transform.to_string()),
                ..about.clone()
            };
            let train = ImageSetInfo { set: split.train.name.clone(), images: Some(scores.n_train) };
            let test = ImageSetInfo { set: split.test.name.clone(), images: Some(scores.n_test) };
            EvaluationRow {
                protocol: Some(protocol.name().into()),
                protocol_in_words: Some(protocol.in_words(&protocol_scores.numbers)),
                settings: protocol.settings().as_object().cloned().unwrap_or_default(),
                details: scored.details.clone(),
                seed: split.seed,
                train: Some(train),
                classes: protocol.needs().has_classes().then(|| split.test.classes().to_vec()),
                ..outcome_row(&scored.metric, outcome, test, about)
            }
        })
        .collect()
}

/// Returns the rows of a classifier that was trained on the images `train` and has `classified`
/// images of `test`, its main score first; `about` describes the network.
pub fn classifier_rows(
    classified: &Classified,
    train: Option<ImageSetInfo>,
    test: &ImageSet,
    about: NetworkInfo,
) -> Vec<EvaluationRow> {
    let info = ImageSetInfo { set: test.name.clone(), images: Some(classified.n_images) };
    let is_multi_label = classified.decisions.is_some();
    let metric = if is_multi_label { MEAN_AVERAGE_PRECISION } else { TOP_1 };
    let row = EvaluationRow {
        protocol: Some("classifier".into()),
        protocol_in_words: Some(CLASSIFIER_IN_WORDS.into()),
        details: json!(classifier_details(classified, test)),
        train,
        classes: Some(test.classes().to_vec()),
        ..outcome_row(metric, &classified.outcome, info, about)
    };
    let Some(decisions) = &classified.decisions else { return vec![row] };
    let f1 = EvaluationRow {
        metric: F1.into(),
        number: Number::new(F1, decisions.f1()),
        interval: Some(decisions.interval()),
        by_class: None,
        details: Value::Null,
        classes: None,
        ..row.clone()
    };
    vec![row, f1]
}

/// Returns the row of `outcome`, the score `metric` on the images `test`, without a protocol;
/// `about` describes the network.
fn outcome_row(metric: &str, outcome: &Outcome, test: ImageSetInfo, about: NetworkInfo) -> EvaluationRow {
    let is_small = outcome.n_classes() <= MAX_KEPT_CONFUSED;
    EvaluationRow {
        interval: Some(outcome.interval()),
        by_class: Some(outcome.by_class()),
        confusion: if is_small { confusion(outcome) } else { None },
        confused: (!is_small).then(|| outcome.most_confused(N_KEPT_PAIRS)),
        ..number_row(metric, Number::new(outcome.measure(), outcome.value()), test, about)
    }
}

/// Returns the row of `number`, the score `metric` on the images `test`, and of nothing else;
/// `about` describes the network.
pub fn number_row(metric: &str, number: Number, test: ImageSetInfo, about: NetworkInfo) -> EvaluationRow {
    EvaluationRow {
        metric: metric.into(),
        number,
        interval: None,
        by_class: None,
        protocol: None,
        protocol_in_words: None,
        settings: Map::new(),
        details: Value::Null,
        seed: 0,
        train: None,
        test,
        about,
        classes: None,
        confusion: None,
        confused: None,
        watch: None,
    }
}

/// Returns the loss and the calibration of a classifier, and the images of `test` on which its
/// losses are largest.
fn classifier_details(classified: &Classified, test: &ImageSet) -> ClassifierDetails {
    let classes = test.classes();
    let mut worst = Vec::with_capacity(classified.worst.len());
    for image in &classified.worst {
        let (shard, key) = test.describe(image.image);
        worst.push(WorstImage {
            shard,
            key,
            class: class_names(&image.labels, classes),
            predicted: class_names(&image.predicted, classes),
            probability: image.probability,
            loss: image.loss,
        });
    }
    ClassifierDetails { loss: Some(classified.loss), calibration: classified.calibration.clone(), worst }
}

/// Returns the rows of a network with a decoder that was trained on the images `train` and has
/// labeled the pixels of images of `test` as `segmented`, with the names of the classes: of the
/// mean intersection over union, and of the share of right pixels. `about` describes the network.
pub fn mask_rows(
    segmented: &Segmented,
    classes: &[String],
    train: Option<ImageSetInfo>,
    test: &ImageSet,
    about: NetworkInfo,
) -> Vec<EvaluationRow> {
    let counts = &segmented.counts;
    let outcome = Outcome::PixelCounts(counts.clone());
    let mut worst_masks = Vec::with_capacity(segmented.worst.len());
    for image in &segmented.worst {
        let (shard, key) = test.describe(image.image);
        worst_masks.push(WorstMask { shard, key, accuracy: image.accuracy });
    }
    let info = ImageSetInfo { set: test.name.clone(), images: Some(segmented.n_images) };
    let transform_in_words = Some(whole_images_in_words(test.transform.size_px));
    let about = NetworkInfo { transform_in_words, ..about };
    let mean_iou = EvaluationRow {
        protocol: Some("decoder".into()),
        protocol_in_words: Some(DECODER_IN_WORDS.into()),
        details: json!(MaskDetails { worst_masks }),
        train,
        classes: Some(classes.to_vec()),
        ..outcome_row(MEAN_IOU, &outcome, info, about)
    };
    let accuracy = EvaluationRow {
        metric: PIXEL_ACCURACY.into(),
        number: Number::new("accuracy", counts.accuracy()),
        interval: Some(counts.accuracy_interval()),
        by_class: None,
        details: Value::Null,
        classes: None,
        confusion: None,
        confused: None,
        ..mean_iou.clone()
    };
    vec![mean_iou, accuracy]
}

/// Describes the transform of images that a decoder is scored on.
fn whole_images_in_words(size_px: u32) -> String {
    format!("Resize(({size_px}, {size_px}), bicubic), whatever the aspect ratio; masks keep their size")
}

/// Returns one row per measure of `images`; `about` describes the network.
pub fn measure_rows(measures: &Measures, images: &ImageSet, about: &NetworkInfo) -> Vec<EvaluationRow> {
    let mut rows = Vec::new();
    for (name, value, _) in measures {
        let test = ImageSetInfo { set: images.name.clone(), images: None };
        rows.push(number_row(name, Number::new("", *value), test, about.clone()));
    }
    rows
}

/// Returns the scores of a network as JSON, by metric.
fn numbers(scores: &Scores, seed: u64) -> Value {
    let mut numbers = Map::new();
    for (protocol_scores, scored) in scores.numbers() {
        let mut value = number(protocol_scores, scored, seed);
        if scored.outcome.n_classes() <= MAX_CONFUSED {
            value["confusion"] = json!(confusion(&scored.outcome));
        }
        numbers.insert(scored.metric.clone(), value);
    }
    Value::Object(numbers)
}

/// Returns a score under the name of its measure, `accuracy`, `mAP` or `mIoU`, with everything that
/// it depends on.
fn number(protocol_scores: &ProtocolScores, scored: &Scored, seed: u64) -> Value {
    let protocol = &protocol_scores.protocol;
    let outcome = &scored.outcome;
    json!({
        outcome.measure(): outcome.value(),
        "interval": outcome.interval(),
        "by_class": outcome.by_class(),
        "protocol": protocol.name(),
        "protocol_in_words": protocol.in_words(&protocol_scores.numbers),
        "transform_in_words": protocol_scores.transform.to_string(),
        "settings": protocol.settings(),
        "details": scored.details,
        "seed": seed,
    })
}

/// Returns the number of images or pixels by true class (rows) and predicted class; `None` if an
/// image may have several classes.
fn confusion(outcome: &Outcome) -> Option<Vec<Vec<u64>>> {
    let counts = outcome.confusion()?;
    Some(counts.chunks(outcome.n_classes().max(1)).map(<[u64]>::to_vec).collect())
}
