//! Scores over seeds: runs that differ only in their seed are one row, with the mean and the
//! deviation of each of their scores.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use eval::MAIN_METRICS;
use pipeline::words::counted;
use serde::Serialize;
use trainer::Plan;

use super::Run;
use super::overview::Overview;
use super::scores::Kind;

/// Keys that do not change what is learned, besides those of `[run]`.
const FREE_KEYS: [&str; 2] = ["name", "seed"];

/// Key of the number of validations after which a run ends that does not become better.
const PATIENCE: &str = "run.patience";

/// Scores of groups of runs.
#[derive(Debug, Clone, Serialize)]
pub struct SeedTable {
    /// The scores, one a column.
    pub columns: Vec<ScoreColumn>,
    /// The groups, one a row.
    pub rows: Vec<SeedRow>,
    /// Work directories of runs that have no score after their last step, and so are in no row.
    pub unscored: Vec<String>,
}

/// A score that runs are compared by.
#[derive(Debug, Clone, Serialize)]
pub struct ScoreColumn {
    /// Name of the score, such as `knn_20`, with what distinguishes it from columns of the same
    /// name.
    pub label: String,
    /// `accuracy`, `mAP` or `mIoU`, in percent; empty for a measure that needs no labels.
    pub measure: &'static str,
    /// Sets of images, transform and settings, in words.
    pub about: String,
}

/// Runs that differ only in their seed.
#[derive(Debug, Clone, Serialize)]
pub struct SeedRow {
    /// Beginning that the names of the runs have in common, or the name of their recipe.
    pub name: String,
    /// Name of the method in recipes.
    pub method: String,
    /// Name of the backbone, and its number of parameters.
    pub backbone: String,
    /// Seeds of the runs, in ascending order.
    pub seeds: Vec<u64>,
    /// Work directories, in the order of the seeds.
    pub runs: Vec<String>,
    /// Smallest and largest number of steps of the runs.
    pub steps: [u64; 2],
    /// Values of the keys in which the rows differ, as recipes write them; `absent` where a row has
    /// no value.
    pub settings: BTreeMap<String, String>,
    /// One entry a column; `None` if no run of the row has the score.
    pub scores: Vec<Option<SeedScore>>,
}

/// A score of several runs, each after its last step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SeedScore {
    /// Values by seed, in the order of the seeds.
    pub values: Vec<f64>,
    /// Mean of the values.
    pub mean: f64,
    /// Standard deviation of the values around their mean, with n − 1; `None` for one value.
    pub deviation: Option<f64>,
}

/// A run with what it is grouped by.
struct Entry<'a> {
    run: &'a Run,
    seed: u64,
    settings: BTreeMap<String, String>,
    /// Scores of the weights that are the result of the run, mostly those after its last step.
    scores: BTreeMap<&'a Kind, f64>,
}

impl SeedTable {
    /// Groups `runs` that differ only in their seed. `folder` is where they were found: their names
    /// are paths below it. Of runs with the same settings and seed, the first counts.
    pub fn new(folder: &Path, runs: &[Run]) -> Self {
        let mut unscored = Vec::new();
        let mut groups: Vec<Vec<Entry<'_>>> = Vec::new();
        for run in runs {
            let entry = Entry::new(run);
            if entry.scores.is_empty() {
                unscored.push(run.workdir.display().to_string());
                continue;
            }
            let Some(index) = groups.iter().position(|group| group[0].settings == entry.settings) else {
                groups.push(vec![entry]);
                continue;
            };
            let group = &mut groups[index];
            if let Some(other) = group.iter().find(|other| other.seed == entry.seed) {
                tracing::warn!(
                    "{} and {} have the same settings and seed: only the first is counted",
                    other.run.workdir.display(),
                    run.workdir.display()
                );
            } else {
                group.push(entry);
            }
        }
        for group in &mut groups {
            group.sort_by_key(|entry| entry.seed);
        }
        let distinct: BTreeSet<&Kind> =
            groups.iter().flatten().flat_map(|entry| entry.scores.keys().copied()).collect();
        let mut kinds: Vec<&Kind> = distinct.into_iter().collect();
        kinds.sort_by(|a, b| metric_order(&a.metric).cmp(&metric_order(&b.metric)));
        let differing = differing_keys(&groups);
        let rows = groups.iter().map(|group| row(folder, group, &kinds, &differing)).collect();
        let columns = kinds.iter().map(|kind| column(kind, &kinds)).collect();
        Self { columns, rows, unscored }
    }
}

