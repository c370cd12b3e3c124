//! Comparison of a device with the CPU.
//!
//! Forward pass, loss and backward pass run on both with the same plan, weights and batch, and then
//! a few steps.
//!
//! Rectifiers, maxima and assignments to prototypes make a gradient jump where a number passes a
//! threshold, and another order of sums suffices for that. So the CPU computes the gradient also
//! from weights that were changed by less than a device's rounding: a difference that is not much
//! larger than that change's is none of the device.

use augment::{Batch, ViewRng};
use burn_tensor::{DType, Device, Tensor, TensorData};
use kernels::device::host::to_host;
use kernels::device::readback::{DeviceFailure, read_back};
use kernels::ops::cast;
use ranks::communicator::Communicator;

use super::noise::noise_batch;
use crate::error::TrainError;
use crate::optim::state::UnitShard;
use crate::recipe::plan::Plan;

/// Largest relative change of a weight when the CPU's own gradient is computed again.
const NUDGE: f32 = 1e-6;

/// Number of changed weights from which the CPU computes its gradient again.
const N_NUDGES: u64 = 3;

/// Differences between a device and the CPU, relative to the CPU's largest number.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// Difference of the embeddings of the evaluated network.
    pub embeddings: f64,
    /// Difference of the loss.
    pub loss: f64,
    /// Differences of the gradient, by unit.
    pub gradients: Vec<UnitGradient>,
    /// Losses of the steps: the CPU's and the device's.
    pub steps: Vec<[f64; 2]>,
}

/// Differences of a unit's gradient.
#[derive(Debug, Clone)]
pub struct UnitGradient {
    /// Name of the unit.
    pub unit: String,
    /// Difference between the device and the CPU.
    pub difference: f64,
    /// Largest difference between the CPU and itself with weights that differ by 1e-6.
    pub own: f64,
}

impl Comparison {
    /// Returns the largest of the gradients' differences.
    pub fn worst_gradient(&self) -> f64 {
        self.gradients.iter().map(|gradient| gradient.difference).fold(0.0, f64::max)
    }

    /// Returns the largest difference between the CPU's gradient and its own with weights that
    /// differ by 1e-6.
    pub fn own_gradient(&self) -> f64 {
        self.gradients.iter().map(|gradient| gradient.own).fold(0.0, f64::max)
    }

    /// Returns the largest relative difference of the steps' losses; infinite where it is not
    /// finite.
    pub fn worst_step(&self) -> f64 {
        self.steps
            .iter()
            .map(|[here, there]| (here - there).abs() / here.abs())
            .map(|gap: f64| if gap.is_finite() { gap } else { f64::INFINITY })
            .fold(0.0, f64::max)
    }
}

/// Compares `device` with the CPU, over `n_steps` steps of `plan` on noise.
///
/// # Errors
/// [`TrainError`] if the method cannot be built or the device fails; a single rank has no others to
/// lose.
pub fn compare(plan: &Plan, device: &Device, n_steps: u64) -> Result<Comparison, TrainError> {
    let mut plan = plan.clone();
    // Gives both the same order of sums.
    plan.n_workers = 1;
    let schedules = plan.schedules();
    let scheduled_values = schedules.at(plan.warmup_steps);
    let first = batch(&plan, 0);
    let mut on_cpu = plan.trainer(Communicator::solo(), &Device::flex())?;
    let mut on_device = plan.trainer(Communicator::solo(), device)?;
    let here = on_cpu.gradients(&first, &scheduled_values, &mut |_| {})?;
    let there = on_device.gradients(&first, &scheduled_values, &mut |_| {})?;
    let loss = here.loss()?;
    let embeddings =
        here.embeddings().iter().zip(there.embeddings()).map(|(a, b)| difference(&flat(a), &flat(b)));
    let mut gradients = Vec::new();
    for ((shard, a), b) in on_cpu.trained().iter().zip(here.shards()).zip(there.shards()) {
        let difference = difference(&to_host(a.clone()), &to_host(b.clone()));
        gradients.push(UnitGradient { unit: shard.layout.name.clone(), difference, own: 0.0 });
    }
    for seed in 0..N_NUDGES {
        let mut nudged = plan.trainer(Communicator::solo(), &Device::flex())?;
        for network in &mut nudged.state.networks {
            network.shards.iter_mut().for_each(|shard| nudge(shard, seed));
        }
        let there = nudged.gradients(&first, &scheduled_values, &mut |_| {})?;
        for ((gradient, a), b) in gradients.iter_mut().zip(here.shards()).zip(there.shards()) {
            let own = difference(&to_host(a.clone()), &to_host(b.clone()));
            gradient.own = gradient.own.max(own);
        }
    }
    let mut comparison = Comparison {
        embeddings: embeddings.fold(0.0, f64::max),
        loss: (loss - there.loss()?).abs() / loss.abs(),
        gradients,
        steps: Vec::new(),
    };
    for number in 0..n_steps {
        let scheduled_values = schedules.at(plan.warmup_steps + number);
        let batch = batch(&plan, number);
        let here = on_cpu.step(&batch, &scheduled_values)?;
        let there = on_device.step(&batch, &scheduled_values)?;
        comparison.steps.push([here.loss, there.loss]);
    }
    Ok(comparison)
}

/// Creates batch `number` of noise for `plan`.
fn batch(plan: &Plan, number: u64) -> Batch {
    noise_batch(&plan.multicrop(), plan.recipe.data.format(), plan.recipe.optim.batch_size, number)
}

/// Changes every weight by at most [`NUDGE`] of it.
fn nudge(shard: &mut UnitShard, seed: u64) {
    let mut rng = ViewRng::from_words([seed, 0x6e75_6467_6500_0000, shard.start as u64, 0]);
    let mut values = to_host(shard.weights.values().clone());
    for value in &mut values {
        *value *= 1.0 + NUDGE * (2.0 * rng.uniform() - 1.0);
    }
    let shape = [values.len()];
    let device = shard.weights.values().device();
    shard.weights = Tensor::from_data(TensorData::new(values, shape), &device).into();
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

/// Returns the largest difference of elements, relative to the largest of `a`; infinite if one is
/// NaN.
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
    use crate::conformance::plans;

    #[test]
    fn differences_are_seen() {
        assert_eq!(difference(&[1.0, -2.0], &[1.0, -2.0]), 0.0);
        assert_eq!(difference(&[1.0, -2.0], &[1.5, -2.0]), 0.25);
        assert_eq!(difference(&[1.0], &[f32::NAN]), f64::INFINITY);
        let comparison = |steps| Comparison { embeddings: 0.0, loss: 0.0, gradients: Vec::new(), steps };
        assert_eq!(comparison(vec![[2.0, 2.0], [2.0, 1.0]]).worst_step(), 0.5);
        assert_eq!(comparison(vec![[2.0, f64::NAN], [2.0, 2.0]]).worst_step(), f64::INFINITY);
    }

    /// The CPU does not differ from itself, but with other weights it does: in every unit.
    #[test]
    fn the_cpus_own_gradient_is_measured() {
        let plan = plans(&[]).remove(0);
        let found = compare(&plan, &Device::flex(), 1).unwrap();
        assert_eq!(
            (found.embeddings, found.loss, found.worst_gradient(), found.worst_step()),
            (0.0, 0.0, 0.0, 0.0)
        );
        for gradient in &found.gradients {
            assert!(gradient.own > 0.0 && gradient.own < 1e-2, "{gradient:?}");
        }
    }
}
