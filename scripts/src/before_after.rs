//! Scores of the features of a network before and after it was trained with labels, in one table
//! with the score of its classifier.

use std::path::Path;

use eval::probe::Scores;
use eval::row::NetworkInfo;
use eval::scores::{CLASSIFIER_IN_WORDS, rows, to_json};
use eval::{Classified, ImageSet, MEAN_AVERAGE_PRECISION, Outcome, Protocol, Split, TOP_1};
use kernels::device::Device;
use pipeline::words::{counted, thousands};
use serde_json::Value;
use session::{Classifier, Initial, InitialNetwork};
use trainer::Plan;

use crate::columns::{Arrangement, Column, print_columns};
use crate::console::{print_paragraph, say};
use crate::progress::StageBar;

/// Protocols by which features are scored.
const PROTOCOLS: [&str; 2] = ["knn", "linear-honest"];

/// Protocols by which features are scored if an image may have several classes.
const MULTI_LABEL_PROTOCOLS: [&str; 1] = ["knn"];

/// Name of the features of the weights that a run began with.
const BEFORE: &str = "before";

/// Name of the features of the run's own backbone.
const AFTER: &str = "after";

/// Scores of features before and after training, fitted on the training images of a run and scored
/// on its validation images.
pub(crate) struct FeatureScores {
    split: Split,
    /// Scores [`BEFORE`], unless the weights can no longer be read, and [`AFTER`].
    table: Vec<(String, Scores)>,
    /// The network after training.
    about: NetworkInfo,
    /// Which weights the scores are of, a sentence for each of them.
    weights: Vec<String>,
}

impl FeatureScores {
    /// Scores the weights that the run of `plan` in `workdir` began with, as `initial` names them,
    /// and those of `classifier`, fitted on the images `train` and scored on `validation`, and
    /// records the scores in the run. If the former cannot be read, this is reported, and only the
    /// latter are scored.
    pub(crate) fn measure(
        plan: &Plan,
        initial: &Initial,
        classifier: &Classifier,
        train: ImageSet,
        validation: &ImageSet,
        workdir: &Path,
        device: &Device,
    ) -> anyhow::Result<Self> {
        let is_multi_label = plan.recipe.method.is_multi_label();
        let names = if is_multi_label { &MULTI_LABEL_PROTOCOLS[..] } else { &PROTOCOLS };
        let mut protocols = Vec::new();
        for name in names {
            protocols.push(Protocol::named(name).map_err(anyhow::Error::msg)?);
        }
        let split = Split::for_protocols(&protocols, train, validation.clone())?;
        let mut table = Vec::new();
        let mut weights = Vec::new();
        match InitialNetwork::open(plan, initial, device) {
            Ok(open) => {
                let bar = StageBar::named("features before training");
                let scores = split.score(&open.network, &protocols, None, &bar)?;
                let scored = rows(&scores, &split, &open.info(plan)?);
                classifier.network.record_initial(workdir, &scored)?;
                table.push((BEFORE.to_string(), scores));
                weights.push(match &open.weights {
                    Some(path) => {
                        format!("{BEFORE}: the weights that the run began with, {}", path.display())
                    }
                    None => format!("{BEFORE}: the random weights that the run began with"),
                });
            }
            Err(error) => {
                say(format!(
                    "warning: --baseline: cannot score the weights that the run began with: {error}"
                ));
            }
        }
        let bar = StageBar::named("features after training");
        let scores = split.score(&classifier.network.network, &protocols, None, &bar)?;
        let about = classifier.network.info(workdir)?;
        classifier.network.record(workdir, &rows(&scores, &split, &about))?;
        table.push((AFTER.to_string(), scores));
        let steps = counted(classifier.network.step().unwrap_or_default(), "step");
        weights.push(format!("{AFTER}: the backbone of the run after {steps}, without the classifier"));
        Ok(Self { split, table, about, weights })
    }

    /// Prints the scores of the features and that of the classifier, `classified`, with their
    /// intervals, and how each was made.
    pub(crate) fn print(&self, classified: &Classified) {
        let Some((_, last)) = self.table.last() else { return };
        let is_multi_label = classified.decisions.is_some();
        let score = if is_multi_label { MEAN_AVERAGE_PRECISION } else { TOP_1 };
        let mut names = vec![format!("{score} of the classifier")];
        for (_, scored) in last.numbers() {
            names.push(format!("{} of the features", scored.metric));
        }
        let heading = format!("{} in %", classified.outcome.measure());
        let mut columns = vec![Column::words(heading, names)];
        for (column, scores) in &self.table {
            // The classifier is trained by the run: there is none before.
            let own = if column == AFTER { score_cell(&classified.outcome) } else { "-".into() };
            let mut cells = vec![own];
            for (_, scored) in last.numbers() {
                cells.push(metric_cell(scores, &scored.metric));
            }
            columns.push(Column::numbers(column.as_str(), cells));
        }
        print_columns(&columns, Arrangement { n_keys: 1, gap: 2 });
        let transform = self.split.test.transform;
        print_paragraph(2, &format!("{score}: {CLASSIFIER_IN_WORDS}; {transform}"));
        let n_train = counted(last.n_train as u64, "image");
        let train = &self.split.train.name;
        for scores in &last.by_protocol {
            let name = scores.protocol.name();
            let words = scores.protocol.in_words(&scores.numbers);
            let transform = scores.transform;
            print_paragraph(2, &format!("{name}: {words}; fitted on {n_train} of {train}; {transform}"));
        }
        if is_multi_label && last.n_test != classified.n_images {
            print_paragraph(
                2,
                &format!(
                    "the features are scored on {} of the {} on which the classifier is: k-NN leaves out images \
                     of no class",
                    thousands(last.n_test as u64),
                    counted(classified.n_images as u64, "image")
                ),
            );
        }
        for sentence in &self.weights {
            print_paragraph(2, sentence);
        }
    }

    /// Returns the scores `before` and `after`, by metric, with their settings as JSON.
    pub(crate) fn to_json(&self) -> Value {
        let mut all = to_json(&self.table, &self.split, &self.about);
        all["networks"].take()
    }
}

/// Formats the score called `metric` among `scores`; a dash if there is none.
fn metric_cell(scores: &Scores, metric: &str) -> String {
    match scores.numbers().find(|(_, scored)| scored.metric == metric) {
        Some((_, scored)) => score_cell(&scored.outcome),
        None => "-".into(),
    }
}

/// Formats a score with its interval.
fn score_cell(outcome: &Outcome) -> String {
    let [low, high] = outcome.interval();
    format!("{:.2} ({low:.1} - {high:.1})", outcome.value())
}
