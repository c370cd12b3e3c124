//! The check of a recipe against the forms of its keys, which lists all mistakes at once.

use toml::{Table, Value};

use super::form::{Field, Form};

/// Keys that were moved, each with a key that its section still has, and a message.
const MOVED: [(&str, &str, &str); 3] = [
    (
        "stat_groups",
        "stat_images",
        "optim.stat_groups is optim.stat_images now, in images: optim.batch_size divided by the groups",
    ),
    ("freeze_last_layer", "stat_images", "optim.freeze_last_layer is method.freeze_last_layer now"),
    ("teacher", "method", "the section [teacher] is gone: teacher.decay is method.teacher_decay now"),
];

/// Returns all keys of `recipe` that are missing, unknown or of another form than `form`, each in a
/// line of words.
pub(crate) fn mistakes(recipe: &Table, form: &Form) -> Vec<String> {
    let mut found = Vec::new();
    compare("", &Value::Table(recipe.clone()), form, &mut found);
    found
}

/// Adds the mistakes of `value`, at `path`, which should have this form.
fn compare(path: &str, value: &Value, form: &Form, found: &mut Vec<String>) {
    match (form, value) {
        (Form::Section(fields), Value::Table(table)) => compare_table(path, table, fields, None, found),
        (Form::Choice { tag, variants }, Value::Table(table)) => {
            let names: Vec<&str> = variants.iter().map(|variant| variant.name.as_str()).collect();
            let named = table.get(tag).and_then(Value::as_str);
            match (named, variants.iter().find(|variant| Some(variant.name.as_str()) == named)) {
                (_, Some(variant)) => compare_table(path, table, &variant.fields, Some(tag), found),
                (Some(name), None) => found.push(format!(
                    "{path}.{tag} = \"{name}\" is not one of {}{}",
                    names.join(", "),
                    did_you_mean(name, &names)
                )),
                (None, None) => found.push(format!("{path}.{tag} is missing: one of {}", names.join(", "))),
            }
        }
        (Form::OneOf(fields), Value::Table(table)) => {
            let known = fields.iter().find(|field| table.len() == 1 && table.contains_key(&field.name));
            match known {
                Some(field) => compare(&joined(path, &field.name), &table[&field.name], &field.form, found),
                None => found.push(unlike(path, value, form)),
            }
        }
        (Form::List(of, len), Value::Array(values)) if len.is_none_or(|len| len == values.len()) => {
            for (i, value) in values.iter().enumerate() {
                compare(&joined(path, &i.to_string()), value, of, found);
            }
        }
        (Form::Any(forms), _) => {
            // The form of the value's type says best what is wrong.
            match forms.iter().find(|form| match form {
                Form::Section(_) | Form::Choice { .. } => value.is_table(),
                Form::Word(_) | Form::Text => value.is_str(),
                Form::Number { .. } => value.is_float() || value.is_integer(),
                _ => false,
            }) {
                Some(form) => compare(path, value, form, found),
                None => found.push(unlike(path, value, form)),
            }
        }
        (Form::Word(words), Value::String(word)) => {
            if !words.iter().any(|(known, _)| known == word) {
                let names: Vec<&str> = words.iter().map(|(known, _)| known.as_str()).collect();
                let nearest = did_you_mean(word, &names);
                found.push(format!("{path} = \"{word}\" is not one of {}{nearest}", names.join(", ")));
            }
        }
        (Form::Whole { is_unsigned }, Value::Integer(number)) if *number >= 0 || !is_unsigned => {}
        (Form::Map, Value::Table(_))
        | (Form::Number { .. }, Value::Integer(_) | Value::Float(_))
        | (Form::Bool, Value::Boolean(_))
        | (Form::Text, Value::String(_)) => {}
        _ => found.push(unlike(path, value, form)),
    }
}

/// Adds the mistakes of a table with these keys, and with `tag`.
fn compare_table(path: &str, table: &Table, fields: &[Field], tag: Option<&str>, found: &mut Vec<String>) {
    for field in fields {
        let path = joined(path, &field.name);
        match table.get(&field.name) {
            Some(value) => compare(&path, value, &field.form, found),
            None if field.is_required => found.push(format!(
                "{path} is missing: {} ({})",
                lower(field.meaning.trim_end_matches('.')),
                expected(field)
            )),
            None => {}
        }
    }
    let names: Vec<&str> = fields.iter().map(|field| field.name.as_str()).chain(tag).collect();
    for name in table.keys().filter(|name| !names.contains(&name.as_str())) {
        let path = joined(path, name);
        let hint = match (
            MOVED.iter().find(|(key, neighbor, _)| key == name && names.contains(neighbor)),
            did_you_mean(name, &names),
        ) {
            (Some((_, _, now)), _) => format!(": {now}"),
            (None, hint) if hint.is_empty() => format!(": known here are {}", names.join(", ")),
            (None, hint) => hint,
        };
        found.push(format!("{path} is not known{hint}"));
    }
}

/// Says what a key of this form should be, with an example.
fn expected(field: &Field) -> String {
    match &field.form {
        Form::Section(_) | Form::Choice { .. } => "a section".into(),
        form => form.example(),
    }
}

/// Says that `value` has another form.
fn unlike(path: &str, value: &Value, form: &Form) -> String {
    let remedy = match (form, value) {
        // Numbers and words of a shell's quotes.
        (Form::Whole { .. } | Form::Number { .. } | Form::Bool, Value::String(text))
            if text.parse::<f64>().is_ok() || ["true", "false"].contains(&text.as_str()) =>
        {
            format!("; without quotation marks it is {text}")
        }
        _ => String::new(),
    };
    let path = if path.is_empty() { "the recipe" } else { path };
    format!("{path} = {value} must be {}{remedy}", form.example())
}

fn joined(path: &str, name: &str) -> String {
    if path.is_empty() { name.into() } else { format!("{path}.{name}") }
}

fn lower(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_lowercase().chain(chars).collect())
}

/// Returns a question that names the word of `known` nearest to `word`, if one is near.
fn did_you_mean(word: &str, known: &[&str]) -> String {
    let likeness = |known: &&str| strsim::jaro_winkler(known, word);
    let near = known.iter().filter(|known| **known != word && likeness(known) > 0.7);
    let nearest = near.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    nearest.map_or(String::new(), |nearest| format!(": did you mean {nearest}?"))
}
