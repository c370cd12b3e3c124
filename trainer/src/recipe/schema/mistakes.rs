//! Check of a recipe against the forms of its keys, which reports all mistakes at once.

use toml::{Table, Value};

use super::form::{Field, Form};
use super::keys::{distinct_paths, keys_named};

/// Keys that were moved, each with a key that still is in its section, and a message.
const MOVED: [(&str, &str, &str); 3] = [
    (
        "stat_groups",
        "stat_images",
        "optim.stat_groups is now optim.stat_images, in images: optim.batch_size divided by the number of \
         groups",
    ),
    ("freeze_last_layer", "stat_images", "optim.freeze_last_layer is now method.freeze_last_layer"),
    ("teacher", "method", "the section [teacher] was removed: teacher.decay is now method.teacher_decay"),
];

/// Returns a message for each key of `recipe` that is missing, unknown or not of its form in
/// `form`.
pub(crate) fn mistakes(recipe: &Table, form: &Form) -> Vec<String> {
    let mut mistakes = Vec::new();
    let mut others = recipe.clone();
    for (name, value) in recipe {
        if let Some(question) = keys_in_sections(name, value, form) {
            mistakes.push(format!("unknown key {name}{question}"));
            others.remove(name);
        }
    }
    compare("", &Value::Table(others), form, &mut mistakes);
    mistakes
}

/// Returns a question with the keys that an unknown key or section of a recipe may mean: those in
/// sections with its name, or with the name of its only key. `None` if it is known, or there are
/// none.
fn keys_in_sections(name: &str, value: &Value, form: &Form) -> Option<String> {
    let Form::Section(fields) = form else { return None };
    if fields.iter().any(|field| field.name == name) {
        return None;
    }
    let mut name = name;
    if let Value::Table(table) = value
        && table.len() == 1
    {
        name = table.keys().next()?;
    }
    let keys = keys_named(form, name);
    let paths = distinct_paths(&keys);
    if paths.is_empty() { None } else { Some(format!(": did you mean {}?", paths.join(" or "))) }
}

/// Adds the mistakes in `value`, which is at `path` and should be of `form`.
fn compare(path: &str, value: &Value, form: &Form, mistakes: &mut Vec<String>) {
    match (form, value) {
        (Form::Section(fields), Value::Table(table)) => compare_table(path, table, fields, None, mistakes),
        (Form::Choice { tag, variants }, Value::Table(table)) => {
            let names: Vec<&str> = variants.iter().map(|variant| variant.name.as_str()).collect();
            let Some(name) = table.get(tag).and_then(Value::as_str) else {
                mistakes.push(format!("{path}.{tag} is missing: expected one of {}", names.join(", ")));
                return;
            };
            match variants.iter().find(|variant| variant.name == name) {
                Some(variant) => compare_table(path, table, &variant.fields, Some(tag), mistakes),
                None => mistakes.push(format!(
                    "{path}.{tag} = \"{name}\" is not one of {}{}",
                    names.join(", "),
                    did_you_mean(name, &names)
                )),
            }
        }
        (Form::OneOf(fields), Value::Table(table)) => {
            let known = fields.iter().find(|field| table.len() == 1 && table.contains_key(&field.name));
            match known {
                Some(field) => {
                    compare(&joined(path, &field.name), &table[&field.name], &field.form, mistakes)
                }
                None => mistakes.push(mismatch(path, value, form)),
            }
        }
        (Form::List(item, len), Value::Array(values)) if len.is_none_or(|len| len == values.len()) => {
            for (i, value) in values.iter().enumerate() {
                compare(&joined(path, &i.to_string()), value, item, mistakes);
            }
        }
        (Form::Any(forms), _) => {
            // The form of the type of the value gives the most precise message.
            match forms.iter().find(|form| has_type_of(value, form)) {
                Some(form) => compare(path, value, form, mistakes),
                None => mistakes.push(mismatch(path, value, form)),
            }
        }
        (Form::Word(words), Value::String(word)) => {
            if !words.iter().any(|(known, _)| known == word) {
                let names: Vec<&str> = words.iter().map(|(known, _)| known.as_str()).collect();
                let nearest = did_you_mean(word, &names);
                mistakes.push(format!("{path} = \"{word}\" is not one of {}{nearest}", names.join(", ")));
            }
        }
        (Form::Whole { is_unsigned }, Value::Integer(number)) if *number >= 0 || !is_unsigned => {}
        (Form::Map, Value::Table(_))
        | (Form::Number { .. }, Value::Integer(_) | Value::Float(_))
        | (Form::Bool, Value::Boolean(_))
        | (Form::Text, Value::String(_)) => {}
        _ => mistakes.push(mismatch(path, value, form)),
    }
}

