//! Linear classifiers that are trained in parallel on the same batches: one for each learning rate
//! and each choice of columns.
//!
//! ```text
//! logits = x Wᵀ + b                     [B, H·C] for the H heads on the same columns, in one product
//! v ← m v + ∇,  (W, b) ← (W, b) - lr v   SGD with momentum, no weight decay
//! ```

use std::ops::Range;

use augment::ViewRng;
use kernels::device::workers::Workers;
use kernels::ops::gemm::{Mat, gemm};

use crate::statistics::largest;

/// RNG domain of the initial weights, distinct from all other streams.
const INIT_DOMAIN: u64 = 0x6865_6164_0000_0000;

/// Training settings of all heads.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadTraining {
    /// Momentum, m.
    pub momentum: f32,
    /// Standard deviation of the initial weights; biases start at 0.
    pub init_std: f32,
    /// Seed of the initial weights.
    pub seed: u64,
}

/// Linear heads on columns of the same batches.
pub(super) struct Heads {
    banks: Vec<Bank>,
    workers: Workers,
    /// Indices of the banks of each worker.
    shares: Vec<Vec<usize>>,
    n_classes: usize,
}

/// Heads of one worker on the same columns.
#[derive(Clone)]
struct Bank {
    columns: Range<usize>,
    rates: Vec<f32>,
    /// `[heads · classes, columns]`
    weight: Vec<f32>,
    weight_velocity: Vec<f32>,
    /// `[heads · classes]`
    bias: Vec<f32>,
    bias_velocity: Vec<f32>,
    /// `[B, heads · classes]`: logits, then their gradients.
    scratch: Vec<f32>,
    momentum: f32,
}

/// A batch of features: `rows` is `[B, width]`.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// Values of all rows.
    pub rows: &'a [f32],
    /// Length of a row.
    pub width: usize,
}

impl Heads {
    /// Returns a head for each of `rates` on each of `columns`, grouped by columns.
    pub(super) fn new(
        columns: &[Range<usize>],
        rates: &[f64],
        n_classes: usize,
        descent: HeadTraining,
    ) -> Self {
        let workers = Workers::new(rayon::current_num_threads());
        let mut banks = Vec::new();
        let mut shares = vec![Vec::new(); workers.len()];
        for (group, columns) in columns.iter().enumerate() {
            // Heads are independent: splitting them by worker needs no reduction.
            let parts = workers.len().min(rates.len());
            for part in 0..parts {
                let range = part * rates.len() / parts..(part + 1) * rates.len() / parts;
                // Every other group is assigned in reverse: workers with larger parts of one get
                // smaller parts of the next.
                let worker = if group % 2 == 0 { part } else { parts - 1 - part };
                shares[worker].push(banks.len());
                let first_head = group * rates.len() + range.start;
                banks.push(Bank::new(columns.clone(), &rates[range], n_classes, first_head, descent));
            }
        }
        Self { banks, workers, shares, n_classes }
    }

    /// Takes one step of all heads; learning rates are multiplied by `scale`.
    pub(super) fn step(&mut self, batch: Rows<'_>, labels: &[u32], scale: f32) {
        let n_classes = self.n_classes;
        self.each_share(|bank| bank.step(batch, labels, n_classes, scale));
    }

    /// Returns the predictions of each head for `rows`, by head.
    pub(super) fn predict(&mut self, rows: Rows<'_>) -> Vec<Vec<u32>> {
        let n_classes = self.n_classes;
        self.each_share(|bank| bank.predict(rows, n_classes)).concat()
    }

    /// Calls `f` for each bank on its worker; returns the results in the order of the banks.
    fn each_share<R: Send>(&mut self, f: impl Fn(&mut Bank) -> R + Sync) -> Vec<R> {
        let mut banks: Vec<Option<&mut Bank>> = self.banks.iter_mut().map(Some).collect();
        let mut inputs: Vec<Vec<(usize, &mut Bank)>> = Vec::with_capacity(self.shares.len());
        for share in &self.shares {
            inputs.push(share.iter().filter_map(|i| Some((*i, banks[*i].take()?))).collect());
        }
        let mut results: Vec<(usize, R)> = self
            .workers
            .map(inputs, |_: usize, share| {
                share.into_iter().map(|(i, bank)| (i, f(bank))).collect::<Vec<_>>()
            })
            .into_iter()
            .flatten()
            .collect();
        results.sort_by_key(|(i, _)| *i);
        results.into_iter().map(|(_, result)| result).collect()
    }
}

