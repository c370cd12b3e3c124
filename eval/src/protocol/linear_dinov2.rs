//! DINOv2's linear probe (Oquab et al. 2023, `eval/linear.py`): 13 rates × {1, 4} levels × average {no, yes} = 52 heads in one pass.
//!
//! ```text
//! x = class tokens of the last 1 or 4 blocks, with or without the mean patch token of the last;  W from N(0, 0.01²)
//! train: random-resized crops (bicubic, area 0.08 to 1) and flips, 12,500 mini-batches of 1,024;  test: the central square
//! SGD with momentum 0.9 and no weight decay, lr · B / 256, cosine to zero over all steps
//! ```
//!
//! **The best head is chosen on the test set**, as published; [`super::linear_honest`] does not look there. The official code keys
//! heads by their scaled rate with five decimals; where two rates print alike, the later head replaces the earlier one. With 128
//! images, its default on one GPU, 48 of the 52 remain, and `linear-dinov2` does the same. A convolutional network has the mean maps
//! of its last stages in place of class tokens, and no mean patch token beside them: half as many heads.
//!
//! `linear-dinov2-features` is a cheap form under a name of its own: all heads on features of the central square, made once. Its
//! numbers are not those of the publication.

use augment::Interpolation;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::batches::{Gathered, classified, cosine};
use super::heads::{Descent, Heads, Rows};
use super::task::{Scored, Task};
use super::{Needs, Rules};
use crate::EvalError;
use crate::score::Classified;
use crate::score::outcome::Outcome;

/// Name of the published protocol.
const NAME: &str = "linear-dinov2";

/// Name of the form on features that are made once.
const FEATURES_NAME: &str = "linear-dinov2-features";

/// Input of the heads during training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sees {
    /// Crops and flips, drawn anew.
    Crops,
    /// Features of the central square, made once.
    Features,
}

/// The protocol's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearDinov2 {
    /// Learning rates for batches of 256.
    pub rates: Vec<f64>,
    /// Steps, where `epochs` is not given.
    pub iterations: usize,
    /// Passes over train.
    pub epochs: Option<usize>,
    /// Rows of a mini-batch.
    pub batch: usize,
    /// Numbers of last levels whose class tokens are concatenated.
    pub levels: Vec<usize>,
}

impl Default for LinearDinov2 {
    /// The published settings: eight GPUs with 128 images each.
    fn default() -> Self {
        let rates = vec![1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1];
        Self { rates, iterations: 12_500, epochs: None, batch: 1024, levels: vec![1, 4] }
    }
}

/// The same settings with heads on features that are made once.
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
        self.described(Sees::Crops, n_heads(numbers))
    }

    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        Ok(vec![self.number(Sees::Crops, task)?])
    }
}

impl Rules for OnFeatures {
    fn needs(&self) -> Needs {
        self.0.needs()
    }

    fn in_words(&self, numbers: &[Scored], _: bool) -> String {
        self.0.described(Sees::Features, n_heads(numbers))
    }

    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        Ok(vec![self.0.number(Sees::Features, task)?])
    }
}

/// Heads that the numbers were chosen among.
fn n_heads(numbers: &[Scored]) -> usize {
    let said = numbers.first().and_then(|scored| scored.details["n_heads"].as_u64());
    said.unwrap_or_default() as usize
}

impl LinearDinov2 {
    /// The rates that have a head: with [`Sees::Crops`] the last one of those whose names are one in the official code.
    fn kept_rates(&self, sees: Sees) -> Vec<f64> {
        let name = |rate: &f64| format!("{:.5}", rate * self.batch as f64 / 256.0);
        let is_last = |i: usize| self.rates[i + 1..].iter().all(|later| name(later) != name(&self.rates[i]));
        let is_kept = |i: &usize| sees == Sees::Features || is_last(*i);
        (0..self.rates.len()).filter(is_kept).map(|i| self.rates[i]).collect()
    }

