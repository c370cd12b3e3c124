//! The recipe resolved: every length in steps, every default filled in.

use augment::MultiCrop;
use burn_tensor::Device;
use serde::{Deserialize, Serialize};

use super::Recipe;
use super::views::{Dinov2Views, PresetSizes, ViewsConfig};
use crate::comm::communicator::Comm;
use crate::comm::topology::Place;
use crate::device::workers::or_cores;
use crate::error::TrainError;
use crate::estimate::{Spread, keep_that_fits, of_plan};
use crate::model::backbone::Readout;
use crate::optim::AdamW;
use crate::schedule::{Ramp, Schedules, WarmupCosine};
use crate::step::{StepConfig, Trainer};

/// A run, resolved against its data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Samples of the data set.
    pub n_samples: u64,
    /// Steps of the run.
    pub total_steps: u64,
    /// Steps of the learning rate's warm-up.
    pub warmup_steps: u64,
    /// Steps of the teacher temperature's warm-up.
    pub temp_warmup_steps: u64,
    /// Steps during which the last layer is frozen.
    pub freeze_last_layer_steps: u64,
    /// Worker threads of a rank: the order in which their gradients are summed is part of the result.
    pub n_workers: usize,
    /// Threads of a rank that decode and augment.
    #[serde(default)]
    pub n_data_threads: usize,
    /// Ranks.
    #[serde(default = "one")]
    pub world_size: usize,
    /// Backbone units that keep their graph, from the last on. It changes no bit of the result.
    #[serde(default = "all_units")]
    pub keep: usize,
    /// The recipe as written.
    pub recipe: Recipe,
}

/// What a rank has to work with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Room {
    /// Cores.
    pub n_cores: usize,
    /// Threads that compute: one for each core, or one that keeps a GPU busy.
    pub n_workers: usize,
    /// Bytes of memory where it computes.
    pub bytes: f64,
}

impl Plan {
    /// Resolves and checks `recipe` for a data set of `n_samples`.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] with the key and what is wrong with it.
    pub fn resolve(recipe: Recipe, n_samples: u64) -> Result<Self, TrainError> {
        let bad = |reason: String| TrainError::Recipe { recipe: recipe.name.clone(), reason };
        recipe.model.validate().map_err(bad)?;
        recipe.method.validate().map_err(bad)?;
        let optim = &recipe.optim;
        if optim.batch_size == 0 {
            return Err(bad("optim.batch_size must be at least 1".into()));
        }
        if recipe.run.log_every_steps == 0 || recipe.run.checkpoint_every_steps == 0 {
            return Err(bad("run.log_every_steps and run.checkpoint_every_steps must be at least 1".into()));
        }
        check_values(&recipe).map_err(bad)?;
        check_views(&recipe).map_err(bad)?;
        let steps = |key: &str, duration: &crate::recipe::duration::Duration, total| {
            duration
                .steps(n_samples, optim.batch_size, total)
                .map_err(|reason| bad(format!("{key}: {reason}")))
        };
        let total_steps = steps("optim.length", &optim.length, None)?;
        if total_steps == 0 {
            return Err(bad("optim.length is less than one step".into()));
        }
        let total = Some(total_steps);
        Ok(Self {
            n_samples,
            total_steps,
            warmup_steps: steps("optim.warmup", &optim.warmup, total)?,
            temp_warmup_steps: steps("teacher.temp_warmup", &recipe.teacher.temp_warmup, total)?,
            freeze_last_layer_steps: steps("optim.freeze_last_layer", &optim.freeze_last_layer, total)?,
            n_workers: or_cores(recipe.run.workers),
            n_data_threads: or_cores(recipe.run.data_threads),
            world_size: 1,
            keep: recipe.run.keep.unwrap_or(all_units()),
            recipe,
        })
    }

