use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use burn_tensor::Device;
use kernels::device::host::to_host;
use pipeline::Dataset;
use ranks::communicator::{Communicator, CommunicatorConfig};
use ranks::engine::{Engine, Local, LocalGroup, Reduction};
use ranks::mesh::Traffic;
use trainer::bench::compare::difference;
use trainer::bench::noise::{noise_batch, rank_share};
use trainer::checkpoint::{Saver, resume};
use trainer::recipe::plan::RankResources;
use trainer::run::Job;
use trainer::run::mixing::Mixer;
use trainer::step::Trainer;
use trainer::{Plan, Recipe, TrainError};

use crate::methods::{VIT, recipe};
use crate::support::TINY;

/// Number of images of a global batch.
pub(crate) const BATCH: usize = 8;

/// Resolves the tiny recipe with `overrides` for `world_size` ranks.
pub(crate) fn plan(world_size: usize, overrides: &[&str]) -> Plan {
    let defaults = ["run.workers=1", "optim.batch_size=8", "model.layer_scale=0.5"];
    let overrides: Vec<String> = defaults.iter().chain(overrides).map(ToString::to_string).collect();
    let recipe = Recipe::parse(TINY, "tiny", &overrides).unwrap();
    trainer::resolve(recipe, 100)
        .unwrap()
        .for_ranks(world_size, RankResources { n_cores: 1, n_workers: 1, bytes: f64::MAX, is_gpu: false })
        .unwrap()
}

/// Runs `f` on each of the plan's ranks, in a thread each; returns the results by rank.
pub(crate) fn on_ranks<R: Send>(plan: &Plan, f: impl Fn(Trainer) -> R + Sync) -> Vec<R> {
    on_engines(plan, LocalGroup::ranks(plan.world_size), f)
}

/// Runs `f` on a rank for each of `engines`, in a thread each; returns the results by rank.
pub(crate) fn on_engines<R: Send>(
    plan: &Plan,
    engines: Vec<Local>,
    f: impl Fn(Trainer) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for engine in engines {
            let f = &f;
            threads.push(
                scope.spawn(move || f(plan.trainer(communicator(plan, engine), &Device::flex()).unwrap())),
            );
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Starts the communicator of a rank of `plan` on `engine`.
pub(crate) fn communicator(plan: &Plan, engine: Local) -> Communicator {
    let topology = plan.topology(engine.rank()).unwrap();
    let exact = plan.recipe.run.exact_sums;
    let config = CommunicatorConfig { topology, exact, deadline: Duration::from_secs(60) };
    let factory = Box::new(move || Ok(Box::new(engine) as Box<dyn Engine>));
    Communicator::start(config, factory).unwrap()
}

/// Returns the job of a run of `plan` on `dataset` in `workdir` from random weights, which ends
/// when `stop` is set.
pub(crate) fn job<'a>(
    plan: &'a Plan,
    dataset: &Arc<Dataset>,
    workdir: &'a Path,
    stop: &'a AtomicBool,
) -> Job<'a> {
    Job {
        plan,
        dataset: Arc::clone(dataset),
        labels: None,
        workdir,
        stop,
        device: Device::flex(),
        fault: None,
        initial: None,
        frozen: &[],
        lengthen: false,
        forked_step: None,
    }
}

/// Results that are compared between runs: losses and gauges of the steps, and the weights and
/// moments of all networks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Trained {
    pub(crate) losses: Vec<f64>,
    pub(crate) gauges: Vec<f64>,
    pub(crate) weights: Vec<f32>,
    /// First moments only.
    pub(crate) moments: Vec<f32>,
}

/// Returns weights and moments of a rank's shards without padding: (network and unit, buffer, first
/// element, values).
fn shards_of(trainer: &Trainer) -> Vec<(usize, usize, usize, Vec<f32>)> {
    let mut shards = Vec::new();
    for (unit, shard) in trainer.state.networks.iter().flat_map(|network| &network.shards).enumerate() {
        let moments = shard.moments.iter().map(|moment| &moment.values);
        for (number, buffer) in [shard.weights.values()].into_iter().chain(moments).enumerate() {
            let mut values = to_host(buffer.clone());
            values.truncate(shard.layout.numel.saturating_sub(shard.start));
            shards.push((unit, number, shard.start, values));
        }
    }
    shards
}

