//! Comparison of a device with the CPU.
//!
//! Forward pass, loss and backward pass run on both with the same plan, weights and batch, and then
//! a few steps.
//!
//! Rectifiers, maxima and assignments to prototypes make a gradient jump where a number passes a
//! threshold, and another order of sums suffices for that. So the CPU also computes the gradient
//! from weights that are changed by less than a device's rounding: a difference between device and
//! CPU that is not much larger than the effect of this change is not an error of the device.

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
use crate::step::precision::Arithmetic;

/// Largest accepted ratio of a device's difference in gradients to the CPU's own variation, where
/// that is more than the tolerance: the gradients of some units jump by random amounts.
pub const MAX_VARIATIONS: f64 = 4.0;

/// Largest relative change of a weight when the CPU's own gradient is computed again.
const NUDGE: f32 = 1e-6;

/// Number of random changes of the weights with which the CPU computes its gradient again.
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
    /// Losses of the steps, on the CPU and on the device.
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
    pub cpu_variation: f64,
}

/// A difference, and the largest that is accepted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CheckedDifference {
    /// Name of the numbers.
    pub name: &'static str,
    /// The difference.
    pub difference: f64,
    /// Largest difference that is accepted.
    pub most: f64,
}

/// Largest differences that are accepted: rounding in another order, and on tensor cores.
struct Tolerance {
    embeddings: f64,
    loss: f64,
    gradients: f64,
    steps: f64,
}

impl Tolerance {
    fn new(arithmetic: Arithmetic) -> Self {
        match arithmetic {
            // Products may round their factors to 10 bits and more (TF32).
            Arithmetic::F32 => Self { embeddings: 1e-2, loss: 1e-3, gradients: 2e-2, steps: 1e-2 },
            Arithmetic::Bf16 => Self { embeddings: 5e-2, loss: 1e-2, gradients: 2e-1, steps: 5e-2 },
        }
    }
}

impl CheckedDifference {
    /// Returns whether the difference is accepted; NaN is not.
    pub fn is_right(&self) -> bool {
        self.difference <= self.most
    }
}

impl Comparison {
    /// Checks all differences, where products have `arithmetic`.
    pub fn check(&self, arithmetic: Arithmetic) -> [CheckedDifference; 4] {
        let tolerance = Tolerance::new(arithmetic);
        let mut most_in_gradients = tolerance.gradients;
        if self.has_sensitive_gradients(arithmetic) {
            most_in_gradients = MAX_VARIATIONS * self.worst_cpu_variation();
        }
        [
            CheckedDifference { name: "embeddings", difference: self.embeddings, most: tolerance.embeddings },
            CheckedDifference { name: "loss", difference: self.loss, most: tolerance.loss },
            CheckedDifference {
                name: "gradients",
                difference: self.worst_gradient(),
                most: most_in_gradients,
            },
            CheckedDifference {
                name: "losses of steps",
                difference: self.worst_step(),
                most: tolerance.steps,
            },
        ]
    }

    /// Returns whether the CPU's own gradients vary so much that more is accepted than rounding
    /// explains, where products have `arithmetic`.
    pub fn has_sensitive_gradients(&self, arithmetic: Arithmetic) -> bool {
        MAX_VARIATIONS * self.worst_cpu_variation() > Tolerance::new(arithmetic).gradients
    }

    /// Returns the largest of the gradients' differences.
    pub fn worst_gradient(&self) -> f64 {
        self.gradients.iter().map(|gradient| gradient.difference).fold(0.0, f64::max)
    }

    /// Returns the largest difference between the CPU's gradient and that of weights that differ by
    /// 1e-6.
    pub fn worst_cpu_variation(&self) -> f64 {
        self.gradients.iter().map(|gradient| gradient.cpu_variation).fold(0.0, f64::max)
    }

