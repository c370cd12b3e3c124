//! Scores as text and as JSON.
use pipeline::secrets::redact_list;
use std::path::Path;

use eval::Split;
use eval::probe::{ProtocolScores, Scores};
use report::{EvaluationRow, ImageSetInfo, NetworkInfo, Number};
use serde_json::{Map, Value, json};

/// Scores by the name of the network.
pub(crate) type Table = Vec<(String, Scores)>;

/// Largest number of classes whose confusions are printed.
const MAX_CONFUSED: usize = 100;

/// Largest number of classes whose whole confusion matrix is kept with a score; with more classes,
/// only the most frequent confusions are kept.
const MAX_KEPT_CONFUSED: usize = 20;

/// Number of confusions that are kept if there are more classes.
const N_KEPT_PAIRS: usize = 30;

/// Width of the column of names, in characters.
const WIDTH: usize = 22;

/// Prints one line per metric and one column per network, the first network's with its interval;
/// then a description of each protocol.
pub(crate) fn print_table(table: &Table) {
    let Some((_, first)) = table.first() else { return };
    let names: String = table[1..].iter().map(|(name, _)| format!(" {name:>12}")).collect();
    out!("{:<WIDTH$} {:>8} {:<15}{names}", heading(first), table[0].0, "");
    for (_, scored) in first.numbers() {
        let [low, high] = scored.outcome.interval();
        let interval = format!("({low:.1} - {high:.1})");
        let others: String = table[1..]
            .iter()
            .map(|(_, scores)| match scores.accuracy(&scored.metric) {
                Some(accuracy) => format!(" {accuracy:>12.2}"),
                None => format!(" {:>12}", "-"),
            })
            .collect();
        out!("{:<WIDTH$} {:>8.2} {interval:<15}{others}", scored.metric, scored.outcome.value());
    }
    for scores in &first.by_protocol {
        let protocol = &scores.protocol;
        out!("{}: {}; {}", protocol.name(), protocol.in_words(&scores.numbers), scores.transform);
    }
}

/// Returns a description of the percentages.
fn heading(scores: &Scores) -> String {
    let mut measures: Vec<&str> = scores.numbers().map(|(_, scored)| scored.outcome.measure()).collect();
    measures.sort_unstable();
    measures.dedup();
    match measures.as_slice() {
        [measure] => format!("{measure} in %"),
        _ => "in %".into(),
    }
}

/// Returns all scores with their settings as JSON.
pub(crate) fn to_json(table: &Table, split: &Split, about: &NetworkInfo) -> Value {
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

/// Returns one row per score, with everything that it depends on; `about` describes the network.
pub(crate) fn rows(scores: &Scores, split: &Split, about: &NetworkInfo) -> Vec<EvaluationRow> {
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
            let is_small = outcome.n_classes() <= MAX_KEPT_CONFUSED;
            let train = ImageSetInfo { set: split.train.name.clone(), images: Some(scores.n_train) };
            let test = ImageSetInfo { set: split.test.name.clone(), images: Some(scores.n_test) };
            EvaluationRow {
                metric: scored.metric.clone(),
                number: Number::new(outcome.measure(), outcome.value()),
                interval: Some(outcome.interval()),
                by_class: Some(outcome.by_class()),
                protocol: Some(protocol.name().into()),
                protocol_in_words: Some(protocol.in_words(&protocol_scores.numbers)),
                settings: protocol.settings().as_object().cloned().unwrap_or_default(),
                details: scored.details.clone(),
                seed: split.seed,
                train: Some(train),
                test,
                about,
                classes: protocol.needs().has_classes().then(|| split.test.classes().to_vec()),
                confusion: if is_small { confusion(outcome) } else { None },
                confused: (!is_small).then(|| outcome.most_confused(N_KEPT_PAIRS)),
                watch: None,
            }
        })
        .collect()
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
fn number(protocol_scores: &ProtocolScores, scored: &eval::Scored, seed: u64) -> Value {
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
fn confusion(outcome: &eval::Outcome) -> Option<Vec<Vec<u64>>> {
    let counts = outcome.confusion()?;
    Some(counts.chunks(outcome.n_classes().max(1)).map(<[u64]>::to_vec).collect())
}

/// Returns the default name of a set: the folder and the common prefix of its shards, such as
/// `cifar10/test`.
pub(crate) fn set_name(specs: &[String]) -> String {
    let first = specs.first().map(|spec| redact_list(spec)).unwrap_or_default();
    // A query is not part of a name; a question mark in a file name is.
    let first = first.split('?').next().filter(|_| first.contains("://")).unwrap_or(&first);
    let shard = first.trim_end_matches(".gz");
    let path = Path::new(shard.trim_end_matches(".tar"));
    let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    // Only names of shards end in numbers; the name of a folder is kept.
    let file = if shard.ends_with(".tar") {
        file.trim_end_matches(|c: char| c.is_ascii_digit() || "-_.{}*?[]".contains(c)).to_string()
    } else {
        file
    };
    let folder = path.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    match folder {
        Some(folder) => format!("{folder}/{file}"),
        None => file,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_named_by_their_folder_and_the_prefix_of_their_shards() {
        for (spec, name) in [
            ("/data/cifar10/test-{000000..000001}.tar", "cifar10/test"),
            ("https://host/b/val_0001.tar.gz", "b/val"),
            ("http://u:PW@host/a/val-{0..3}.tar?token=PW&x=1", "a/val"),
            ("held-out.tar", "held-out"),
            ("data/photos-2024/", "data/photos-2024"),
        ] {
            assert_eq!(set_name(&[spec.to_string()]), name);
        }
    }
}
