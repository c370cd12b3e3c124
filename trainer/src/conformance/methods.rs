//! Methods on every backbone: a run is the same on any number of ranks, with kept or recomputed
//! graphs, and with or without an interruption.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use augment::SizeChoice;
use burn_tensor::{Device, Tensor};
use kernels::device::host::to_host;
use networks::Network;
use networks::backbone::Readout;
use networks::layout::UnitLayout;
use networks::mask::MaskKind;
use networks::patches::Normalization;
use networks::tensor::NamedTensor;
use ranks::communicator::{Communicator, CommunicatorConfig};
use ranks::engine::{Engine, Local, LocalGroup, Reduction};

use super::step::{N_PERTURBATIONS, differences, perturb_weights};
use super::{BATCH, batch, pair, plans};
use crate::bench::noise::rank_share;
use crate::checkpoint::{Saver, resume};
use crate::method::network::{Backbone, UpdateRule};
use crate::method::{CustomViews, ViewsConfig};
use crate::optim::state::UnitShard;
use crate::recipe::plan::RankResources;
use crate::step::Trainer;
use crate::{Plan, Recipe};

/// Results of a run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Trained {
    /// Names and values of losses and gauges, by step.
    pub(super) reports: Vec<(&'static str, f64)>,
    /// Network and unit, name of the buffer, and its values by parameter without padding.
    pub(super) buffers: Vec<(String, &'static str, Vec<f32>)>,
    /// State of the method.
    pub(super) state: Vec<(String, Vec<f32>)>,
}

/// Runs `f` on each rank, as a thread.
pub(super) fn on_ranks<R: Send>(
    plan: &Plan,
    world_size: usize,
    f: impl Fn(&Plan, Trainer) -> R + Sync,
) -> Vec<R> {
    let room = RankResources { n_cores: 1, n_workers: 1, bytes: f64::MAX, is_gpu: false };
    let plan = &plan.clone().for_ranks(world_size, room).unwrap();
    let f = &f;
    std::thread::scope(|scope| {
        let mut threads = Vec::with_capacity(world_size);
        for engine in LocalGroup::ranks(world_size) {
            threads.push(scope.spawn(move || f(plan, rank_trainer(plan, engine))));
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Creates the trainer of the rank that communicates through `engine`.
fn rank_trainer(plan: &Plan, engine: Local) -> Trainer {
    let topology = plan.topology(engine.rank()).unwrap();
    let config = CommunicatorConfig { topology, exact: true, deadline: Duration::from_secs(60) };
    let comm =
        Communicator::start(config, Box::new(move || Ok(Box::new(engine) as Box<dyn Engine>))).unwrap();
    plan.trainer(comm, &Device::flex()).unwrap()
}

/// Takes `n_steps` steps and returns their losses, gradient norms and gauges.
pub(super) fn take_steps(plan: &Plan, trainer: &mut Trainer, n_steps: u64) -> Vec<(&'static str, f64)> {
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

/// Returns the names and values of the buffers of a shard.
fn named_buffers(shard: &UnitShard) -> Vec<(&'static str, &Tensor<1>)> {
    let moments = shard.moments.iter().map(|moment| (moment.name, &moment.values));
    std::iter::once(("weights", shard.weights.values())).chain(moments).collect()
}

/// Returns the elements of a unit's buffer in the order of the names of its parameters, which does
/// not depend on their positions in the buffer.
fn by_parameter(layout: &UnitLayout, flat: &[f32]) -> Vec<f32> {
    let tensors = networks::tensor::joined(layout.tensors(flat));
    let sorted: BTreeMap<String, Vec<f32>> =
        tensors.into_iter().map(|tensor| (tensor.name, tensor.values)).collect();
    sorted.into_values().flatten().collect()
}

/// Merges the results of ranks, which differ in nothing but their shards.
pub(super) fn merge_ranks(ranks: Vec<(Vec<(&'static str, f64)>, Trainer)>) -> Trained {
    let (first, trainer) = &ranks[0];
    let mut buffers = Vec::new();
    for (index, network) in trainer.state.networks.iter().enumerate() {
        for (unit, shard) in network.shards.iter().enumerate() {
            for (buffer, (name, _)) in named_buffers(shard).into_iter().enumerate() {
                let mut values: Vec<f32> = Vec::new();
                for (_, trainer) in &ranks {
                    let shard = &trainer.state.networks[index].shards[unit];
                    let (_, rank_values) = named_buffers(shard)[buffer];
                    values.extend(to_host(rank_values.clone()));
                }
                let values = by_parameter(&shard.layout, &values);
                buffers.push((format!("{}/{}", network.name, shard.layout.name), name, values));
            }
        }
    }
    assert!(ranks.iter().all(|(reports, _)| reports == first), "ranks report the same");
    Trained { reports: first.clone(), buffers, state: trainer.state.method.state() }
}

/// Runs `n_steps` steps on `world_size` ranks.
pub(super) fn train(plan: &Plan, world_size: usize, n_steps: u64) -> Trained {
    merge_ranks(on_ranks(plan, world_size, |plan, mut trainer| {
        (take_steps(plan, &mut trainer, n_steps), trainer)
    }))
}

#[test]
fn runs_are_bit_identical_across_ranks_and_with_recomputed_graphs() {
    let recomputed = plans(&["run.keep=0"]);
    for (plan, recomputed) in plans(&[]).iter().zip(&recomputed) {
        let one = train(plan, 1, 3);
        for world_size in [2, 4] {
            assert!(train(plan, world_size, 3) == one, "{world_size} ranks: {}", pair(plan));
        }
        assert!(train(recomputed, 1, 3) == one, "recomputed: {}", pair(plan));
        assert!(train(recomputed, 2, 3) == one, "recomputed on 2 ranks: {}", pair(plan));
        for segment in [2, 3] {
            let mut segmented = recomputed.clone();
            segmented.recipe.run.segment = Some(segment);
            segmented.segment = segment;
            assert!(train(&segmented, 2, 3) == one, "recomputed by {segment} on 2 ranks: {}", pair(plan));
        }
    }
}

/// With bf16 in products, maps and gathered weights, runs of every backbone have the same bits on
/// any number of ranks and with recomputed graphs, and losses differ from those in f32 by a few
/// roundings.
#[test]
fn bf16_runs_are_bit_identical_across_ranks() {
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

/// Covers groups of images with separate statistics, and layer-wise rates, whose norms are summed
/// over shards.
#[test]
fn statistics_groups_and_layerwise_rates_are_bit_identical_across_ranks() {
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

/// Returns `plan` with batches whose views have either the sizes of its recipe, or twice these.
fn with_mixed_sizes(plan: &Plan) -> Plan {
    let ViewsConfig::Custom(views) = &plan.recipe.views else { unreachable!("examples are lists") };
    let groups = plan.multicrop().groups();
    let mut mix = Vec::new();
    for factor in [1, 2] {
        let sizes_px = groups.iter().map(|group| group.size_px * factor).collect();
        mix.push(SizeChoice { share: 1.0, sizes_px });
    }
    let views = CustomViews { mix, ..views.clone() };
    let recipe = Recipe { views: ViewsConfig::Custom(views), ..plan.recipe.clone() };
    crate::resolve(recipe, 100).unwrap()
}

/// Covers views whose sizes differ from batch to batch, also with recomputed graphs.
#[test]
fn runs_with_mixed_view_sizes_are_bit_identical_across_ranks() {
    for (plan, recomputed) in plans(&[]).iter().zip(&plans(&["run.keep=0"])) {
        let plan = with_mixed_sizes(plan);
        let recomputed = with_mixed_sizes(recomputed);
        let mix = plan.view_mix();
        let first = mix.multicrop(plan.recipe.seed, 0).groups();
        let sizes_vary = (1..4).any(|step| mix.multicrop(plan.recipe.seed, step).groups() != first);
        assert!(sizes_vary, "all batches have the same sizes");
        let one = train(&plan, 1, 4);
        assert!(train(&plan, 2, 4) == one, "2 ranks: {}", pair(&plan));
        assert!(train(&recomputed, 4, 4) == one, "recomputed on 4 ranks: {}", pair(&plan));
    }
}

/// Returns `plan` with batches whose masked views have either the size of its recipe, or are one
/// patch, of which no part is masked; `None` if its method does not mask blocks of patches.
fn with_unmasked_batches(plan: &Plan) -> Option<Plan> {
    let rule = plan.method().unwrap().masks()?;
    if !matches!(rule.kind, MaskKind::Blocks(_)) {
        return None;
    }
    let ViewsConfig::Custom(views) = &plan.recipe.views else { unreachable!("examples are lists") };
    let sizes_px: Vec<u32> = plan.multicrop().groups().iter().map(|group| group.size_px).collect();
    let mut one_patch_px = sizes_px.clone();
    one_patch_px[rule.size] = plan.recipe.model.stride_px() as u32;
    let mix = [sizes_px, one_patch_px].map(|sizes_px| SizeChoice { share: 1.0, sizes_px }).to_vec();
    let views = CustomViews { mix, ..views.clone() };
    let recipe = Recipe { views: ViewsConfig::Custom(views), ..plan.recipe.clone() };
    Some(crate::resolve(recipe, 100).unwrap())
}

/// Returns the number of masked patches in the batch of `step`, of a plan whose method masks some.
fn n_masked(plan: &Plan, step: u64) -> usize {
    let rule = plan.method().unwrap().masks().unwrap();
    let seed = plan.recipe.seed;
    let group = plan.view_mix().multicrop(seed, step).groups()[rule.size];
    let side = group.size_px as usize / plan.recipe.model.cell_px();
    rule.at(seed, step, BATCH, group.n_views, [side; 2]).rows(0..BATCH as u64).n()
}

/// Covers batches in which no patch is masked, between others.
#[test]
fn runs_with_unmasked_batches_are_bit_identical_across_ranks() {
    let mut n_plans = 0;
    for plan in plans(&[]) {
        let Some(plan) = with_unmasked_batches(&plan) else { continue };
        let numbers: Vec<usize> = (0..4).map(|step| n_masked(&plan, step)).collect();
        let has_both = numbers.contains(&0) && numbers.iter().any(|n| *n > 0);
        assert!(has_both, "{numbers:?} masked patches: {}", pair(&plan));
        let one = train(&plan, 1, 4);
        assert!(train(&plan, 2, 4) == one, "2 ranks: {}", pair(&plan));
        n_plans += 1;
    }
    assert!(n_plans >= 5, "{n_plans} plans");
}

/// Statistics never wait behind a gather: between the gather of a unit, which ends before the unit
/// begins, and its last statistics there is no other gather.
#[test]
fn statistics_wait_for_no_gather() {
    for plan in plans(&["run.keep=0"]) {
        let backbone = plan.recipe.model.units(Readout::Pooled);
        let mut unit_names = Vec::new();
        let mut staged_names = Vec::new();
        for unit in &backbone {
            unit_names.push(unit.name());
            if unit.n_stages() > 1 {
                staged_names.push(unit.name());
            }
        }
        let entries = on_ranks(&plan, 2, |plan, mut trainer| {
            take_steps(plan, &mut trainer, 1);
            trainer.comm.recorder().entries()
        });
        for entries in entries {
            let mut gathered = None;
            let mut n_statistics = 0;
            for entry in entries {
                match entry.collective {
                    "gather" if unit_names.contains(&entry.unit.as_str()) => gathered = Some(entry.unit),
                    "sum" if staged_names.contains(&entry.unit.as_str()) => {
                        assert_eq!(gathered, Some(entry.unit), "{}", pair(&plan));
                        n_statistics += 1;
                    }
                    _ => {}
                }
            }
            assert_eq!(n_statistics > 0, !staged_names.is_empty(), "{}", pair(&plan));
        }
    }
}

/// Returns the first moments of a run, by unit.
pub(super) fn first_moments(run: &Trained) -> Vec<Vec<f32>> {
    let mut moments = Vec::new();
    for (_, name, values) in &run.buffers {
        if *name == "exp_avg" {
            moments.push(values.clone());
        }
    }
    moments
}

/// One micro-batch of the whole batch gives the same gradients as four, up to rounding. The first
/// moments after one step are the gradients; weights are not compared, because AdamW turns rounding
/// into steps of full size where gradients are nearly zero.
#[test]
fn micro_batches_change_rounding_only() {
    let single_plans = plans(&["optim.micro_batches=1"]);
    for (plan, single_plan) in plans(&[]).iter().zip(&single_plans) {
        let four = train(plan, 1, 1);
        let one = train(single_plan, 1, 1);
        for ((_, a), (_, b)) in four.reports.iter().zip(&one.reports) {
            assert!((a - b).abs() <= 1e-5 * b.abs(), "{}: {a} {b}", pair(plan));
        }
        let expected = first_moments(&one);
        let differences_by_unit = differences(&expected, &first_moments(&four));
        let mut tolerances = vec![2e-5; expected.len()];
        if differences_by_unit.iter().any(|difference| *difference > 2e-5) {
            // Where the last bit of the weights changes gradients by more, their own rounding is
            // larger.
            for seed in 0..N_PERTURBATIONS {
                let perturbed = merge_ranks(on_ranks(single_plan, 1, |plan, mut trainer| {
                    trainer.state.networks = perturb_weights(&trainer.state.networks, seed);
                    (take_steps(plan, &mut trainer, 1), trainer)
                }));
                let changes = differences(&expected, &first_moments(&perturbed));
                for (tolerance, change) in tolerances.iter_mut().zip(changes) {
                    *tolerance = f64::max(*tolerance, 2.0 * change);
                }
            }
        }
        for (worst, allowed) in differences_by_unit.into_iter().zip(tolerances) {
            assert!(worst <= allowed, "{}: {worst} of the largest, {allowed} allowed", pair(plan));
        }
    }
}

/// Writes a checkpoint into `folder`. All ranks call it.
pub(super) fn save(trainer: &Trainer, plan: &Plan, folder: &Path) {
    let mut saver = Saver::new(folder, trainer.topology(), 10);
    // Rank 0 removes unfinished checkpoints, so all savers must exist before any writes.
    trainer.comm.all_reduce("savers", vec![0.0], Reduction::Sum).unwrap();
    saver.start(&trainer.state, plan);
    let (saved, failed) = saver.wait();
    let votes = trainer.comm.all_reduce("saved", vec![saved, failed], Reduction::Sum).unwrap();
    saver.count_votes(votes[0], votes[1]).unwrap();
    trainer.comm.all_reduce("renamed", vec![0.0], Reduction::Sum).unwrap();
}

/// Resumes from the newest checkpoint in `folder` and returns its step; panics on warnings.
pub(super) fn resume_newest(trainer: &mut Trainer, folder: &Path) -> Option<u64> {
    let state = &mut trainer.state;
    let comm = &trainer.comm;
    let warn = &mut |warning: &str| panic!("{warning}");
    resume(folder, None, state, comm, &Device::flex(), warn).unwrap()
}

/// A run that is interrupted after two steps and resumed from its checkpoint, also on another
/// number of ranks, equals one without interruption.
#[test]
fn resumed_runs_equal_uninterrupted_ones() {
    for plan in plans(&[]) {
        check_resumed(&plan, &[1, 2, 4], |_| {});
    }
}

/// Checks that a run of `plan` that two ranks save after two steps, and numbers of ranks
/// `world_sizes` resume, equals one without interruption. `prepare` is called with the trainers
/// that resume it.
pub(super) fn check_resumed(plan: &Plan, world_sizes: &[usize], prepare: fn(&mut Trainer)) {
    let folder = tempfile::tempdir().unwrap();
    let all = train(plan, 1, 4);
    let first = on_ranks(plan, 2, |plan, mut trainer| {
        let reports = take_steps(plan, &mut trainer, 2);
        save(&trainer, plan, folder.path());
        reports
    });
    for world_size in world_sizes {
        let rest = merge_ranks(on_ranks(plan, *world_size, |plan, mut trainer| {
            prepare(&mut trainer);
            assert_eq!(resume_newest(&mut trainer, folder.path()), Some(2));
            (take_steps(plan, &mut trainer, 2), trainer)
        }));
        assert_eq!([&first[0][..], &rest.reports[..]].concat(), all.reports, "{}", pair(plan));
        assert!(rest.buffers == all.buffers && rest.state == all.state, "{}", pair(plan));
    }
}

/// Returns the tensor `name` of `tensors`.
fn find_tensor<'t>(tensors: &'t [NamedTensor], name: &str) -> Option<&'t NamedTensor> {
    tensors.iter().find(|tensor| tensor.name == name)
}

/// Networks with the recipe's backbone start from given weights, even if these lack optional
/// parameters. All other networks, and heads, keep their weights.
#[test]
fn runs_start_from_given_weights() {
    for plan in plans(&[]) {
        let model = &plan.recipe.model;
        let network = Network::random(model, Normalization::default(), 99, 1, &Device::flex());
        let weights = network.tensors();
        let specs = plan.method().unwrap().networks();
        on_ranks(&plan, 2, |_, mut trainer| {
            let before = trainer.state.networks.clone();
            trainer.start_from(&weights, false).unwrap();
            for ((spec, before), network) in specs.iter().zip(&before).zip(&trainer.state.networks) {
                let starts = spec.backbone == Backbone::Recipe && spec.update_rule != UpdateRule::Frozen;
                for (index, (old, shard)) in before.shards.iter().zip(&network.shards).enumerate() {
                    let mut expected = to_host(old.weights.values().clone());
                    let values = to_host(shard.weights.values().clone());
                    for segment in shard.segments().filter(|_| starts && index < network.n_backbone) {
                        let name = shard.layout.full_name(segment.slot);
                        let substitute = shard.layout.substitute(segment.slot);
                        let tensor =
                            find_tensor(&weights, &name).or_else(|| find_tensor(&weights, &substitute?));
                        let Some(tensor) = tensor else {
                            assert!(segment.slot.spec.is_optional, "{name}: {}", pair(&plan));
                            continue;
                        };
                        let start = shard.start + segment.start - segment.slot.offset;
                        let values = &tensor.values[start..start + segment.end - segment.start];
                        expected[segment.start..segment.end].copy_from_slice(values);
                    }
                    assert!(values == expected, "{} {index}: {}", spec.name, pair(&plan));
                }
            }
        });
    }
}
