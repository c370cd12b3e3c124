//! Logistic regression on class tokens without normalization (the protocol of DINOv2 and DINOv3),
//! solved to convergence.
//!
//! ```text
//! f(W, b) = (1/n) Σ -log softmax(W x + b)_y + ‖W‖² / (2 C n)              in f64; b is not penalized
//! C is one of 45 from 10⁻⁶ to 10⁵, chosen on a held-out tenth of train; then W, b are fitted again on all of train
//! ```
//!
//! The short side of images is resized to the side of the square, as in DINOv2's script, not to
//! 256/224 of it.

use augment::Transform;
use kernels::ops::gemm::{Mat, gemm};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::batches::hold_out;
use super::lbfgs::{Limits, Value, minimize};
use super::task::{Scored, Task};
use super::{Needs, Rules, as_published};
use crate::EvalError;
use crate::features::set::FeatureSet;
use crate::statistics::outcome::Outcome;
use crate::statistics::{Predictions, largest};

/// Held-out share of the rows: one in this many.
const HELD_OUT: usize = 10;

/// Number of parts of the sum over rows; fixed, so that results are the same on any number of
/// cores.
const PARTS: usize = 16;

/// Number of rows converted to f64 at a time.
const BLOCK: usize = 256;

/// The protocol's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Logreg {
    /// Candidate values of C.
    pub c: Vec<f64>,
    /// Maximum number of steps of L-BFGS.
    pub iterations: usize,
    /// Largest component of the gradient at which L-BFGS stops.
    pub tolerance: f64,
}

impl Default for Logreg {
    fn default() -> Self {
        let c = (0..45).map(|i| 10f64.powf(-6.0 + 11.0 * f64::from(i) / 44.0)).collect();
        Self { c, iterations: 1000, tolerance: 1e-12 }
    }
}

impl Rules for Logreg {
    fn needs(&self) -> Needs {
        Needs::VECTORS
    }

    fn in_words(&self, _: &[Scored], is_published: bool) -> String {
        if self.c.len() == 1 {
            return "as DINOv2's, but for a C that is given".into();
        }
        format!("{}: C is chosen on a tenth of train", as_published("DINOv2's", false, is_published))
    }

    /// Returns a transform that resizes the short side to the size of the crop.
    fn transform(&self, usual: Transform) -> Transform {
        Transform { resize_px: usual.size_px, ..usual }
    }

    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        Ok(vec![self.number(task)])
    }
}

impl Logreg {
    /// Computes the score on `task.test`.
    fn number(&self, task: &Task<'_>) -> Scored {
        let columns = task.train.layout().last(1);
        let train = task.train.columns(columns.clone());
        let test = task.test.columns(columns);
        let (fit, held_out) = hold_out(&train, HELD_OUT, task.seed);
        task.progress.begin("logreg", self.c.len() as u64);
        let accuracies: Vec<f64> = if self.c.len() == 1 {
            vec![0.0]
        } else {
            self.c
                .par_iter()
                .map(|c| {
                    let accuracy = self.fit(&fit, task.n_classes, *c).classify(&held_out).accuracy();
                    task.progress.advance(1);
                    accuracy
                })
                .collect()
        };
        // The smallest C among equals: the simplest classifier.
        let best = (0..self.c.len()).rev().max_by(|a, b| accuracies[*a].total_cmp(&accuracies[*b]));
        let c = self.c[best.unwrap_or_default()];
        let regression = self.fit(&train, task.n_classes, c);
        let held_out: Vec<_> = self.c.iter().zip(accuracies).collect();
        let details = json!({ "c": c, "steps": regression.n_steps, "held_out": held_out });
        Scored {
            metric: "logreg".into(),
            outcome: Outcome::Predictions(regression.classify(&test)),
            details,
            counts: None,
        }
    }

    fn fit(&self, set: &FeatureSet, n_classes: usize, c: f64) -> Regression {
        let len = n_classes * (set.width() + 1);
        // scikit-learn's criteria: the gradient, or a decrease of at most 64 machine epsilons.
        let limits =
            Limits { gradient: self.tolerance, descent: 64.0 * f64::EPSILON, n_steps: self.iterations };
        let (params, n_steps) = minimize(vec![0.0; len], limits, |params| value(set, n_classes, c, params));
        Regression { params, n_classes, n_steps }
    }
}

/// A fitted regression.
struct Regression {
    /// `[classes, width]`, then the biases.
    params: Vec<f64>,
    n_classes: usize,
    n_steps: usize,
}

impl Regression {
    fn classify(&self, set: &FeatureSet) -> Predictions {
        let starts: Vec<usize> = (0..set.len()).step_by(BLOCK).collect();
        let predicted = starts
            .par_iter()
            .flat_map_iter(|start| {
                let mut block = Block::default();
                block.logits(set, *start..set.len().min(start + BLOCK), self.n_classes, &self.params);
                largest(&block.logits, self.n_classes)
            })
            .collect();
        Predictions::new(predicted, &set.labels, self.n_classes)
    }
}

