//! Parsing of a recipe's text, with `--set` overrides.

use serde::de::DeserializeOwned;

use super::schema::{Form, mistakes};

/// Value of `model.arch`, or of `model`, for the backbone of the weights that a run starts with.
const FROM_INIT: &str = "from_init";

/// Keys that the plan of a run has beside its recipe.
const OF_PLAN: [&str; 2] = ["total_steps", "world_size"];

/// Returns the backbone of weights as the table of a recipe, given `init.weights`.
pub(super) type ModelOf<'a> = &'a mut dyn FnMut(Option<&str>) -> Result<toml::Table, String>;

/// Parses `text`, a recipe of this form or the plan of a run, and applies `overrides` of the form
/// `optim.lr=1e-3`. Where the recipe takes its backbone from the weights that it starts with,
/// `model_of` returns that backbone; other keys of the recipe's `[model]` replace its keys.
///
/// # Errors
/// A message in words: all keys that are missing, unknown or of another form, or the message of
/// `model_of`.
pub(super) fn recipe<T: DeserializeOwned>(
    text: &str,
    overrides: &[String],
    form: &Form,
    model_of: Option<ModelOf<'_>>,
) -> Result<T, String> {
    let mut table: toml::Table =
        text.parse().map_err(|error: toml::de::Error| error.to_string().trim_end().to_string())?;
    if OF_PLAN.iter().all(|key| table.contains_key(*key))
        && let Some(toml::Value::Table(recipe)) = table.remove("recipe")
    {
        table = recipe;
    }
    overrides.iter().try_for_each(|entry| set(&mut table, entry))?;
    if let Some(model_of) = model_of {
        take_model(&mut table, model_of)?;
    }
    match mistakes(&table, form).as_slice() {
        [] => {}
        [mistake] => return Err(mistake.clone()),
        all => return Err(format!("{} mistakes:\n  {}", all.len(), all.join("\n  "))),
    }
    T::deserialize(table).map_err(|error| error.to_string().trim_end().to_string())
}

/// Replaces the model of `recipe` with that of the weights it starts with, if it says so.
fn take_model(recipe: &mut toml::Table, model_of: ModelOf<'_>) -> Result<(), String> {
    let own = match recipe.get("model") {
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
    let mut model = model_of(weights)?;
    model.extend(own);
    recipe.insert("model".into(), model.into());
    Ok(())
}

/// Units of a length of time, which has exactly one of them.
const UNITS: [&str; 4] = ["steps", "epochs", "samples", "percent"];

/// Sets one dotted key.
fn set(table: &mut toml::Table, entry: &str) -> Result<(), String> {
    let (path, value) = entry.split_once('=').ok_or(format!("--set {entry}: expected key=value"))?;
    if value.contains(['\n', '\r']) {
        return Err(format!("--set {path}: a value is one line"));
    }
    let parsed: toml::Table = format!("v = {value}")
        .parse()
        .or_else(|_| format!("v = {value:?}").parse())
        .map_err(|error: toml::de::Error| format!("--set {entry}: {error}"))?;
    let mut keys: Vec<&str> = path.trim().split('.').collect();
    let last = keys.pop().unwrap_or_default();
    let mut at = Place::Table(table);
    for key in keys {
        at = match at.value(key, entry)? {
            toml::Value::Table(table) => Place::Table(table),
            toml::Value::Array(list) => Place::List(list),
            _ => return Err(format!("--set {entry}: {key} is not a section")),
        };
    }
    let value = parsed.get("v").cloned().unwrap_or(toml::Value::Boolean(false));
    match at {
        Place::Table(table) => {
            // A length has one unit: a new unit replaces the old one.
            if UNITS.contains(&last) && table.keys().all(|key| UNITS.contains(&key.as_str())) {
                table.clear();
            }
            table.insert(last.into(), value);
        }
        Place::List(_) => *at.value(last, entry)? = value,
    }
    Ok(())
}

/// Place that a part of a dotted key leads to.
enum Place<'a> {
    Table(&'a mut toml::Table),
    /// Its entries are numbered from 0.
    List(&'a mut Vec<toml::Value>),
}

impl<'a> Place<'a> {
    /// Returns the value of `key`, which a table receives as a section if it lacks it.
    fn value(self, key: &str, entry: &str) -> Result<&'a mut toml::Value, String> {
        match self {
            Self::Table(table) => Ok(table.entry(key).or_insert_with(|| toml::Table::new().into())),
            Self::List(list) => {
                let n = list.len();
                let number = key.parse::<usize>().ok().filter(|number| *number < n);
                let number = number
                    .ok_or(format!("--set {entry}: {key} is not one of its {n} entries, counted from 0"))?;
                Ok(&mut list[number])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::recipe::Recipe;

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

    fn refused(text: &str, overrides: &[&str]) -> String {
        let overrides: Vec<String> = overrides.iter().map(|entry| entry.to_string()).collect();
        match Recipe::parse(text, "r", &overrides) {
            Err(crate::TrainError::Recipe { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn entries_of_lists_are_set_by_number() {
        let set = |entry: &str| Recipe::parse(RECIPE, "r", &[entry.into()]);
        let views = set("views.crops.0.size_px=64").unwrap().views.multicrop().unwrap();
        assert_eq!(views.crops[0].size_px, 64);
        let views = set("views.crops.0.scale.1=0.5").unwrap().views.multicrop().unwrap();
        assert_eq!(views.crops[0].scale, [0.2, 0.5]);
        assert!(refused(RECIPE, &["views.crops.1.size_px=64"]).contains("1 is not one of its 1 entries"));
        assert!(
            refused(RECIPE, &["views.crops.first.size_px=64"]).contains("first is not one of its 1 entries")
        );
        assert!(refused(RECIPE, &["optim.lr.x=64"]).contains("lr is not a section"));
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
    fn mistakes_are_told_at_once() {
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
        let told = refused(
            &RECIPE
                .replace("lr = 1e-3", "")
                .replace("name = \"simclr\"\ntemperature = 0.1", "name = \"dino\""),
            &wrong,
        );
        for mistake in [
            "model.heads is not known: known here are channels, depth, image_px",
            "model.depth = \"18\" must be a whole number",
            "without quotation marks it is 18",
            "optim.betas = 0.9 must be two numbers, [start, end]",
            "optim.length = 3 must be a length of time such as { epochs = 3 }",
            "optim.warmpu is not known: did you mean warmup?",
            "optim.schedule = \"cosinus\" is not one of cosine,",
            "did you mean cosine?",
            "views.crops.0.count = -1 must be a whole number of 0 or more",
            "teacher is not known: the section [teacher] is gone: teacher.decay is method.teacher_decay now",
            "optim.lr is missing: learning rate for a batch of 256 images",
            "method.prototypes is missing",
        ] {
            assert!(told.contains(mistake), "{mistake} in:\n{told}");
        }
        assert!(refused(RECIPE, &["method.name=dion"]).contains("did you mean dino?"));
        let one = refused(RECIPE, &["optim.batch_size=0.5"]);
        assert_eq!(one, "optim.batch_size = 0.5 must be a whole number of 0 or more");
    }

    #[test]
    fn errors_of_syntax_name_the_line() {
        assert!(refused(&RECIPE.replace("lr = 1e-3", "lr = "), &[]).contains("line 18"));
    }
}
