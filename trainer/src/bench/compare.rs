//! Comparison of a device with the CPU.
//!
//! Forward pass, loss and backward pass run on both with the same plan, weights and batch, and then a few steps.

use burn_tensor::{DType, Device, Tensor};
use kernels::device::host::to_host;
use kernels::device::readback::{DeviceFailure, read_back};
use kernels::ops::cast;
use ranks::communicator::Communicator;

use super::noise::noise_batch;
use crate::error::TrainError;
use crate::recipe::plan::Plan;

/// Differences between a device and the CPU, relative to the CPU's largest number.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// Difference of the embeddings of the evaluated network.
    pub embeddings: f64,
    /// Difference of the loss.
    pub loss: f64,
    /// Difference of the gradient, by unit.
    pub gradients: Vec<(String, f64)>,
    /// Losses of the steps: the CPU's and the device's.
    pub steps: Vec<[f64; 2]>,
}

impl Comparison {
    /// Returns the largest of the gradients' differences.
    pub fn worst_gradient(&self) -> f64 {
        self.gradients.iter().map(|(_, difference)| *difference).fold(0.0, f64::max)
    }

    /// Returns the largest relative difference of the steps' losses; infinite where it is not finite.
    pub fn worst_step(&self) -> f64 {
        let relative = |[here, there]: &[f64; 2]| (here - there).abs() / here.abs();
        let finite = |gap: f64| if gap.is_finite() { gap } else { f64::INFINITY };
        self.steps.iter().map(relative).map(finite).fold(0.0, f64::max)
    }
}

/// Compares `device` with the CPU, over `n_steps` steps of `plan` on noise.
///
/// # Errors
/// [`TrainError`] if the method cannot be built or the device fails; a single rank has no others to lose.
pub fn compare(plan: &Plan, device: &Device, n_steps: u64) -> Result<Comparison, TrainError> {
    let mut plan = plan.clone();
    // Gives both the same order of sums.
    plan.n_workers = 1;
    let schedules = plan.schedules();
    let batch = |number| {
        noise_batch(&plan.multicrop(), plan.recipe.data.format(), plan.recipe.optim.batch_size, number)
    };
    let trainer = |device: &Device| plan.trainer(Communicator::solo(), device);
    let mut trainers = [trainer(&Device::flex())?, trainer(device)?];
    let scheduled_values = schedules.at(plan.warmup_steps);
    let first = batch(0);
    let [here, there] = [0, 1].map(|i| trainers[i].gradients(&first, &scheduled_values, &mut |_| {}));
    let (here, there) = (here?, there?);
    let loss = here.loss()?;
    let embeddings =
        here.embeddings().iter().zip(there.embeddings()).map(|(a, b)| difference(&flat(a), &flat(b)));
    let names = trainers[0].trained().iter().map(|shard| shard.layout.name.clone());
    let gradients = names
        .zip(here.shards().iter().zip(there.shards()))
        .map(|(name, (a, b))| (name, difference(&to_host(a.clone()), &to_host(b.clone()))));
    let mut comparison = Comparison {
        embeddings: embeddings.fold(0.0, f64::max),
        loss: (loss - there.loss()?).abs() / loss.abs(),
        gradients: gradients.collect(),
        steps: Vec::new(),
    };
    for number in 0..n_steps {
        let scheduled_values = schedules.at(plan.warmup_steps + number);
        let batch = batch(number);
        let [here, there] = [0, 1].map(|i| trainers[i].step(&batch, &scheduled_values));
        comparison.steps.push([here?.loss, there?.loss]);
    }
    Ok(comparison)
}

/// Reads the elements of `tensor` as f32.
///
/// # Errors
/// [`DeviceFailure`].
pub(super) fn read_in_f32(tensor: Tensor<3>) -> Result<Vec<f32>, DeviceFailure> {
    let n: usize = tensor.dims().iter().product();
    read_back(cast(tensor, DType::F32).reshape([n]))
}

/// Returns whether all numbers have the same bits.
pub(super) fn have_same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn flat(rows: &Tensor<2>) -> Vec<f32> {
    let [b, d] = rows.dims();
    to_host(rows.clone().reshape([b * d]))
}

/// Returns the largest difference of elements, relative to the largest of `a`; infinite if one is NaN.
///
/// # Panics
/// If the lengths differ.
pub fn difference(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "elements to compare");
    let largest = a.iter().fold(0.0f32, |max, v| max.max(v.abs()));
    let mut worst = 0.0f32;
    for (a, b) in a.iter().zip(b) {
        let gap = (a - b).abs();
        worst = if gap.is_nan() { f32::INFINITY } else { worst.max(gap) };
    }
    f64::from(worst) / f64::from(largest.max(f32::MIN_POSITIVE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_seen() {
        assert_eq!(difference(&[1.0, -2.0], &[1.0, -2.0]), 0.0);
        assert_eq!(difference(&[1.0, -2.0], &[1.5, -2.0]), 0.25);
        assert_eq!(difference(&[1.0], &[f32::NAN]), f64::INFINITY);
        let comparison = |steps| Comparison { embeddings: 0.0, loss: 0.0, gradients: Vec::new(), steps };
        assert_eq!(comparison(vec![[2.0, 2.0], [2.0, 1.0]]).worst_step(), 0.5);
        assert_eq!(comparison(vec![[2.0, f64::NAN], [2.0, 2.0]]).worst_step(), f64::INFINITY);
    }
}
