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

fn worst(a: Vec<Tensor<1>>, b: Vec<Tensor<1>>) -> f64 {
    assert_eq!(a.len(), b.len());
    a.into_iter()
        .zip(b)
        .map(|(a, b)| {
            let a = to_host(a);
            let b = to_host(b);
            assert!(b.iter().any(|value| *value != 0.0), "every unit has a gradient");
            difference(&b, &a)
        })
        .fold(0.0, f64::max)
}

fn losses(plan: &Plan, n: u64) -> Vec<f64> {
    let mut trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    let schedules = plan.schedules();
    (0..n)
        .map(|step| {
            let batch = noise_batch(&plan.multicrop(), plan.recipe.data.format(), 8, step);
            let report = trainer.step(&batch, &schedules.at(step)).unwrap();
            assert!(report.finite);
            report.loss
        })
        .collect()
}

/// Keeping graphs or recomputing, with drop-path, gives the same losses bit for bit.
#[test]
fn every_keep_trains_alike() {
    let all = losses(&plan(&[]), 6);
    for keep in ["run.keep=0", "run.keep=2"] {
        assert_eq!(losses(&plan(&[keep]), 6), all, "{keep}");
    }
}

/// A batch sent by the upload thread has the same gradients as a local one, bit for bit, in the
/// order of the requests; a batch that is not waited for blocks no other.
#[test]
fn batches_that_are_sent_train_like_batches_that_are_here() {
    let plan = plan(&["run.workers=1", "optim.micro_batches=2"]);
    let trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    let scheduled_values = plan.schedules().at(3);
    let batches = [0, 1, 2].map(|seed| noise_batch(&plan.multicrop(), plan.recipe.data.format(), 8, seed));
    let uploads = Uploads::start(trainer.uploader()).unwrap();
    let mut on_their_way = batches.clone().map(|batch| uploads.push(batch)).into_iter();
    drop(on_their_way.next());
    for (batch, upload) in batches[1..].iter().zip(on_their_way) {
        let (back, sent) = upload.wait().unwrap();
        assert!(back == *batch);
        let there = trainer.gradients_of_sent(sent, &scheduled_values, &mut |_| {}).unwrap();
        let here = trainer.gradients(batch, &scheduled_values, &mut |_| {}).unwrap();
        assert_eq!(there.loss().unwrap(), here.loss().unwrap());
        assert_eq!(worst(there.shards().to_vec(), here.shards().to_vec()), 0.0);
    }
}

/// Fewer images than workers: some get none, and the drop-path factors still fit.
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

/// A frozen last layer does not change; the rest of the network does.
#[test]
fn the_last_layer_is_frozen_at_first() {
    let plan = plan(&[]);
    let mut trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    let weights = |trainer: &Trainer, name: &str| {
        let shard = trainer.trained().iter().find(|s| s.layout.name == name).unwrap();
        to_host(shard.weights.values().clone())
    };
    let last = weights(&trainer, "head.last_layer");
    let block = weights(&trainer, "blocks.0");
    for step in 0..2 {
        // The first step of the warm-up has a rate of zero.
        let batch = noise_batch(&plan.multicrop(), plan.recipe.data.format(), 8, step);
        trainer.step(&batch, &plan.schedules().at(step)).unwrap();
    }
    assert_eq!(weights(&trainer, "head.last_layer"), last);
    assert_ne!(weights(&trainer, "blocks.0"), block);
    trainer
        .step(&noise_batch(&plan.multicrop(), plan.recipe.data.format(), 8, 2), &plan.schedules().at(2))
        .unwrap();
    assert_ne!(weights(&trainer, "head.last_layer"), last);
}

/// A step with a loss that is not finite leaves everything as it was.
#[test]
fn a_step_that_is_not_finite_is_skipped() {
    let plan = plan(&[]);
    let mut trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    let scheduled_values = plan.schedules().at(5);
    let all = |trainer: &Trainer| -> Vec<Vec<f32>> {
        let shards = trainer.state.networks.iter().flat_map(|network| &network.shards);
        let buffers =
            shards.flat_map(|s| s.moments.iter().map(|moment| &moment.values).chain([s.weights.values()]));
        buffers.map(|buffer| to_host(buffer.clone())).collect()
    };
    let before = all(&trainer);
    let state = trainer.state.method.state();
    let mut gradients = trainer
        .gradients(
            &noise_batch(&plan.multicrop(), plan.recipe.data.format(), 8, 0),
            &scheduled_values,
            &mut |_| {},
        )
        .unwrap();
    gradients.fill_nan();
    let report = trainer.update(gradients, Votes::default(), &scheduled_values).unwrap();
    assert!(!report.finite);
    let after = all(&trainer);
    assert_eq!(before, after);
    assert_eq!(trainer.state.method.state(), state);
    assert_eq!(trainer.state.bad_steps, 1);
}
