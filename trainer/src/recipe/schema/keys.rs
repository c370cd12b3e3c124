//! Reference of all keys.

use serde_json::Value;

use super::form::{Field, Form, Variant};

/// Suffixes of keys that have a unit, with the name of the unit.
const UNITS: [(&str, &str); 6] = [
    ("_px", "pixels"),
    ("_s", "seconds"),
    ("_minutes", "minutes"),
    ("_steps", "steps"),
    ("_images", "images"),
    ("_rate_steps", "steps"),
];

/// End of the description of a variant that is for tests only.
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

impl Key {
    /// Returns the last part of the path, such as `batch_size`.
    pub fn last_part(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or_default()
    }

    /// Returns the argument of `--set` that gives the key `value`, as it is typed in a shell. A
    /// number becomes a length in epochs where a length is expected, and both numbers of a pair.
    pub fn setting(&self, value: &str) -> String {
        let path = self.path.replace("[]", ".0");
        let is_number = value.parse::<f64>().is_ok();
        if is_number && self.form.starts_with("length of time") {
            return format!("{path}.epochs={value}");
        }
        if is_number && self.form == "[number, number]" {
            return format!("'{path}=[{value},{value}]'");
        }
        let is_plain = value.chars().all(|c| c.is_alphanumeric() || "._-/+".contains(c));
        if is_plain { format!("{path}={value}") } else { format!("'{path}={value}'") }
    }

    /// Describes the values, and the default.
    pub fn describe_values(&self) -> String {
        match (&self.default, self.is_required) {
            (Some(default), _) => format!("{}, default {default}", self.form),
            (None, true) => format!("{}, required", self.form),
            (None, false) => format!("{}, optional", self.form),
        }
    }

    /// Lists the settings with which the key exists: `method.name = "dino" or "ibot"`.
    pub fn settings(&self) -> String {
        let mut listed: Vec<(&str, Vec<&str>)> = Vec::new();
        for (name, value) in self.belongs_to.iter().filter_map(|setting| setting.split_once(" = ")) {
            match listed.iter_mut().find(|(other, _)| *other == name) {
                Some((_, values)) => values.push(value),
                None => listed.push((name, vec![value])),
            }
        }
        listed
            .iter()
            .map(|(name, values)| match values.split_last() {
                Some((last, rest)) if !rest.is_empty() => format!("{name} = {} or {last}", rest.join(", ")),
                _ => format!("{name} = {}", values.concat()),
            })
            .collect::<Vec<_>>()
            .join("; ")
    }
}

/// Returns all keys of a recipe of this form, section by section.
pub(crate) fn keys(recipe: &Form) -> Vec<Key> {
    let mut keys = Vec::new();
    add_form("", recipe, "", &mut keys);
    keys
}

/// Returns the keys of a recipe of this form whose last part is `name`, with hyphens or
/// underscores. Keys of a frozen teacher, which a run records from its weights, are left out.
pub(crate) fn keys_named(recipe: &Form, name: &str) -> Vec<Key> {
    let name = name.replace('-', "_").to_lowercase();
    let mut found = keys(recipe);
    found.retain(|key| key.last_part() == name && !key.path.starts_with("method.teacher."));
    found
}

/// Returns the paths of `keys`, each once: several methods may have a key of one path.
pub fn distinct_paths(keys: &[Key]) -> Vec<&str> {
    let mut paths: Vec<&str> = Vec::new();
    for key in keys {
        if !paths.contains(&key.path.as_str()) {
            paths.push(&key.path);
        }
    }
    paths
}

