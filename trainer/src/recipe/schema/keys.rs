//! The reference of all keys.

use serde_json::Value;

use super::form::{Field, Form, Variant};

/// Endings of keys that state a unit, with the unit in words.
const UNITS: [(&str, &str); 6] = [
    ("_px", "pixels"),
    ("_s", "seconds"),
    ("_minutes", "minutes"),
    ("_steps", "steps"),
    ("_images", "images"),
    ("_rate_steps", "steps"),
];

/// End of the meaning of a variant that exists in tests alone.
const FOR_TESTS: &str = ": for tests.";

/// Key of a recipe.
#[derive(Debug, Clone, PartialEq)]
pub struct Key {
    /// Path of the key, such as `optim.batch_size`; `[]` follows the name of a list of tables.
    pub path: String,
    /// Form of its values, in words.
    pub form: String,
    /// Default, as a recipe writes it, if there is one.
    pub default: Option<String>,
    /// Whether a recipe must have it, where the key belongs.
    pub is_required: bool,
    /// Meaning.
    pub meaning: String,
    /// Words that it may be, each with its meaning, where they have one.
    pub words: Vec<(String, String)>,
    /// Settings that it belongs to, such as `method.name = "dino"`; empty for any.
    pub belongs_to: Vec<String>,
}

/// Returns all keys of a recipe of this form, section by section.
pub(crate) fn keys(recipe: &Form) -> Vec<Key> {
    let mut keys = Vec::new();
    list("", recipe, "", &mut keys);
    keys
}

/// Adds the keys of the table `form` at `path`, which belong to `setting` unless it is empty.
fn list(path: &str, form: &Form, setting: &str, keys: &mut Vec<Key>) {
    match form {
        Form::Section(fields) => fields.iter().for_each(|field| add(path, field, setting, keys)),
        Form::Choice { tag, variants } => {
            let variants: Vec<&Variant> =
                variants.iter().filter(|variant| !variant.meaning.ends_with(FOR_TESTS)).collect();
            let names = variants.iter().map(|variant| (variant.name.clone(), variant.meaning.clone()));
            let words = Form::Word(names.collect());
            let meaning = String::from("Kind of the section, which decides about its other keys.");
            let tag = Field { name: tag.clone(), meaning, form: words, default: None, is_required: true };
            add(path, &tag, setting, keys);
            for variant in variants {
                let setting = format!("{} = \"{}\"", joined(path, &tag.name), variant.name);
                variant.fields.iter().for_each(|field| add(path, field, &setting, keys));
            }
        }
        Form::Any(forms) => forms.iter().for_each(|form| list(path, form, setting, keys)),
        Form::List(of, _) => list(&format!("{path}[]"), of, setting, keys),
        _ => {}
    }
}

/// Adds `field` of the table at `path`, and the keys of its own table.
fn add(path: &str, field: &Field, setting: &str, keys: &mut Vec<Key>) {
    let path = joined(path, &field.name);
    let is_table = matches!(field.form, Form::Section(_) | Form::Choice { .. });
    if !is_table {
        let key = Key {
            form: described(&field.name, &field.form),
            default: field.default.as_ref().map(|value| written(value, &field.form)),
            is_required: field.is_required,
            meaning: field.meaning.clone(),
            words: match &field.form {
                Form::Word(words) => {
                    words.iter().filter(|(_, meaning)| !meaning.is_empty()).cloned().collect()
                }
                _ => Vec::new(),
            },
            belongs_to: Vec::new(),
            path: path.clone(),
        };
        match keys.iter_mut().find(|other| Key { belongs_to: Vec::new(), ..(**other).clone() } == key) {
            Some(other) => other.belongs_to.push(setting.into()),
            None if setting.is_empty() => keys.push(key),
            None => keys.push(Key { belongs_to: vec![setting.into()], ..key }),
        }
    }
    list(&path, &field.form, setting, keys);
}

fn joined(path: &str, name: &str) -> String {
    if path.is_empty() { name.into() } else { format!("{path}.{name}") }
}

/// Describes the values of the key `name`.
fn described(name: &str, form: &Form) -> String {
    let unit = UNITS.iter().find(|(ending, _)| name.ends_with(ending)).map(|(_, unit)| format!(" of {unit}"));
    match form {
        Form::Whole { .. } | Form::Number { .. } => {
            format!("{}{}", form.in_words(), unit.unwrap_or_default())
        }
        _ => form.in_words(),
    }
}

/// Returns `value` as a recipe writes it.
pub(super) fn written(value: &Value, form: &Form) -> String {
    match (value, form) {
        // Has been widened to double precision.
        (Value::Number(number), Form::Number { is_single: true }) => {
            format!("{:?}", number.as_f64().unwrap_or_default() as f32)
        }
        (Value::Number(number), Form::Number { is_single: false }) => {
            format!("{:?}", number.as_f64().unwrap_or_default())
        }
        (Value::Array(values), Form::List(of, _)) => {
            let values: Vec<String> = values.iter().map(|value| written(value, of)).collect();
            format!("[{}]", values.join(", "))
        }
        (Value::Object(values), Form::Section(fields) | Form::OneOf(fields)) => {
            let entry = |field: &Field| {
                values
                    .get(&field.name)
                    .map(|value| format!("{} = {}", field.name, written(value, &field.form)))
            };
            format!("{{ {} }}", fields.iter().filter_map(entry).collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}