    /// The plan over `world_size` ranks, each of which has `room`. Where the recipe leaves it open, as many
    /// units keep their graph as fit.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] when batch, parts or groups do not divide.
    pub fn over(mut self, world_size: usize, room: Room) -> Result<Self, TrainError> {
        self.world_size = world_size;
        if self.recipe.run.workers == 0 {
            self.n_workers = room.n_workers.max(1);
        }
        if self.recipe.run.data_threads == 0 {
            self.n_data_threads = room.n_cores.max(1);
        }
        let bad = |reason: String| TrainError::Recipe { recipe: self.recipe.name.clone(), reason };
        let n_parts = self.n_parts();
        if !n_parts.is_multiple_of(world_size) {
            return Err(bad(format!(
                "optim.micro_batches {n_parts} is no multiple of {world_size} ranks: each takes as many"
            )));
        }
        let batch_size = self.recipe.optim.batch_size;
        if !batch_size.is_multiple_of(n_parts) {
            return Err(bad(format!(
                "optim.batch_size {batch_size} does not divide into {n_parts} parts, {} on each of {world_size} \
                 ranks",
                n_parts / world_size
            )));
        }
        self.place(0).map_err(bad)?;
        if self.recipe.run.keep.is_none() {
            self.keep = keep_that_fits(&of_plan(&self), &self.spread(), room.bytes).unwrap_or(0);
        }
        Ok(self)
    }

    /// Parts of a global batch, N.
    pub fn n_parts(&self) -> usize {
        match self.recipe.optim.micro_batches {
            0 => self.world_size,
            n => n,
        }
    }

    /// Where `rank` stands.
    ///
    /// # Errors
    /// In words, when groups do not divide the ranks.
    pub fn place(&self, rank: usize) -> Result<Place, String> {
        let run = &self.recipe.run;
        Place::new(rank, self.world_size, run.shard, run.shard_group)
    }

    /// The schedules of the run.
    pub fn schedules(&self) -> Schedules {
        let (optim, teacher) = (&self.recipe.optim, &self.recipe.teacher);
        let cosine = |ends: [f64; 2]| WarmupCosine::cosine(ends[0], ends[1], self.total_steps);
        Schedules {
            lr: WarmupCosine {
                start: 0.0,
                peak: optim.lr * optim.batch_size as f64 / 256.0,
                end: optim.min_lr,
                warmup_steps: self.warmup_steps,
                total_steps: self.total_steps,
            },
            weight_decay: cosine(optim.weight_decay),
            teacher_temp: Ramp {
                from: teacher.temp[0],
                to: teacher.temp[1],
                ramp_steps: self.temp_warmup_steps,
            },
            teacher_decay: cosine(teacher.decay),
            freeze_last_layer_steps: self.freeze_last_layer_steps,
        }
    }

    /// The optimizer.
    pub fn optimizer(&self) -> AdamW {
        let optim = &self.recipe.optim;
        AdamW { betas: optim.betas, clip_norm: optim.clip_norm, clip: optim.clip }
    }

    /// How steps are taken.
    pub fn step_config(&self) -> StepConfig {
        StepConfig {
            seed: self.recipe.seed,
            patch_px: self.recipe.model.patch_px(),
            keep: self.keep,
            n_workers: self.n_workers,
            n_parts: self.n_parts(),
            sharding: self.recipe.run.shard,
            offload: self.recipe.run.offload,
            precision: self.recipe.optim.precision,
        }
    }

    /// How the run is spread, for estimates.
    pub fn spread(&self) -> Spread {
        let step = self.step_config();
        let rank_batch = self.recipe.optim.batch_size / self.world_size;
        Spread {
            world_size: self.world_size,
            group_size: self.place(0).map_or(self.world_size, |place| place.group_size),
            sharding: step.sharding,
            keep: step.keep,
            rank_batch,
            rank_parts: (self.n_parts() / self.world_size).max(1),
            workers: self.n_workers.min(rank_batch),
            precision: step.precision,
            offload: step.offload,
        }
    }

    /// The views of an image.
    pub fn multicrop(&self) -> MultiCrop {
        self.recipe.views.multicrop()
    }

