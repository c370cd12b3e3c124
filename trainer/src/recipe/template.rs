//! New recipes for a method, a backbone and an image size, made from the shipped recipe nearest to
//! them.

use std::collections::BTreeMap;

use networks::ModelConfig;
use textwrap::{Options, WordSplitter, fill};
use toml::{Table, Value};

use super::parse::override_key;
use super::resolve::resolve;
use super::{Recipe, keys};
use crate::error::TrainError;

/// Number of images of the data set with which a recipe is checked.
const N_IMAGES: u64 = 1 << 20;

/// Longest line of a comment, in characters.
const COMMENT_WIDTH: usize = 110;

/// Number of parameters of the largest backbone from which a recipe is made, if there is a smaller
/// one.
const LARGEST_PARAMS: usize = 100_000_000;

/// Requested recipe.
#[derive(Debug, Clone)]
pub struct TemplateRequest<'a> {
    /// Method: a `method.name`.
    pub method: &'a str,
    /// Backbone: a `model.arch`; that of the shipped recipe if absent.
    pub arch: Option<&'a str>,
    /// Size of the images in pixels.
    pub image_px: u32,
    /// Width of the backbone, `model.width`; that of the shipped recipe if absent.
    pub width: Option<usize>,
    /// Name of the recipe.
    pub name: &'a str,
    /// Values to set, of the form `optim.lr=1e-3`.
    pub overrides: &'a [String],
}

/// Shipped recipes from which new ones are made.
pub struct Templates<'a>(Vec<Template<'a>>);

/// A shipped recipe.
struct Template<'a> {
    name: &'a str,
    table: Table,
    image_px: u32,
    /// Whether the backbone has few enough parameters for one GPU.
    is_small: bool,
}

impl Template<'_> {
    fn has_method(&self, method: &str) -> bool {
        tag_value(&self.table, "method", "name") == Some(method)
    }

    /// Returns whether the backbone is `arch`; any is if that is `None`.
    fn has_arch(&self, arch: Option<&str>) -> bool {
        arch.is_none() || tag_value(&self.table, "model", "arch") == arch
    }
}

