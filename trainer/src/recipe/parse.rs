//! Parsing of a recipe's text, with `--set` overrides.

use serde::de::DeserializeOwned;

use super::flat::flatten;
use super::schema::{Form, mistakes};

/// Value of `model.arch`, or of `model`, for the backbone of the weights that a run starts with.
const FROM_INIT: &str = "from_init";

/// Keys of the plan of a run that a recipe does not have.
const PLAN_KEYS: [&str; 2] = ["total_steps", "world_size"];

/// Function that reads the backbone of weights as the table of a recipe, given `init.weights`.
pub(super) type ReadModel<'a> = &'a mut dyn FnMut(Option<&str>) -> Result<toml::Table, String>;

/// Parses `text`, a recipe of this form or the plan of a run, and applies `overrides` of the form
/// `optim.lr=1e-3`. Where the recipe takes its backbone from the weights that it starts with,
/// `read_model` returns that backbone; other keys of the recipe's `[model]` replace its keys.
///
/// # Errors
/// A message in words: all keys that are missing, unknown or of another form, or the message of
/// `read_model`.
pub(super) fn parse_recipe<T: DeserializeOwned>(
    text: &str,
    overrides: &[String],
    form: &Form,
    read_model: Option<ReadModel<'_>>,
) -> Result<T, String> {
    let Text { mut table, .. } = Text::read(text)?;
    for entry in overrides {
        set(&mut table, entry)?;
    }
    if let Some(read_model) = read_model {
        replace_model(&mut table, read_model)?;
    }
    match mistakes(&table, form).as_slice() {
        [] => {}
        [mistake] => return Err(mistake.clone()),
        all => return Err(format!("{} mistakes:\n  {}", all.len(), all.join("\n  "))),
    }
    T::deserialize(table).map_err(|error| error.to_string().trim_end().to_string())
}

/// Text of a recipe as a table.
struct Text {
    /// The recipe.
    table: toml::Table,
    /// Whether it is that of the plan of a run.
    is_plan: bool,
}

impl Text {
    /// Reads `text`, a recipe or the plan of a run.
    fn read(text: &str) -> Result<Self, String> {
        let mut table: toml::Table =
            text.parse().map_err(|error: toml::de::Error| error.to_string().trim_end().to_string())?;
        if PLAN_KEYS.iter().all(|key| table.contains_key(*key))
            && let Some(toml::Value::Table(recipe)) = table.remove("recipe")
        {
            return Ok(Self { table: recipe, is_plan: true });
        }
        Ok(Self { table, is_plan: false })
    }
}

/// Keys that the text of a recipe states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatedKeys {
    /// Keys with their values, such as `optim.lr` and `optim.length.epochs`.
    keys: Vec<String>,
    /// Whether the text is the plan of a run, which has every value: a key that is absent there has
    /// its default.
    is_plan: bool,
}

impl StatedKeys {
    /// Reads the keys of `text`, a recipe or the plan of a run.
    ///
    /// # Errors
    /// A message in words if `text` is not TOML.
    pub fn read(text: &str) -> Result<Self, String> {
        let Text { table, is_plan } = Text::read(text)?;
        let mut values = Vec::new();
        flatten("", &toml::Value::Table(table), &mut values);
        let keys = values.into_iter().map(|(key, _)| key).collect();
        Ok(Self { keys, is_plan })
    }

    /// Returns whether the text states `key`, a part of it, or a list that it is in.
    pub fn contains(&self, key: &str) -> bool {
        self.is_plan || self.keys.iter().any(|stated| overlap(stated, key))
    }
}

/// Returns whether `overrides` of the form `optim.lr=1e-3` set `key`, a part of it, or the section
/// that it is in.
pub fn is_set(overrides: &[String], key: &str) -> bool {
    overrides.iter().any(|entry| entry.contains('=') && overlap(override_key(entry), key))
}

/// Returns whether one of two keys is the other, or within it.
fn overlap(key: &str, other: &str) -> bool {
    is_within(key, other) || is_within(other, key)
}

