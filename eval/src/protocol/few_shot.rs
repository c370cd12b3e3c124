//! Nearest neighbors among a few images of each class, like DINOv2's k-NN with
//! `--n-per-class-list`: as many neighbors as shots, at most 20; one draw, as in DINOv2, or the
//! mean over several.

use std::collections::BTreeMap;

use augment::ViewRng;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::knn::Knn;
use super::task::{Scored, Task};
use super::{Needs, Rules};
use crate::EvalError;
use crate::images::ImageSet;
use crate::statistics::Predictions;
use crate::statistics::outcome::Outcome;

/// RNG domain of the draws of shots, distinct from all other streams.
const DOMAIN: u64 = 0x6665_7773_0000_0000;

/// The protocol's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FewShot {
    /// Numbers of images per class; each gives a score.
    pub shots: Vec<usize>,
    /// Number of draws for each number of shots.
    pub tries: usize,
    /// Maximum number of neighbors; the number of shots limits it further.
    pub neighbors: usize,
    /// Temperature of the votes.
    pub temperature: f64,
}

impl Default for FewShot {
    fn default() -> Self {
        Self { shots: vec![1, 2, 5, 10], tries: 1, neighbors: 20, temperature: 0.07 }
    }
}

impl Rules for FewShot {
    fn needs(&self) -> Needs {
        Needs::VECTORS
    }

    fn in_words(&self, _: &[Scored], _: bool) -> String {
        let draws = if self.tries == 1 { "1 draw".into() } else { format!("mean of {} draws", self.tries) };
        format!("as DINOv2's k-NN among a few images of each class, {draws}")
    }

    fn check(&self, train: &ImageSet) -> Result<(), EvalError> {
        self.check_labels((0..train.len()).filter_map(|image| train.label(image)))
    }

    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        // Checked again: images that could not be decoded are missing from train.
        self.check_labels(task.train.labels.iter().copied())?;
        Ok(self.shots.iter().map(|shots| self.score_shots(task, *shots)).collect())
    }
}

impl FewShot {
    /// Checks that every class among the `labels` of train has at least as many images as shots:
    /// otherwise the number would not match its name. Classes missing from train altogether cause a
    /// warning elsewhere.
    ///
    /// # Errors
    /// [`EvalError::TooFewImages`] if a class has fewer.
    fn check_labels(&self, labels: impl Iterator<Item = u32>) -> Result<(), EvalError> {
        let mut n_images = BTreeMap::<u32, usize>::new();
        for label in labels {
            *n_images.entry(label).or_default() += 1;
        }
        let fewest = n_images.into_values().min().unwrap_or_default();
        match self.shots.iter().find(|shots| **shots > fewest) {
            Some(shots) => Err(EvalError::TooFewImages { n_images: fewest, shots: *shots }),
            None => Ok(()),
        }
    }

    /// Computes the number for `shots` images per class: the predictions of all draws,
    /// concatenated.
    fn score_shots(&self, task: &Task<'_>, shots: usize) -> Scored {
        let columns = task.train.layout().last(1);
        let train = task.train.columns(columns.clone());
        let test = task.test.columns(columns);
        let k = vec![shots.min(self.neighbors)];
        let knn = Knn { k, temperature: self.temperature, leave_one_out: false };
        let mut all =
            Predictions { n_tries: self.tries, ..Predictions::new(Vec::new(), &[], task.n_classes) };
        let mut accuracies = Vec::new();
        for attempt in 0..self.tries {
            let mut by_class = vec![Vec::new(); task.n_classes];
            for (row, label) in train.labels.iter().enumerate() {
                by_class[*label as usize].push(row);
            }
            let mut rng = ViewRng::from_words([task.seed, DOMAIN, attempt as u64, shots as u64]);
            for rows in &mut by_class {
                rng.shuffle(rows);
                rows.truncate(shots);
            }
            let few = train.select(by_class.into_iter().flatten());
            for (_, classified) in knn.classify(&few, &test, task.n_classes) {
                accuracies.push(classified.accuracy());
                all.predicted.extend(classified.predicted);
                all.labels.extend(classified.labels);
            }
        }
        let details = json!({ "shots": shots, "tries": accuracies });
        Scored {
            metric: format!("few_shot_{shots}"),
            outcome: Outcome::Predictions(all),
            details,
            counts: None,
        }
    }
}