/// Assembles the values of all units from the shards of the ranks.
fn assemble(mut shards: Vec<(usize, usize, usize, Vec<f32>)>) -> Vec<f32> {
    shards.sort_by_key(|(unit, buffer, start, _)| (*unit, *buffer, *start));
    // Replicas hold the same values.
    shards.dedup_by(|b, a| {
        let are_replicas = (a.0, a.1, a.2) == (b.0, b.1, b.2);
        assert!(!are_replicas || a.3 == b.3, "replicas differ");
        are_replicas
    });
    shards.into_iter().flat_map(|(.., values)| values).collect()
}

pub(crate) fn train(plan: &Plan, n_steps: u64) -> Trained {
    train_on(plan, LocalGroup::ranks(plan.world_size), n_steps)
}

pub(crate) fn train_on(plan: &Plan, engines: Vec<Local>, n_steps: u64) -> Trained {
    let schedules = plan.schedules();
    let mixer = Mixer::new(plan).unwrap();
    let ranks = on_engines(plan, engines, |mut trainer| {
        let topology = trainer.topology();
        let mut losses = Vec::new();
        let mut gauges = Vec::new();
        for step in 0..n_steps {
            let mut batch =
                rank_share(noise_batch(&plan.multicrop(), plan.recipe.data.format(), BATCH, step), topology);
            batch.index = step;
            if let Some(mixer) = &mixer {
                mixer.mix(&mut batch);
            }
            let report = trainer.step(&batch, &schedules.at(step + 3)).unwrap();
            assert!(report.finite);
            losses.push(report.loss);
            losses.push(report.grad_norm);
            gauges.extend(report.gauges.iter().map(|(_, value)| *value));
        }
        (losses, gauges, shards_of(&trainer))
    });
    let (losses, gauges, _) = ranks[0].clone();
    assert!(ranks.iter().all(|rank| rank.0 == losses && rank.1 == gauges), "ranks report the same");
    let shards: Vec<_> = ranks.into_iter().flat_map(|rank| rank.2).collect();
    let moments = shards.iter().filter(|shard| shard.1 == 1).cloned().collect();
    Trained { losses, gauges, weights: assemble(shards), moments: assemble(moments) }
}

/// Settings with statistics over a whole batch.
pub(crate) const STATISTICS: [&str; 3] =
    ["method.centering=\"sinkhorn\"", "method.koleo_weight=0.1", "model.drop_path=0.3"];

/// Initial weights of all units.
fn initial_weights(world_size: usize) -> Vec<f32> {
    let plan = plan(world_size, &["optim.batch_size=24"]);
    let shards = on_ranks(&plan, |trainer| shards_of(&trainer));
    assemble(shards.into_iter().flatten().collect())
}

/// Every rank initializes its own shard, and the assembled weights are those of one rank.
#[test]
fn initial_weights_do_not_depend_on_ranks() {
    let expected = initial_weights(1);
    for world_size in [2, 3, 4, 8] {
        assert!(initial_weights(world_size) == expected, "{world_size} ranks");
    }
}

/// Trains for three steps with four micro-batches.
fn train_micro_batches(world_size: usize, statistics: &[&str], more: &[&str]) -> Trained {
    let overrides = [&["optim.micro_batches=4"][..], statistics, more].concat();
    train(&plan(world_size, &overrides), 3)
}

/// Gates D and E: for a fixed number of micro-batches, training is bit-identical on 1, 2 and 4
/// ranks, in all modes of sharding, with groups, and with kept or recomputed graphs.
#[test]
fn ranks_and_modes_give_the_same_bits() {
    for statistics in [&[][..], &STATISTICS] {
        let expected = train_micro_batches(1, statistics, &[]);
        assert!(expected.weights.iter().all(|w| w.is_finite()));
        for (world_size, more) in [
            (1, &["run.keep=0"][..]),
            (2, &[]),
            (4, &[]),
            (4, &["run.keep=0"]),
            (4, &["run.keep=4"]),
            (4, &["run.shard=\"grad\""]),
            (4, &["run.shard=\"grad\"", "run.keep=1"]),
            (2, &["run.shard=\"none\""]),
            (4, &["run.shard=\"none\""]),
            (4, &["run.shard_group=2"]),
            (4, &["run.shard_group=2", "run.shard=\"grad\""]),
        ] {
            let trained = train_micro_batches(world_size, statistics, more);
            assert_eq!(trained.losses, expected.losses, "{world_size} ranks, {more:?}");
            assert_eq!(trained.gauges, expected.gauges, "{world_size} ranks, {more:?}");
            assert!(trained.weights == expected.weights, "{world_size} ranks, {more:?}: weights differ");
        }
    }
}