impl Bank {
    fn new(
        columns: Range<usize>,
        rates: &[f64],
        n_classes: usize,
        first_head: usize,
        descent: HeadTraining,
    ) -> Self {
        let n_rows = rates.len() * n_classes;
        let d = columns.len();
        let mut weight = Vec::with_capacity(n_rows * d);
        for head in 0..rates.len() {
            let mut rng = ViewRng::from_words([descent.seed, INIT_DOMAIN, (first_head + head) as u64, 0]);
            if descent.init_std > 0.0 {
                weight.extend((0..n_classes * d).map(|_| descent.init_std * rng.normal()))
            } else {
                weight.resize(weight.len() + n_classes * d, 0.0)
            }
        }
        Self {
            weight_velocity: vec![0.0; weight.len()],
            weight,
            bias: vec![0.0; n_rows],
            bias_velocity: vec![0.0; n_rows],
            scratch: Vec::new(),
            columns,
            rates: rates.iter().map(|rate| *rate as f32).collect(),
            momentum: descent.momentum,
        }
    }

    /// Computes the logits of `rows` into `scratch`, `[B, heads · classes]`.
    fn logits(&mut self, Rows { rows, width }: Rows<'_>) {
        let b = rows.len() / width;
        let n = self.bias.len();
        let d = self.columns.len();
        self.scratch.clear();
        for _ in 0..b {
            self.scratch.extend_from_slice(&self.bias);
        }
        if b > 0 {
            let x = Mat::rows(&rows[self.columns.start..], width);
            gemm([b, d, n], 1.0, x, Mat::rows(&self.weight, d).t(), 1.0, &mut self.scratch, n);
        }
    }

    fn predict(&mut self, rows: Rows<'_>, n_classes: usize) -> Vec<Vec<u32>> {
        self.logits(rows);
        let n_heads = self.rates.len();
        // `[B, heads]`
        let classes = largest(&self.scratch, n_classes);
        (0..n_heads).map(|head| classes.iter().skip(head).step_by(n_heads).copied().collect()).collect()
    }

    fn step(&mut self, batch: Rows<'_>, labels: &[u32], n_classes: usize, scale: f32) {
        self.logits(batch);
        let b = labels.len();
        let n = self.bias.len();
        let d = self.columns.len();
        for (logits, label) in self.scratch.chunks_exact_mut(n).zip(labels) {
            for logits in logits.chunks_exact_mut(n_classes) {
                softmax(logits);
                logits[*label as usize] -= 1.0;
            }
        }
        let mean = 1.0 / b as f32;
        let errors = Mat::rows(&self.scratch, n).t();
        let x = Mat::rows(&batch.rows[self.columns.start..], batch.width);
        gemm([n, b, d], mean, errors, x, self.momentum, &mut self.weight_velocity, d);
        for (class, velocity) in self.bias_velocity.iter_mut().enumerate() {
            let sum: f32 = self.scratch.iter().skip(class).step_by(n).sum();
            *velocity = self.momentum * *velocity + mean * sum;
        }
        for (head, rate) in self.rates.iter().enumerate() {
            let rows = head * n_classes..(head + 1) * n_classes;
            descend(&mut self.bias[rows.clone()], &self.bias_velocity[rows.clone()], rate * scale);
            let range = rows.start * d..rows.end * d;
            descend(&mut self.weight[range.clone()], &self.weight_velocity[range], rate * scale);
        }
    }
}

fn descend(params: &mut [f32], velocity: &[f32], rate: f32) {
    params.iter_mut().zip(velocity).for_each(|(param, velocity)| *param -= rate * velocity);
}

