//! Values by the names that the command line has for them.

/// The one of `all` whose `name` is `text`.
///
/// # Errors
/// The names that there are.
pub(crate) fn by_name<T: Copy>(all: &[T], name: fn(T) -> &'static str, text: &str) -> Result<T, String> {
    let names = || all.iter().map(|value| name(*value)).collect::<Vec<_>>().join(", ");
    all.iter().copied().find(|value| name(*value) == text).ok_or_else(|| format!("one of {}", names()))
}
