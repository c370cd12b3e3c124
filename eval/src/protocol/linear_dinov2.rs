//! DINOv2's linear probe (Oquab et al. 2023, `eval/linear.py`): 13 rates × {1, 4} levels × average
//! {no, yes} = 52 heads, trained in parallel.
//!
//! ```text
//! x = class tokens of the last 1 or 4 blocks, with or without the mean patch token of the last;  W from N(0, 0.01²)
//! train: random-resized crops (bicubic, area 0.08 to 1) and flips, 12,500 mini-batches of 1,024;  test: central square
//! SGD with momentum 0.9 and no weight decay, lr · B / 256, cosine to zero over all steps
//! ```
//!
//! **The best head is chosen on the test set**, as published; [`super::linear_honest`] never
//! chooses on it. The official code keys heads by their scaled rate with five decimals; if two
//! rates print alike, the later head replaces the earlier one. With batches of 128, its default on
//! one GPU, 48 of the 52 remain, and `linear-dinov2` does the same. A convolutional network has the
//! spatial means of its last stages in place of class tokens, and no mean patch token: half as many
//! heads.
//!
//! `linear-dinov2-features` is a cheap variant with its own name: all heads on features of the
//! central square, extracted once. Its numbers do not compare with published ones.

use augment::Interpolation;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::batches::{BatchReader, classified, cosine};
use super::heads::{HeadTraining, Heads, Rows};
use super::task::{Scored, Task};
use super::{Needs, Rules};
use crate::EvalError;
use crate::statistics::Predictions;
use crate::statistics::outcome::Outcome;

/// Name of the published protocol.
const NAME: &str = "linear-dinov2";

/// Name of the variant on features that are extracted once.
const FEATURES_NAME: &str = "linear-dinov2-features";

/// Input of the heads during training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeadInput {
    /// Features of crops and flips, drawn anew in every pass.
    Crops,
    /// Features of the central square, extracted once.
    Features,
}

/// The protocol's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearDinov2 {
    /// Learning rates for batches of 256.
    pub rates: Vec<f64>,
    /// Number of steps if `epochs` is absent.
    pub iterations: usize,
    /// Number of passes over train; overrides `iterations`.
    pub epochs: Option<usize>,
    /// Images per mini-batch.
    pub batch: usize,
    /// Choices for the number of last levels whose class tokens are concatenated.
    pub levels: Vec<usize>,
}

impl Default for LinearDinov2 {
    /// Returns the published settings: eight GPUs with 128 images each.
    fn default() -> Self {
        let rates = vec![1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1];
        Self { rates, iterations: 12_500, epochs: None, batch: 1024, levels: vec![1, 4] }
    }
}

/// Settings of the variant on features that are extracted once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OnFeatures(pub LinearDinov2);

impl Default for OnFeatures {
    fn default() -> Self {
        Self(LinearDinov2 { batch: 128, ..LinearDinov2::default() })
    }
}

impl Rules for LinearDinov2 {
    fn needs(&self) -> Needs {
        let n_levels = self.levels.iter().copied().max().unwrap_or(1);
        Needs { n_levels, average: true, ..Needs::VECTORS }
    }

    fn in_words(&self, numbers: &[Scored], _: bool) -> String {
        self.describe(HeadInput::Crops, n_heads(numbers))
    }

    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        Ok(vec![self.number(HeadInput::Crops, task)?])
    }
}

impl Rules for OnFeatures {
    fn needs(&self) -> Needs {
        self.0.needs()
    }

    fn in_words(&self, numbers: &[Scored], _: bool) -> String {
        self.0.describe(HeadInput::Features, n_heads(numbers))
    }

    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        Ok(vec![self.0.number(HeadInput::Features, task)?])
    }
}

/// Returns the number of heads that the best was chosen from.
fn n_heads(numbers: &[Scored]) -> usize {
    let n_heads = numbers.first().and_then(|scored| scored.details["n_heads"].as_u64());
    n_heads.unwrap_or_default() as usize
}

impl LinearDinov2 {
    /// Returns the rates that have a head: with [`HeadInput::Crops`], only the last of those that
    /// share a name in the official code.
    fn kept_rates(&self, input: HeadInput) -> Vec<f64> {
        if input == HeadInput::Features {
            return self.rates.clone();
        }
        let names: Vec<String> =
            self.rates.iter().map(|rate| format!("{:.5}", rate * self.batch as f64 / 256.0)).collect();
        let mut kept = Vec::with_capacity(self.rates.len());
        for (i, rate) in self.rates.iter().enumerate() {
            if !names[i + 1..].contains(&names[i]) {
                kept.push(*rate);
            }
        }
        kept
    }

