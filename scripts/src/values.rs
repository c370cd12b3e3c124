//! Values of flags.

/// Reads a number that is at least 1.
///
/// # Errors
/// What is wrong with `text`.
pub(crate) fn at_least_one(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("it must be a whole number, at least 1".into()),
    }
}
