//! Recipes by name or by file.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use kernels::device::Opened;
use networks::ModelConfig;
use pipeline::Storage;
use pipeline::magic::{FileKind, recognize_file};
use session::{Advice, Initial, Wish, advise, initial_model, open_frozen, trained_head};
use trainer::recipe::{StatedKeys, is_set};
use trainer::{Plan, Recipe};

use crate::console::say;
use crate::guesses;
use crate::progress::Activity;

/// Lists recipes by their names, with their texts.
macro_rules! recipes {
    ($($name:literal)*) => {
        &[$(($name, include_str!(concat!("../recipes/", $name, ".toml")))),*]
    };
}

/// Recipes that ship with the program, by name.
pub(crate) const BUILT_IN: &[(&str, &str)] = recipes! {
    "quickstart" "barlow_twins_cifar" "byol_cifar" "classify_cifar" "data2vec_cifar" "dino_cifar"
    "dino_resnet50" "dino_shapes" "dino_vits16" "dino_vits16_boosted" "dino_vits16_released"
    "dinov2_cifar" "dinov2_continue" "dinov2_vitg14" "dinov2_vitl14" "dinov2_vitl16" "dinov2_vits14"
    "dinov3_cifar" "dinov3_continue" "dinov3_vit7b16" "dinov3_vit7b16_gram" "dinov3_vit7b16_highres"
    "dinov3_vitl16_distilled" "dinov3_vitl16_im1k" "distill_convnext_t" "distill_vits16" "finetune"
    "finetune_dino_vits16" "finetune_dinov2" "finetune_mae_vitb16"
    "ibot_vits16" "ijepa_cifar" "lejepa_cifar" "lejepa_vits16" "lejepa_vits8_imagenette" "mae_cifar"
    "moco_cifar" "moco_v3_resnet50" "moco_v3_vits16" "seer_regnety_10b" "seer_regnety_128gf"
    "seer_regnety_256gf" "seer_regnety_32gf" "seer_regnety_64gf" "segment" "segment_small"
    "simclr_cifar" "simclr_resnet50" "swav_cifar" "swav_resnet50" "swav_resnet50_bs256"
    "vicreg_cifar"
};

/// Upper limit of a recipe's length.
const MAX_BYTES: u64 = 1 << 20;

/// Loads the recipe called `name`, or the file `name`, and applies the `--set` entries.
pub(crate) fn load(name: &str, overrides: &[String]) -> anyhow::Result<Recipe> {
    load_with_model(name, overrides, |weights| {
        initial_model(&Initial::default(), None, weights).map_err(|error| error.to_string())
    })
}

/// Loads a recipe as [`load`]. `model` returns the backbone of the weights that a run starts with,
/// for a recipe that takes it from them; it is called with the recipe's `init.weights`.
pub(crate) fn load_with_model(
    name: &str,
    overrides: &[String],
    model: impl Fn(Option<&str>) -> Result<ModelConfig, String>,
) -> anyhow::Result<Recipe> {
    let text = read_text(name)?;
    check_settings(overrides, name, &text)?;
    let mut weights_model = None;
    let parsed = Recipe::parse_with_model(&text, name, overrides, |weights| {
        let model = model(weights)?;
        weights_model = Some(model.clone());
        Ok(model)
    });
    match (parsed, weights_model) {
        // A convolutional network does not have all keys of transformers.
        (Err(error), Some(model)) if error.to_string().contains("unknown key model.") => {
            match convolutional_name(&model) {
                Some(kind) => bail!(
                    "the weights are convolutional ({kind}), but recipe {name} is for transformers: {}",
                    advice_for_convolutional(&text, name, &model)
                ),
                None => bail!(error),
            }
        }
        (parsed, _) => Ok(parsed?),
    }
}

/// Says how to start from convolutional weights, with the backbone `model`, in place of the recipe
/// called `name`, whose text is `text`.
fn advice_for_convolutional(text: &str, name: &str, model: &ModelConfig) -> &'static str {
    let sets = ["model=from_init".to_string()];
    let recipe = Recipe::parse_with_model(text, name, &sets, |_| Ok(model.clone()));
    if recipe.is_ok_and(|recipe| trained_head(&recipe).is_some()) {
        // Rates that decrease from unit to unit are for networks of few units.
        "add --set model=from_init --set optim.layer_decay=1"
    } else {
        "continue from them with --recipe lejepa_vits16 --set model=from_init and the same --init"
    }
}