    /// The first key in which the recipes differ, `[run]` aside, with both values.
    pub fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        let flat = |plan: &Self| {
            let mut flat = Vec::new();
            if let Ok(table) = toml::Table::try_from(&plan.recipe) {
                flatten("", &toml::Value::Table(table), &mut flat);
            }
            flat.retain(|(key, _)| !key.starts_with("run."));
            flat.push(("n_samples".into(), plan.n_samples.to_string()));
            flat
        };
        let (a, b) = (flat(self), flat(other));
        let find = |key: &String, list: &[(String, String)]| {
            list.iter().find(|(k, _)| k == key).map_or("absent".into(), |(_, value)| value.clone())
        };
        a.iter()
            .chain(&b)
            .map(|(key, _)| (key.clone(), find(key, &a), find(key, &b)))
            .find(|(_, x, y)| x != y)
    }
}

/// The network under training that `plan` describes, at step zero, on `device`.
pub fn trainer_of(plan: &Plan, comm: Comm, device: &Device) -> Trainer {
    let model = &plan.recipe.model;
    let method = plan.recipe.method.build(plan.multicrop(), model.width());
    Trainer::new(
        model.units(Readout::Class),
        method,
        comm,
        plan.optimizer(),
        plan.step_config(),
        device.clone(),
    )
}

fn one() -> usize {
    1
}

/// More than any network has.
fn all_units() -> usize {
    u32::MAX as usize
}

/// Values that would do harm without a word: a negative clip norm turns every gradient round.
fn check_values(recipe: &Recipe) -> Result<(), String> {
    let (optim, teacher) = (&recipe.optim, &recipe.teacher);
    let within = |key: &str, value: f64, low: f64, high: f64| {
        if value >= low && value <= high {
            return Ok(());
        }
        Err(format!("{key} is {value} and must lie in {low}..={high}"))
    };
    const MOST: f64 = 1e6;
    within("optim.lr", optim.lr, 0.0, MOST)?;
    within("optim.min_lr", optim.min_lr, 0.0, MOST)?;
    within("optim.clip_norm (0 for none)", optim.clip_norm, 0.0, MOST)?;
    within("data.max_bad_rate", recipe.data.max_bad_rate, 0.0, 1.0)?;
    within("run.workers (0 for one a core)", recipe.run.workers as f64, 0.0, 4096.0)?;
    within("run.data_threads (0 for one a core)", recipe.run.data_threads as f64, 0.0, 4096.0)?;
    for i in 0..2 {
        within("optim.betas", optim.betas[i], 0.0, 1.0 - 1e-9)?;
        within("optim.weight_decay", optim.weight_decay[i], 0.0, MOST)?;
        within("teacher.decay", teacher.decay[i], 0.0, 1.0)?;
        within("teacher.temp", teacher.temp[i], f64::MIN_POSITIVE, MOST)?;
    }
    Ok(())
}

fn check_views(recipe: &Recipe) -> Result<(), String> {
    let multicrop = recipe.views.multicrop();
    if let ViewsConfig::Dino(PresetSizes { global_px, local_px, n_local })
    | ViewsConfig::Dinov2(Dinov2Views { global_px, local_px, n_local, .. }) = &recipe.views
        && global_px == local_px
        && *n_local > 0
    {
        return Err(format!(
            "views.local_px equals views.global_px, {global_px}: the teacher sees all views of the first size, \
             so that local ones need another"
        ));
    }
    multicrop.validate().map_err(|error| format!("views.{error}"))?;
    let patch_px = recipe.model.patch_px() as u32;
    if let Some(crop) = multicrop.crops.iter().find(|crop| !crop.size_px.is_multiple_of(patch_px)) {
        return Err(format!(
            "views: a view of {} px does not divide by model.patch_px {patch_px}",
            crop.size_px
        ));
    }
    match multicrop.groups().first() {
        Some(group) if group.n_views >= 2 => Ok(()),
        _ => Err("views: the first size needs two views or more, one to predict the other".into()),
    }
}

fn flatten(prefix: &str, value: &toml::Value, out: &mut Vec<(String, String)>) {
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table {
                let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&key, value, out);
            }
        }
        other => out.push((prefix.into(), other.to_string())),
    }
}
