//! Form of the values of a recipe, read from the schema that `schemars` derives from their types.

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
    pub(crate) fn from_type<T: JsonSchema>() -> Self {
        let schema = schema_for!(T).to_value();
        Self::read(&schema, &schema["$defs"])
    }

    /// Describes the form.
    pub(super) fn describe(&self) -> String {
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
            Self::List(item, Some(len)) => format!("[{}]", vec![item.describe(); *len].join(", ")),
            Self::List(item, None) => format!("list, [{}, …]", item.describe()),
            Self::Any(forms) => forms.iter().map(Self::describe).collect::<Vec<_>>().join(", or "),
        }
    }

    /// Describes the form in a sentence, with an example where necessary.
    pub(super) fn example(&self) -> String {
        match self {
            Self::OneOf(_) => "a length of time such as { epochs = 3 }, { steps = 500 }, { samples = 1e6 } \
                or { percent = 5 }"
                .into(),
            Self::List(item, Some(2)) if **item == (Self::Number { is_single: false }) => {
                "two numbers, [start, end] or [smallest, largest]".into()
            }
            Self::Whole { is_unsigned: true } => "a whole number of 0 or more".into(),
            Self::Whole { .. } | Self::Number { .. } => format!("a {}", self.describe()),
            Self::Text => "text in quotation marks".into(),
            Self::Section(_) | Self::Choice { .. } | Self::Map => "a table, { key = value }".into(),
            Self::Word(_) | Self::Bool | Self::List(..) | Self::Any(_) => self.describe(),
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
                    let words = words.iter().map(|word| word.as_str().unwrap_or_default().to_string());
                    Self::Word(words.map(|word| (word, String::new())).collect())
                }
                None => Self::Text,
            },
        }
    }

    /// Reads an enum: words, a choice by a tag, or a table with one of several keys.
    fn read_variants(variants: &[Value], types: &Value) -> Self {
        if variants.iter().all(|variant| variant["type"] == "string") {
            return Self::Word(variants.iter().flat_map(variant_words).collect());
        }
        let Some(tag) = variants.iter().find_map(variant_tag) else {
            let mut keys = Vec::new();
            for variant in variants {
                for field in fields(variant, types, None) {
                    keys.push(Field { meaning: meaning(variant), ..field });
                }
            }
            return Self::OneOf(keys);
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

/// Returns the words of a variant with their meaning. Variants without documentation are listed
/// together.
fn variant_words(variant: &Value) -> Vec<(String, String)> {
    let listed = variant["enum"].as_array().map_or(&[][..], Vec::as_slice);
    let words = listed.iter().chain(Some(&variant["const"])).filter_map(Value::as_str);
    words.map(|word| (word.to_string(), meaning(variant))).collect()
}

/// Returns the key of a variant that names it, if it has one.
fn variant_tag(variant: &Value) -> Option<String> {
    let properties = variant["properties"].as_object()?;
    properties.iter().find(|(_, form)| form["const"].is_string()).map(|(name, _)| name.clone())
}

/// Reads the keys of the table that `schema` describes, and those of a type that it refers to,
/// without `tag`.
fn fields(schema: &Value, types: &Value, tag: Option<&str>) -> Vec<Field> {
    let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
    let properties = schema["properties"].as_object().into_iter().flatten();
    let mut fields: Vec<Field> = properties
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
