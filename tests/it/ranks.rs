use std::path::Path;
use std::time::Duration;

use burn_tensor::Device;
use kernels::device::host::to_host;
use ranks::communicator::{Communicator, CommunicatorConfig};
use ranks::engine::{Engine, Local, LocalGroup, Reduction};
use ranks::mesh::Traffic;
use trainer::bench::compare::difference;
use trainer::bench::noise::noise_batch;
use trainer::bench::shard::rank_share;
use trainer::checkpoint::{Saver, resume};
use trainer::recipe::plan::RankResources;
use trainer::step::Trainer;
use trainer::{Plan, Recipe};

use crate::support::TINY;

/// Number of images of a global batch.
pub(crate) const BATCH: usize = 8;

pub(crate) fn plan(world_size: usize, overrides: &[&str]) -> Plan {
    let defaults = ["run.workers=1", "optim.batch_size=8", "model.layer_scale=0.5"];
    let overrides: Vec<String> = defaults.iter().chain(overrides).map(ToString::to_string).collect();
    let recipe = Recipe::parse(TINY, "tiny", &overrides).unwrap();
    trainer::resolve(recipe, 100)
        .unwrap()
        .over(world_size, RankResources { n_cores: 1, n_workers: 1, bytes: f64::MAX, is_gpu: false })
        .unwrap()
}

/// Runs `f` on each of the plan's ranks, as a thread; returns the results by rank.
pub(crate) fn on_ranks<R: Send>(plan: &Plan, f: impl Fn(Trainer) -> R + Sync) -> Vec<R> {
    on_engines(plan, LocalGroup::ranks(plan.world_size), f)
}

