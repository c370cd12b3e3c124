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

use crate::recipes::BUILT_IN;

/// Flags of `recipe new`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli recipe new --method dino --arch vit --image-px 64 --width 192\n  ocelli recipe new --method swav --arch resnet --image-px 96 --set optim.batch_size=128"
)]
pub(super) struct Args {
    /// Method: a value of method.name.
    #[arg(long)]
    method: String,
    /// Backbone: a value of model.arch; by default that of the shipped recipe.
    #[arg(long)]
    arch: Option<String>,
    /// Side of the images that the backbone sees, in pixels.
    #[arg(long, default_value_t = 224)]
    image_px: u32,
    /// Channels of the backbone, model.width.
    #[arg(long)]
    width: Option<usize>,
    /// Name of the recipe.
    #[arg(long, default_value = "mine")]
    name: String,
    /// Change a value of the recipe. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

/// Number of images of the data set with which the recipe is checked.
const N_IMAGES: u64 = 1 << 20;

/// Longest line of a comment.
const COMMENT_WIDTH: usize = 110;

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    out!("{}", text(args, &shipped()?)?.trim_end());
    Ok(ExitCode::SUCCESS)
}

/// Writes the recipe that `args` ask for, made from the recipes `shipped`.
fn text(args: &Args, shipped: &[Shipped]) -> anyhow::Result<String> {
    let methods = names(shipped, "method", "name");
    if !methods.contains(&args.method) {
        bail!("--method {}: none of {}", args.method, methods.join(", "));
    }
    let with_arch = |recipe: &Shipped| {
        args.arch.as_deref().is_none_or(|arch| kind(&recipe.table, "model", "arch") == Some(arch))
    };
    let has_method = |recipe: &Shipped| kind(&recipe.table, "method", "name") == Some(&args.method);
    let Some(base) = nearest(shipped.iter().filter(|recipe| has_method(recipe)), args.image_px, with_arch)
    else {
        bail!("no recipe has the method {}", args.method);
    };
    let Some(model) = nearest(shipped.iter().filter(|recipe| with_arch(recipe)), args.image_px, |recipe| {
        recipe.name == base.name
    }) else {
        let archs = names(shipped, "model", "arch").join(", ");
        bail!("--arch {}: none of {archs}", args.arch.as_deref().unwrap_or_default());
    };
    let arch = kind(&model.table, "model", "arch").unwrap_or_default();
    let mut table = base.table.clone();
    table.insert("name".into(), args.name.clone().into());
    table.insert("model".into(), model.table["model"].clone());
    fit_model(&mut table, args)?;
    fit_views(&mut table, args.image_px, base.image_px)?;
    let written = toml::to_string(&table)?;
    // Overrides may add keys: the recipe is written as they leave it. Through text, in which a
    // single-precision number has only the digits that it needs.
    let recipe = Recipe::parse(&written, &args.name, &args.overrides)?;
    let mut table = only(toml::to_string(&recipe)?.parse()?, &table, &args.overrides, "");
    table.insert("name".into(), args.name.clone().into());
    check(&table, &args.name)?;
    let method = &args.method;
    let from = base.name;
    let origin = if model.name == base.name {
        format!("the settings of {from}")
    } else {
        format!("the settings of {from}, the backbone of {}", model.name)
    };
    let head = format!(
        "{method} with {arch} on images of {} px: {origin}, sizes adapted. Not run, no score.",
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

/// Number of parameters of the largest backbone from which a recipe is made, if there is a smaller
/// one.
const LARGEST_PARAMS: usize = 100_000_000;

/// Returns the shipped recipes that state their backbone.
fn shipped() -> anyhow::Result<Vec<Shipped>> {
    let mut recipes = Vec::new();
    for (name, text) in BUILT_IN {
        let table: Table = text.parse()?;
        let Some(image_px) = table["model"].get("image_px").and_then(Value::as_integer) else { continue };
        // Weights of another run, and their backbone, are not those of a new recipe.
        if kind(&table, "model", "arch") != Some("from_init") && !table.contains_key("init") {
            let is_small = model_of(&table)?.n_params() <= LARGEST_PARAMS;
            recipes.push(Shipped { name, table, image_px: image_px as u32, is_small });
        }
    }
    Ok(recipes)
}

fn model_of(table: &Table) -> anyhow::Result<ModelConfig> {
    table["model"].clone().try_into().map_err(|error: toml::de::Error| anyhow::anyhow!("model: {error}"))
}

fn kind<'a>(table: &'a Table, section: &str, tag: &str) -> Option<&'a str> {
    table.get(section)?.get(tag)?.as_str()
}

/// Returns the values of a section's tag among `recipes`.
fn names(recipes: &[Shipped], section: &str, tag: &str) -> Vec<String> {
    let mut names: Vec<String> =
        recipes.iter().filter_map(|recipe| kind(&recipe.table, section, tag)).map(String::from).collect();
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
    let distance = |recipe: &Shipped| (f64::from(recipe.image_px) / f64::from(image_px)).ln().abs();
    recipes.min_by(|a, b| {
        let by_size = b.is_small.cmp(&a.is_small).then(distance(a).total_cmp(&distance(b)));
        by_size.then(is_preferred(b).cmp(&is_preferred(a)))
    })
}

