//! The choice: the largest candidate that sees the images often enough, or else the one that comes
//! nearest to it.
//!
//! ```text
//! epochs = hours · batch / (step · images)
//! ```
//!
//! Candidates are tried from the cheapest on, until one has too few epochs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kernels::device::{DeviceKind, Opened};
use networks::{ModelConfig, Positions};
use pipeline::Storage;
use pipeline::words::{counted, thousands};
use trainer::recipe::is_set;
use trainer::run::format_time;
use trainer::{Length, Plan, Recipe, TrainError};

use super::images::Images;
use super::speed::Speed;
use super::table::{
    CANDIDATES, Candidate, Given, LONGEST_PUBLISHED_EPOCHS, Role, SMALL_PX, few_images_warning_for,
};
use crate::data::open_sampled;
use crate::error::SessionError;
use crate::frozen;
use crate::initial::{self, Initial};
use crate::network::model_of;
use crate::stages::plan_alone;

/// Seconds of an hour.
const HOUR_S: f64 = 3600.0;

/// Largest side of the views with which transformers are continued: that of published recipes.
const MOST_VIEW_PX: usize = 224;

/// Key of the images of a step.
const BATCH_SIZE: &str = "optim.batch_size";

/// What a recipe is chosen for.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    /// Hours that the run is to take.
    pub hours: f64,
    /// Built-in recipes: their names and texts.
    pub recipes: &'a [(&'a str, &'a str)],
    /// Shards or folders of images; none if a setting names them.
    pub shards: &'a [String],
    /// Settings of `--set`, which take precedence over those of the choice.
    pub overrides: &'a [String],
    /// Initial state of the run: weights, or nothing.
    pub initial: &'a Initial,
    /// Device that the run computes on.
    pub device: &'a Opened,
}

/// A recipe that was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// The recipe with its settings, those of the wish, and the shards; its length is that of the
    /// wish.
    pub recipe: Recipe,
    /// Settings of `--set` that change the built-in recipe of this name, besides those of the wish.
    pub settings: Vec<String>,
    /// Weights that the run begins with; none if the recipe distills them.
    pub weights: Option<PathBuf>,
    /// Five lines: method, network, images, batch and length, each with its reason.
    pub lines: Vec<String>,
    /// Warning if there are few images for the network, which the run prints, too.
    pub warning: Option<String>,
}

/// Weights that are given, and the images.
struct Situation {
    given: Given,
    /// Backbone of the weights.
    model: Option<ModelConfig>,
    images: Images,
}

/// A candidate whose step has been estimated.
struct Estimate {
    candidate: &'static Candidate,
    recipe: Recipe,
    settings: Vec<String>,
    /// Why a step has as many images as it has.
    batch_reason: &'static str,
    plan: Plan,
    step_s: f64,
    epochs: f64,
}

/// Chooses a recipe for a process that runs alone.
///
/// # Errors
/// [`SessionError`] when the images or the weights cannot be opened, or if no recipe can be run
/// with the settings of the wish; [`SessionError::NoShards`] without images.
pub fn advise(wish: &Wish<'_>, storage: &Storage) -> Result<Advice, SessionError> {
    if wish.shards.is_empty() && !is_set(wish.overrides, "data.shards") {
        return Err(SessionError::NoShards);
    }
    let model = match &wish.initial.weights {
        Some(path) => Some(model_of(path, &wish.initial.hints)?),
        None => None,
    };
    let given = model.as_ref().map_or(Given::Nothing, kind_of_weights);
    let possible = possible_candidates(wish, given);
    let first = read_first(wish, &possible, model.as_ref())?;
    let dataset = Arc::new(open_sampled(&first.data, storage)?);
    let situation = Situation { given, model, images: Images::inspect(&dataset) };
    let mut speed = Speed::new(wish.device, &dataset, first.data.rules());
    let mut estimates: Vec<Estimate> = Vec::new();
    let mut first_error = None;
    for candidate in suitable(&possible, situation.images) {
        match estimate(wish, candidate, &situation, &mut speed) {
            Ok(estimate) => {
                let is_too_short = estimate.epochs < candidate.least_epochs;
                estimates.push(estimate);
                // Those that follow cost more.
                if is_too_short {
                    break;
                }
            }
            Err(error) => {
                first_error.get_or_insert(error);
            }
        }
    }
    let Some(index) = choose(&estimates) else {
        return Err(first_error.unwrap_or(SessionError::NoChoice));
    };
    let lines = lines(wish, &situation, &estimates, index);
    let Estimate { candidate, recipe, settings, .. } = estimates.swap_remove(index);
    let weights = match candidate.role {
        Role::Continues => wish.initial.weights.clone(),
        Role::FromRandom | Role::Distills => None,
    };
    let has_weights = candidate.role != Role::FromRandom;
    let warning = few_images_warning_for(&recipe, has_weights, situation.images.n);
    Ok(Advice { recipe, settings, weights, lines, warning })
}