/// Resolves the recipe of a classifier with `method` for `world_size` ranks.
fn classifier(world_size: usize, method: &str) -> Plan {
    let method = format!("name = 'classification'\nclasses = ['a', 'b', 'c']\nlabels = 'f'\n{method}");
    let overrides = ["run.workers=1".to_string(), "optim.micro_batches=4".to_string()];
    let recipe = Recipe::parse(&recipe(VIT, &method, 0, ""), "tiny", &overrides).unwrap();
    let resources = RankResources { n_cores: 1, n_workers: 1, bytes: f64::MAX, is_gpu: false };
    trainer::resolve(recipe, 100).unwrap().for_ranks(world_size, resources).unwrap()
}

/// Settings with mixup, cutmix and batches that are left as they are.
const MIXED: &str = "smoothing = 0.1\nmixup = 0.8\ncutmix = 1.0\nmix_probability = 0.75";

/// The images of a rank and their labels are mixed as in the whole batch.
#[test]
fn ranks_mix_as_in_the_whole_batch() {
    let plan = classifier(1, MIXED);
    let mixer = Mixer::new(&plan).unwrap().unwrap();
    let mut n_mixed = 0;
    for index in 0..24 {
        let mut batch = noise_batch(&plan.multicrop(), plan.recipe.data.format(), BATCH, index);
        batch.index = index;
        let mut whole = batch.clone();
        mixer.mix(&mut whole);
        n_mixed += usize::from(whole != batch);
        for world_size in [2, 4] {
            let plan = classifier(world_size, MIXED);
            for rank in 0..world_size {
                let topology = plan.topology(rank).unwrap();
                let mut share = rank_share(batch.clone(), topology);
                mixer.mix(&mut share);
                assert!(share == rank_share(whole.clone(), topology), "{index}: {rank} of {world_size}");
            }
        }
    }
    assert!((10..24).contains(&n_mixed), "{n_mixed} of 24 batches");
}

/// Training on mixed images is bit-identical on 1, 2 and 4 ranks for a number of micro-batches.
#[test]
fn ranks_train_on_mixed_images_with_the_same_bits() {
    let expected = train(&classifier(1, MIXED), 6);
    for world_size in [2, 4] {
        let trained = train(&classifier(world_size, MIXED), 6);
        assert!(trained == expected, "{world_size} ranks");
    }
    let plain = train(&classifier(1, "smoothing = 0.1"), 6);
    assert!(plain.weights != expected.weights, "images are mixed");
}

/// Three ranks, which form no complete binary tree, are bit-identical to one rank with three
/// micro-batches.
#[test]
fn three_ranks_are_bit_identical_to_three_micro_batches() {
    let overrides = [&["optim.micro_batches=3", "optim.batch_size=24"][..], &STATISTICS].concat();
    let expected = train_batch(&plan(1, &overrides), 24);
    assert!(train_batch(&plan(3, &overrides), 24) == expected);
}

/// Trains for two steps; returns weights and moments of all units.
fn train_batch(plan: &Plan, batch_size: usize) -> Vec<f32> {
    let schedules = plan.schedules();
    let ranks = on_ranks(plan, |mut trainer| {
        for step in 0..2 {
            let batch = rank_share(
                noise_batch(&plan.multicrop(), plan.recipe.data.format(), batch_size, step),
                trainer.topology(),
            );
            trainer.step(&batch, &schedules.at(step + 3)).unwrap();
        }
        shards_of(&trainer)
    });
    assemble(ranks.into_iter().flatten().collect())
}