/// Replaces logits by probabilities.
pub(super) fn softmax(logits: &mut [f32]) {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    logits.iter_mut().for_each(|v| *v = (*v - max).exp());
    let sum: f32 = logits.iter().sum();
    logits.iter_mut().for_each(|v| *v /= sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the parameters of head `head` of `bank` after a step, in f64: weights, then biases.
    fn stepped(
        bank: &Bank,
        head: usize,
        batch: Rows<'_>,
        labels: &[u32],
        n_classes: usize,
        scale: f64,
    ) -> Vec<f64> {
        let d = bank.columns.len();
        let b = labels.len();
        let first_class = head * n_classes;
        // Columns of the bank, `[B, D]`.
        let mut x: Vec<f64> = Vec::with_capacity(b * d);
        for row in batch.rows.chunks_exact(batch.width) {
            x.extend(row[bank.columns.clone()].iter().map(|v| f64::from(*v)));
        }
        // Gradients of the logits, `[B, classes]`: probabilities minus the true distribution.
        let mut errors: Vec<f64> = Vec::with_capacity(b * n_classes);
        for (x, label) in x.chunks_exact(d).zip(labels) {
            let mut exponentials: Vec<f64> = Vec::with_capacity(n_classes);
            for class in 0..n_classes {
                let weight = &bank.weight[(first_class + class) * d..(first_class + class + 1) * d];
                let dot: f64 = weight.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
                exponentials.push((f64::from(bank.bias[first_class + class]) + dot).exp());
            }
            let sum: f64 = exponentials.iter().sum();
            for (class, exponential) in exponentials.iter().enumerate() {
                errors.push(exponential / sum - f64::from(u8::from(*label as usize == class)));
            }
        }
        let rate = f64::from(bank.rates[head]) * scale;
        let momentum = f64::from(bank.momentum);
        let mut weights: Vec<f64> = Vec::with_capacity(n_classes * d);
        let mut biases: Vec<f64> = Vec::with_capacity(n_classes);
        for class in 0..n_classes {
            let row = first_class + class;
            for c in 0..d {
                let gradient: f64 = (0..b).map(|i| errors[i * n_classes + class] * x[i * d + c]).sum();
                let velocity = f64::from(bank.weight_velocity[row * d + c]);
                let step = rate * (momentum * velocity + gradient / b as f64);
                weights.push(f64::from(bank.weight[row * d + c]) - step);
            }
            let gradient: f64 = (0..b).map(|i| errors[i * n_classes + class]).sum();
            let velocity = f64::from(bank.bias_velocity[row]);
            biases.push(f64::from(bank.bias[row]) - rate * (momentum * velocity + gradient / b as f64));
        }
        weights.extend(biases);
        weights
    }

    #[test]
    fn a_step_of_every_head_follows_the_formula() {
        let b = 5;
        let width = 7;
        let n_classes = 3;
        let rows: Vec<f32> = (0..b * width).map(|i| ((i * 7919 % 100) as f32) / 50.0 - 1.0).collect();
        let labels: Vec<u32> = (0..b as u32).map(|i| i % 3).collect();
        let descent = HeadTraining { momentum: 0.9, init_std: 0.3, seed: 1 };
        let mut heads = Heads::new(&[0..7, 2..5], &[0.5, 0.1, 0.01], n_classes, descent);
        let batch = Rows { rows: &rows, width };
        for step in 0..3 {
            let before = heads.banks.clone();
            heads.step(batch, &labels, 0.7);
            for (bank, before) in heads.banks.iter().zip(&before) {
                let d = bank.columns.len();
                for head in 0..bank.rates.len() {
                    let expected = stepped(before, head, batch, &labels, n_classes, f64::from(0.7f32));
                    let weights = &bank.weight[head * n_classes * d..(head + 1) * n_classes * d];
                    let biases = &bank.bias[head * n_classes..(head + 1) * n_classes];
                    for (found, expected) in weights.iter().chain(biases).zip(&expected) {
                        assert!(
                            (f64::from(*found) - expected).abs() < 1e-5,
                            "step {step}: {found} {expected}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn predictions_are_grouped_by_head() {
        let descent = HeadTraining { momentum: 0.9, init_std: 0.0, seed: 0 };
        let mut heads = Heads::new(std::slice::from_ref(&(0..1)), &[1.0, 0.0], 2, descent);
        // The first head learns the sign; the second has rate 0 and always predicts the first
        // class.
        for _ in 0..20 {
            heads.step(Rows { rows: &[1.0, -1.0], width: 1 }, &[1, 0], 1.0);
        }
        assert_eq!(heads.predict(Rows { rows: &[2.0, -2.0, 1.0], width: 1 }), [[1, 0, 1], [0, 0, 0]]);
    }
}