/// Returns the name of a convolutional network; `None` for a transformer.
fn convolutional_name(model: &ModelConfig) -> Option<&'static str> {
    match model {
        ModelConfig::Vit(_) => None,
        ModelConfig::Resnet(_) => Some("a ResNet"),
        ModelConfig::RegnetY(_) => Some("a RegNetY"),
        ModelConfig::Convnext(_) => Some("a ConvNeXt"),
        // The networks of tests.
        #[allow(unreachable_patterns)]
        _ => None,
    }
}

/// Checks that the settings of `--set` for the recipe called `name`, whose text is `text`, have
/// keys that a recipe may have, as far as others are known.
pub(crate) fn check_settings(overrides: &[String], name: &str, text: &str) -> anyhow::Result<()> {
    match guesses::answer_settings(overrides, name, text) {
        Some(answer) => bail!("{answer}"),
        None => Ok(()),
    }
}

/// Chooses one of the recipes that ship with the program for a run of `hours` on `device`.
pub(crate) fn choose(
    hours: f64,
    shards: &[String],
    overrides: &[String],
    initial: &Initial,
    device: &Opened,
    storage: &Storage,
) -> anyhow::Result<Advice> {
    let wish = Wish { hours, recipes: BUILT_IN, shards, overrides, initial, device };
    let _activity = Activity::new("measuring this machine, to choose a recipe …");
    Ok(advise(&wish, storage)?)
}

/// Checks that the length of a run is given once: by `--hours` or by an entry of `--set`.
pub(crate) fn check_length(hours: Option<f64>, overrides: &[String]) -> anyhow::Result<()> {
    let Some(hours) = hours else { return Ok(()) };
    for entry in overrides {
        if is_set(std::slice::from_ref(entry), "optim.length") {
            bail!("--hours {hours} and --set {entry} are both the length of the run: give one of them");
        }
    }
    Ok(())
}

/// Keys of a recipe that are set, and do not have values by default: by its text, and by `--set`.
pub(crate) struct SetKeys<'a> {
    overrides: &'a [String],
    stated: StatedKeys,
    is_built_in: bool,
}

impl<'a> SetKeys<'a> {
    /// Reads the keys of the recipe called `name`, or of the file `name`, with the `--set` entries.
    pub(crate) fn read(name: &str, overrides: &'a [String]) -> anyhow::Result<Self> {
        let keys = Self::from_text(&read_text(name)?, names().contains(&name), overrides);
        keys.map_err(|error| anyhow!("{name}: {error}"))
    }

    /// Reads the keys of a recipe with the text `text`, with the `--set` entries.
    fn from_text(text: &str, is_built_in: bool, overrides: &'a [String]) -> Result<Self, String> {
        Ok(Self { overrides, stated: StatedKeys::read(text)?, is_built_in })
    }

    /// Returns whether `key` or a part of it is set.
    pub(crate) fn contains(&self, key: &str) -> bool {
        is_set(self.overrides, key) || self.stated.contains(key)
    }

    /// Returns whether `key` or a part of it is set by the user: by `--set`, or in a recipe of
    /// their own.
    pub(crate) fn contains_own(&self, key: &str) -> bool {
        is_set(self.overrides, key) || (!self.is_built_in && self.stated.contains(key))
    }
}

/// Returns the names of the recipes that ship with the program.
pub(crate) fn names() -> Vec<&'static str> {
    BUILT_IN.iter().map(|(name, _)| *name).collect()
}