/// Ranks train like one rank on the whole batch, up to rounding, for sums in the order of the
/// engine and in that of Ocelli.
#[test]
fn ranks_train_like_one_rank_on_the_whole_batch() {
    // AdamW turns rounding into steps of full size where gradients are nearly zero. The test
    // compares the first moments, which are proportional to the gradients after one step.
    let one = train(&plan(1, &STATISTICS), 1);
    for more in [&[][..], &["run.exact_sums=false"]] {
        let four = train(&plan(4, &[&STATISTICS[..], more].concat()), 1);
        assert!((four.losses[0] - one.losses[0]).abs() < 1e-5 * one.losses[0].abs());
        assert!((four.losses[1] - one.losses[1]).abs() < 1e-5 * one.losses[1]);
        let moment_difference = difference(&four.moments, &one.moments);
        assert!(moment_difference < 1e-5, "{moment_difference}");
    }
}

/// Number of bytes that a rank receives if `bytes` are gathered or reduced over all ranks.
fn received(bytes: u64, world_size: usize) -> u64 {
    bytes * (world_size as u64 - 1) / world_size as u64
}

/// A rank receives the number of bytes of the formulas, in one collective per unit and direction.
#[test]
fn traffic_equals_the_formulas() {
    let world_size = 4;
    for (more, n_gathers, n_reduces) in [
        // Teacher, student, and all units of the backbone except the last again.
        (&["run.keep=1"][..], 2 * 6 + 3, 6),
        (&["run.keep=0"], 2 * 6 + 4, 6),
        // All units except the last of each pair once more.
        (&["run.keep=0", "run.segment=2"], 2 * 6 + 4 + 2, 6),
        (&["run.shard=\"grad\""], 2 * 6, 6),
        (&["run.shard=\"none\""], 0, 6),
    ] {
        let plan = plan(world_size, more);
        let traffic: Vec<(Traffic, Vec<u64>)> = on_ranks(&plan, |mut trainer| {
            let batch = rank_share(
                noise_batch(&plan.multicrop(), plan.recipe.data.format(), BATCH, 0),
                trainer.topology(),
            );
            trainer.step(&batch, &plan.schedules().at(3)).unwrap();
            let units = trainer.trained().iter().map(|s| 4 * s.layout.padded as u64).collect();
            (trainer.comm.traffic().unwrap(), units)
        });
        for (traffic, units) in traffic {
            assert_eq!((traffic.n_gathers, traffic.n_reduces), (n_gathers, n_reduces), "{more:?}");
            let all: u64 = units.iter().sum();
            let backbone: u64 = units[..4].iter().sum();
            let gathered = match n_gathers {
                0 => 0,
                12 => 2 * all,
                15 => 2 * all + backbone - units[3],
                18 => 2 * all + backbone + units[0] + units[2],
                _ => 2 * all + backbone,
            };
            let gathered = received(gathered, world_size);
            // Without sharding, the sums are gathered as well.
            let n_directions = if n_gathers == 0 { 2 } else { 1 };
            let reduced = n_directions * received(all, world_size);
            assert_eq!((traffic.gather_bytes, traffic.reduce_bytes), (gathered, reduced), "{more:?}");
            // One sum of the center and one of norms and votes.
            assert_eq!(traffic.n_other, 2, "{more:?}");
        }
    }
}

/// Creates a saver on each rank. Rank 0's removes unfinished checkpoints, so all must exist before
/// any starts to write.
fn new_saver(trainer: &Trainer, folder: &Path) -> Saver {
    let saver = Saver::new(folder, trainer.topology(), 10);
    trainer.comm.all_reduce("savers", vec![0.0], Reduction::Sum).unwrap();
    saver
}

/// Writes a checkpoint of all ranks and waits until it is complete.
fn save(trainer: &mut Trainer, plan: &Plan, saver: &mut Saver) {
    saver.start(&trainer.state, plan);
    let (saved, failed) = saver.wait();
    let votes = trainer.comm.all_reduce("saved", vec![saved, failed], Reduction::Sum).unwrap();
    saver.count_votes(votes[0], votes[1]).unwrap();
    // No rank reads before rank 0 has renamed.
    trainer.comm.all_reduce("renamed", vec![0.0], Reduction::Sum).unwrap();
}

