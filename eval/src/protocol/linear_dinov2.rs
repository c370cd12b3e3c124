//! DINOv2's linear probe (Oquab et al. 2023): 13 rates × {1, 4} levels × average {no, yes} = 52 heads
//! in one pass.
//!
//! ```text
//! x = class tokens of the last 1 or 4 blocks, with or without the mean patch token of the last;  W from N(0, 0.01²)
//! SGD with momentum 0.9 and no weight decay, lr · B / 256, cosine to zero over all steps
//! ```
//!
//! **The best head is chosen on the test set**, as published; [`super::linear_honest`] does not look there. The
//! published numbers come from random crops and flips, whose features are made anew in every epoch (`crops`); without them
//! features are those of the central square, made once. A convolutional network has the mean maps of its last stages in place of class tokens.

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::batches::{Gathered, classified, cosine};
use super::heads::{Descent, Heads, Rows};
use super::task::{Scored, Task};
use super::views::Views;
use crate::EvalError;
use crate::score::Classified;
use crate::score::outcome::Outcome;

/// What it is called.
pub(crate) const NAME: &str = "linear-dinov2";

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
    /// Whether each epoch sees new crops and flips of the training images.
    #[serde(default)]
    pub crops: bool,
}

impl Default for LinearDinov2 {
    /// DINOv2's on one GPU.
    fn default() -> Self {
        let rates = vec![1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1];
        Self { rates, iterations: 12_500, epochs: None, batch: 128, levels: vec![1, 4], crops: false }
    }
}

impl LinearDinov2 {
    /// The score of the best head on `task.test`.
    ///
    /// # Errors
    /// With `crops`, [`EvalError::NoViews`] where the task has features alone, [`EvalError::Data`] when a shard cannot be
    /// read.
    pub(crate) fn score(&self, task: &Task<'_>) -> Result<Scored, EvalError> {
        let layout = task.train.layout();
        let mut inputs = Vec::new();
        for level in &self.levels {
            inputs.push((*level, false, layout.last(*level)));
            if layout.average > 0 {
                inputs.push((*level, true, layout.last_and_average(*level)));
            }
        }
        let columns: Vec<_> = inputs.iter().map(|(_, _, columns)| columns.clone()).collect();
        let descent = Descent { momentum: 0.9, init_std: 0.01, seed: task.seed };
        let mut heads = Heads::new(&columns, &self.rates, task.n_classes, descent);
        let n_steps = self.fit(&mut heads, task)?;
        let n_heads = columns.len() * self.rates.len();
        let mut found = classified(&mut heads, n_heads, task.test, None, task.n_classes);
        let accuracies: Vec<f64> = found.iter().map(Classified::accuracy).collect();
        let about = |head: usize| {
            let (level, average, _) = &inputs[head / self.rates.len()];
            let rate = self.rates[head % self.rates.len()];
            json!({ "levels": level, "average": average, "rate": rate, "accuracy": accuracies[head] })
        };
        let best =
            (0..n_heads).rev().max_by(|a, b| accuracies[*a].total_cmp(&accuracies[*b])).unwrap_or_default();
        let details = json!({
            "chosen_on": "test, as published",
            "head": about(best),
            "steps": n_steps,
            "heads": (0..n_heads).map(about).collect::<Vec<_>>(),
        });
        let outcome = Outcome::Classified(found.swap_remove(best));
        Ok(Scored { metric: "linear_dinov2".into(), outcome, details, counts: None })
    }

    /// Trains all heads side by side; gives the steps that they took.
    fn fit(&self, heads: &mut Heads, task: &Task<'_>) -> Result<usize, EvalError> {
        let batch = self.batch.max(1);
        let views =
            self.crops.then(|| task.views.ok_or(EvalError::NoViews { protocol: NAME })).transpose()?;
        let of_epoch = views.map_or(task.train.len(), Views::len).div_ceil(batch).max(1);
        let n_steps = self.epochs.map_or(self.iterations, |epochs| epochs * of_epoch);
        let (mut step, rate_scale) = (0, batch as f32 / 256.0);
        task.progress.begins(NAME, n_steps);
        let mut one = |rows: Rows<'_>, labels: &[u32]| {
            if step < n_steps {
                heads.step(rows, labels, rate_scale * cosine(step as f32 / n_steps as f32));
                task.progress.seen(1);
            }
            step += 1;
        };
        let mut batches = Gathered::new(task.train, None);
        for epoch in 0..n_steps.div_ceil(of_epoch) {
            match views {
                Some(views) => views.epoch(task.seed, epoch, batch, &mut |table, labels| {
                    one(Rows { rows: table.rows(), width: table.columns.width() }, labels);
                })?,
                None => batches.epoch(task.seed, epoch, batch, &mut one),
            }
        }
        Ok(n_steps)
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

    /// Each head sees the levels and the average that it is said to see, and no others; small rates stay behind.
    #[test]
    fn heads_see_their_columns_alone() {
        let protocol = LinearDinov2 {
            rates: vec![1e-5, 0.1],
            iterations: 300,
            levels: vec![1, 2],
            ..LinearDinov2::default()
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
            let scored = protocol.score(&task).unwrap();
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
