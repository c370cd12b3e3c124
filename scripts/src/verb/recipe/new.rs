//! `ocelli recipe new`: a recipe for a method, a backbone and an image size, made from the shipped
//! recipe nearest to it.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::bail;
use networks::ModelConfig;
use textwrap::{Options, WordSplitter, fill};
use toml::{Table, Value};
use trainer::Recipe;
use trainer::recipe::keys;

use crate::recipes::{BUILT_IN, override_key};

/// Flags of `recipe new`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli recipe new --method dino --arch vit --image-px 64 --width 192\n  \
        ocelli recipe new --method swav --arch resnet --image-px 96 --set optim.batch_size=128"
)]
pub(super) struct Args {
    /// Method: a method.name value.
    #[arg(long)]
    method: String,
    /// Backbone: a model.arch value [default: the built-in recipe's].
    #[arg(long)]
    arch: Option<String>,
    /// Input image size of the backbone, in pixels.
    #[arg(long, default_value_t = 224)]
    image_px: u32,
    /// Width of the backbone, model.width.
    #[arg(long)]
    width: Option<usize>,
    /// Name of the recipe.
    #[arg(long, default_value = "mine")]
    name: String,
    /// Override a recipe value. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

/// Number of images of the data set with which the recipe is checked.
const N_IMAGES: u64 = 1 << 20;

/// Longest line of a comment, in characters.
const COMMENT_WIDTH: usize = 110;

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    out!("{}", text(args, &shipped()?)?.trim_end());
    Ok(ExitCode::SUCCESS)
}

/// Writes the recipe that `args` ask for, made from the recipes `shipped`.
fn text(args: &Args, shipped: &[Shipped]) -> anyhow::Result<String> {
    let methods = names(shipped, "method", "name");
    if !methods.contains(&args.method) {
        bail!("--method {}: expected one of {}", args.method, methods.join(", "));
    }
    let arch = args.arch.as_deref();
    let with_method = shipped.iter().filter(|recipe| recipe.has_method(&args.method));
    let Some(base) = nearest(with_method, args.image_px, |recipe| recipe.has_arch(arch)) else {
        bail!("no recipe has the method {}", args.method);
    };
    let with_arch = shipped.iter().filter(|recipe| recipe.has_arch(arch));
    let Some(model) = nearest(with_arch, args.image_px, |recipe| recipe.name == base.name) else {
        let archs = names(shipped, "model", "arch").join(", ");
        bail!("--arch {}: expected one of {archs}", arch.unwrap_or_default());
    };
    let arch = tag_value(&model.table, "model", "arch").unwrap_or_default();
    let mut table = base.table.clone();
    table.insert("name".into(), args.name.clone().into());
    table.insert("model".into(), model.table["model"].clone());
    fit_model(&mut table, args)?;
    fit_views(&mut table, args.image_px, base.image_px)?;
    // Overrides may add keys. The recipe is converted through text, in which a single-precision
    // number has only the digits that it needs.
    let recipe = Recipe::parse(&toml::to_string(&table)?, &args.name, &args.overrides)?;
    let mut table = stated_keys(toml::to_string(&recipe)?.parse()?, &table, &args.overrides, "");
    table.insert("name".into(), args.name.clone().into());
    check(&table, &args.name)?;
    let method = &args.method;
    let from = base.name;
    let origin = if model.name == base.name {
        format!("settings from {from}")
    } else {
        format!("settings from {from}, backbone from {}", model.name)
    };
    let head = format!(
        "{method} with {arch} on {} px images: {origin}, with sizes adapted. Never run; no score.",
        args.image_px
    );
    Ok(format!("{}\n\n{}", comment(&head), document(&table)))
}

/// A recipe that ships with the program.
struct Shipped {
    name: &'static str,
    table: Table,
    image_px: u32,
    /// Whether the backbone has few enough parameters for one GPU.
    is_small: bool,
}

impl Shipped {
    fn has_method(&self, method: &str) -> bool {
        tag_value(&self.table, "method", "name") == Some(method)
    }

    /// Returns whether the backbone is `arch`; any is if that is `None`.
    fn has_arch(&self, arch: Option<&str>) -> bool {
        arch.is_none() || tag_value(&self.table, "model", "arch") == arch
    }
}

/// Number of parameters of the largest backbone from which a recipe is made, if there is a smaller
/// one.
const LARGEST_PARAMS: usize = 100_000_000;

/// Returns the shipped recipes that state their backbone.
fn shipped() -> anyhow::Result<Vec<Shipped>> {
    let mut recipes = Vec::new();
    for (name, text) in BUILT_IN {
        let table: Table = text.parse()?;
        let Some(image_px) = table["model"].get("image_px").and_then(Value::as_integer) else { continue };
        // A new recipe has neither the initial weights of another one nor their backbone.
        if tag_value(&table, "model", "arch") != Some("from_init") && !table.contains_key("init") {
            let is_small = model_config(&table)?.n_params() <= LARGEST_PARAMS;
            recipes.push(Shipped { name, table, image_px: image_px as u32, is_small });
        }
    }
    Ok(recipes)
}

