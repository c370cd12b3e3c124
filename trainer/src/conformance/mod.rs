//! Conformance tests of every backbone and every method, from the `examples` of both: each backbone
//! is tested with one method, and each method with two backbones, one of which has statistics over
//! the batch. With `RUN_SLOW_TESTS=1` all pairs are tested.

mod adapter;
mod collectives;
mod columns;
mod division;
mod fixed;
mod levels;
mod methods;
mod step;
mod units;

use augment::{Batch, MultiCrop};
use networks::Normalization;
use networks::backbone::ModelConfig;

use crate::bench::noise::noise_batch;
use crate::method::MethodConfig;
use crate::method::check::idle_setting_of_masks;
use crate::method::network::{NetworkSpec, UpdateRule};
use crate::{Plan, Recipe};

/// Number of images in a global batch.
const BATCH: usize = 8;

/// Recipe of all plans; `[model]`, `[method]` and `[views]` are replaced.
const BASE: &str = r#"
name = "conformance"
seed = 3
[model]
arch = "toy"
width = 6
[method]
name = "toy"
scores = 5
[views]
preset = "dino"
global_px = 16
local_px = 8
n_local = 2
[optim]
batch_size = 8
micro_batches = 4
length = { steps = 12 }
lr = 1e-2
warmup = { steps = 3 }
[run]
workers = 1
"#;

/// Parts of the errors for pairs of a backbone and a method that cannot be combined: masks need a
/// backbone with tokens, and the network that a method brings must take images with as many
/// channels and have patches of the same size.
const DO_NOT_FIT: [&str; 3] =
    ["no tokens to mask", "both networks see the same views", "masked patches are compared one by one"];

/// Returns the resolved plans of all pairs of a backbone and a method, with `overrides`. Pairs in
/// which a setting has no effect are left out: its parameters would never be trained.
pub(crate) fn plans(overrides: &[&str]) -> Vec<Plan> {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    let base = Recipe::parse(BASE, "conformance", &overrides).unwrap();
    let mut plans = Vec::new();
    let all_pairs = std::env::var_os("RUN_SLOW_TESTS").is_some();
    let models = ModelConfig::examples();
    for (model_index, model) in models.iter().enumerate() {
        // A model with a setting of masked training is paired with the first method that masks.
        let mut lacks_masks = model.setting_of_masks().is_some();
        for (method_index, (method, views)) in MethodConfig::examples().into_iter().enumerate() {
            let is_first_method = method_index == 0;
            let is_outer_model = model_index == 0 || model_index + 1 == models.len();
            if !(all_pairs || lacks_masks || is_first_method || is_outer_model) {
                continue;
            }
            let model = model.clone();
            let mut views = scaled(views, model.stride_px() as u32);
            let mut data = base.data.clone();
            let channels = model.n_channels();
            if channels != data.channels {
                views = views.into_multichannel(0.3, 0.1);
                data.normalization = Normalization::half(channels);
                data.channels = channels;
            }
            let recipe = Recipe { model, method, views: views.into(), data, ..base.clone() };
            match crate::resolve(recipe, 100) {
                Err(error) if DO_NOT_FIT.iter().any(|reason| error.to_string().contains(reason)) => {}
                plan => {
                    let plan = plan.unwrap();
                    let networks = plan.method().unwrap().networks();
                    if idle_setting_of_masks(&networks, &plan.recipe.model).is_none() {
                        lacks_masks = false;
                        plans.push(plan);
                    }
                }
            }
        }
    }
    plans
}

/// Scales the views up by the smallest factor for which `stride_px` divides their sizes.
fn scaled(mut views: MultiCrop, stride_px: u32) -> MultiCrop {
    let factor = (1..=stride_px)
        .find(|factor| views.crops.iter().all(|crop| (crop.size_px * factor).is_multiple_of(stride_px)))
        .unwrap();
    views.crops.iter_mut().for_each(|crop| crop.size_px *= factor);
    views
}

/// Returns the first of `plans` of each backbone.
fn first_by_backbone(plans: Vec<Plan>) -> Vec<Plan> {
    let mut chosen: Vec<Plan> = Vec::new();
    for plan in plans {
        if chosen.iter().all(|other| other.recipe.model != plan.recipe.model) {
            chosen.push(plan);
        }
    }
    chosen
}

/// Returns the specification of the trained network of `plan`.
fn trained_network(plan: &Plan) -> NetworkSpec {
    let networks = plan.method().unwrap().networks();
    networks.into_iter().find(|network| network.update_rule == UpdateRule::Gradient).unwrap()
}

/// Returns the names of the method and the backbone, for messages.
pub(crate) fn pair(plan: &Plan) -> String {
    format!("{:?} on {:?}", plan.recipe.method, plan.recipe.model)
}

/// Returns the global batch of `step`: noise whose brightness increases from image to image. Means
/// of plain noise hardly differ, and a batch normalization would magnify their differences, and
/// with them their rounding.
fn batch(plan: &Plan, step: u64) -> Batch {
    let mix = plan.view_mix();
    let mut batch =
        noise_batch(mix.multicrop(plan.recipe.seed, step), plan.recipe.data.format(), BATCH, step);
    for (i, sample) in batch.samples.iter_mut().enumerate() {
        for byte in sample.groups.iter_mut().flatten() {
            *byte = (usize::from(*byte) * (i + 2) / (BATCH + 1)) as u8;
        }
    }
    batch
}