    /// Describes the protocol for readers who compare numbers; `n_heads` is how many there were.
    fn described(&self, sees: Sees, n_heads: usize) -> String {
        let length = match self.epochs {
            Some(epochs) => format!("{epochs} passes in batches of {}", self.batch),
            None => format!("iterations: {} of {} images", self.iterations, self.batch),
        };
        let best = format!("the best of {n_heads} heads on test");
        // A convolutional network has no mean patch token beside its mean maps.
        let is_transformer = n_heads == 2 * self.levels.len() * self.kept_rates(sees).len();
        match sees {
            Sees::Features => format!(
                "DINOv2's heads on features made once, without crops; {length}; {best}; not the published protocol"
            ),
            Sees::Crops if !is_transformer => format!(
                "DINOv2's heads on the stages of a convolutional network, bicubic crops and flips; {length}; {best}; not a \
                 published protocol"
            ),
            Sees::Crops if *self == Self::default() => {
                format!("as published, bicubic crops and flips; {length}; {best}")
            }
            Sees::Crops => {
                format!("as DINOv2's, but for its settings, bicubic crops and flips; {length}; {best}")
            }
        }
    }

    /// The score of the best head on `task.test`.
    ///
    /// # Errors
    /// With [`Sees::Crops`], [`EvalError::NoViews`] where the task has features alone, [`EvalError::Data`] when a shard cannot
    /// be read.
    fn number(&self, sees: Sees, task: &Task<'_>) -> Result<Scored, EvalError> {
        let layout = task.test.layout();
        let rates = self.kept_rates(sees);
        let mut inputs = Vec::new();
        for level in &self.levels {
            inputs.push((*level, false, layout.last(*level)));
            if layout.average > 0 {
                inputs.push((*level, true, layout.last_and_average(*level)));
            }
        }
        let columns: Vec<_> = inputs.iter().map(|(_, _, columns)| columns.clone()).collect();
        let descent = Descent { momentum: 0.9, init_std: 0.01, seed: task.seed };
        let mut heads = Heads::new(&columns, &rates, task.n_classes, descent);
        let n_steps = match sees {
            Sees::Crops => self.fit_on_crops(&mut heads, task)?,
            Sees::Features => self.fit_on_features(&mut heads, task),
        };
        let n_heads = columns.len() * rates.len();
        let mut found = classified(&mut heads, n_heads, task.test, None, task.n_classes);
        let accuracies: Vec<f64> = found.iter().map(Classified::accuracy).collect();
        let about = |head: usize| {
            let (level, average, _) = &inputs[head / rates.len()];
            let rate = rates[head % rates.len()];
            json!({ "levels": level, "average": average, "rate": rate, "accuracy": accuracies[head] })
        };
        let best =
            (0..n_heads).rev().max_by(|a, b| accuracies[*a].total_cmp(&accuracies[*b])).unwrap_or_default();
        let details = json!({
            "chosen_on": "test, as published",
            "head": about(best),
            "steps": n_steps,
            "n_heads": n_heads,
            "heads": (0..n_heads).map(about).collect::<Vec<_>>(),
        });
        let outcome = Outcome::Classified(found.swap_remove(best));
        let metric = match sees {
            Sees::Crops => "linear_dinov2",
            Sees::Features => "linear_dinov2_features",
        };
        Ok(Scored { metric: metric.into(), outcome, details, counts: None })
    }

    /// Trains all heads side by side on crops; gives the steps that they took.
    fn fit_on_crops(&self, heads: &mut Heads, task: &Task<'_>) -> Result<usize, EvalError> {
        let views = task.views.ok_or(EvalError::NoViews { protocol: NAME })?;
        let batch = self.batch.max(1);
        let n_steps =
            self.epochs.map_or(self.iterations, |epochs| (epochs * views.len()).div_ceil(batch).max(1));
        let (mut step, scale) = (0, batch as f32 / 256.0);
        task.progress.begins(NAME, n_steps);
        views.crops(Interpolation::Bicubic).stream(task.seed, batch, n_steps, &mut |table, labels| {
            let rows = Rows { rows: table.rows(), width: table.columns.width() };
            heads.step(rows, labels, scale * cosine(step as f32 / n_steps as f32));
            task.progress.seen(1);
            step += 1;
        })?;
        Ok(n_steps)
    }