    /// Returns the largest relative difference of the steps' losses; infinite where it is not
    /// finite.
    pub fn worst_step(&self) -> f64 {
        let mut worst = 0.0;
        for [cpu, device] in &self.steps {
            let difference = (cpu - device).abs() / cpu.abs();
            worst = if difference.is_finite() { f64::max(worst, difference) } else { f64::INFINITY };
        }
        worst
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
    let cpu_gradients = on_cpu.gradients(&first, &scheduled_values, &mut |_| {})?;
    let device_gradients = on_device.gradients(&first, &scheduled_values, &mut |_| {})?;
    let loss = cpu_gradients.loss()?;
    let mut embeddings = 0.0;
    for (a, b) in cpu_gradients.embeddings().iter().zip(device_gradients.embeddings()) {
        embeddings = f64::max(embeddings, difference(&flat(a), &flat(b)));
    }
    let mut gradients = Vec::new();
    let units = on_cpu.trained().iter();
    for ((shard, a), b) in units.zip(cpu_gradients.shards()).zip(device_gradients.shards()) {
        let difference = difference(&to_host(a.clone()), &to_host(b.clone()));
        gradients.push(UnitGradient { unit: shard.layout.name.clone(), difference, cpu_variation: 0.0 });
    }
    for seed in 0..N_NUDGES {
        let mut nudged = plan.trainer(Communicator::solo(), &Device::flex())?;
        for network in &mut nudged.state.networks {
            network.shards.iter_mut().for_each(|shard| nudge(shard, seed));
        }
        let nudged_gradients = nudged.gradients(&first, &scheduled_values, &mut |_| {})?;
        let shards = cpu_gradients.shards().iter().zip(nudged_gradients.shards());
        for (gradient, (a, b)) in gradients.iter_mut().zip(shards) {
            let variation = difference(&to_host(a.clone()), &to_host(b.clone()));
            gradient.cpu_variation = gradient.cpu_variation.max(variation);
        }
    }
    let mut comparison = Comparison {
        embeddings,
        loss: (loss - device_gradients.loss()?).abs() / loss.abs(),
        gradients,
        steps: Vec::new(),
    };
    for index in 0..n_steps {
        let scheduled_values = schedules.at(plan.warmup_steps + index);
        let batch = batch(&plan, index);
        let cpu_report = on_cpu.step(&batch, &scheduled_values)?;
        let device_report = on_device.step(&batch, &scheduled_values)?;
        comparison.steps.push([cpu_report.loss, device_report.loss]);
    }
    Ok(comparison)
}

/// Creates batch `index` of noise for `plan`.
fn batch(plan: &Plan, index: u64) -> Batch {
    noise_batch(&plan.multicrop(), plan.recipe.data.format(), plan.recipe.optim.batch_size, index)
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

/// Number of runs that must give the same bits.
pub(super) const N_EQUAL: usize = 3;

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

    /// Returns a comparison of steps with these losses, without other differences.
    fn comparison_of_steps(steps: Vec<[f64; 2]>) -> Comparison {
        Comparison { embeddings: 0.0, loss: 0.0, gradients: Vec::new(), steps }
    }

    #[test]
    fn differences_are_relative_and_nan_is_infinite() {
        assert_eq!(difference(&[1.0, -2.0], &[1.0, -2.0]), 0.0);
        assert_eq!(difference(&[1.0, -2.0], &[1.5, -2.0]), 0.25);
        assert_eq!(difference(&[1.0], &[f32::NAN]), f64::INFINITY);
        assert_eq!(comparison_of_steps(vec![[2.0, 2.0], [2.0, 1.0]]).worst_step(), 0.5);
        assert_eq!(comparison_of_steps(vec![[2.0, f64::NAN], [2.0, 2.0]]).worst_step(), f64::INFINITY);
    }

    /// The CPU does not differ from itself, except with changed weights: then it does in every
    /// unit.
    #[test]
    fn cpu_variation_is_measured_in_every_unit() {
        let plan = plans(&[]).remove(0);
        let comparison = compare(&plan, &Device::flex(), 1).unwrap();
        assert_eq!(comparison.embeddings, 0.0);
        assert_eq!(comparison.loss, 0.0);
        assert_eq!(comparison.worst_gradient(), 0.0);
        assert_eq!(comparison.worst_step(), 0.0);
        for gradient in &comparison.gradients {
            assert!(gradient.cpu_variation > 0.0 && gradient.cpu_variation < 1e-2, "{gradient:?}");
        }
    }
}
