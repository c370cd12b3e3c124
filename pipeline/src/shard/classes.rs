//! Classes as text members, columns and lists state them.
//!
//! A class is a number or a name. A text, an integer, and true or false state a class; 3.0 states
//! the class 3, because programs write integers like that beside missing values. A negative number
//! states that the class is not known.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::words::counted;

/// Text of a class member of a sample whose class is not known, even if it is in a folder or has a
/// column that would state one.
pub const UNKNOWN_CLASS: &str = "-1";

/// Names of the columns of a sample that state its class, the first of which counts.
pub const CLASS_COLUMNS: [&str; 2] = ["label", "labels"];

/// Largest integer up to which every one is a floating-point number.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// Columns of a sample, by name.
pub type Columns = Map<String, Value>;

/// Returns a class in canonical form: 7 for 007, without surrounding space. Negative numbers mean
/// no class in members, lists and columns.
pub fn canonical_class(text: &str) -> Option<String> {
    let text = text.trim();
    match text.parse::<i64>() {
        Ok(number) if number < 0 => None,
        Ok(number) => Some(number.to_string()),
        Err(_) => Some(text.to_string()).filter(|text| !text.is_empty()),
    }
}

/// Returns the class that `value` states, if it states one.
fn class_of(value: &Value) -> Option<String> {
    match value {
        // A class is a line of a class member.
        Value::String(text) => canonical_class(text).filter(|class| !class.contains(['\n', '\r'])),
        Value::Bool(is_true) => Some(is_true.to_string()),
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() => {
                let is_integer = float.fract() == 0.0 && float.abs() <= MAX_EXACT;
                if is_integer { canonical_class(&format!("{float:.0}")) } else { None }
            }
            _ => canonical_class(&number.to_string()),
        },
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

/// Returns the value of `label`, or else of `labels`, in the columns of a sample.
pub fn stated_class(columns: &Columns) -> Option<&Value> {
    CLASS_COLUMNS.iter().find_map(|name| columns.get(*name))
}

/// Returns the classes that the columns of a sample state under `label`, or else under `labels`:
/// one, or a list of them, without duplicates.
pub fn classes_of(columns: &Columns) -> Vec<String> {
    let values = match stated_class(columns) {
        Some(Value::Array(values)) => values.as_slice(),
        Some(value) => std::slice::from_ref(value),
        None => &[],
    };
    distinct(values.iter().filter_map(class_of))
}

/// Returns whether the columns of a sample state that it is of no class: by an empty list.
pub fn states_no_class(columns: &Columns) -> bool {
    stated_class(columns).and_then(Value::as_array).is_some_and(Vec::is_empty)
}

/// Returns whether the columns of a sample state classes, or that there are none.
pub fn states_classes(columns: &Columns) -> bool {
    states_no_class(columns) || !classes_of(columns).is_empty()
}

/// Removes duplicates, which detection data sets have: they state a class for each box. The order
/// is that of first occurrence.
pub(super) fn distinct(classes: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = HashSet::new();
    classes.filter(|class| seen.insert(class.clone())).collect()
}

/// Reader of a column of classes, which counts the values that state none although they are not
/// empty.
#[derive(Debug, Default)]
pub struct ClassColumn {
    n_unusable: u64,
    first_unusable: String,
    /// Whether a list repeats the numbers 0 and 1, as one with a number for each class does.
    has_flags: bool,
}

impl ClassColumn {
    /// Returns the classes that `value` states, one or a list of them, without duplicates: none for
    /// an empty list, and `None` if nothing in it is a class.
    pub fn read(&mut self, value: &Value) -> Option<Vec<String>> {
        let values = match value {
            Value::Array(values) if values.is_empty() => return Some(Vec::new()),
            Value::Array(values) => values.as_slice(),
            value => std::slice::from_ref(value),
        };
        self.has_flags |= values.len() > 2 && values.iter().all(is_zero_or_one);
        let mut classes = Vec::with_capacity(values.len());
        for value in values {
            match class_of(value) {
                Some(class) => classes.push(class),
                None => self.count_unusable(value),
            }
        }
        let classes = distinct(classes.into_iter());
        if classes.is_empty() { None } else { Some(classes) }
    }

    /// Counts a value that is no class, unless it says that the class is not known.
    fn count_unusable(&mut self, value: &Value) {
        let is_unknown = match value {
            Value::Null => true,
            Value::String(text) => canonical_class(text).is_none(),
            Value::Number(number) => number.as_f64().is_some_and(|number| number < 0.0),
            Value::Bool(_) | Value::Array(_) | Value::Object(_) => false,
        };
        if is_unknown {
            return;
        }
        if self.n_unusable == 0 {
            self.first_unusable = value.to_string();
        }
        self.n_unusable += 1;
    }

    /// Warns of values of the column of `name`, a list or file, that are no classes.
    pub fn report(&self, name: &str) {
        if self.n_unusable > 0 {
            tracing::warn!(
                "{name}: {} in the column of classes, such as {}, state no class",
                counted(self.n_unusable, "value"),
                self.first_unusable
            );
        }
        if self.has_flags {
            tracing::warn!(
                "{name}: lists of 0 and 1 are read as lists of the classes 0 and 1: instead of a number for \
                 each class, list those that an image has"
            );
        }
    }
}

fn is_zero_or_one(value: &Value) -> bool {
    matches!(value.as_u64(), Some(0 | 1))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Reads the classes of `value`, and whether it was counted as unusable.
    fn read(value: Value) -> (Option<Vec<String>>, bool) {
        let mut column = ClassColumn::default();
        let classes = column.read(&value);
        (classes, column.n_unusable > 0)
    }

    fn classes(names: &[&str]) -> Option<Vec<String>> {
        Some(names.iter().map(|name| name.to_string()).collect())
    }

    #[test]
    fn values_state_classes() {
        for (value, expected) in [
            (json!("cat"), classes(&["cat"])),
            (json!(" 007 "), classes(&["7"])),
            (json!(3), classes(&["3"])),
            (json!(3.0), classes(&["3"])),
            (json!(true), classes(&["true"])),
            (json!(u64::MAX), classes(&["18446744073709551615"])),
            (json!(["cat", 3, "cat", null]), classes(&["cat", "3"])),
            (json!([]), classes(&[])),
            (json!(null), None),
            (json!(""), None),
            (json!(-1), None),
            (json!(-1.0), None),
            (json!([null, "", -1]), None),
        ] {
            assert_eq!(read(value.clone()), (expected, false), "{value}");
        }
    }

    #[test]
    fn values_that_are_no_classes_are_counted() {
        for (value, expected) in [
            (json!(0.5), None),
            (json!({"name": "cat"}), None),
            (json!([["cat"]]), None),
            (json!("a\nb"), None),
            (json!(["cat", 0.5]), classes(&["cat"])),
        ] {
            assert_eq!(read(value.clone()), (expected, true), "{value}");
        }
    }

    /// The same values state the same classes in a list and in the columns of a sample.
    #[test]
    fn columns_of_samples_are_read_alike() {
        for value in [json!("cat"), json!(3.0), json!(true), json!(-1), json!(["b", 2, "b"]), json!(0.5)] {
            let mut columns = Columns::new();
            columns.insert("labels".into(), value.clone());
            assert_eq!(classes_of(&columns), read(value.clone()).0.unwrap_or_default(), "{value}");
        }
    }
}