/// Reads the text of the recipe called `name`, or of the file `name`.
pub(crate) fn read_text(name: &str) -> anyhow::Result<String> {
    if let Some((_, text)) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
        return Ok((*text).to_string());
    }
    let path = Path::new(name);
    if !path.exists() {
        bail!("{}", guesses::unknown_recipe(name, &names()));
    }
    if path.is_dir() {
        let plan = Plan::path_in(path);
        if plan.is_file() {
            bail!("{name} is the folder of a run: its recipe is --recipe {}", plan.display());
        }
        bail!("{name} is a folder: a recipe is a TOML file, or a name that `ocelli recipe list` lists");
    }
    if guesses::is_recipe_of_other_tools(name) {
        bail!(
            "{name}: a recipe is a TOML file; `ocelli recipe list` lists the built-in ones, and `ocelli \
             recipe new` prints one to edit"
        );
    }
    if let Some(format) = recognize_file(path)
        && format.kind != FileKind::Text
    {
        bail!(
            "{name} is {}: a recipe is a TOML file, or a name that `ocelli recipe list` lists; weights are \
             given with --init",
            format.name
        );
    }
    let mut text = String::new();
    let file = std::fs::File::open(name).with_context(|| format!("cannot read recipe {name}"))?;
    let read = file.take(MAX_BYTES).read_to_string(&mut text);
    if read.with_context(|| format!("cannot read recipe {name}"))? as u64 == MAX_BYTES {
        bail!("{name} is not a recipe: it is larger than 1 MB");
    }
    Ok(text)
}

/// Loads a recipe for a benchmark, with `batch` images per step, else as many as `overrides` set,
/// else `usual`.
pub(crate) fn load_for_bench(
    name: &str,
    overrides: &[String],
    batch: Option<usize>,
    usual: usize,
) -> anyhow::Result<Recipe> {
    let mut recipe = load(name, overrides)?;
    if recipe.views.keep_first_choice() {
        say("note: each batch of this recipe has one of several view sizes (views.mix); only the first is \
             measured");
    }
    open_frozen(&mut recipe, None)?;
    let is_batch_set = is_set(overrides, "optim.batch_size");
    if let Some(batch) = batch.or((!is_batch_set).then_some(usual)) {
        recipe.fit_batch(batch);
    }
    Ok(recipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of a recipe sets keys, as does `--set`; a built-in one is not the user's own.
    #[test]
    fn keys_are_set_by_texts_and_by_overrides() {
        let overrides = ["data.bits=16".to_string()];
        let built_in = SetKeys::read("finetune", &overrides).unwrap();
        assert!(built_in.contains("data.bits") && built_in.contains_own("data.bits"));
        assert!(built_in.contains("views.crops.0.size_px"));
        assert!(!built_in.contains_own("views.crops.0.size_px"), "a template");
        assert!(!built_in.contains("data.normalization"));
        let text = "name = \"mine\"\n[data]\nbackground = [0, 0, 0]\n";
        let own = SetKeys::from_text(text, false, &overrides).unwrap();
        assert!(own.contains("data.background") && own.contains_own("data.background"));
        assert!(own.contains_own("data.bits") && !own.contains("data.normalization"));
    }

    #[test]
    fn the_length_of_a_run_is_given_once() {
        let length = ["optim.lr=1".to_string(), "optim.length.epochs=3".to_string()];
        assert!(check_length(None, &length).is_ok());
        assert!(check_length(Some(8.0), &length[..1]).is_ok());
        let error = check_length(Some(8.0), &length).unwrap_err().to_string();
        assert!(error.contains("--hours 8 and --set optim.length.epochs=3"), "{error}");
    }

    /// Returns the images of a step, and those that share statistics, in a benchmark of a recipe
    /// with 4096 and 512.
    fn images_for_bench(overrides: &[&str], batch: Option<usize>) -> (usize, usize) {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        let optim = load_for_bench("simclr_resnet50", &overrides, batch, 4).unwrap().optim;
        (optim.batch_size, optim.stat_images())
    }

    #[test]
    fn a_benchmark_takes_the_batch_of_its_flag_else_of_an_override_else_the_usual_one() {
        let set = ["optim.batch_size=1024"];
        assert_eq!(images_for_bench(&[], Some(8)), (8, 8));
        assert_eq!(images_for_bench(&set, Some(8)), (8, 8));
        assert_eq!(images_for_bench(&set, None), (1024, 512));
        assert_eq!(images_for_bench(&[], None), (4, 4));
        assert_eq!(images_for_bench(&["optim.lr=0.1"], None), (4, 4));
    }
}