/// Returns the kind of weights for the backbone `model`.
fn kind_of_weights(model: &ModelConfig) -> Given {
    match model {
        ModelConfig::Vit(config) if config.image_px < SMALL_PX => Given::SmallTransformer,
        ModelConfig::Vit(config) if config.positions == Positions::Rope => Given::RotaryTransformer,
        ModelConfig::Vit(_) => Given::Transformer,
        _ => Given::Convolutional,
    }
}

/// Returns the candidates for the weights and the device, the cheapest first.
fn possible_candidates(wish: &Wish<'_>, given: Given) -> Vec<&'static Candidate> {
    let is_gpu = wish.device.kind != DeviceKind::Cpu;
    // A teacher is read without hints.
    let has_hints = !wish.initial.hints.is_empty();
    let mut possible = Vec::new();
    for candidate in &CANDIDATES {
        if candidate.is_possible(given, is_gpu) && !(has_hints && candidate.role == Role::Distills) {
            possible.push(candidate);
        }
    }
    possible
}

/// Returns those of `possible` that suit `images`, or the cheapest if none does.
fn suitable(possible: &[&'static Candidate], images: Images) -> Vec<&'static Candidate> {
    let mut suitable = possible.to_vec();
    suitable.retain(|candidate| candidate.suits(images.n, images.side_px));
    if suitable.is_empty() {
        suitable.extend(possible.first());
    }
    suitable
}

/// Reads the first of `possible` that takes the settings of the wish, to open the images as it
/// says. `model` is the backbone of the weights.
fn read_first(
    wish: &Wish<'_>,
    possible: &[&'static Candidate],
    model: Option<&ModelConfig>,
) -> Result<Recipe, SessionError> {
    let mut first_error = None;
    for candidate in possible {
        let settings: Vec<String> = candidate.settings.iter().map(ToString::to_string).collect();
        match read(wish, candidate, &settings, model) {
            Ok(recipe) => return Ok(recipe),
            Err(error) => {
                first_error.get_or_insert(error);
            }
        }
    }
    Err(first_error.unwrap_or(SessionError::NoChoice))
}

/// Reads the recipe of `candidate` with `settings` and those of the wish. `model` is the backbone
/// of the weights.
fn read(
    wish: &Wish<'_>,
    candidate: &Candidate,
    settings: &[String],
    model: Option<&ModelConfig>,
) -> Result<Recipe, SessionError> {
    let name = candidate.recipe;
    let Some((_, text)) = wish.recipes.iter().find(|(built_in, _)| *built_in == name) else {
        let reason = "there is no built-in recipe of this name".to_string();
        return Err(SessionError::Train(TrainError::Recipe { recipe: name.into(), reason }));
    };
    let all: Vec<String> = settings.iter().chain(wish.overrides).cloned().collect();
    let mut recipe = Recipe::parse_with_model(text, name, &all, |weights| match model {
        Some(model) => Ok(model.clone()),
        None => initial::model(wish.initial, None, weights).map_err(|error| error.to_string()),
    })?;
    // Built-in recipes have none: without shards, a setting names them.
    if !wish.shards.is_empty() {
        recipe.data.shards = wish.shards.to_vec();
    }
    recipe.optim.length = Length::from_hours(wish.hours);
    Ok(recipe)
}

/// Returns the settings of `candidate` in `situation`.
fn settings(wish: &Wish<'_>, candidate: &Candidate, situation: &Situation) -> Vec<String> {
    let mut settings: Vec<String> = candidate.settings.iter().map(ToString::to_string).collect();
    if wish.device.kind == DeviceKind::Cpu {
        settings.extend(candidate.cpu_settings.iter().map(ToString::to_string));
    }
    match (candidate.role, &wish.initial.weights, &situation.model) {
        (Role::Distills, Some(path), _) => settings.push(teacher_setting(path)),
        (Role::Continues, _, Some(model)) => settings.extend(view_settings(model, situation.given)),
        _ => {}
    }
    settings
}

/// Returns the setting with which the weights in `path` are distilled.
fn teacher_setting(path: &Path) -> String {
    format!("method.teacher.weights={}", path.display())
}

/// Returns the sizes of the views with which the weights of `model` are continued: those that it is
/// for, as far as its patches allow, at most 224 px, and 3/7 of that for local views, as 96 of 224.
fn view_settings(model: &ModelConfig, given: Given) -> Vec<String> {
    let stride_px = model.stride_px();
    let global_px = MOST_VIEW_PX.min(model.image_px()).next_multiple_of(stride_px);
    let local_px = ((3 * global_px / 7 + stride_px / 2) / stride_px).max(1) * stride_px;
    match given {
        Given::Transformer | Given::RotaryTransformer => {
            vec![format!("views.global_px={global_px}"), format!("views.local_px={local_px}")]
        }
        Given::SmallTransformer => {
            vec![format!("views.crops.0.size_px={global_px}"), format!("views.crops.1.size_px={local_px}")]
        }
        // The recipe has views that the strides of all convolutional networks divide.
        Given::Convolutional | Given::Nothing => Vec::new(),
    }
}

/// Estimates the step of `candidate` and its epochs.
fn estimate(
    wish: &Wish<'_>,
    candidate: &'static Candidate,
    situation: &Situation,
    speed: &mut Speed<'_>,
) -> Result<Estimate, SessionError> {
    let mut settings = settings(wish, candidate, situation);
    let model = situation.model.as_ref();
    let mut recipe = read(wish, candidate, &settings, model)?;
    let n_images = situation.images.n;
    let batch_reason = if is_set(wish.overrides, BATCH_SIZE) {
        "as --set says"
    } else if recipe.optim.batch_size as u64 > n_images {
        settings.push(format!("{BATCH_SIZE}={}", batch_within(recipe.optim.batch_size, n_images)));
        recipe = read(wish, candidate, &settings, model)?;
        "so that no image is in a batch twice"
    } else if is_set(&settings, BATCH_SIZE) {
        "fewer than in the recipe, so that there are more steps"
    } else {
        "as in the recipe"
    };
    let mut known = recipe.clone();
    frozen::open(&mut known, None)?;
    let plan = plan_alone(known, wish.device)?;
    let step_s = speed.step_s(&plan)?;
    let batch_size = plan.recipe.optim.batch_size as f64;
    let epochs = HOUR_S * wish.hours / step_s * batch_size / n_images.max(1) as f64;
    Ok(Estimate { candidate, recipe, settings, batch_reason, plan, step_s, epochs })
}

/// Halves `batch_size` until no more than `n_images` are left, so that none repeats within a batch.
fn batch_within(batch_size: usize, n_images: u64) -> usize {
    let mut within = batch_size;
    while within as u64 > n_images && within > 1 {
        within /= 2;
    }
    within
}

/// Returns the index of the estimate that is chosen: the last with enough epochs, or else the one
/// with the largest share of them. `None` if there are none.
fn choose(estimates: &[Estimate]) -> Option<usize> {
    let mut chosen = None;
    let mut largest = f64::NEG_INFINITY;
    for (index, estimate) in estimates.iter().enumerate() {
        // No share above 1 is better than another one: the later candidate is larger.
        let share = (estimate.epochs / estimate.candidate.best_epochs).min(1.0);
        if share > largest || share >= 1.0 {
            largest = share;
            chosen = Some(index);
        }
    }
    chosen
}

/// Describes the choice `index` and its reasons.
fn lines(wish: &Wish<'_>, situation: &Situation, estimates: &[Estimate], index: usize) -> Vec<String> {
    let chosen = &estimates[index];
    let Estimate { candidate, recipe, batch_reason, plan, step_s, epochs, .. } = chosen;
    let hours = hours_in_words(wish.hours);
    let is_too_short = *epochs < candidate.least_epochs;
    let network_reason = match estimates.get(index + 1) {
        Some(larger) => format!(
            "the next larger choice, {} with views of {} px, would see each image {} times in {hours}, \
             and it is chosen from {} on",
            describe_network(&larger.recipe.model),
            view_px(&larger.plan),
            rounded(larger.epochs),
            rounded(larger.candidate.best_epochs)
        ),
        None if is_too_short => "a larger one would see each image even less often".into(),
        None => "no larger choice suits the images, the weights and this machine".into(),
    };
    let images_reason = match (candidate.view_px, situation.images.side_px) {
        (None, _) => "the size that the weights are for".to_string(),
        (Some(_), Some(side_px)) => {
            format!("the images have {side_px} px (the short side, the median of a few)")
        }
        (Some(_), None) => "the size of the images is not known, because they are on a server".to_string(),
    };
    let length_reason = if is_too_short {
        format!("fewer than {} may help little: give more hours, if you can", rounded(candidate.least_epochs))
    } else if *epochs > LONGEST_PUBLISHED_EPOCHS {
        format!(
            "the longest published run has {}: fewer hours, or more images, may do as well",
            rounded(LONGEST_PUBLISHED_EPOCHS)
        )
    } else {
        candidate.evidence.to_string()
    };
    vec![
        format!(
            "method: {} (recipe {}), because {}",
            recipe.method.title(),
            candidate.recipe,
            candidate.reason
        ),
        format!("network: {}; {network_reason}", describe_network(&recipe.model)),
        format!("images: views of {} px; {images_reason}", view_px(plan)),
        format!(
            "batch: {} a step, {batch_reason}; a step takes about {} here, by an estimate",
            counted(recipe.optim.batch_size as u64, "image"),
            format_time(*step_s)
        ),
        format!(
            "length: about {} passes over {} in {hours}; {length_reason}",
            rounded(*epochs),
            counted(situation.images.n, "image")
        ),
    ]
}

/// Returns the side of the first views of `plan` in pixels.
fn view_px(plan: &Plan) -> u32 {
    plan.multicrop().groups().first().map_or(0, |group| group.size_px)
}

/// Describes a backbone in a few words.
fn describe_network(model: &ModelConfig) -> String {
    let millions = model.n_params() as f64 / 1e6;
    match model {
        ModelConfig::Vit(config) => {
            format!("a ViT of {millions:.1} M parameters with patches of {} px", config.patch_px)
        }
        _ => format!("a convolutional network of {millions:.1} M parameters"),
    }
}

/// Formats a number with one decimal below 10, and with none above.
fn rounded(number: f64) -> String {
    if number < 9.95 { format!("{number:.1}") } else { thousands(number.round() as u64) }
}

/// Formats hours with their noun: `1 hour`, `0.5 hours`.
fn hours_in_words(hours: f64) -> String {
    if hours == 1.0 { "1 hour".into() } else { format!("{hours} hours") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the backbone of weights of this kind.
    fn model(given: Given) -> ModelConfig {
        let text = match given {
            Given::SmallTransformer => {
                r#"{"arch": "vit", "image_px": 32, "patch_px": 8, "width": 128, "depth": 4, "heads": 4}"#
            }
            Given::Nothing | Given::Transformer => {
                r#"{"arch": "vit", "image_px": 518, "patch_px": 14, "width": 384, "depth": 12, "heads": 6}"#
            }
            Given::RotaryTransformer => {
                r#"{"arch": "vit", "image_px": 224, "patch_px": 16, "width": 384, "depth": 12, "heads": 6,
                    "positions": "rope"}"#
            }
            Given::Convolutional => r#"{"arch": "resnet", "image_px": 224, "depth": 18}"#,
        };
        serde_json::from_str(text).unwrap()
    }

    /// Reads the built-in recipe of `candidate` with its settings for a CPU.
    fn recipe(candidate: &Candidate) -> Recipe {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/recipes");
        let text = std::fs::read_to_string(format!("{folder}/{}.toml", candidate.recipe)).unwrap();
        let given = candidate.given[0];
        let all = candidate.settings.iter().chain(candidate.cpu_settings);
        let mut settings: Vec<String> = all.map(ToString::to_string).collect();
        if candidate.role == Role::Continues {
            settings.extend(view_settings(&model(given), given));
        }
        Recipe::parse_with_model(&text, candidate.recipe, &settings, |_| Ok(model(given))).unwrap()
    }

    #[test]
    fn kinds_of_weights_are_recognized() {
        for given in
            [Given::SmallTransformer, Given::Transformer, Given::RotaryTransformer, Given::Convolutional]
        {
            assert_eq!(kind_of_weights(&model(given)), given);
        }
    }

    /// Every candidate is a recipe that can be run, with views of its size, and its lengths fit
    /// runs of any length.
    #[test]
    fn candidates_are_recipes() {
        for candidate in &CANDIDATES {
            let recipe = recipe(candidate);
            if let Some(view_px) = candidate.view_px {
                assert_eq!(recipe.evaluated_px(), view_px as usize, "{candidate:?}");
            }
            // A teacher has to be read first.
            if candidate.role == Role::Distills {
                continue;
            }
            let plan = trainer::resolve(recipe, 1 << 20).unwrap();
            let mut short = plan.recipe;
            short.optim.length = Length::Steps(100);
            let plan = trainer::resolve(short, 1 << 20).unwrap();
            assert!(plan.warmup_steps <= 10, "{candidate:?}: {}", plan.warmup_steps);
        }
    }

    /// Local views are 96 px of 224, and 98 where patches have 14.
    #[test]
    fn views_have_whole_patches() {
        let settings = view_settings(&model(Given::Transformer), Given::Transformer);
        assert_eq!(settings, ["views.global_px=224", "views.local_px=98"]);
        let settings = view_settings(&model(Given::RotaryTransformer), Given::RotaryTransformer);
        assert_eq!(settings, ["views.global_px=224", "views.local_px=96"]);
        let settings = view_settings(&model(Given::SmallTransformer), Given::SmallTransformer);
        assert_eq!(settings, ["views.crops.0.size_px=32", "views.crops.1.size_px=16"]);
    }

    /// Returns estimates of the first candidates, with these epochs.
    fn estimates(epochs: &[f64]) -> Vec<Estimate> {
        let mut estimates = Vec::new();
        for (candidate, epochs) in CANDIDATES.iter().zip(epochs) {
            let recipe = recipe(candidate);
            let plan = trainer::resolve(recipe.clone(), 1000).unwrap();
            estimates.push(Estimate {
                candidate,
                recipe,
                settings: Vec::new(),
                batch_reason: "as in the recipe",
                plan,
                step_s: 1.0,
                epochs: *epochs,
            });
        }
        estimates
    }

    /// The first three are best from 33 epochs on, the fourth from 100.
    #[test]
    fn the_largest_with_enough_epochs_is_chosen() {
        assert_eq!(choose(&estimates(&[1000.0, 300.0, 40.0, 5.0])), Some(2));
        assert_eq!(choose(&estimates(&[1000.0, 300.0, 34.0, 120.0])), Some(3));
        assert_eq!(choose(&estimates(&[1000.0, 20.0, 30.0])), Some(0));
        assert_eq!(choose(&estimates(&[3.0, 1.0])), Some(0), "the nearest");
        assert_eq!(choose(&[]), None);
    }

    #[test]
    fn a_batch_has_no_image_twice() {
        assert_eq!(batch_within(64, 100), 64);
        assert_eq!(batch_within(64, 60), 32);
        assert_eq!(batch_within(512, 1), 1);
    }

    /// Five lines, each with what was chosen and why.
    #[test]
    fn a_choice_is_told_in_five_lines() {
        let initial = Initial::default();
        let device = Opened::cpu();
        let wish = Wish {
            hours: 8.0,
            recipes: &[],
            shards: &[],
            overrides: &[],
            initial: &initial,
            device: &device,
        };
        let images = Images { n: 9469, side_px: Some(160) };
        let situation = Situation { given: Given::Nothing, model: None, images };
        let lines = lines(&wish, &situation, &estimates(&[1000.0, 300.0, 61.0, 1.4]), 2);
        assert_eq!(lines.len(), 5);
        for (line, parts) in lines.iter().zip([
            ["method: LeJEPA (recipe lejepa_cifar), because ", "docs/methods.md"],
            ["network: a ViT of 5.", "views of 128 px, would see each image 1.4 times in 8 hours"],
            ["images: views of 64 px; ", "160 px"],
            ["batch: 64 images a step, as in the recipe; ", "about 1.0 s"],
            ["length: about 61 passes over 9,469 images in 8 hours; ", "33 passes"],
        ]) {
            assert!(line.starts_with(parts[0]) && line.contains(parts[1]), "{line}");
        }
    }
}