    /// Describes the protocol for readers who compare numbers; `n_heads` is the number of heads
    /// that were trained.
    fn describe(&self, input: HeadInput, n_heads: usize) -> String {
        let length = match self.epochs {
            Some(epochs) => format!("{epochs} passes in batches of {}", self.batch),
            None => format!("iterations: {} of {} images", self.iterations, self.batch),
        };
        let best = format!("the best of {n_heads} heads on test");
        // A convolutional network has no mean patch token, and hence half as many heads.
        let is_transformer = n_heads == 2 * self.levels.len() * self.kept_rates(input).len();
        match input {
            HeadInput::Features => format!(
                "DINOv2's heads on features made once, without crops; {length}; {best}; not the published \
                 protocol"
            ),
            HeadInput::Crops if !is_transformer => format!(
                "DINOv2's heads on the stages of a convolutional network, bicubic crops and flips; \
                 {length}; {best}; not a published protocol"
            ),
            HeadInput::Crops if *self == Self::default() => {
                format!("as published, bicubic crops and flips; {length}; {best}")
            }
            HeadInput::Crops => {
                format!("as DINOv2's, but for its settings, bicubic crops and flips; {length}; {best}")
            }
        }
    }

    /// Computes the score of the best head on `task.test`.
    ///
    /// # Errors
    /// With [`HeadInput::Crops`]: [`EvalError::ImagesRequired`] if the task has features only,
    /// [`EvalError::Data`] if a shard cannot be read, [`EvalError::NotFinite`].
    fn number(&self, input: HeadInput, task: &Task<'_>) -> Result<Scored, EvalError> {
        let layout = task.test.layout();
        let rates = self.kept_rates(input);
        let mut inputs = Vec::new();
        for level in &self.levels {
            inputs.push((*level, false, layout.last(*level)));
            if layout.average > 0 {
                inputs.push((*level, true, layout.last_and_average(*level)));
            }
        }
        let columns: Vec<_> = inputs.iter().map(|(_, _, columns)| columns.clone()).collect();
        let descent = HeadTraining { momentum: 0.9, init_std: 0.01, seed: task.seed };
        let mut heads = Heads::new(&columns, &rates, task.n_classes, descent);
        let n_steps = match input {
            HeadInput::Crops => self.fit_on_crops(&mut heads, task)?,
            HeadInput::Features => self.fit_on_features(&mut heads, task),
        };
        let n_heads = columns.len() * rates.len();
        let mut predictions = classified(&mut heads, n_heads, task.test, None, task.n_classes);
        let accuracies: Vec<f64> = predictions.iter().map(Predictions::accuracy).collect();
        let mut descriptions = Vec::with_capacity(n_heads);
        for (head, accuracy) in accuracies.iter().enumerate() {
            let (level, average, _) = &inputs[head / rates.len()];
            let rate = rates[head % rates.len()];
            descriptions
                .push(json!({ "levels": level, "average": average, "rate": rate, "accuracy": accuracy }));
        }
        let best =
            (0..n_heads).rev().max_by(|a, b| accuracies[*a].total_cmp(&accuracies[*b])).unwrap_or_default();
        let details = json!({
            "chosen_on": "test, as published",
            "head": descriptions[best],
            "steps": n_steps,
            "n_heads": n_heads,
            "heads": descriptions,
        });
        let outcome = Outcome::Predictions(predictions.swap_remove(best));
        let metric = match input {
            HeadInput::Crops => "linear_dinov2",
            HeadInput::Features => "linear_dinov2_features",
        };
        Ok(Scored { metric: metric.into(), outcome, details, counts: None })
    }

    /// Trains all heads in parallel on crops; returns the number of steps.
    fn fit_on_crops(&self, heads: &mut Heads, task: &Task<'_>) -> Result<usize, EvalError> {
        let views = task.views.ok_or(EvalError::ImagesRequired { protocol: NAME })?;
        let batch = self.batch.max(1);
        let n_steps =
            self.epochs.map_or(self.iterations, |epochs| (epochs * views.len()).div_ceil(batch).max(1));
        let mut step = 0;
        let scale = batch as f32 / 256.0;
        task.progress.begin(NAME, n_steps as u64);
        views.crops(Interpolation::Bicubic).stream(task.seed, batch, n_steps, &mut |table, labels| {
            let rows = Rows { rows: table.rows(), width: table.columns.width() };
            heads.step(rows, labels, scale * cosine(step as f32 / n_steps as f32));
            task.progress.advance(1);
            step += 1;
        })?;
        Ok(n_steps)
    }