/// Parses the section `model`.
fn model_config(table: &Table) -> anyhow::Result<ModelConfig> {
    table["model"].clone().try_into().map_err(|error: toml::de::Error| anyhow::anyhow!("model: {error}"))
}

/// Returns the value of the key `tag` of a section.
fn tag_value<'a>(table: &'a Table, section: &str, tag: &str) -> Option<&'a str> {
    table.get(section)?.get(tag)?.as_str()
}

/// Returns the values of a section's tag among `recipes`.
fn names(recipes: &[Shipped], section: &str, tag: &str) -> Vec<String> {
    let mut names: Vec<String> = recipes
        .iter()
        .filter_map(|recipe| tag_value(&recipe.table, section, tag))
        .map(String::from)
        .collect();
    names.sort();
    names.dedup();
    names
}

/// Returns the recipe whose images are nearest in size to `image_px`: one with a small backbone if
/// there is any, and one that `is_preferred` if several are as near.
fn nearest<'a>(
    recipes: impl Iterator<Item = &'a Shipped>,
    image_px: u32,
    is_preferred: impl Fn(&Shipped) -> bool,
) -> Option<&'a Shipped> {
    recipes.min_by(|a, b| {
        let distances = [a, b].map(|recipe| log_ratio(f64::from(recipe.image_px), f64::from(image_px)));
        b.is_small
            .cmp(&a.is_small)
            .then(distances[0].total_cmp(&distances[1]))
            .then(is_preferred(b).cmp(&is_preferred(a)))
    })
}

/// Returns the absolute value of the logarithm of `a / b`.
fn log_ratio(a: f64, b: f64) -> f64 {
    (a / b).ln().abs()
}

/// Sets the image size and the width of the model, and a patch size that keeps the number of
/// patches of an image about the same.
fn fit_model(table: &mut Table, args: &Args) -> anyhow::Result<()> {
    let Some(model) = table.get_mut("model").and_then(Value::as_table_mut) else { return Ok(()) };
    let before = model.get("image_px").and_then(Value::as_integer).unwrap_or(i64::from(args.image_px));
    model.insert("image_px".into(), i64::from(args.image_px).into());
    if let Some(width) = args.width {
        model.insert("width".into(), (width as i64).into());
    }
    let Some(patch) = model.get("patch_px").and_then(Value::as_integer) else { return Ok(()) };
    let wanted = patch as f64 * f64::from(args.image_px) / before as f64;
    let sizes = (0..7).map(|power| 1i64 << power).chain([patch, 14]);
    let divisors = sizes.filter(|size| i64::from(args.image_px) % size == 0);
    let nearest =
        divisors.min_by(|a, b| log_ratio(*a as f64, wanted).total_cmp(&log_ratio(*b as f64, wanted)));
    let Some(nearest) = nearest else {
        bail!("--image-px {}: not divisible by any patch size", args.image_px);
    };
    model.insert("patch_px".into(), nearest.into());
    Ok(())
}

/// Scales the sides of the views to images of `image_px`, in steps of the backbone's stride.
fn fit_views(table: &mut Table, image_px: u32, before_px: u32) -> anyhow::Result<()> {
    let stride = model_config(table)?.stride_px() as f64;
    let scale = f64::from(image_px) / f64::from(before_px);
    let mut sides = BTreeMap::new();
    if let Some(views) = table.get_mut("views") {
        for_each_side(views, &mut |side| {
            sides.insert(*side, 0i64);
        });
        // Views are distinguished by their sizes: different sizes stay different.
        let mut taken = Vec::new();
        for (side, fitted) in sides.iter_mut().rev() {
            let mut steps = (*side as f64 * scale / stride).round().max(1.0);
            while taken.contains(&(steps as i64)) && steps > 1.0 {
                steps -= 1.0;
            }
            taken.push(steps as i64);
            *fitted = (steps * stride) as i64;
        }
        for_each_side(views, &mut |side| *side = sides[side]);
    }
    Ok(())
}