impl<'a> Templates<'a> {
    /// Reads `recipes`, each by its name, and keeps those that state their backbone.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] for a recipe that is not TOML, [`TrainError::ModelSection`].
    pub fn new(recipes: &[(&'a str, &str)]) -> Result<Self, TrainError> {
        let mut templates = Vec::new();
        for &(name, text) in recipes {
            let table = parse(text, name)?;
            let image_px = table.get("model").and_then(|model| model.get("image_px"));
            let Some(image_px) = image_px.and_then(Value::as_integer) else { continue };
            // A new recipe has neither the initial weights of another one nor their backbone.
            if tag_value(&table, "model", "arch") != Some("from_init") && !table.contains_key("init") {
                let is_small = model_config(&table)?.n_params() <= LARGEST_PARAMS;
                templates.push(Template { name, table, image_px: image_px as u32, is_small });
            }
        }
        Ok(Self(templates))
    }

    /// Writes the recipe of `request`, with the meaning of each key above it.
    ///
    /// # Errors
    /// [`TrainError::NoTemplate`] for an unknown method or backbone, [`TrainError::ModelSection`],
    /// [`TrainError::Recipe`] for a recipe that cannot be run.
    pub fn write(&self, request: &TemplateRequest<'_>) -> Result<String, TrainError> {
        let TemplateRequest { method, arch, image_px, name, overrides, .. } = *request;
        let with_method = self.0.iter().filter(|recipe| recipe.has_method(method));
        let Some(base) = nearest(with_method, image_px, |recipe| recipe.has_arch(arch)) else {
            return Err(self.no_template("--method", method, "method", "name"));
        };
        let with_arch = self.0.iter().filter(|recipe| recipe.has_arch(arch));
        let Some(model) = nearest(with_arch, image_px, |recipe| recipe.name == base.name) else {
            return Err(self.no_template("--arch", arch.unwrap_or_default(), "model", "arch"));
        };
        let mut table = base.table.clone();
        table.insert("name".into(), name.into());
        table.insert("model".into(), model.table["model"].clone());
        fit_model(&mut table, request);
        fit_views(&mut table, image_px, base.image_px)?;
        // Overrides may add keys. The recipe is converted through text, in which a single-precision
        // number has only the digits that it needs.
        let recipe = Recipe::parse(&text(&table, name)?, name, overrides)?;
        let mut table = stated_keys(parse(&text(&recipe, name)?, name)?, &table, overrides, "");
        table.insert("name".into(), name.into());
        check(&table, name)?;
        let from = base.name;
        let origin = if model.name == base.name {
            format!("settings from {from}")
        } else {
            format!("settings from {from}, backbone from {}", model.name)
        };
        let arch = tag_value(&model.table, "model", "arch").unwrap_or_default();
        let head = format!(
            "{method} with {arch} on {image_px} px images: {origin}, with sizes adapted. Never run; no score."
        );
        Ok(format!("{}\n\n{}", comment(&head), document(&table)))
    }

    /// Returns the error of `flag`, whose `value` is not the tag of a section in any recipe.
    fn no_template(&self, flag: &'static str, value: &str, section: &str, tag: &str) -> TrainError {
        let mut names: Vec<&str> =
            self.0.iter().filter_map(|recipe| tag_value(&recipe.table, section, tag)).collect();
        names.sort_unstable();
        names.dedup();
        TrainError::NoTemplate { flag, value: value.into(), known: names.join(", ") }
    }
}

/// Parses the recipe `name`.
fn parse(text: &str, name: &str) -> Result<Table, TrainError> {
    text.parse().map_err(|error: toml::de::Error| TrainError::Recipe {
        recipe: name.into(),
        reason: error.to_string(),
    })
}

/// Returns the text of the recipe `name`.
fn text(recipe: &impl serde::Serialize, name: &str) -> Result<String, TrainError> {
    toml::to_string(recipe)
        .map_err(|error| TrainError::Recipe { recipe: name.into(), reason: error.to_string() })
}

/// Parses the section `model`.
fn model_config(table: &Table) -> Result<ModelConfig, TrainError> {
    let model = table["model"].clone();
    model.try_into().map_err(|error: toml::de::Error| TrainError::ModelSection { reason: error.to_string() })
}

/// Returns the value of the key `tag` of a section.
fn tag_value<'t>(table: &'t Table, section: &str, tag: &str) -> Option<&'t str> {
    table.get(section)?.get(tag)?.as_str()
}

/// Returns the recipe whose images are nearest in size to `image_px`: one with a small backbone if
/// there is any, and one that `is_preferred` if several are as near.
fn nearest<'t, 'a: 't>(
    recipes: impl Iterator<Item = &'t Template<'a>>,
    image_px: u32,
    is_preferred: impl Fn(&Template<'a>) -> bool,
) -> Option<&'t Template<'a>> {
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
fn fit_model(table: &mut Table, request: &TemplateRequest<'_>) {
    let image_px = i64::from(request.image_px);
    let Some(model) = table.get_mut("model").and_then(Value::as_table_mut) else { return };
    let before = model.get("image_px").and_then(Value::as_integer).unwrap_or(image_px);
    model.insert("image_px".into(), image_px.into());
    if let Some(width) = request.width {
        model.insert("width".into(), (width as i64).into());
    }
    let Some(patch) = model.get("patch_px").and_then(Value::as_integer) else { return };
    let wanted = patch as f64 * image_px as f64 / before as f64;
    let sizes = (0..7).map(|power| 1i64 << power).chain([patch, 14]);
    let divisors = sizes.filter(|size| image_px % size == 0);
    let nearest =
        divisors.min_by(|a, b| log_ratio(*a as f64, wanted).total_cmp(&log_ratio(*b as f64, wanted)));
    // One pixel divides every size.
    model.insert("patch_px".into(), nearest.unwrap_or(1).into());
}

/// Scales the sides of the views to images of `image_px`, in steps of the backbone's stride.
fn fit_views(table: &mut Table, image_px: u32, before_px: u32) -> Result<(), TrainError> {
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
fn check(table: &Table, name: &str) -> Result<(), TrainError> {
    let mut recipe = Recipe::parse(&text(table, name)?, name, &[])?;
    // The shape of a frozen network is known only once its file has been read.
    if recipe.method.frozen().is_empty() {
        resolve(recipe, N_IMAGES)?;
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