impl<'a> Entry<'a> {
    fn new(run: &'a Run) -> Self {
        let plan = &run.status.plan;
        let result_step = run.status.result_step();
        let mut scores = BTreeMap::new();
        for (kind, scored) in &run.evaluations.scores {
            if let Some(last) = scored.iter().find(|scored| scored.step == result_step) {
                scores.insert(kind, last.value);
            }
        }
        Self { run, seed: plan.recipe.seed, settings: settings_of(plan), scores }
    }

    /// Returns the number of steps of the run, or of its best weights if it keeps these.
    fn steps(&self) -> u64 {
        let status = &self.run.status;
        let keeps_best = status.plan.recipe.run.patience.is_some();
        if keeps_best { status.result_step() } else { status.plan.total_steps }
    }
}

/// Returns everything that decides what a run of `plan` learns except its seed, by key. Images and
/// initial weights count by their fingerprints, wherever they are.
fn settings_of(plan: &Plan) -> BTreeMap<String, String> {
    let has_fingerprint = plan.data_fingerprint.is_some();
    let has_initial_fingerprint = plan.recipe.init.as_ref().is_some_and(|init| !init.fingerprint.is_empty());
    let mut settings = BTreeMap::new();
    for (key, value) in plan.recipe.values() {
        let is_location =
            (has_fingerprint && key == "data.shards") || (has_initial_fingerprint && key == "init.weights");
        // With patience the result is the best of several validations, not the last weights.
        let is_free = (key.starts_with("run.") && key != PATIENCE) || FREE_KEYS.contains(&key.as_str());
        if !is_location && !is_free {
            settings.insert(key, value.to_string());
        }
    }
    if let Some(minutes) = plan.minutes {
        // Runs of the same minutes have as many steps as fitted into them.
        settings.remove("optim.length.steps");
        settings.insert("optim.length.minutes".into(), minutes.to_string());
    }
    settings.insert("images".into(), plan.n_samples.to_string());
    settings.insert("version of the views".into(), plan.views_version.to_string());
    if let Some(fingerprint) = &plan.data_fingerprint {
        settings.insert("fingerprint of the images".into(), fingerprint.clone());
    }
    settings
}

