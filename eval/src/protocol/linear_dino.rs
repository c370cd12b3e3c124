//! DINO's linear probe (Caron et al. 2021, `eval_linear.py`): one head on crops that are drawn anew
//! in every epoch.
//!
//! ```text
//! x = class tokens of the last 4 blocks (ViT-S), or class token and mean patch token of the last block (ViT-B)
//! train: random-resized crops (bilinear, area 0.08 to 1) and flips;  test: the central square
//! SGD with momentum 0.9 and no weight decay, lr · B / 256, cosine to zero by epoch, W from N(0, 0.01²)
//! ```
//!
//! The number is the accuracy after the last epoch; the authors' script prints the maximum over all
//! epochs, which is chosen on the test set. A convolutional network has the spatial means of its
//! last stages in place of class tokens; the authors use only the last stage (`levels` 1).

use augment::Interpolation;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::batches::{classified, cosine};
use super::heads::{HeadTraining, Heads, Rows};
use super::task::{Scored, Task};
use super::{Needs, Rules, as_published};
use crate::EvalError;
use crate::statistics::outcome::Outcome;

/// Name of the protocol.
const NAME: &str = "linear-dino";

/// The protocol's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearDino {
    /// Learning rate for batches of 256.
    pub rate: f64,
    /// Number of passes over train.
    pub epochs: usize,
    /// Images per mini-batch.
    pub batch: usize,
    /// Number of last levels whose class tokens are concatenated.
    pub levels: usize,
    /// Appends the mean patch token.
    pub average: bool,
}

impl Default for LinearDino {
    /// Returns DINO's settings for ViT-S on one GPU.
    fn default() -> Self {
        Self { rate: 0.001, epochs: 100, batch: 128, levels: 4, average: false }
    }
}

impl Rules for LinearDino {
    fn needs(&self) -> Needs {
        Needs { n_levels: self.levels, average: self.average, ..Needs::VECTORS }
    }

    fn in_words(&self, _: &[Scored], is_published: bool) -> String {
        format!(
            "{}, bilinear crops and flips, {} epochs in batches of {}; the last epoch, where the script \
             prints the best",
            as_published("DINO's script", false, is_published),
            self.epochs,
            self.batch
        )
    }

    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        Ok(vec![self.number(task)?])
    }
}

impl LinearDino {
    /// Computes the score on `task.test`.
    ///
    /// # Errors
    /// [`EvalError::ImagesRequired`] if the task has features only, [`EvalError::Data`] if a shard
    /// cannot be read, [`EvalError::NotFinite`].
    fn number(&self, task: &Task<'_>) -> Result<Scored, EvalError> {
        let views = task.views.ok_or(EvalError::ImagesRequired { protocol: NAME })?;
        let crops = views.crops(Interpolation::Bilinear);
        let columns = if self.average {
            task.test.layout().last_and_average(self.levels)
        } else {
            task.test.layout().last(self.levels)
        };
        let test = task.test.columns(columns.clone());
        let descent = HeadTraining { momentum: 0.9, init_std: 0.01, seed: task.seed };
        let scaled = self.rate * self.batch as f64 / 256.0;
        let all = 0..columns.len();
        let mut heads = Heads::new(std::slice::from_ref(&all), &[scaled], task.n_classes, descent);
        let mut rows = Vec::new();
        task.progress.begin(NAME, (self.epochs * views.len()) as u64);
        for epoch in 0..self.epochs {
            let scale = cosine(epoch as f32 / self.epochs as f32);
            crops.epoch(task.seed, epoch, self.batch.max(1), &mut |table, labels| {
                rows.clear();
                task.progress.advance(table.len() as u64);
                for i in 0..table.len() {
                    rows.extend_from_slice(&table.row(i)[columns.clone()]);
                }
                heads.step(Rows { rows: &rows, width: columns.len() }, labels, scale);
            })?;
        }
        let classified = classified(&mut heads, 1, &test, None, task.n_classes).remove(0);
        let details = json!({ "levels": self.levels, "average": self.average });
        Ok(Scored {
            metric: "linear_dino".into(),
            outcome: Outcome::Predictions(classified),
            details,
            counts: None,
        })
    }
}
