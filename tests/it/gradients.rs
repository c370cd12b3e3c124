use burn_tensor::{Device, Tensor};
use kernels::device::host::to_host;
use ranks::communicator::Communicator;
use trainer::bench::compare::difference;
use trainer::bench::noise::noise_batch;
use trainer::step::upload::Uploads;
use trainer::step::{Trainer, Votes};
use trainer::{Plan, Recipe};

use crate::support::TINY;

fn plan(overrides: &[&str]) -> Plan {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    trainer::resolve(Recipe::parse(TINY, "tiny", &overrides).unwrap(), 1000).unwrap()
}

/// Returns the largest difference of the gradients of a unit.
fn largest_difference(a: Vec<Tensor<1>>, b: Vec<Tensor<1>>) -> f64 {
    assert_eq!(a.len(), b.len());
    let mut largest = 0.0_f64;
    for (a, b) in a.into_iter().zip(b) {
        let a = to_host(a);
        let b = to_host(b);
        assert!(b.iter().any(|value| *value != 0.0), "every unit has a gradient");
        largest = largest.max(difference(&b, &a));
    }
    largest
}

/// Returns the losses of the first `n` steps on noise.
fn losses(plan: &Plan, n: u64) -> Vec<f64> {
    let mut trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    let schedules = plan.schedules();
    let mut losses = Vec::new();
    for step in 0..n {
        let batch = noise_batch(&plan.multicrop(), plan.recipe.data.format(), 8, step);
        let report = trainer.step(&batch, &schedules.at(step)).unwrap();
        assert!(report.finite);
        losses.push(report.loss);
    }
    losses
}

/// Steps that keep graphs and steps that recompute them, with drop-path, have the same losses, bit
/// for bit.
#[test]
fn losses_do_not_depend_on_kept_graphs() {
    let all = losses(&plan(&[]), 6);
    for keep in ["run.keep=0", "run.keep=2"] {
        assert_eq!(losses(&plan(&[keep]), 6), all, "{keep}");
    }
}

/// A batch that the upload thread sends to the device has the same gradients as a batch on the
/// host, bit for bit, in the order of the requests; a batch that nothing waits for does not block
/// others.
#[test]
fn uploaded_batches_have_the_gradients_of_host_batches() {
    let plan = plan(&["run.workers=1", "optim.micro_batches=2"]);
    let trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    let scheduled_values = plan.schedules().at(3);
    let batches = [0, 1, 2].map(|seed| noise_batch(&plan.multicrop(), plan.recipe.data.format(), 8, seed));
    let uploads = Uploads::start(trainer.uploader()).unwrap();
    let mut pending = batches.clone().map(|batch| uploads.push(batch)).into_iter();
    drop(pending.next());
    for (batch, upload) in batches[1..].iter().zip(pending) {
        let (returned, uploaded) = upload.wait().unwrap();
        assert!(returned == *batch);
        let from_device =
            trainer.gradients_from_device_batch(uploaded, &scheduled_values, &mut |_| {}).unwrap();
        let from_host = trainer.gradients(batch, &scheduled_values, &mut |_| {}).unwrap();
        assert_eq!(from_device.loss().unwrap(), from_host.loss().unwrap());
        assert_eq!(largest_difference(from_device.shards().to_vec(), from_host.shards().to_vec()), 0.0);
    }
}

/// With fewer images than workers, some workers have no images, and drop-path factors still have
/// the right sizes.
#[test]
fn more_workers_than_images_train() {
    let plan = plan(&["run.workers=3", "model.drop_path=0.5"]);
    let mut trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    let batch = noise_batch(&plan.multicrop(), plan.recipe.data.format(), 2, 0);
    assert!(trainer.step(&batch, &plan.schedules().at(0)).unwrap().finite);
}

#[test]
fn workers_change_rounding_only() {
    let two = losses(&plan(&[]), 4);
    let one = losses(&plan(&["run.workers=1"]), 4);
    for (a, b) in one.iter().zip(&two) {
        assert!((a - b).abs() < 1e-4 * b.abs(), "{one:?} {two:?}");
    }
}

/// Returns the weights of a unit of the trained network.
fn unit_weights(trainer: &Trainer, name: &str) -> Vec<f32> {
    let shard = trainer.trained().iter().find(|shard| shard.layout.name == name).unwrap();
    to_host(shard.weights.values().clone())
}

/// A frozen last layer does not change; the rest of the network does.
#[test]
fn the_last_layer_is_frozen_at_first() {
    let plan = plan(&[]);
    let mut trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    let last = unit_weights(&trainer, "head.last_layer");
    let block = unit_weights(&trainer, "blocks.0");
    for step in 0..2 {
        // The first step of the warm-up has a rate of zero.
        let batch = noise_batch(&plan.multicrop(), plan.recipe.data.format(), 8, step);
        trainer.step(&batch, &plan.schedules().at(step)).unwrap();
    }
    assert_eq!(unit_weights(&trainer, "head.last_layer"), last);
    assert_ne!(unit_weights(&trainer, "blocks.0"), block);
    let batch = noise_batch(&plan.multicrop(), plan.recipe.data.format(), 8, 2);
    trainer.step(&batch, &plan.schedules().at(2)).unwrap();
    assert_ne!(unit_weights(&trainer, "head.last_layer"), last);
}

/// Returns the weights and the optimizer's moments of all units.
fn weights_and_moments(trainer: &Trainer) -> Vec<Vec<f32>> {
    let mut buffers = Vec::new();
    for shard in trainer.state.networks.iter().flat_map(|network| &network.shards) {
        for moment in &shard.moments {
            buffers.push(to_host(moment.values.clone()));
        }
        buffers.push(to_host(shard.weights.values().clone()));
    }
    buffers
}

/// A step with a loss that is not finite changes no weights and no state.
#[test]
fn a_step_that_is_not_finite_is_skipped() {
    let plan = plan(&[]);
    let mut trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    let scheduled_values = plan.schedules().at(5);
    let before = weights_and_moments(&trainer);
    let state = trainer.state.method.state();
    let batch = noise_batch(&plan.multicrop(), plan.recipe.data.format(), 8, 0);
    let mut gradients = trainer.gradients(&batch, &scheduled_values, &mut |_| {}).unwrap();
    gradients.fill_nan();
    let report = trainer.update(gradients, Votes::default(), &scheduled_values).unwrap();
    assert!(!report.finite);
    assert_eq!(weights_and_moments(&trainer), before);
    assert_eq!(trainer.state.method.state(), state);
    assert_eq!(trainer.state.bad_steps, 1);
}