/// Applies `change` to every side in pixels within `value`.
fn for_each_side(value: &mut Value, change: &mut dyn FnMut(&mut i64)) {
    match value {
        Value::Table(table) => {
            for (key, value) in table.iter_mut() {
                match value {
                    Value::Integer(side) if key.ends_with("_px") => change(side),
                    value => for_each_side(value, change),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| for_each_side(value, change)),
        _ => {}
    }
}

/// Returns the keys of `all` that `stated` has, or that `overrides` set. `prefix` is the path of
/// the table within the recipe, with a dot at its end.
fn stated_keys(all: Table, stated: &Table, overrides: &[String], prefix: &str) -> Table {
    let mut kept = Table::new();
    for (key, value) in all {
        let path = format!("{prefix}{key}");
        let within = format!("{path}.");
        let is_set = overrides.iter().any(|entry| override_key(entry) == path);
        let is_partly_set = overrides.iter().any(|entry| override_key(entry).starts_with(&within));
        match (value, stated.get(&key)) {
            (Value::Table(all), Some(Value::Table(stated))) if !is_set => {
                kept.insert(key, stated_keys(all, stated, overrides, &within).into());
            }
            (value, stated) if stated.is_some() || is_set || is_partly_set => {
                kept.insert(key, value);
            }
            _ => {}
        }
    }
    kept
}

/// Checks that the recipe can be run.
fn check(table: &Table, name: &str) -> anyhow::Result<()> {
    let mut recipe = Recipe::parse(&toml::to_string(table)?, name, &[])?;
    // The shape of a frozen network is known only once its file has been read.
    if recipe.method.frozen().is_empty() {
        trainer::resolve(recipe, N_IMAGES)?;
    }
    Ok(())
}

/// Writes `table` as a recipe, with the meaning of each key above it.
fn document(table: &Table) -> String {
    let keys = keys();
    let mut text = String::new();
    for name in ["name", "seed"] {
        if let Some(value) = table.get(name) {
            text += &format!("{name} = {value}\n");
        }
    }
    for section in ["model", "method", "views", "optim", "data", "run"] {
        let Some(Value::Table(entries)) = table.get(section) else { continue };
        text += &format!("\n[{section}]\n");
        let kind = ["arch", "name", "preset"].into_iter().find(|tag| entries.contains_key(*tag));
        let setting = kind.map(|tag| format!("{section}.{tag} = {}", entries[tag]));
        if let Some(tag) = kind {
            text += &format!("{tag} = {}\n", entries[tag]);
        }
        for (key, value) in entries.iter().filter(|(key, _)| Some(key.as_str()) != kind) {
            let path = format!("{section}.{key}");
            // Several kinds of a section may have a key of this name.
            let documented = keys.iter().filter(|key| key.path == path).find(|key| {
                key.belongs_to.is_empty()
                    || setting.as_ref().is_some_and(|setting| key.belongs_to.contains(setting))
            });
            if let Some(documented) = documented {
                text += &format!("{}\n", comment(&documented.meaning));
            }
            text += &format!("{key} = {}\n", inline(value));
        }
    }
    text
}

/// Writes a value on one line; a list of tables has a line for each of them.
fn inline(value: &Value) -> String {
    match value {
        Value::Array(values) if values.iter().any(Value::is_table) => {
            let lines: Vec<String> = values.iter().map(|value| format!("    {value},\n")).collect();
            format!("[\n{}]", lines.concat())
        }
        value => value.to_string(),
    }
}

/// Wraps `text` as a comment.
fn comment(text: &str) -> String {
    fill(
        text,
        Options::new(COMMENT_WIDTH)
            .initial_indent("# ")
            .subsequent_indent("# ")
            .word_splitter(WordSplitter::NoHyphenation),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(method: &str, arch: &str, image_px: u32) -> Args {
        Args {
            method: method.into(),
            arch: Some(arch.into()),
            image_px,
            width: None,
            name: "mine".into(),
            overrides: Vec::new(),
        }
    }

    /// Every method with every backbone that it works with, at several sizes, is a recipe that can
    /// be run.
    #[test]
    fn every_pair_is_a_recipe_or_gives_a_reason() {
        let shipped = shipped().unwrap();
        let methods = names(&shipped, "method", "name");
        let archs = names(&shipped, "model", "arch");
        for (path, names) in [("method.name", &methods), ("model.arch", &archs)] {
            let key = keys().into_iter().find(|key| key.path == path).unwrap();
            let words: Vec<String> = key.words.into_iter().map(|(word, _)| word).collect();
            assert!(words.iter().all(|word| names.contains(word)), "{path}: {names:?} of {words:?}");
        }
        for method in &methods {
            for arch in &archs {
                for image_px in [32, 96, 224] {
                    match text(&args(method, arch, image_px), &shipped) {
                        Ok(text) => {
                            let recipe = Recipe::parse(&text, "mine", &[]).unwrap();
                            assert_eq!(recipe.model.image_px() as u32, image_px, "{method} {arch}");
                            assert!(text.lines().all(|line| line.len() < 400), "{text}");
                        }
                        Err(error) => {
                            let error = error.to_string();
                            // The stride of these backbones is the side of a small image.
                            let is_coarse = image_px == 32 && error.contains("told apart by their size");
                            let is_expected = error.contains("no tokens to mask") || is_coarse;
                            assert!(is_expected, "{method} {arch} {image_px}: {error}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn width_and_overrides_are_in_the_recipe() {
        let args = Args {
            width: Some(192),
            overrides: vec!["optim.batch_size=32".into(), "model.drop_path=0.1".into()],
            ..args("dino", "vit", 64)
        };
        let text = text(&args, &shipped().unwrap()).unwrap();
        for line in ["width = 192", "batch_size = 32", "drop_path = 0.1", "image_px = 64"] {
            assert!(text.lines().any(|written| written == line), "{line} in:\n{text}");
        }
    }
}