    /// Trains all heads side by side on the rows of train; gives the steps that they took.
    fn fit_on_features(&self, heads: &mut Heads, task: &Task<'_>) -> usize {
        let batch = self.batch.max(1);
        let of_epoch = task.train.len().div_ceil(batch).max(1);
        let n_steps = self.epochs.map_or(self.iterations, |epochs| epochs * of_epoch);
        let (mut step, scale) = (0, batch as f32 / 256.0);
        task.progress.begins(FEATURES_NAME, n_steps);
        let mut one = |rows: Rows<'_>, labels: &[u32]| {
            if step < n_steps {
                heads.step(rows, labels, scale * cosine(step as f32 / n_steps as f32));
                task.progress.seen(1);
            }
            step += 1;
        };
        let mut batches = Gathered::new(task.train, None);
        (0..n_steps.div_ceil(of_epoch)).for_each(|epoch| batches.epoch(task.seed, epoch, batch, &mut one));
        n_steps
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use augment::ViewRng;

    use super::*;
    use crate::features::columns::Columns;
    use crate::features::extract::Silent;
    use crate::features::set::FeatureSet;
    use crate::features::table::Table;

    /// Rows of two levels of two columns and an average of two, of which only columns `informative` tell the class.
    fn set(informative: std::ops::Range<usize>, n: usize, seed: u64) -> FeatureSet {
        let mut rng = ViewRng::from_words([seed, 0, 0, 0]);
        let mut rows = Vec::new();
        for i in 0..n {
            let value = |c: usize| if informative.contains(&c) && c % 2 == i % 2 { 6.0 } else { 0.0 };
            rows.extend((0..6).map(|c| value(c) + rng.normal()));
        }
        let table = Table::new(Columns { levels: vec![2, 2], average: 2 }, (0..n as u32).collect(), rows);
        FeatureSet::of(Arc::new(table), |image| Some((image % 2) as u32))
    }

    /// The official code names heads by `lr:.5f`; of those with one name the last one stays.
    #[test]
    fn heads_of_one_name_are_one_head() {
        for (batch, n_rates) in [(1024, 13), (512, 13), (256, 13), (128, 12), (64, 12), (32, 11), (16, 10)] {
            let protocol = LinearDinov2 { batch, ..LinearDinov2::default() };
            let kept = protocol.kept_rates(Sees::Crops);
            assert_eq!((kept.len(), kept.last()), (n_rates, Some(&0.1)), "{batch}");
            assert_eq!(protocol.kept_rates(Sees::Features).len(), 13);
            let words = protocol.described(Sees::Crops, 4 * n_rates);
            assert_eq!(words.contains("as published"), batch == 1024, "{words}");
            assert!(protocol.described(Sees::Crops, 2 * n_rates).contains("not a published protocol"));
        }
        let protocol = LinearDinov2 { batch: 128, ..LinearDinov2::default() };
        assert_eq!(protocol.kept_rates(Sees::Crops)[0], 2e-5);
    }

    /// Each head sees the levels and the average that it is said to see, and no others; small rates stay behind.
    #[test]
    fn heads_see_their_columns_alone() {
        let protocol = LinearDinov2 {
            rates: vec![1e-5, 0.1],
            iterations: 300,
            levels: vec![1, 2],
            ..OnFeatures::default().0
        };
        for (informative, who) in [(0..2, [2, 2]), (2..4, [1, 2]), (4..6, [0, 0])] {
            let (train, test) = (set(informative.clone(), 400, 1), set(informative.clone(), 400, 2));
            let task = Task {
                train: &train,
                test: &test,
                n_classes: 2,
                seed: 0,
                views: None,
                sets: None,
                progress: &Silent,
            };
            let scored = protocol.number(Sees::Features, &task).unwrap();
            let heads = scored.details["heads"].as_array().unwrap();
            assert_eq!(heads.len(), 8);
            for head in heads.iter().filter(|head| head["rate"] == 0.1) {
                let (levels, average) =
                    (head["levels"].as_u64().unwrap(), head["average"].as_bool().unwrap());
                let sees = if informative.start == 4 { average } else { who.contains(&levels) };
                let accuracy = head["accuracy"].as_f64().unwrap();
                assert_eq!(accuracy > 90.0, sees, "columns {informative:?}: {head}");
            }
            assert!(scored.outcome.value() > 90.0);
            assert_eq!(scored.details["steps"], 300);
        }
    }
}
