//! The recipe resolved: every length in steps, every default filled in.

use std::path::{Path, PathBuf};

use augment::{MultiCrop, ViewMix};
use burn_tensor::Device;
use kernels::ops::choose_kernels;
use kernels::product_kernels::Kernels;
use networks::divided::{divided, numel};
use networks::layout::{ALIGNMENT, UnitLayout};
use networks::part_name::undivided_name;
use networks::patches::PixelInput;
use networks::{NamedTensor, Origin};
use ranks::communicator::Communicator;
use ranks::topology::Topology;
use serde::{Deserialize, Serialize};

use super::Recipe;
use super::optim::{Algorithm, LrSchedule};
use crate::error::TrainError;
use crate::method::{Method, MethodContext};
use crate::optim::{AdamW, Adaptation, LayerRates, Optimizer, RateRule, Rule, Sgd};
use crate::schedule::{RunLength, Schedule, Schedules, Shape};
use crate::step::{StepConfig, Trainer};

/// A run, resolved against its data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Number of samples in the data set.
    pub n_samples: u64,
    /// Fingerprint of the samples; `None` in plans of older releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_fingerprint: Option<String>,
    /// Hash of the shards' checksums; `None` if a shard has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_checksums: Option<String>,
    /// Hash of a few images' bytes; `None` if shards would have to be fetched for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_images: Option<String>,
    /// [`augment::VIEWS_VERSION`] of the release that began the run; 1 in plans of releases that
    /// did not record it.
    #[serde(default = "first_views_version")]
    pub views_version: u32,
    /// Number of steps of the run.
    pub total_steps: u64,
    /// Steps of the learning rate's warm-up.
    pub warmup_steps: u64,
    /// Steps at the end over which a constant learning rate decays.
    #[serde(default)]
    pub cooldown_steps: u64,
    /// Steps at the beginning over which the backbone of the trained network is frozen.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub frozen_backbone_steps: u64,
    /// Minutes from which the number of steps was measured, if the recipe gave them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minutes: Option<f64>,
    /// Worker threads of a rank: the order in which their gradients are summed is part of the
    /// result.
    pub n_workers: usize,
    /// Threads of a rank that decode and augment.
    pub n_data_threads: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of backbone units, counted from the last, that keep their graph. Changes no bit of
    /// the result.
    pub keep: usize,
    /// Number of backbone units without graph that are computed again together, from the input of
    /// the first. Changes no bit of the result.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub segment: usize,
    /// Kernels that multiply matrices: `cublaslt-13.2.0`, `cubecl-0.11.3`; empty on a CPU. Another
    /// set changes the rounding.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kernels: String,
    /// Weights that the run began with, the latest first: a run may begin with weights that began
    /// with others. Empty for random weights, and in plans of older releases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub origins: Vec<Origin>,
    /// The recipe, with every default filled in.
    pub recipe: Recipe,
}

fn is_zero(steps: &u64) -> bool {
    *steps == 0
}

fn one() -> usize {
    1
}

fn is_one(n: &usize) -> bool {
    *n == 1
}

fn first_views_version() -> u32 {
    1
}

/// Resources of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankResources {
    /// CPU cores.
    pub n_cores: usize,
    /// Threads that compute: one for each core, or one that keeps a GPU busy.
    pub n_workers: usize,
    /// Bytes of memory of the device that computes.
    pub bytes: f64,
    /// Whether that device is a GPU.
    pub is_gpu: bool,
}

impl Plan {
    /// Returns the path of the plan of the run in `workdir`, which exists once the run has begun.
    pub fn path_in(workdir: &Path) -> PathBuf {
        workdir.join("plan.toml")
    }

    /// Returns the plan as TOML, as it is stored in a work directory.
    pub fn to_toml(&self) -> String {
        // Numbers, texts and tables alone, all of which TOML can represent.
        toml::to_string_pretty(self).unwrap_or_default()
    }

