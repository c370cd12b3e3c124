//! Methods on every backbone: the same run on any number of ranks, however graphs are kept and
//! wherever it was interrupted.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use augment::SizeChoice;
use burn_tensor::{Device, Tensor};
use kernels::device::host::to_host;
use networks::Network;
use networks::backbone::Readout;
use networks::layout::UnitLayout;
use networks::patches::Normalization;
use ranks::communicator::{Communicator, CommunicatorConfig};
use ranks::engine::{Engine, Local, LocalGroup, Reduction};

use super::step::{ROUNDINGS, rounded};
use super::{batch, pair, plans};
use crate::bench::compare::difference;
use crate::bench::shard::rank_share;
use crate::checkpoint::{Saver, resume};
use crate::method::network::{Backbone, UpdateRule};
use crate::method::{CustomViews, ViewsConfig};
use crate::optim::state::UnitShard;
use crate::recipe::plan::RankResources;
use crate::step::Trainer;
use crate::{Plan, Recipe};

/// Results of a run: losses and gauges by step, and every buffer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Trained {
    /// Names and values.
    pub(super) reports: Vec<(&'static str, f64)>,
    /// Network and unit, buffer, values by parameter without padding.
    pub(super) buffers: Vec<(String, &'static str, Vec<f32>)>,
    pub(super) state: Vec<(String, Vec<f32>)>,
}

/// Runs `f` on each rank, as a thread.
pub(super) fn on_ranks<R: Send>(
    plan: &Plan,
    world_size: usize,
    f: impl Fn(&Plan, Trainer) -> R + Sync,
) -> Vec<R> {
    let room = RankResources { n_cores: 1, n_workers: 1, bytes: f64::MAX, is_gpu: false };
    let plan = plan.clone().over(world_size, room).unwrap();
    let run = |engine: Local| {
        let topology = plan.topology(engine.rank()).unwrap();
        let config = CommunicatorConfig { topology, exact: true, deadline: Duration::from_secs(60) };
        let comm =
            Communicator::start(config, Box::new(move || Ok(Box::new(engine) as Box<dyn Engine>))).unwrap();
        f(&plan, plan.trainer(comm, &Device::flex()).unwrap())
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = LocalGroup::ranks(world_size)
            .into_iter()
            .map(|engine| scope.spawn(move || run(engine)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(super) fn take(plan: &Plan, trainer: &mut Trainer, n_steps: u64) -> Vec<(&'static str, f64)> {
    let mut reports = Vec::new();
    for _ in 0..n_steps {
        let step = trainer.state.step;
        let share = rank_share(batch(plan, step), trainer.topology());
        let report = trainer.step(&share, &plan.schedules().at(step + 3)).unwrap();
        assert!(report.finite, "{}", pair(plan));
        for target in trainer.state.method.target_distributions() {
            let is_reported = report.gauges.iter().any(|(gauge, _)| *gauge == target.entropy);
            assert!(is_reported, "{}: {}", target.entropy, pair(plan));
        }
        reports.extend([("loss", report.loss), ("norm", report.grad_norm)]);
        reports.extend(report.gauges.iter().copied());
    }
    reports
}

/// Returns the buffers of a shard by their names.
fn named(shard: &UnitShard) -> Vec<(&'static str, &Tensor<1>)> {
    let moments = shard.moments.iter().map(|moment| (moment.name, &moment.values));
    std::iter::once(("weights", shard.weights.values())).chain(moments).collect()
}

/// Returns the elements of a unit's buffer by the names of its parameters, wherever these are in
/// the buffer.
fn by_parameter(layout: &UnitLayout, flat: &[f32]) -> Vec<f32> {
    let tensors = networks::tensor::joined(layout.tensors(flat));
    let sorted: BTreeMap<String, Vec<f32>> =
        tensors.into_iter().map(|tensor| (tensor.name, tensor.values)).collect();
    sorted.into_values().flatten().collect()
}

/// Joins the results of ranks, which agree on all but their shards.
pub(super) fn joined(ranks: Vec<(Vec<(&'static str, f64)>, Trainer)>) -> Trained {
    let (first, trainer) = &ranks[0];
    let mut buffers = Vec::new();
    for (number, network) in trainer.state.networks.iter().enumerate() {
        for (unit, shard) in network.shards.iter().enumerate() {
            for (buffer, (name, _)) in named(shard).into_iter().enumerate() {
                let values: Vec<f32> = ranks
                    .iter()
                    .flat_map(|(_, trainer)| {
                        to_host(named(&trainer.state.networks[number].shards[unit])[buffer].1.clone())
                    })
                    .collect();
                let values = by_parameter(&shard.layout, &values);
                buffers.push((format!("{}/{}", network.name, shard.layout.name), name, values));
            }
        }
    }
    assert!(ranks.iter().all(|(reports, _)| reports == first), "ranks report the same");
    Trained { reports: first.clone(), buffers, state: trainer.state.method.state() }
}

pub(super) fn train(plan: &Plan, world_size: usize, n_steps: u64) -> Trained {
    joined(on_ranks(plan, world_size, |plan, mut trainer| (take(plan, &mut trainer, n_steps), trainer)))
}

#[test]
fn ranks_and_kept_graphs_give_the_same_bits() {
    let recomputed = plans(&["run.keep=0"]);
    for (plan, recomputed) in plans(&[]).iter().zip(&recomputed) {
        let one = train(plan, 1, 3);
        for world_size in [2, 4] {
            assert!(train(plan, world_size, 3) == one, "{world_size} ranks: {}", pair(plan));
        }
        assert!(train(recomputed, 1, 3) == one, "recomputed: {}", pair(plan));
        assert!(train(recomputed, 2, 3) == one, "recomputed on 2 ranks: {}", pair(plan));
        for segment in [2, 3] {
            let mut together = recomputed.clone();
            (together.recipe.run.segment, together.segment) = (Some(segment), segment);
            assert!(train(&together, 2, 3) == one, "recomputed by {segment} on 2 ranks: {}", pair(plan));
        }
    }
}

/// 16 bits in products, maps and gathered weights, with every backbone: the same bits on any number
/// of ranks and recomputed, in losses within a few roundings of those in f32.
#[test]
fn sixteen_bits_do_not_know_ranks() {
    let bf16 = "optim.precision={compute='bf16',memory='bf16',gather='bf16'}";
    let recomputed = plans(&[bf16, "run.keep=0"]);
    let mut backbones = Vec::new();
    for ((plan, recomputed), wide) in plans(&[bf16]).iter().zip(&recomputed).zip(&plans(&[])) {
        if backbones.contains(&plan.recipe.model) {
            continue;
        }
        backbones.push(plan.recipe.model.clone());
        let one = train(plan, 1, 2);
        assert!(train(plan, 2, 2) == one, "2 ranks: {}", pair(plan));
        assert!(train(recomputed, 4, 2) == one, "recomputed on 4 ranks: {}", pair(plan));
        let wide = train(wide, 1, 2).reports;
        assert!(one.reports != wide, "nothing is rounded: {}", pair(plan));
        // The first report is a loss of the initial weights.
        assert!(
            (one.reports[0].1 - wide[0].1).abs() <= 2e-2 * wide[0].1.abs(),
            "{} {}: {}",
            one.reports[0].1,
            wide[0].1,
            pair(plan)
        );
    }
}

/// Groups with statistics of their own, and rates by layer, whose lengths are summed over shards.
#[test]
fn groups_of_statistics_and_rates_by_layer_do_not_know_ranks() {
    let sets = ["optim.algorithm=larc", "optim.decay_vectors=true", "optim.lr=1.0"];
    let joint = plans(&sets);
    let grouped = plans(&[&sets[..], &["optim.stat_images=4"]].concat());
    for (plan, joint) in grouped.iter().zip(&joint) {
        let backbone = plan.recipe.model.units(Readout::Pooled);
        if backbone.iter().all(|unit| unit.n_stages() == 1) {
            continue;
        }
        let one = train(plan, 1, 2);
        for world_size in [2, 4] {
            assert!(train(plan, world_size, 2) == one, "{world_size} ranks: {}", pair(plan));
        }
        assert!(train(joint, 1, 2).reports != one.reports, "groups change nothing: {}", pair(plan));
    }
}

/// Views whose sizes differ from batch to batch, on any number of ranks and with graphs recomputed.
#[test]
fn views_of_several_sizes_give_the_same_bits_on_any_ranks() {
    let (plans, recomputed) = (plans(&[]), plans(&["run.keep=0"]));
    for (plan, recomputed) in plans.into_iter().zip(recomputed) {
        let [plan, recomputed] = [plan, recomputed].map(|plan| {
            let groups = plan.multicrop().groups();
            let choice = |factor: u32| SizeChoice {
                share: 1.0,
                sizes_px: groups.iter().map(|group| group.size_px * factor).collect(),
            };
            let ViewsConfig::Custom(views) = &plan.recipe.views else { unreachable!("examples are lists") };
            let views = CustomViews { mix: vec![choice(1), choice(2)], ..views.clone() };
            let recipe = Recipe { views: ViewsConfig::Custom(views), ..plan.recipe.clone() };
            crate::resolve(recipe, 100).unwrap()
        });
        let sizes = |step| plan.view_mix().multicrop(plan.recipe.seed, step).groups();
        assert!((1..4).any(|step| sizes(step) != sizes(0)), "all batches have the same sizes");
        let one = train(&plan, 1, 4);
        assert!(train(&plan, 2, 4) == one, "2 ranks: {}", pair(&plan));
        assert!(train(&recomputed, 4, 4) == one, "recomputed on 4 ranks: {}", pair(&plan));
    }
}

/// Statistics never wait behind a gather: between the gather of a unit, which it waits for before
/// it begins, and its last statistics there is no other gather.
#[test]
fn statistics_wait_for_no_gather() {
    for plan in plans(&["run.keep=0"]) {
        let backbone = plan.recipe.model.units(Readout::Pooled);
        let is_unit = |name: &str| backbone.iter().any(|unit| unit.name() == name);
        let is_staged = |name: &str| backbone.iter().any(|unit| unit.name() == name && unit.n_stages() > 1);
        let entries = on_ranks(&plan, 2, |plan, mut trainer| {
            take(plan, &mut trainer, 1);
            trainer.comm.recorder().entries()
        });
        for entries in entries {
            let mut gathered = None;
            let mut n_statistics = 0;
            for entry in entries {
                match entry.collective {
                    "gather" if is_unit(&entry.unit) => gathered = Some(entry.unit),
                    "sum" if is_staged(&entry.unit) => {
                        assert_eq!(gathered, Some(entry.unit), "{}", pair(&plan));
                        n_statistics += 1;
                    }
                    _ => {}
                }
            }
            let expected = backbone.iter().any(|unit| unit.n_stages() > 1);
            assert_eq!(n_statistics > 0, expected, "{}", pair(&plan));
        }
    }
}

/// One micro-batch of the whole batch, and four: the same gradients up to rounding. The first
/// moments after one step are the gradients; AdamW would turn rounding into steps of full size
/// where they are nearly zero.
#[test]
fn micro_batches_change_rounding_only() {
    let whole = plans(&["optim.micro_batches=1"]);
    for (plan, whole) in plans(&[]).iter().zip(&whole) {
        let four = train(plan, 1, 1);
        let one = train(whole, 1, 1);
        for ((_, a), (_, b)) in four.reports.iter().zip(&one.reports) {
            assert!((a - b).abs() <= 1e-5 * b.abs(), "{}: {a} {b}", pair(plan));
        }
        let first_moments = |run: &Trained| -> Vec<Vec<f32>> {
            run.buffers
                .iter()
                .filter(|(_, name, _)| *name == "exp_avg")
                .map(|(.., values)| values.clone())
                .collect()
        };
        let one = first_moments(&one);
        let worst = |moments: &[Vec<f32>]| -> Vec<f64> {
            one.iter().zip(moments).map(|(b, a)| difference(b, a)).collect()
        };
        let given = worst(&first_moments(&four));
        let mut allowed = vec![2e-5; one.len()];
        // Where the last bit of the weights moves gradients by more, their own rounding is larger.
        for seed in (0..ROUNDINGS).filter(|_| given.iter().any(|worst| *worst > 2e-5)) {
            let moved = joined(on_ranks(whole, 1, |plan, mut trainer| {
                trainer.state.networks = rounded(&trainer.state.networks, seed);
                (take(plan, &mut trainer, 1), trainer)
            }));
            let moved = worst(&first_moments(&moved));
            allowed = allowed.into_iter().zip(moved).map(|(a, moved)| f64::max(a, 2.0 * moved)).collect();
        }
        for (worst, allowed) in given.into_iter().zip(allowed) {
            assert!(worst <= allowed, "{}: {worst} of the largest, {allowed} allowed", pair(plan));
        }
    }
}

pub(super) fn save(trainer: &Trainer, plan: &Plan, folder: &Path) {
    let mut saver = Saver::new(folder, trainer.topology(), 10);
    // Rank 0 removes unfinished checkpoints, so all savers must exist before any writes.
    trainer.comm.all_reduce("savers", vec![0.0], Reduction::Sum).unwrap();
    saver.start(&trainer.state, plan);
    let (saved, failed) = saver.wait_for_own();
    let said = trainer.comm.all_reduce("saved", vec![saved, failed], Reduction::Sum).unwrap();
    saver.agreed(said[0], said[1]).unwrap();
    trainer.comm.all_reduce("renamed", vec![0.0], Reduction::Sum).unwrap();
}

/// A run that is interrupted after two steps and continues from its checkpoint, also on another
/// number of ranks, equals one without interruption.
#[test]
fn a_run_that_is_cut_off_goes_on() {
    for plan in plans(&[]) {
        let folder = tempfile::tempdir().unwrap();
        let all = train(&plan, 1, 4);
        let first = on_ranks(&plan, 2, |plan, mut trainer| {
            let reports = take(plan, &mut trainer, 2);
            save(&trainer, plan, folder.path());
            reports
        });
        for world_size in [1, 2, 4] {
            let rest = joined(on_ranks(&plan, world_size, |plan, mut trainer| {
                let state = &mut trainer.state;
                let comm = &trainer.comm;
                let mut warn = |warning: &str| panic!("{warning}");
                let step = resume(folder.path(), u64::MAX, state, comm, &Device::flex(), &mut warn).unwrap();
                assert_eq!(step, Some(2));
                (take(plan, &mut trainer, 2), trainer)
            }));
            assert_eq!([&first[0][..], &rest.reports[..]].concat(), all.reports, "{}", pair(&plan));
            assert!(rest.buffers == all.buffers && rest.state == all.state, "{}", pair(&plan));
        }
    }
}

/// Networks with the recipe's backbone start from given weights, also where these lack what is
/// optional. All others, and heads, keep theirs.
#[test]
fn runs_start_from_given_weights() {
    for plan in plans(&[]) {
        let model = &plan.recipe.model;
        let network = Network::random(model, Normalization::default(), 99, 1, &Device::flex());
        let given = network.tensors();
        let value = |name: &str| given.iter().find(|tensor| tensor.name == name);
        let specs = plan.method().unwrap().networks();
        on_ranks(&plan, 2, |_, mut trainer| {
            let before = trainer.state.networks.clone();
            trainer.start_from(&given, false).unwrap();
            for ((spec, before), network) in specs.iter().zip(&before).zip(&trainer.state.networks) {
                let starts = spec.backbone == Backbone::Recipe && spec.update_rule != UpdateRule::Frozen;
                for (number, (old, shard)) in before.shards.iter().zip(&network.shards).enumerate() {
                    let mut expected = to_host(old.weights.values().clone());
                    let values = to_host(shard.weights.values().clone());
                    for segment in shard.segments().filter(|_| starts && number < network.n_backbone) {
                        let name = shard.layout.full_name(segment.slot);
                        let substitute = shard.layout.substitute(segment.slot);
                        let given = value(&name).or_else(|| value(&substitute?));
                        let Some(tensor) = given else {
                            assert!(segment.slot.spec.is_optional, "{name}: {}", pair(&plan));
                            continue;
                        };
                        let first = shard.start + segment.start - segment.slot.offset;
                        let part = &tensor.values[first..first + segment.end - segment.start];
                        expected[segment.start..segment.end].copy_from_slice(part);
                    }
                    assert!(values == expected, "{} {number}: {}", spec.name, pair(&plan));
                }
            }
        });
    }
}