    /// Trains all heads in parallel on the rows of train; returns the number of steps.
    fn fit_on_features(&self, heads: &mut Heads, task: &Task<'_>) -> usize {
        let batch = self.batch.max(1);
        let steps_per_epoch = task.train.len().div_ceil(batch).max(1);
        let n_steps = self.epochs.map_or(self.iterations, |epochs| epochs * steps_per_epoch);
        let mut step = 0;
        let scale = batch as f32 / 256.0;
        task.progress.begin(FEATURES_NAME, n_steps as u64);
        let mut batches = BatchReader::new(task.train, None);
        for epoch in 0..n_steps.div_ceil(steps_per_epoch) {
            batches.epoch(task.seed, epoch, batch, |rows, labels| {
                if step < n_steps {
                    heads.step(rows, labels, scale * cosine(step as f32 / n_steps as f32));
                    task.progress.advance(1);
                }
                step += 1;
            });
        }
        n_steps
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use augment::ViewRng;

    use super::*;
    use crate::features::columns::Columns;
    use crate::features::set::FeatureSet;
    use crate::features::table::Table;
    use pipeline::NoProgress;

    /// Returns rows of two levels with two columns each and an average of two; only columns
    /// `informative` depend on the class.
    fn set(informative: std::ops::Range<usize>, n: usize, seed: u64) -> FeatureSet {
        let mut rng = ViewRng::from_words([seed, 0, 0, 0]);
        let mut rows = Vec::new();
        for i in 0..n {
            for c in 0..6 {
                let mean = if informative.contains(&c) && c % 2 == i % 2 { 6.0 } else { 0.0 };
                rows.push(mean + rng.normal());
            }
        }
        let table = Table::new(Columns { levels: vec![2, 2], average: 2 }, (0..n as u32).collect(), rows);
        FeatureSet::from_table(Arc::new(table), |image| Some((image % 2) as u32))
    }

    /// The official code names heads by `lr:.5f`; the last head of a name replaces the others.
    #[test]
    fn heads_with_equal_names_are_merged() {
        for (batch, n_rates) in [(1024, 13), (512, 13), (256, 13), (128, 12), (64, 12), (32, 11), (16, 10)] {
            let protocol = LinearDinov2 { batch, ..LinearDinov2::default() };
            let kept = protocol.kept_rates(HeadInput::Crops);
            assert_eq!((kept.len(), kept.last()), (n_rates, Some(&0.1)), "{batch}");
            assert_eq!(protocol.kept_rates(HeadInput::Features).len(), 13);
            let words = protocol.describe(HeadInput::Crops, 4 * n_rates);
            assert_eq!(words.contains("as published"), batch == 1024, "{words}");
            assert!(protocol.describe(HeadInput::Crops, 2 * n_rates).contains("not a published protocol"));
        }
        let protocol = LinearDinov2 { batch: 128, ..LinearDinov2::default() };
        assert_eq!(protocol.kept_rates(HeadInput::Crops)[0], 2e-5);
    }

    /// Each head uses exactly the levels and the average that its details state.
    #[test]
    fn heads_use_only_their_own_columns() {
        let protocol = LinearDinov2 {
            rates: vec![1e-5, 0.1],
            iterations: 300,
            levels: vec![1, 2],
            ..OnFeatures::default().0
        };
        for (informative, informed_levels) in [(0..2, [2, 2]), (2..4, [1, 2]), (4..6, [0, 0])] {
            let train = set(informative.clone(), 400, 1);
            let test = set(informative.clone(), 400, 2);
            let task = Task {
                train: &train,
                test: &test,
                n_classes: 2,
                seed: 0,
                views: None,
                sets: None,
                progress: &NoProgress,
            };
            let scored = protocol.number(HeadInput::Features, &task).unwrap();
            let heads = scored.details["heads"].as_array().unwrap();
            assert_eq!(heads.len(), 8);
            for head in heads.iter().filter(|head| head["rate"] == 0.1) {
                let levels = head["levels"].as_u64().unwrap();
                let average = head["average"].as_bool().unwrap();
                let is_informed =
                    if informative.start == 4 { average } else { informed_levels.contains(&levels) };
                let accuracy = head["accuracy"].as_f64().unwrap();
                assert_eq!(accuracy > 90.0, is_informed, "columns {informative:?}: {head}");
            }
            assert!(scored.outcome.value() > 90.0);
            assert_eq!(scored.details["steps"], 300);
        }
    }
}