/// Returns whether the type of `value` is that of `form`, for forms that occur in [`Form::Any`].
fn has_type_of(value: &Value, form: &Form) -> bool {
    match form {
        Form::Section(_) | Form::Choice { .. } => value.is_table(),
        Form::Word(_) | Form::Text => value.is_str(),
        Form::Number { .. } => value.is_float() || value.is_integer(),
        _ => false,
    }
}

/// Adds the mistakes in `table`, whose keys are those of `fields` and `tag`.
fn compare_table(path: &str, table: &Table, fields: &[Field], tag: Option<&str>, mistakes: &mut Vec<String>) {
    for field in fields {
        let path = joined(path, &field.name);
        match table.get(&field.name) {
            Some(value) => compare(&path, value, &field.form, mistakes),
            None if field.is_required => mistakes.push(format!(
                "{path} is missing: {} ({})",
                with_lower_case(field.meaning.trim_end_matches('.')),
                expected(field)
            )),
            None => {}
        }
    }
    let names: Vec<&str> = fields.iter().map(|field| field.name.as_str()).chain(tag).collect();
    for name in table.keys().filter(|name| !names.contains(&name.as_str())) {
        let path = joined(path, name);
        let moved = MOVED.iter().find(|(key, neighbor, _)| key == name && names.contains(neighbor));
        let mut hint = did_you_mean(name, &names);
        if let Some((_, _, message)) = moved {
            hint = format!(": {message}");
        } else if hint.is_empty() {
            hint = format!("; known keys are {}", names.join(", "));
        }
        mistakes.push(format!("unknown key {path}{hint}"));
    }
}

/// Describes the value that a key should have, with an example.
fn expected(field: &Field) -> String {
    match &field.form {
        Form::Section(_) | Form::Choice { .. } => "a section".into(),
        form => form.example(),
    }
}

/// Returns the message that `value` is not of `form`.
fn mismatch(path: &str, value: &Value, form: &Form) -> String {
    let remedy = match (form, value) {
        // Numbers and words that a shell has quoted.
        (Form::Whole { .. } | Form::Number { .. } | Form::Bool, Value::String(text))
            if text.parse::<f64>().is_ok() || ["true", "false"].contains(&text.as_str()) =>
        {
            format!("; write {text} without quotation marks")
        }
        _ => String::new(),
    };
    let path = if path.is_empty() { "the recipe" } else { path };
    format!("{path} = {value} must be {}{remedy}", form.example())
}

fn joined(path: &str, name: &str) -> String {
    if path.is_empty() { name.into() } else { format!("{path}.{name}") }
}

/// Returns `text` with its first letter in lower case.
fn with_lower_case(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_lowercase().chain(chars).collect(),
        None => String::new(),
    }
}

/// Similarity above which a word is suggested in place of an unknown one.
const MIN_SIMILARITY: f64 = 0.7;

/// Returns a question with the word of `known` that is most similar to `word`, or an empty string
/// if none is similar.
fn did_you_mean(word: &str, known: &[&str]) -> String {
    let mut nearest = None;
    let mut largest_similarity = MIN_SIMILARITY;
    for candidate in known.iter().filter(|candidate| **candidate != word) {
        let similarity = strsim::jaro_winkler(candidate, word);
        if similarity > MIN_SIMILARITY && similarity >= largest_similarity {
            nearest = Some(candidate);
            largest_similarity = similarity;
        }
    }
    match nearest {
        Some(nearest) => format!(": did you mean {nearest}?"),
        None => String::new(),
    }
}