/// Computes f and its gradient at `params`.
fn value(set: &FeatureSet, n_classes: usize, c: f64, params: &[f64]) -> Value {
    let n = set.len();
    let parts: Vec<Value> = (0..PARTS)
        .into_par_iter()
        .map(|part: usize| {
            let mut block = Block::default();
            let mut loss = 0.0;
            let mut gradient = vec![0.0; params.len()];
            let end = (part + 1) * n / PARTS;
            for start in (part * n / PARTS..end).step_by(BLOCK) {
                loss += block.add(set, start..end.min(start + BLOCK), n_classes, params, &mut gradient);
            }
            (loss, gradient)
        })
        .collect();
    let n_weights = n_classes * set.width();
    let strength = 1.0 / (c * n as f64);
    let mut loss = 0.5 * strength * params[..n_weights].iter().map(|w| w * w).sum::<f64>();
    let mut gradient = vec![0.0; params.len()];
    for (part_loss, part_gradient) in parts {
        loss += part_loss / n as f64;
        gradient.iter_mut().zip(part_gradient).for_each(|(sum, g)| *sum += g / n as f64);
    }
    gradient[..n_weights].iter_mut().zip(params).for_each(|(g, w)| *g += strength * w);
    (loss, gradient)
}

/// Buffers for a block of rows in f64.
#[derive(Default)]
struct Block {
    rows: Vec<f64>,
    /// `[B, classes]`
    logits: Vec<f64>,
}

impl Block {
    /// Computes the logits of the rows in `range`.
    fn logits(&mut self, set: &FeatureSet, range: std::ops::Range<usize>, n_classes: usize, params: &[f64]) {
        let b = range.len();
        let d = set.width();
        self.rows.clear();
        for i in range {
            self.rows.extend(set.row(i).iter().map(|v| f64::from(*v)));
        }
        let (weight, bias) = params.split_at(n_classes * d);
        self.logits.clear();
        for _ in 0..b {
            self.logits.extend_from_slice(bias);
        }
        let x = Mat::rows(&self.rows, d);
        let w = Mat::rows(weight, d).t();
        gemm([b, d, n_classes], 1.0, x, w, 1.0, &mut self.logits, n_classes);
    }

    /// Returns the sum of the losses of the rows in `range` and adds their gradients to `gradient`.
    fn add(
        &mut self,
        set: &FeatureSet,
        range: std::ops::Range<usize>,
        n_classes: usize,
        params: &[f64],
        gradient: &mut [f64],
    ) -> f64 {
        self.logits(set, range.clone(), n_classes, params);
        let b = range.len();
        let d = set.width();
        let mut loss = 0.0;
        let (weights, biases) = gradient.split_at_mut(n_classes * d);
        for (logits, i) in self.logits.chunks_exact_mut(n_classes).zip(range) {
            let label = set.labels[i] as usize;
            let max = logits.iter().copied().fold(f64::MIN, f64::max);
            let label_logit = logits[label] - max;
            logits.iter_mut().for_each(|v| *v = (*v - max).exp());
            let sum: f64 = logits.iter().sum();
            loss += sum.ln() - label_logit;
            logits.iter_mut().for_each(|v| *v /= sum);
            logits[label] -= 1.0;
            biases.iter_mut().zip(&*logits).for_each(|(bias, error)| *bias += error);
        }
        let errors = Mat::rows(&self.logits, n_classes).t();
        let x = Mat::rows(&self.rows, d);
        gemm([n_classes, b, d], 1.0, errors, x, 1.0, weights, d);
        loss
    }
}

#[cfg(test)]
mod tests {
    use augment::ViewRng;

    use super::*;

    fn set(n: usize) -> FeatureSet {
        let mut rng = ViewRng::from_words([3, 0, 0, 0]);
        let labels: Vec<u32> = (0..n as u32).map(|i| i % 4).collect();
        let mut rows = Vec::with_capacity(3 * n);
        for label in &labels {
            let mut row = [rng.normal(), rng.normal(), rng.normal()];
            row[(*label as usize) % 3] += *label as f32;
            rows.extend(row);
        }
        FeatureSet::from_rows(3, rows, labels)
    }

    #[test]
    fn the_gradient_equals_finite_differences() {
        let set = set(301);
        let params: Vec<f64> = (0..16).map(|i| (f64::from(i) * 0.7).sin()).collect();
        let (_, gradient) = value(&set, 4, 0.3, &params);
        for (i, g) in gradient.iter().enumerate() {
            let mut above = params.clone();
            above[i] += 1e-5;
            let mut below = params.clone();
            below[i] -= 1e-5;
            let expected = (value(&set, 4, 0.3, &above).0 - value(&set, 4, 0.3, &below).0) / 2e-5;
            assert!((g - expected).abs() < 1e-9, "{i}: {g} {expected}");
        }
    }

    /// The gradient vanishes at the solution.
    #[test]
    fn the_minimum_is_reached() {
        let set = set(400);
        let logreg = Logreg { c: vec![1.0], ..Logreg::default() };
        let fitted = logreg.fit(&set, 4, 1.0);
        let (_, gradient) = value(&set, 4, 1.0, &fitted.params);
        assert!(gradient.iter().all(|g| g.abs() < 1e-6), "{} steps: {gradient:?}", fitted.n_steps);
        assert!(fitted.n_steps < 200, "{}", fitted.n_steps);
    }
}