    /// Returns the weights that the run began with, the latest first. Of a run that an older
    /// release began, only the path and the fingerprint of those that its recipe names are known.
    pub fn began_with(&self) -> Vec<Origin> {
        if let Some(init) = &self.recipe.init
            && self.origins.is_empty()
        {
            return vec![Origin {
                name: init.weights.clone(),
                step: None,
                library: String::new(),
                fingerprint: init.fingerprint.clone(),
                license: None,
            }];
        }
        self.origins.clone()
    }

    /// Returns the name of the network that is evaluated.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] when the method cannot be built.
    pub fn evaluated(&self) -> Result<&'static str, TrainError> {
        Ok(self.method()?.evaluated())
    }

    /// Returns the plan for `world_size` ranks with `resources` each.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] when batch, micro-batches, groups or pairs do not divide.
    pub fn for_ranks(mut self, world_size: usize, resources: RankResources) -> Result<Self, TrainError> {
        self.world_size = world_size;
        self.recipe.optim.precision = self.recipe.optim.precision.with_defaults(resources.is_gpu);
        if self.recipe.run.workers == 0 {
            self.n_workers = resources.n_workers.max(1);
        }
        if self.recipe.run.data_threads == 0 {
            self.n_data_threads = resources.n_cores.max(1);
        }
        let n = self.n_micro_batches();
        if !n.is_multiple_of(world_size) {
            return Err(self.recipe.error(format!(
                "optim.micro_batches {n} must be a multiple of the number of ranks, {world_size}"
            )));
        }
        let batch_size = self.recipe.optim.batch_size;
        if !batch_size.is_multiple_of(n) {
            return Err(self.recipe.error(format!(
                "optim.batch_size {batch_size} does not divide into {n} micro-batches, {} on each of \
                 {world_size} ranks",
                n / world_size
            )));
        }
        let share = batch_size / world_size;
        if !share.is_multiple_of(2) && self.method()?.mixing().is_some() {
            return Err(self.recipe.error(format!(
                "method.mixup and method.cutmix mix pairs of images of a rank, which has {share} of the \
                 {batch_size} of a batch: set optim.batch_size to a multiple of {}, or both to 0",
                2 * world_size
            )));
        }
        let groups = self.recipe.optim.n_stat_groups();
        if !n.is_multiple_of(groups) {
            return Err(self.recipe.error(format!(
                "optim.stat_images {} divides a batch into {groups} groups: the {n} micro-batches \
                 (optim.micro_batches) must be a multiple of that",
                self.recipe.optim.stat_images
            )));
        }
        let topology = self.topology(0).map_err(|reason| self.recipe.error(reason))?;
        self.check_columns(topology)?;
        self.check_unit_sizes()?;
        Ok(self)
    }

    /// Chooses the kernels of the recipe on `device`, for this process, and records them in the
    /// plan.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] when the device does not have them.
    pub fn choose_kernels(&mut self, device: &Device) -> Result<(), TrainError> {
        self.use_kernels(self.recipe.run.kernels.into(), device)
    }

    /// Chooses `kernels` in place of those of the recipe: see [`Plan::choose_kernels`].
    ///
    /// # Errors
    /// As [`Plan::choose_kernels`].
    pub fn use_kernels(&mut self, kernels: Kernels, device: &Device) -> Result<(), TrainError> {
        let chosen = choose_kernels(kernels, device);
        let name = chosen.map_err(|error| {
            self.recipe.error(format!(
                "run.kernels = \"cublaslt\": {error}: set it to \"auto\", or make the library available"
            ))
        })?;
        self.kernels = if *device == Device::flex() { String::new() } else { name };
        Ok(())
    }

    /// Checks that no unit has more than `run.max_unit_parameters` parameters after division.
    ///
    /// # Errors
    /// [`TrainError::Recipe`].
    pub fn check_unit_sizes(&self) -> Result<(), TrainError> {
        let Some(limit) = self.recipe.run.max_unit_parameters else { return Ok(()) };
        let networks = self.method()?.networks();
        let units =
            networks.iter().flat_map(|network| divided(network.units(&self.recipe.model), Some(limit)));
        let sizes = units.map(|part| (numel(part.unit.as_ref()), part.unit));
        match sizes.max_by_key(|(size, _)| *size) {
            Some((size, unit)) if size > limit => Err(self.recipe.error(format!(
                "run.max_unit_parameters {limit}: unit {} cannot be divided into parts of fewer than \
                 {size} parameters: set it to at least that, or remove it",
                undivided_name(unit.name())
            ))),
            _ => Ok(()),
        }
    }

    /// Checks that each shard of a divided head lies within the columns that one rank scores.
    ///
    /// # Errors
    /// [`TrainError::Recipe`].
    fn check_columns(&self, topology: Topology) -> Result<(), TrainError> {
        let Topology { group_size, column_group_size, .. } = topology;
        if column_group_size == 1 {
            return Ok(());
        }
        let networks = self.method()?.networks();
        let heads = networks.iter().flat_map(|network| &network.heads).filter(|head| head.may_divide);
        for unit in heads.filter_map(|head| head.units.last()) {
            let UnitLayout { numel, padded, .. } = unit.layout(group_size);
            if numel != padded || unit.column_part(column_group_size).is_none() {
                return Err(self.recipe.error(format!(
                    "method.prototype_group {column_group_size}: the {numel} parameters of {} (prototypes \
                     times embedding channels, plus their lengths if these are trained) must be a \
                     multiple of {ALIGNMENT} times the {group_size} ranks of a shard group: choose other \
                     sizes, another run.shard_group, or method.prototype_group = 1",
                    unit.name()
                )));
            }
        }
        Ok(())
    }

    /// Returns the number of micro-batches in a batch, N; by default the least common multiple of
    /// ranks and groups.
    pub fn n_micro_batches(&self) -> usize {
        let n_groups = self.recipe.optim.n_stat_groups();
        match self.recipe.optim.micro_batches {
            0 => self.world_size / greatest_common_divisor(self.world_size, n_groups) * n_groups,
            n => n,
        }
    }

    /// Checks that the number of steps is known.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] for a length in minutes that was not measured.
    pub(crate) fn check_measured(&self) -> Result<(), TrainError> {
        match self.recipe.optim.length.minutes() {
            Some(minutes) => Err(self.recipe.error(format!(
                "optim.length: {minutes} minutes have to be measured in steps before the run begins"
            ))),
            None => Ok(()),
        }
    }

    /// Returns the topology as `rank` sees it.
    ///
    /// # Errors
    /// A message in words if groups do not divide the ranks.
    pub fn topology(&self, rank: usize) -> Result<Topology, String> {
        let run = &self.recipe.run;
        let topology = Topology::new(rank, self.world_size, run.shard, run.shard_group)?;
        let size = self.method().map_err(|error| error.to_string())?.column_group_size();
        topology.with_column_group(size).map_err(|reason| {
            format!(
                "method.prototype_group {reason}, the ranks that share weights (the number of ranks, \
                 run.shard, run.shard_group): set it to a divisor of that number, or to 1"
            )
        })
    }

    /// Returns the length of the run.
    pub fn length(&self) -> RunLength {
        let batch_size = self.recipe.optim.batch_size;
        RunLength { n_samples: self.n_samples, batch_size, total_steps: self.total_steps }
    }

    /// Returns the number of steps of the run, after the first `done`, that are followed by probes
    /// as the recipe says: those at intervals, and the last.
    pub fn n_probes_after(&self, done: u64) -> u64 {
        self.n_due(self.recipe.run.probe_every_steps, done)
    }

    /// Returns how often what is due every `every` steps happens after the first `done`: always
    /// after the last step, and only then if `every` is 0.
    pub fn n_due(&self, every: u64, done: u64) -> u64 {
        if done >= self.total_steps {
            return 0;
        }
        if every == 0 {
            return 1;
        }
        let at_intervals = self.total_steps / every - done / every;
        at_intervals + u64::from(!self.total_steps.is_multiple_of(every))
    }

    /// Returns the schedules of the run.
    pub fn schedules(&self) -> Schedules {
        let optim = &self.recipe.optim;
        let [decay_start, decay_end] = optim.weight_decay();
        let scale = optim.lr_scaling.factor(optim.batch_size);
        Schedules {
            lr: Schedule {
                start: optim.start_lr * scale,
                peak: optim.lr * scale,
                end: optim.min_lr,
                warmup_steps: self.warmup_steps,
                total_steps: self.total_steps,
                shape: match optim.schedule {
                    LrSchedule::Cosine => Shape::Cosine,
                    LrSchedule::HalfCosine => Shape::HalfCosine,
                    LrSchedule::CosineOfRun => Shape::CosineOfRun,
                    LrSchedule::Constant => Shape::Constant { cooldown_steps: self.cooldown_steps },
                },
            },
            weight_decay: Schedule::cosine(decay_start, decay_end, self.total_steps),
        }
    }

    /// Returns the optimizer.
    pub fn optimizer(&self) -> Optimizer {
        let optim = &self.recipe.optim;
        let adaptation = match optim.algorithm {
            Algorithm::Adamw | Algorithm::Sgd => None,
            Algorithm::Lars => Some(Adaptation { trust: optim.trust, rule: RateRule::Lars }),
            Algorithm::Larc => Some(Adaptation { trust: optim.trust, rule: RateRule::Larc }),
        };
        let rule = match optim.algorithm {
            Algorithm::Adamw => Rule::AdamW(AdamW { betas: optim.betas }),
            Algorithm::Sgd | Algorithm::Lars | Algorithm::Larc => {
                Rule::Sgd(Sgd { momentum: optim.momentum, nesterov: optim.nesterov, adaptation })
            }
        };
        let clip_norm = optim.clip_norm();
        let clip = optim.clip;
        Optimizer { rule, clip_norm, clip, decays_vectors: optim.decay_vectors }
    }

    /// Returns the configuration of the training step.
    pub fn step_config(&self) -> StepConfig {
        StepConfig {
            seed: self.recipe.seed,
            input: self.pixel_input(),
            n_kept_graphs: self.keep,
            segment_len: self.segment,
            max_unit_numel: self.recipe.run.max_unit_parameters,
            n_workers: self.n_workers,
            n_micro_batches: self.n_micro_batches(),
            n_stat_groups: self.recipe.optim.n_stat_groups(),
            sharding: self.recipe.run.shard,
            offload: self.recipe.run.offload,
            precision: self.recipe.optim.precision,
            rates: LayerRates {
                layer_decay: self.recipe.optim.layer_decay,
                patch_rate: self.recipe.optim.patch_rate,
                frozen_steps: self.frozen_backbone_steps,
                trained_units: self.recipe.optim.trained_units,
            },
            adapter: self.recipe.optim.adapter,
        }
    }

    /// Returns the conversion of pixels into the input of the first unit.
    pub fn pixel_input(&self) -> PixelInput {
        PixelInput { cell_px: self.recipe.model.cell_px(), pixels: self.recipe.data.pixels() }
    }

    /// Returns the views of an image: those of the first choice of sizes, if there are several.
    pub fn multicrop(&self) -> MultiCrop {
        self.recipe.views.multicrop().expect("views that were checked")
    }

    /// Returns the views of every batch.
    pub fn view_mix(&self) -> ViewMix {
        self.recipe.views.view_mix().expect("views that were checked")
    }

    /// Builds the method.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] with the key and the reason.
    pub fn method(&self) -> Result<Box<dyn Method>, TrainError> {
        let views = self.recipe.views.multicrop().map_err(|reason| self.recipe.error(reason))?;
        let model = self.recipe.model.clone();
        let length = self.length();
        let seed = self.recipe.seed;
        let cx = MethodContext { views, model, length, seed };
        self.recipe.method.build(&cx).map_err(|reason| self.recipe.error(reason))
    }

    /// Checks that the initial `weights` have the heads of the method, where `init.heads` is set.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] with the parameter and both shapes.
    pub fn check_initial_heads(&self, weights: &[NamedTensor]) -> Result<(), TrainError> {
        if !self.recipe.init.as_ref().is_some_and(|init| init.heads) {
            return Ok(());
        }
        let networks = self.method()?.networks();
        let initialized = networks.iter().filter(|network| network.starts_from_weights());
        for unit in initialized.flat_map(|network| &network.heads).flat_map(|head| &head.units) {
            let layout = unit.layout(1);
            for slot in &layout.params {
                let name = layout.full_name(slot);
                let shape = &slot.spec.shape;
                let initial = weights.iter().find(|tensor| tensor.name == name);
                let initial_shape = initial.map(|tensor| &tensor.shape);
                if initial_shape != Some(shape) {
                    let description = initial_shape.map_or("absent".into(), |shape| format!("{shape:?}"));
                    return Err(self.recipe.error(format!(
                        "init.heads: {name} is {shape:?} in the recipe and {description} in the weights: \
                         give method the head sizes of their run, or set init.heads=false"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Checks that the run may start from random weights.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] with the key of a setting that needs trained weights.
    pub fn check_random_start(&self) -> Result<(), TrainError> {
        if self.recipe.optim.adapter.is_some() {
            return Err(self.recipe.error(
                "optim.adapter: the backbone would keep its random weights, because only adapters and heads \
                 are trained: give trained weights with --init of `ocelli pretrain` or --checkpoint of \
                 `ocelli finetune`, or remove optim.adapter"
                    .into(),
            ));
        }
        match self.method()?.needs_trained_weights() {
            Some(key) => Err(self.recipe.error(format!(
                "{key} is 0, so the first step would use random weights as trained ones: give --init \
                 WEIGHTS or --fork RUN, or a later {key}"
            ))),
            None => Ok(()),
        }
    }

    /// Creates the trainer of the run, at step zero, on `device`.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] with the key and the reason.
    pub fn trainer(&self, comm: Communicator, device: &Device) -> Result<Trainer, TrainError> {
        let method = self.method()?;
        let optimizer = self.optimizer();
        let config = self.step_config();
        Ok(Trainer::new(&self.recipe.model, method, comm, optimizer, config, device.clone()))
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use crate::conformance::plans;

    #[test]
    fn probes_are_due_at_intervals_and_after_the_last_step() {
        let mut plan = plans(&[]).remove(0);
        plan.total_steps = 10;
        for (every, due) in [(0, vec![10]), (3, vec![3, 6, 9, 10]), (5, vec![5, 10]), (20, vec![10])] {
            plan.recipe.run.probe_every_steps = every;
            for done in 0..=12 {
                let left = due.iter().filter(|step| **step > done).count() as u64;
                assert_eq!(plan.n_probes_after(done), left, "every {every}, after {done}");
            }
        }
    }

    #[test]
    fn both_ends_of_the_warm_up_scale_with_the_batch_size() {
        for (scaling, factor) in [("linear", 1.0 / 64.0), ("sqrt", 0.125), ("fixed", 1.0)] {
            let scaling = format!("optim.lr_scaling={scaling}");
            let overrides = [
                "optim.batch_size=4",
                "optim.lr=0.4",
                "optim.start_lr=0.1",
                "optim.warmup={steps=5}",
                &scaling,
            ];
            let lr = plans(&overrides).remove(0).schedules().lr;
            assert!((lr.at(0) - 0.1 * factor).abs() < 1e-12, "{scaling}");
            assert!((lr.at(4) - 0.4 * factor).abs() < 1e-12, "{scaling}");
        }
    }
}