/// Sets the image size and the width of the model, and the size of its patches, so that an image
/// has about as many.
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
    let distance = |size: i64| (size as f64 / wanted).ln().abs();
    let fits = sizes.filter(|size| i64::from(args.image_px) % size == 0);
    let Some(nearest) = fits.min_by(|a, b| distance(*a).total_cmp(&distance(*b))) else {
        bail!("--image-px {}: no patch size divides it", args.image_px);
    };
    model.insert("patch_px".into(), nearest.into());
    Ok(())
}

/// Scales the sides of the views to images of `image_px`, in steps of the backbone's stride.
fn fit_views(table: &mut Table, image_px: u32, before_px: u32) -> anyhow::Result<()> {
    let stride = model_of(table)?.stride_px() as f64;
    let scale = f64::from(image_px) / f64::from(before_px);
    let mut sides = BTreeMap::new();
    if let Some(views) = table.get_mut("views") {
        each_side(views, &mut |side| {
            sides.insert(*side, 0i64);
        });
        // Views are told apart by their sizes: those of different sizes stay different.
        let mut taken = Vec::new();
        for (side, fitted) in sides.iter_mut().rev() {
            let mut steps = (*side as f64 * scale / stride).round().max(1.0);
            while taken.contains(&(steps as i64)) && steps > 1.0 {
                steps -= 1.0;
            }
            taken.push(steps as i64);
            *fitted = (steps * stride) as i64;
        }
        each_side(views, &mut |side| *side = sides[side]);
    }
    Ok(())
}

/// Applies `change` to every side in pixels within `value`.
fn each_side(value: &mut Value, change: &mut dyn FnMut(&mut i64)) {
    match value {
        Value::Table(table) => {
            for (key, value) in table.iter_mut() {
                match value {
                    Value::Integer(side) if key.ends_with("_px") => change(side),
                    value => each_side(value, change),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| each_side(value, change)),
        _ => {}
    }
}

/// Returns the keys of `all` that `stated` has, or that `overrides` set.
fn only(all: Table, stated: &Table, overrides: &[String], path: &str) -> Table {
    all.into_iter()
        .filter_map(|(key, value)| {
            let path = format!("{path}{key}");
            let set = |entry: &String| entry.split('=').next().unwrap_or_default().trim().to_string();
            let is_set = overrides.iter().map(set).any(|set| set == path);
            let is_within = overrides.iter().map(set).any(|set| set.starts_with(&format!("{path}.")));
            match (value, stated.get(&key)) {
                (Value::Table(all), Some(Value::Table(stated))) if !is_set => {
                    Some((key, only(all, stated, overrides, &format!("{path}.")).into()))
                }
                (value, stated) => (stated.is_some() || is_set || is_within).then_some((key, value)),
            }
        })
        .collect()
}

/// Checks that the recipe can be run.
fn check(table: &Table, name: &str) -> anyhow::Result<()> {
    let mut recipe = Recipe::parse(&toml::to_string(table)?, name, &[])?;
    // What a frozen network is like is known when its file has been read.
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
            if let Some(key) = keys.iter().filter(|key| key.path == path).find(|key| {
                key.belongs_to.is_empty() || setting.as_ref().is_some_and(|of| key.belongs_to.contains(of))
            }) {
                text += &format!("{}\n", comment(&key.meaning));
            }
            text += &format!("{key} = {}\n", inline(value));
        }
    }
    text
}

/// Writes a value in one line; a list of tables has a line for each.
fn inline(value: &Value) -> String {
    match value {
        Value::Array(values) if values.iter().any(Value::is_table) => {
            let lines: Vec<String> = values.iter().map(|value| format!("    {value},\n")).collect();
            format!("[\n{}]", lines.concat())
        }
        value => value.to_string(),
    }
}

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
    fn every_pair_is_a_recipe_or_says_why_not() {
        let shipped = shipped().unwrap();
        let methods = names(&shipped, "method", "name");
        let archs = names(&shipped, "model", "arch");
        let words = |path: &str| keys().into_iter().find(|key| key.path == path).unwrap().words;
        for (path, found) in [("method.name", &methods), ("model.arch", &archs)] {
            let known = words(path).into_iter().map(|(word, _)| word);
            assert!(
                known.clone().all(|word| found.contains(&word)),
                "{path}: {found:?} of {:?}",
                known.collect::<Vec<_>>()
            );
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
                            // A cell of these backbones covers all of a small image.
                            let is_coarse = image_px == 32 && error.contains("told apart by their size");
                            let why = error.contains("no tokens to mask") || is_coarse;
                            assert!(why, "{method} {arch} {image_px}: {error}");
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
            assert!(text.lines().any(|found| found == line), "{line} in:\n{text}");
        }
    }
}