/// Returns the keys whose values differ between `groups`.
fn differing_keys(groups: &[Vec<Entry<'_>>]) -> BTreeSet<String> {
    let keys: BTreeSet<&String> = groups.iter().flat_map(|group| group[0].settings.keys()).collect();
    let mut differing = BTreeSet::new();
    for key in keys {
        let values: BTreeSet<Option<&String>> =
            groups.iter().map(|group| group[0].settings.get(key)).collect();
        if values.len() > 1 {
            differing.insert(key.clone());
        }
    }
    differing
}

/// Returns the row of `group`, with a score for each of `kinds` and the values of the keys
/// `differing`.
fn row(folder: &Path, group: &[Entry<'_>], kinds: &[&Kind], differing: &BTreeSet<String>) -> SeedRow {
    let overview = Overview::from_run(group[0].run);
    let steps: Vec<u64> = group.iter().map(Entry::steps).collect();
    let mut settings = BTreeMap::new();
    for key in differing {
        let value = group[0].settings.get(key).cloned();
        settings.insert(key.clone(), value.unwrap_or_else(|| "absent".into()));
    }
    let mut scores = Vec::new();
    for kind in kinds {
        scores.push(SeedScore::new(
            group.iter().filter_map(|entry| entry.scores.get(*kind).copied()).collect(),
        ));
    }
    SeedRow {
        name: common_name(folder, group),
        method: overview.method,
        backbone: overview.backbone,
        seeds: group.iter().map(|entry| entry.seed).collect(),
        runs: group.iter().map(|entry| entry.run.workdir.display().to_string()).collect(),
        steps: [
            steps.iter().copied().min().unwrap_or_default(),
            steps.iter().copied().max().unwrap_or_default(),
        ],
        settings,
        scores,
    }
}

/// Returns the name of a single run; of several, the beginning that their names have in common,
/// without a mark such as `-seed` at its end; or the name of their recipe if there is none.
fn common_name(folder: &Path, group: &[Entry<'_>]) -> String {
    let names: Vec<String> = group.iter().map(|entry| entry.run.name_below(folder)).collect();
    let mut common = names[0].as_str();
    if names.len() > 1 {
        for name in &names[1..] {
            let n_equal: usize =
                common.chars().zip(name.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
            common = &common[..n_equal];
        }
        // The digits that seeds have in common, as 10 and 11 do, are no part of the name.
        common = without_separators(common.trim_end_matches(|c: char| c.is_ascii_digit()));
        common = without_separators(common.strip_suffix("seed").unwrap_or(common));
    }
    if common.is_empty() { group[0].run.status.plan.recipe.name.clone() } else { common.to_string() }
}

/// Returns `name` without separators at its end.
fn without_separators(name: &str) -> &str {
    name.trim_end_matches(['-', '_', '.', '/', '=', ' '])
}

impl SeedScore {
    /// Creates the score with these values; `None` if there are none.
    fn new(values: Vec<f64>) -> Option<Self> {
        if values.is_empty() {
            return None;
        }
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let mut deviation = None;
        if values.len() > 1 {
            let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
            deviation = Some((squares / (n - 1.0)).sqrt());
        }
        Some(Self { values, mean, deviation })
    }
}

/// Returns what the scores called `metric` are ordered by: the score of a classifier or a decoder
/// that a run trains comes first; then the name, and the number at its end, so that `knn_20` comes
/// before `knn_100`.
fn metric_order(metric: &str) -> (bool, &str, u64) {
    let name = metric.trim_end_matches(|c: char| c.is_ascii_digit());
    (!MAIN_METRICS.contains(&metric), name, metric[name.len()..].parse().unwrap_or(0))
}

/// Returns the column of `kind`, whose label distinguishes it from the others of `kinds`.
fn column(kind: &Kind, kinds: &[&Kind]) -> ScoreColumn {
    let own = parts(kind);
    let mut distinct = Vec::new();
    for (index, part) in own.iter().enumerate() {
        let mut others = kinds.iter().filter(|other| other.metric == kind.metric);
        if others.any(|other| parts(other)[index] != *part) && !part.is_empty() {
            distinct.push(part.clone());
        }
    }
    let mut label = kind.metric.clone();
    if !distinct.is_empty() {
        label += &format!(" ({})", distinct.join(", "));
    }
    let about: Vec<String> = own.into_iter().filter(|part| !part.is_empty()).collect();
    ScoreColumn { label, measure: kind.measure, about: about.join("; ") }
}

/// Returns what a score of this kind depends on, in words; a part is empty if there is nothing to
/// say.
fn parts(kind: &Kind) -> [String; 6] {
    [
        set_in_words("on", &kind.set, kind.test_images),
        set_in_words("fitted on", &kind.train, kind.train_images),
        if kind.network.is_empty() { String::new() } else { format!("network {}", kind.network) },
        kind.transform.clone(),
        kind.settings.clone(),
        if kind.seed == 0 { String::new() } else { format!("seed {} of the protocol", kind.seed) },
    ]
}

/// Describes a set of images after `word`; empty for no set.
fn set_in_words(word: &str, set: &str, n_images: Option<usize>) -> String {
    match n_images {
        _ if set.is_empty() => String::new(),
        Some(n) => format!("{word} {} of {set}", counted(n as u64, "image")),
        None => format!("{word} {set}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviations_are_those_of_a_sample() {
        let score = SeedScore::new(vec![1.0, 2.0, 6.0]).unwrap();
        assert_eq!(score.mean, 3.0);
        assert!((score.deviation.unwrap() - 7f64.sqrt()).abs() < 1e-12);
        assert_eq!(SeedScore::new(vec![4.0]).unwrap().deviation, None);
        assert_eq!(SeedScore::new(Vec::new()), None);
    }

    fn kind(metric: &str, set: &str, transform: &str) -> Kind {
        Kind {
            set: set.into(),
            test_images: Some(9),
            train: "train".into(),
            train_images: Some(20),
            metric: metric.into(),
            measure: "accuracy",
            network: String::new(),
            transform: transform.into(),
            settings: String::new(),
            seed: 0,
        }
    }

    /// Labels are as short as they can be.
    #[test]
    fn labels_name_what_differs() {
        let all = [kind("knn_20", "a", "32 px"), kind("knn_20", "b", "32 px"), kind("linear", "a", "32 px")];
        let kinds: Vec<&Kind> = all.iter().collect();
        let labels: Vec<String> = all.iter().map(|kind| column(kind, &kinds).label).collect();
        assert_eq!(labels, ["knn_20 (on 9 images of a)", "knn_20 (on 9 images of b)", "linear"]);
        assert!(
            metric_order("knn_20") < metric_order("knn_100")
                && metric_order("knn_20") < metric_order("linear")
                && metric_order("top1") < metric_order("knn_20")
        );
        assert_eq!(column(&all[2], &kinds).about, "on 9 images of a; fitted on 20 images of train; 32 px");
    }
}
