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

/// Reads a number of hours.
///
/// # Errors
/// What is wrong with `text`.
pub(crate) fn hours(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(hours) if hours > 0.0 && hours.is_finite() => Ok(hours),
        _ => Err("it must be a number of hours above 0, such as 8 or 0.5".into()),
    }
}
