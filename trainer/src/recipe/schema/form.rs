//! The form of a recipe's values, read from the schema that `schemars` derives from their types.

use schemars::{JsonSchema, schema_for};
use serde_json::Value;

/// Form of a value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Form {
    /// Table with these keys.
    Section(Vec<Field>),
    /// Table whose key `tag` names one of the variants, which has further keys.
    Choice { tag: String, variants: Vec<Variant> },
    /// Table with exactly one of these keys.
    OneOf(Vec<Field>),
    /// Table with keys of any name.
    Map,
    /// One of these words, each with its meaning.
    Word(Vec<(String, String)>),
    /// Whole number, of 0 or more if `is_unsigned`.
    Whole { is_unsigned: bool },
    /// Number; of single precision if `is_single`.
    Number { is_single: bool },
    /// `true` or `false`.
    Bool,
    /// Text.
    Text,
    /// List of values of a form, of a fixed length or of any.
    List(Box<Form>, Option<usize>),
    /// Any of several forms.
    Any(Vec<Form>),
}

/// Key of a table.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Field {
    pub(super) name: String,
    pub(super) meaning: String,
    pub(super) form: Form,
    pub(super) default: Option<Value>,
    pub(super) is_required: bool,
}

/// Variant of a choice.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Variant {
    pub(super) name: String,
    pub(super) meaning: String,
    pub(super) fields: Vec<Field>,
}

impl Form {
    /// Returns the form of the values of `T`.
    pub(crate) fn of<T: JsonSchema>() -> Self {
        let schema = schema_for!(T).to_value();
        Self::read(&schema, &schema["$defs"])
    }

    /// Describes the form.
    pub(super) fn in_words(&self) -> String {
        match self {
            Self::Section(fields) => {
                let names: Vec<&str> = fields.iter().map(|field| field.name.as_str()).collect();
                format!("table with {}", names.join(", "))
            }
            Self::Choice { .. } | Self::Map => "table".into(),
            Self::OneOf(fields) => {
                let names: Vec<&str> = fields.iter().map(|field| field.name.as_str()).collect();
                format!("length of time, {{ {} = number }}", names.join(" | "))
            }
            Self::Word(words) => {
                let words: Vec<String> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
                match words.split_last() {
                    Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
                    _ => words.concat(),
                }
            }
            Self::Whole { .. } => "whole number".into(),
            Self::Number { .. } => "number".into(),
            Self::Bool => "true or false".into(),
            Self::Text => "text".into(),
            Self::List(of, Some(len)) => format!("[{}]", vec![of.in_words(); *len].join(", ")),
            Self::List(of, None) => format!("list, [{}, …]", of.in_words()),
            Self::Any(forms) => forms.iter().map(Self::in_words).collect::<Vec<_>>().join(", or "),
        }
    }

    /// Describes the form with an example where words are not enough.
    pub(super) fn example(&self) -> String {
        match self {
            Self::OneOf(_) => "a length of time such as { epochs = 3 }, { steps = 500 }, { samples = 1e6 } or { percent = 5 }".into(),
            Self::List(of, Some(2)) if **of == (Self::Number { is_single: false }) => {
                "two numbers, [start, end] or [smallest, largest]".into()
            }
            Self::Whole { is_unsigned: true } => "a whole number of 0 or more".into(),
            Self::Whole { .. } | Self::Number { .. } => format!("a {}", self.in_words()),
            Self::Text => "text in quotation marks".into(),
            Self::Section(_) | Self::Choice { .. } | Self::Map => "a table, { key = value }".into(),
            Self::Word(_) | Self::Bool | Self::List(..) | Self::Any(_) => self.in_words(),
        }
    }

    /// Reads the form that `schema` describes, where `types` are the types that it refers to.
    fn read(schema: &Value, types: &Value) -> Self {
        if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
            return Self::read(&types[name], types);
        }
        if let Some(variants) = schema["oneOf"].as_array() {
            return Self::read_variants(variants, types);
        }
        if let Some(forms) = schema["anyOf"].as_array() {
            let mut forms: Vec<Self> = forms
                .iter()
                .filter(|form| form["type"] != "null")
                .map(|form| Self::read(form, types))
                .collect();
            return if forms.len() == 1 { forms.remove(0) } else { Self::Any(forms) };
        }
        // The type of an optional value is a list with `null`.
        let kind = schema["type"].as_array().map_or(&schema["type"], |kinds| &kinds[0]);
        match kind.as_str().unwrap_or_default() {
            "object" if schema["properties"].is_object() => Self::Section(fields(schema, types, None)),
            "object" => Self::Map,
            "array" => {
                let len = schema["maxItems"].as_u64().filter(|_| schema["maxItems"] == schema["minItems"]);
                Self::List(Box::new(Self::read(&schema["items"], types)), len.map(|len| len as usize))
            }
            "integer" => Self::Whole { is_unsigned: schema["minimum"] == 0 },
            "number" => Self::Number { is_single: schema["format"] == "float" },
            "boolean" => Self::Bool,
            _ => match schema["enum"].as_array() {
                Some(words) => {
                    let word = |word: &Value| (word.as_str().unwrap_or_default().to_string(), String::new());
                    Self::Word(words.iter().map(word).collect())
                }
                None => Self::Text,
            },
        }
    }

    /// Reads an enum: words, a choice by a tag, or a table with one of several keys.
    fn read_variants(variants: &[Value], types: &Value) -> Self {
        // Variants without documentation are listed together.
        let words = |variant: &Value| -> Vec<(String, String)> {
            let together = variant["enum"].as_array().map_or(&[][..], Vec::as_slice);
            let all = together.iter().chain(Some(&variant["const"])).filter_map(Value::as_str);
            all.map(|word| (word.to_string(), meaning(variant))).collect()
        };
        if variants.iter().all(|variant| variant["type"] == "string") {
            return Self::Word(variants.iter().flat_map(words).collect());
        }
        let tag = |variant: &Value| -> Option<String> {
            let properties = variant["properties"].as_object()?;
            properties.iter().find(|(_, form)| form["const"].is_string()).map(|(name, _)| name.clone())
        };
        let Some(tag) = variants.iter().find_map(tag) else {
            let one = |variant: &Value| -> Vec<Field> {
                fields(variant, types, None)
                    .into_iter()
                    .map(|field| Field { meaning: meaning(variant), ..field })
                    .collect()
            };
            return Self::OneOf(variants.iter().flat_map(one).collect());
        };
        Self::Choice {
            variants: variants
                .iter()
                .map(|variant| Variant {
                    name: variant["properties"][&tag]["const"].as_str().unwrap_or_default().to_string(),
                    meaning: meaning(variant),
                    fields: fields(variant, types, Some(&tag)),
                })
                .collect(),
            tag,
        }
    }
}

/// Reads the keys of the table that `schema` describes, but for `tag`; those of a type that it
/// refers to as well.
fn fields(schema: &Value, types: &Value, tag: Option<&str>) -> Vec<Field> {
    let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
    let own = schema["properties"].as_object().into_iter().flatten();
    let mut fields: Vec<Field> = own
        .filter(|(name, _)| Some(name.as_str()) != tag)
        .map(|(name, value)| Field {
            name: name.clone(),
            meaning: meaning(value),
            form: Form::read(value, types),
            default: value.get("default").filter(|default| !default.is_null()).cloned(),
            is_required: required.iter().any(|required| required == name.as_str()),
        })
        .collect();
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        fields.extend(self::fields(&types[name], types, tag));
    }
    fields
}

/// Returns the documentation of `schema` in one line.
fn meaning(schema: &Value) -> String {
    schema["description"].as_str().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}