pub(crate) fn on_engines<R: Send>(
    plan: &Plan,
    engines: Vec<Local>,
    f: impl Fn(Trainer) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let run = |engine: Local| {
            let f = &f;
            move || {
                let topology = plan.topology(engine.rank()).unwrap();
                let exact = plan.recipe.run.exact_sums;
                let config = CommunicatorConfig { topology, exact, deadline: Duration::from_secs(60) };
                let factory = Box::new(move || Ok(Box::new(engine) as Box<dyn Engine>));
                f(plan.trainer(Communicator::start(config, factory).unwrap(), &Device::flex()).unwrap())
            }
        };
        let threads: Vec<_> = engines.into_iter().map(|engine| scope.spawn(run(engine))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Results by which runs are compared: losses and gauges of the steps, and all weights, moments and
/// teachers.
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
    // Replicas hold the same.
    shards.dedup_by(|b, a| {
        let same = (a.0, a.1, a.2) == (b.0, b.1, b.2);
        assert!(!same || a.3 == b.3, "replicas differ");
        same
    });
    shards.into_iter().flat_map(|(.., values)| values).collect()
}

pub(crate) fn train(plan: &Plan, n_steps: u64) -> Trained {
    train_on(plan, LocalGroup::ranks(plan.world_size), n_steps)
}

pub(crate) fn train_on(plan: &Plan, engines: Vec<Local>, n_steps: u64) -> Trained {
    let schedules = plan.schedules();
    let ranks = on_engines(plan, engines, |mut trainer| {
        let topology = trainer.topology();
        let mut losses = Vec::new();
        let mut gauges = Vec::new();
        for step in 0..n_steps {
            let batch =
                rank_share(noise_batch(&plan.multicrop(), plan.recipe.data.format(), BATCH, step), topology);
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

/// Every rank initializes its own slice, and the slices form the whole.
#[test]
fn initial_weights_do_not_depend_on_ranks() {
    let weights = |world| {
        let plan = plan(world, &["optim.batch_size=24"]);
        assemble(on_ranks(&plan, |trainer| shards_of(&trainer)).into_iter().flatten().collect())
    };
    let one = weights(1);
    for world in [2, 3, 4, 8] {
        assert!(weights(world) == one, "{world} ranks");
    }
}

/// Gates D and E: with a number of micro-batches 1, 2 and 4 ranks, all modes of sharding, groups,
/// and keeping or recomputing train to the same bits.
#[test]
fn ranks_and_modes_give_the_same_bits() {
    for statistics in [&[][..], &STATISTICS] {
        let run = |world, more: &[&str]| {
            let overrides: Vec<&str> =
                ["optim.micro_batches=4"].iter().chain(statistics).chain(more).copied().collect();
            train(&plan(world, &overrides), 3)
        };
        let one = run(1, &[]);
        assert!(one.weights.iter().all(|w| w.is_finite()));
        for (world, more) in [
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
            let other = run(world, more);
            assert_eq!(other.losses, one.losses, "{world} ranks, {more:?}");
            assert_eq!(other.gauges, one.gauges, "{world} ranks, {more:?}");
            assert!(other.weights == one.weights, "{world} ranks, {more:?}: weights differ");
        }
    }
}

/// Three ranks, which fit no binary tree, have the same bits as one rank with three micro-batches.
#[test]
fn an_odd_number_of_ranks_equals_its_micro_batches() {
    let overrides = [&["optim.micro_batches=3", "optim.batch_size=24"][..], &STATISTICS].concat();
    let one = train_batch(&plan(1, &overrides), 24);
    assert!(train_batch(&plan(3, &overrides), 24) == one);
}

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

/// Ranks train like one rank on the whole batch at once, up to rounding; and sums
/// in the engine's order like sums in Ocelli's.
#[test]
fn ranks_train_like_the_whole_batch() {
    // AdamW turns rounding into steps of full size where gradients are nearly zero: the first
    // moments, which are the gradients after one step, are what is compared.
    let whole = train(&plan(1, &STATISTICS), 1);
    for more in [&[][..], &["run.exact_sums=false"]] {
        let four = train(&plan(4, &[&STATISTICS[..], more].concat()), 1);
        assert!((four.losses[0] - whole.losses[0]).abs() < 1e-5 * whole.losses[0].abs());
        assert!((four.losses[1] - whole.losses[1]).abs() < 1e-5 * whole.losses[1]);
        assert!(
            difference(&four.moments, &whole.moments) < 1e-5,
            "{}",
            difference(&four.moments, &whole.moments)
        );
    }
}

/// A rank receives the bytes of the formulas, in one collective per unit and direction.
#[test]
fn traffic_is_what_the_formulas_say() {
    let world = 4;
    for (more, n_gathers, n_reduces) in [
        // Teacher, student, and all but the last unit of the backbone again.
        (&["run.keep=1"][..], 2 * 6 + 3, 6),
        (&["run.keep=0"], 2 * 6 + 4, 6),
        // All but the last unit of each pair once more.
        (&["run.keep=0", "run.segment=2"], 2 * 6 + 4 + 2, 6),
        (&["run.shard=\"grad\""], 2 * 6, 6),
        (&["run.shard=\"none\""], 0, 6),
    ] {
        let plan = plan(world, more);
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
            let received = |bytes: u64| bytes * (world as u64 - 1) / world as u64;
            let backbone: u64 = units[..4].iter().sum();
            let (gathered, reduced) = match n_gathers {
                0 => (0, 2 * received(all)),
                12 => (received(2 * all), received(all)),
                15 => (received(2 * all + backbone - units[3]), received(all)),
                18 => (received(2 * all + backbone + units[0] + units[2]), received(all)),
                _ => (received(2 * all + backbone), received(all)),
            };
            assert_eq!((traffic.gather_bytes, traffic.reduce_bytes), (gathered, reduced), "{more:?}");
            // One sum of the center and one of norms and votes.
            assert_eq!(traffic.n_other, 2, "{more:?}");
        }
    }
}

/// Creates a saver on each rank. Rank 0's removes unfinished checkpoints, so all must exist before
/// any starts to write.
fn saver_of(trainer: &Trainer, folder: &Path) -> Saver {
    let saver = Saver::new(folder, trainer.topology(), 10);
    trainer.comm.all_reduce("savers", vec![0.0], Reduction::Sum).unwrap();
    saver
}

/// Writes a checkpoint of all ranks and waits until it is complete.
fn save(trainer: &mut Trainer, plan: &Plan, saver: &mut Saver) {
    saver.start(&trainer.state, plan);
    let (saved, failed) = saver.wait_for_own();
    let said = trainer.comm.all_reduce("saved", vec![saved, failed], Reduction::Sum).unwrap();
    saver.agreed(said[0], said[1]).unwrap();
    // Nobody reads before rank 0 has renamed.
    trainer.comm.all_reduce("renamed", vec![0.0], Reduction::Sum).unwrap();
}

fn load(trainer: &mut Trainer, folder: &Path) -> (Option<u64>, Vec<String>) {
    let mut warnings = Vec::new();
    let warn = &mut |message: &str| warnings.push(message.to_string());
    let step = resume(folder, u64::MAX, &mut trainer.state, &trainer.comm, &Device::flex(), warn).unwrap();
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

/// Four ranks write, three read and write, four read and write: the same bytes, and the same next
/// loss.
#[test]
fn checkpoints_change_the_number_of_ranks_without_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second, third] = ["a", "b", "c"].map(|name| folder.path().join(name));
    let overrides = ["optim.batch_size=24", "optim.micro_batches=12", "method.koleo_weight=0.1"];
    let four = plan(4, &overrides);
    let three = plan(3, &overrides);
    let expected = on_ranks(&four, |mut trainer| {
        step(&mut trainer, &four);
        step(&mut trainer, &four);
        let mut saver = saver_of(&trainer, &first);
        save(&mut trainer, &four, &mut saver);
        step(&mut trainer, &four)
    });
    let on_three = on_ranks(&three, |mut trainer| {
        assert_eq!(load(&mut trainer, &first), (Some(2), Vec::new()));
        let mut saver = saver_of(&trainer, &second);
        save(&mut trainer, &three, &mut saver);
        step(&mut trainer, &three)
    });
    let again = on_ranks(&four, |mut trainer| {
        assert_eq!(load(&mut trainer, &second), (Some(2), Vec::new()));
        let mut saver = saver_of(&trainer, &third);
        save(&mut trainer, &four, &mut saver);
        step(&mut trainer, &four)
    });
    assert_eq!((files(&first, 2).len(), files(&second, 2).len()), (4, 3));
    assert!(files(&first, 2) == files(&third, 2), "bytes differ");
    assert_eq!(again, expected);
    assert!((on_three[0] - expected[0]).abs() < 1e-6 * expected[0], "{on_three:?} {expected:?}");
}

/// One rank's file is damaged: all ranks return to the previous checkpoint, and the warning names
/// the rank.
#[test]
fn a_file_that_one_rank_cannot_read_sends_all_to_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let four = plan(4, &["optim.batch_size=24"]);
    on_ranks(&four, |mut trainer| {
        let mut saver = saver_of(&trainer, path);
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
    for ((found, warnings), step) in loaded {
        assert_eq!((found, step), (Some(1), 1));
        assert!(warnings[0].contains("rank 2: the checksum of rank-00002"), "{warnings:?}");
    }
    // A checkpoint whose file is gone is no better.
    std::fs::remove_file(path.join("step-0000000001/rank-00003.safetensors")).unwrap();
    let errors = on_ranks(&four, |mut trainer| {
        resume(path, u64::MAX, &mut trainer.state, &trainer.comm, &Device::flex(), &mut |_| {})
            .unwrap_err()
            .to_string()
    });
    assert!(errors.iter().all(|error| error.contains("rank 3: rank-00003")), "{errors:?}");
}
