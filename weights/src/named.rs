//! Lookup of values by their names on the command line.

/// Returns the value among `all` whose `name` is `text`.
///
/// # Errors
/// A list of the known names, if `text` is none of them.
pub(crate) fn by_name<T: Copy>(all: &[T], name: fn(T) -> &'static str, text: &str) -> Result<T, String> {
    match all.iter().copied().find(|value| name(*value) == text) {
        Some(value) => Ok(value),
        None => {
            let names: Vec<&str> = all.iter().map(|value| name(*value)).collect();
            Err(format!("expected one of {}", names.join(", ")))
        }
    }
}