/// Resumes from the newest checkpoint in `folder`; returns its step and the warnings.
fn load(trainer: &mut Trainer, folder: &Path) -> (Option<u64>, Vec<String>) {
    let mut warnings = Vec::new();
    let warn = &mut |message: &str| warnings.push(message.to_string());
    let step = resume(folder, None, &mut trainer.state, &trainer.comm, &Device::flex(), warn).unwrap();
    (step, warnings)
}

fn files(folder: &Path, step: u64) -> Vec<Vec<u8>> {
    let folder = folder.join(format!("step-{step:010}"));
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    paths.sort();
    paths.into_iter().map(|path| std::fs::read(path).unwrap()).collect()
}

fn step(trainer: &mut Trainer, plan: &Plan) -> f64 {
    let number = trainer.state.step;
    let batch =
        rank_share(noise_batch(&plan.multicrop(), plan.recipe.data.format(), 24, number), trainer.topology());
    trainer.step(&batch, &plan.schedules().at(number + 3)).unwrap().loss
}

/// Four ranks write a checkpoint, three read and write it, four read and write it again: the bytes
/// are the same, and so is the next loss.
#[test]
fn checkpoints_are_bit_identical_after_a_change_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let first = folder.path().join("a");
    let second = folder.path().join("b");
    let third = folder.path().join("c");
    let overrides = ["optim.batch_size=24", "optim.micro_batches=12", "method.koleo_weight=0.1"];
    let four = plan(4, &overrides);
    let three = plan(3, &overrides);
    let expected = on_ranks(&four, |mut trainer| {
        step(&mut trainer, &four);
        step(&mut trainer, &four);
        let mut saver = new_saver(&trainer, &first);
        save(&mut trainer, &four, &mut saver);
        step(&mut trainer, &four)
    });
    let on_three = on_ranks(&three, |mut trainer| {
        assert_eq!(load(&mut trainer, &first), (Some(2), Vec::new()));
        let mut saver = new_saver(&trainer, &second);
        save(&mut trainer, &three, &mut saver);
        step(&mut trainer, &three)
    });
    let again = on_ranks(&four, |mut trainer| {
        assert_eq!(load(&mut trainer, &second), (Some(2), Vec::new()));
        let mut saver = new_saver(&trainer, &third);
        save(&mut trainer, &four, &mut saver);
        step(&mut trainer, &four)
    });
    assert_eq!((files(&first, 2).len(), files(&second, 2).len()), (4, 3));
    assert!(files(&first, 2) == files(&third, 2), "bytes differ");
    assert_eq!(again, expected);
    assert!((on_three[0] - expected[0]).abs() < 1e-6 * expected[0], "{on_three:?} {expected:?}");
}

/// If the file of one rank is damaged, all ranks load the previous checkpoint, and the warning
/// names the rank.
#[test]
fn all_ranks_load_the_previous_checkpoint_if_one_cannot_read_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let four = plan(4, &["optim.batch_size=24"]);
    on_ranks(&four, |mut trainer| {
        let mut saver = new_saver(&trainer, path);
        for _ in 0..2 {
            step(&mut trainer, &four);
            save(&mut trainer, &four, &mut saver);
        }
    });
    let damaged = path.join("step-0000000002/rank-00002.safetensors");
    let mut bytes = std::fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let loaded = on_ranks(&four, |mut trainer| (load(&mut trainer, path), trainer.state.step));
    for ((loaded_step, warnings), step) in loaded {
        assert_eq!((loaded_step, step), (Some(1), 1));
        assert!(warnings[0].contains("rank 2: the checksum of rank-00002"), "{warnings:?}");
    }
    // A checkpoint without one of its files cannot be loaded either.
    std::fs::remove_file(path.join("step-0000000001/rank-00003.safetensors")).unwrap();
    let errors = on_ranks(&four, |mut trainer| {
        resume(path, None, &mut trainer.state, &trainer.comm, &Device::flex(), &mut |_| {}).unwrap_err()
    });
    for error in errors {
        let TrainError::CheckpointRead { reason, .. } = &error else { panic!("{error}") };
        assert!(reason.contains("rank 3: rank-00003"), "{error}");
    }
}