/// Returns whether the key `path` is `outer` or within it.
fn is_within(path: &str, outer: &str) -> bool {
    path.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Replaces the model of `recipe` by that of the weights that it starts with, if `model.arch` is
/// [`FROM_INIT`].
fn replace_model(recipe: &mut toml::Table, read_model: ReadModel<'_>) -> Result<(), String> {
    let replaced_keys = match recipe.get("model") {
        Some(toml::Value::String(name)) if name == FROM_INIT => toml::Table::new(),
        Some(toml::Value::Table(model))
            if model.get("arch").and_then(|arch| arch.as_str()) == Some(FROM_INIT) =>
        {
            let keys = model.iter().filter(|(key, _)| *key != "arch");
            keys.map(|(key, value)| (key.clone(), value.clone())).collect()
        }
        _ => return Ok(()),
    };
    let weights = recipe.get("init").and_then(|init| init.get("weights")).and_then(|path| path.as_str());
    let mut model = read_model(weights)?;
    model.extend(replaced_keys);
    recipe.insert("model".into(), model.into());
    Ok(())
}

/// Units of a length of time, which has exactly one.
const UNITS: [&str; 5] = ["steps", "epochs", "samples", "percent", "minutes"];

/// Returns the key of an override such as `optim.lr=1e-3`.
pub(super) fn override_key(entry: &str) -> &str {
    entry.split('=').next().unwrap_or_default().trim()
}

/// Sets one dotted key.
fn set(table: &mut toml::Table, entry: &str) -> Result<(), String> {
    let (path, value) = entry.split_once('=').ok_or(format!("--set {entry}: expected key=value"))?;
    if value.contains(['\n', '\r']) {
        return Err(format!("--set {path}: the value must be on one line"));
    }
    let parsed: toml::Table = format!("v = {value}")
        .parse()
        .or_else(|_| format!("v = {value:?}").parse())
        .map_err(|error: toml::de::Error| format!("--set {entry}: {error}"))?;
    let mut keys: Vec<&str> = path.trim().split('.').collect();
    let last = keys.pop().unwrap_or_default();
    let mut container = Container::Table(table);
    for key in keys {
        container = match container.value(key, entry)? {
            toml::Value::Table(table) => Container::Table(table),
            toml::Value::Array(list) => Container::List(list),
            _ => return Err(format!("--set {entry}: {key} is not a section")),
        };
    }
    let value = parsed.get("v").cloned().unwrap_or(toml::Value::Boolean(false));
    match container {
        Container::Table(table) => {
            // A length has one unit: a new unit replaces the old one.
            if UNITS.contains(&last) && table.keys().all(|key| UNITS.contains(&key.as_str())) {
                table.clear();
            }
            table.insert(last.into(), value);
        }
        Container::List(_) => *container.value(last, entry)? = value,
    }
    Ok(())
}

/// Table or list that a part of a dotted key names.
enum Container<'a> {
    Table(&'a mut toml::Table),
    /// List, whose entries are numbered from 0.
    List(&'a mut Vec<toml::Value>),
}

impl<'a> Container<'a> {
    /// Returns the value of `key`; inserts an empty section if a table does not have the key.
    fn value(self, key: &str, entry: &str) -> Result<&'a mut toml::Value, String> {
        match self {
            Self::Table(table) => Ok(table.entry(key).or_insert_with(|| toml::Table::new().into())),
            Self::List(list) => {
                let n = list.len();
                let index = key.parse::<usize>().ok().filter(|index| *index < n);
                let index = index.ok_or(format!(
                    "--set {entry}: there is no entry {key}: the list has {n}, counted from 0"
                ))?;
                Ok(&mut list[index])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::recipe::{Recipe, StatedKeys, is_set};

    const RECIPE: &str = r#"
name = "r"
[model]
arch = "resnet"
image_px = 32
depth = 18
[method]
name = "simclr"
temperature = 0.1
[views]
preset = "custom"
crops = [
    { count = 2, size_px = 32, scale = [0.2, 1.0], flip_p = 0.5, jitter = { brightness = 0.4, contrast = 0.4, saturation = 0.2, hue = 0.1, p = 0.8 }, gray_p = 0.2, blur_p = 0.5, blur_sigma = [0.1, 2.0], solarize_p = 0.0 },
]
[optim]
batch_size = 8
length = { steps = 3 }
lr = 1e-3
warmup = { steps = 1 }
"#;

    fn parse_error(text: &str, overrides: &[&str]) -> String {
        let overrides: Vec<String> = overrides.iter().map(|entry| entry.to_string()).collect();
        match Recipe::parse(text, "r", &overrides) {
            Err(crate::TrainError::Recipe { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the views of the recipe with one override.
    fn views_with(entry: &str) -> augment::MultiCrop {
        let recipe = Recipe::parse(RECIPE, "r", &[entry.into()]).unwrap();
        recipe.views.multicrop().unwrap()
    }

    #[test]
    fn entries_of_lists_are_set_by_number() {
        let views = views_with("views.crops.0.size_px=64");
        assert_eq!(views.crops[0].size_px, 64);
        let views = views_with("views.crops.0.scale.1=0.5");
        assert_eq!(views.crops[0].scale, [0.2, 0.5]);
        for (entry, cause) in [
            ("views.crops.1.size_px=64", "no entry 1: the list has 1"),
            ("views.crops.first.size_px=64", "no entry first: the list has 1"),
            ("optim.lr.x=64", "lr is not a section"),
        ] {
            let error = parse_error(RECIPE, &[entry]);
            assert!(error.contains(entry) && error.contains(cause), "{error}");
        }
    }

    /// The recipe of a plan is taken, with overrides.
    #[test]
    fn the_plan_of_a_run_is_a_recipe() {
        let plan = crate::resolve(Recipe::parse(RECIPE, "r", &[]).unwrap(), 64).unwrap();
        let read = Recipe::parse(&plan.to_toml(), "r", &["optim.lr=0.5".into()]).unwrap();
        assert_eq!(read.optim.lr, 0.5);
        assert_eq!(Recipe { optim: plan.recipe.optim.clone(), ..read }, plan.recipe);
    }

    #[test]
    fn a_key_is_set_with_its_section_or_with_a_part_of_it() {
        for (entry, expected) in [
            ("data.normalization={mean=[0.5],std=[0.5]}", true),
            ("data.normalization.mean=[0.5]", true),
            (" data = {}", true),
            ("data.normalizations=1", false),
            ("data.normalization", false),
            ("data.bits=16", false),
            ("optim.lr=1", false),
        ] {
            assert_eq!(is_set(&[entry.to_string()], "data.normalization"), expected, "{entry}");
        }
    }

    /// A section is stated with its keys, of which others are not; a plan states everything.
    #[test]
    fn keys_of_a_text_are_stated() {
        let stated = StatedKeys::read(RECIPE).unwrap();
        for key in ["optim.lr", "optim.length", "optim.length.steps", "optim", "views.crops.0.size_px"] {
            assert!(stated.contains(key), "{key}");
        }
        for key in ["optim.clip_norm", "data.normalization", "data", "optim.l", "model.depths"] {
            assert!(!stated.contains(key), "{key}");
        }
        let plan = crate::resolve(Recipe::parse(RECIPE, "r", &[]).unwrap(), 64).unwrap();
        let stated = StatedKeys::read(&plan.to_toml()).unwrap();
        assert!(stated.contains("data.background") && stated.contains("data.bits"), "defaults");
        assert!(StatedKeys::read("optim =").is_err());
    }

    #[test]
    fn all_mistakes_are_reported_at_once() {
        let wrong = [
            "model.heads=3",
            "model.depth=\"18\"",
            "optim.betas=0.9",
            "optim.length=3",
            "optim.warmpu={ steps = 1 }",
            "optim.schedule=cosinus",
            "views.crops.0.count=-1",
            "teacher.decay=0.9",
        ];
        let reason = parse_error(
            &RECIPE
                .replace("lr = 1e-3", "")
                .replace("name = \"simclr\"\ntemperature = 0.1", "name = \"dino\""),
            &wrong,
        );
        for (key, value) in [
            ("unknown key model.heads", "known keys are channels, depth, image_px"),
            ("model.depth = \"18\" must be a whole number", "write 18 without quotation marks"),
            ("optim.betas = 0.9 must be", "[start, end]"),
            ("optim.length = 3 must be", "{ epochs = 3 }"),
            ("unknown key optim.warmpu", "did you mean warmup?"),
            ("optim.schedule = \"cosinus\" is not one of cosine,", "did you mean cosine?"),
            ("views.crops.0.count = -1 must be", "a whole number of 0 or more"),
            ("unknown key teacher", "teacher.decay is now method.teacher_decay"),
            ("optim.lr is missing", "256"),
            ("method.prototypes is missing", ""),
        ] {
            let mut mistakes = reason.lines();
            assert!(
                mistakes.any(|mistake| mistake.contains(key) && mistake.contains(value)),
                "{key} in:\n{reason}"
            );
        }
        assert!(parse_error(RECIPE, &["method.name=dion"]).contains("did you mean dino?"));
        assert_eq!(parse_error(RECIPE, &["lr=1"]), "unknown key lr: did you mean optim.lr?");
        assert_eq!(parse_error(RECIPE, &["train.lr=1"]), "unknown key train: did you mean optim.lr?");
        let reason = parse_error(RECIPE, &["optim.batch_size=0.5"]);
        assert_eq!(reason, "optim.batch_size = 0.5 must be a whole number of 0 or more");
    }

    #[test]
    fn errors_of_syntax_name_the_line() {
        assert!(parse_error(&RECIPE.replace("lr = 1e-3", "lr = "), &[]).contains("line 18"));
    }
}