/// Adds the keys of the table `form` at `path`, which belong to `setting` unless it is empty.
fn add_form(path: &str, form: &Form, setting: &str, keys: &mut Vec<Key>) {
    match form {
        Form::Section(fields) => {
            for field in fields {
                add_field(path, field, setting, keys);
            }
        }
        Form::Choice { tag, variants } => {
            let variants: Vec<&Variant> =
                variants.iter().filter(|variant| !variant.meaning.ends_with(FOR_TESTS)).collect();
            let names = variants.iter().map(|variant| (variant.name.clone(), variant.meaning.clone()));
            let words = Form::Word(names.collect());
            let meaning = String::from("Kind of the section, which determines its other keys.");
            let tag = Field { name: tag.clone(), meaning, form: words, default: None, is_required: true };
            add_field(path, &tag, setting, keys);
            for variant in variants {
                let setting = format!("{} = \"{}\"", joined(path, &tag.name), variant.name);
                for field in &variant.fields {
                    add_field(path, field, &setting, keys);
                }
            }
        }
        Form::Any(forms) => {
            for form in forms {
                add_form(path, form, setting, keys);
            }
        }
        Form::List(item, _) => add_form(&format!("{path}[]"), item, setting, keys),
        _ => {}
    }
}

/// Adds `field` of the table at `path`, and the keys of the field if it is a table.
fn add_field(path: &str, field: &Field, setting: &str, keys: &mut Vec<Key>) {
    let path = joined(path, &field.name);
    let is_table = matches!(field.form, Form::Section(_) | Form::Choice { .. });
    if !is_table {
        let key = Key {
            form: describe_values(&field.name, &field.form),
            default: field.default.as_ref().map(|value| format_value(value, &field.form)),
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
    add_form(&path, &field.form, setting, keys);
}

fn joined(path: &str, name: &str) -> String {
    if path.is_empty() { name.into() } else { format!("{path}.{name}") }
}

/// Describes the values of the key `name`.
fn describe_values(name: &str, form: &Form) -> String {
    let is_number = matches!(form, Form::Whole { .. } | Form::Number { .. });
    match UNITS.iter().find(|(suffix, _)| name.ends_with(suffix)) {
        Some((_, unit)) if is_number => format!("{} of {unit}", form.describe()),
        _ => form.describe(),
    }
}

/// Returns `value` as the text of a recipe.
fn format_value(value: &Value, form: &Form) -> String {
    match (value, form) {
        // The schema has widened it to double precision.
        (Value::Number(number), Form::Number { is_single: true }) => {
            format!("{:?}", number.as_f64().unwrap_or_default() as f32)
        }
        (Value::Number(number), Form::Number { is_single: false }) => {
            format!("{:?}", number.as_f64().unwrap_or_default())
        }
        (Value::Array(values), Form::List(item, _)) => {
            let values: Vec<String> = values.iter().map(|value| format_value(value, item)).collect();
            format!("[{}]", values.join(", "))
        }
        (Value::Object(values), Form::Section(fields) | Form::OneOf(fields)) => {
            let mut entries = Vec::new();
            for field in fields {
                if let Some(value) = values.get(&field.name) {
                    entries.push(format!("{} = {}", field.name, format_value(value, &field.form)));
                }
            }
            format!("{{ {} }}", entries.join(", "))
        }
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    fn setting(name: &str, value: &str) -> String {
        crate::recipe::keys_named(name)[0].setting(value)
    }

    #[test]
    fn settings_have_the_form_of_their_key() {
        assert_eq!(setting("lr", "0.001"), "optim.lr=0.001");
        assert_eq!(setting("weight-decay", "0.05"), "'optim.weight_decay=[0.05,0.05]'");
        assert_eq!(setting("warmup", "5"), "optim.warmup.epochs=5");
        assert_eq!(setting("shards", "a b"), "'data.shards=a b'");
        assert_eq!(setting("flip_p", "0"), "views.flip_p=0");
    }

    /// The meaning of every key is stated without references to code.
    #[test]
    fn every_key_has_a_meaning() {
        let keys = crate::recipe::keys();
        assert!(keys.len() > 100, "{}", keys.len());
        for key in keys {
            let all = key.words.iter().map(|(_, meaning)| meaning).chain([&key.meaning]);
            for text in all {
                let is_code = text.contains("[`") || text.contains("::") || text.contains("`true` if");
                assert!(text.len() > 3 && !is_code, "{}: {text}", key.path);
            }
        }
    }
}
