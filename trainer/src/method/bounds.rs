//! Checks of settings that must lie in a range.

/// Value of each key under `method`, with its smallest and largest allowed value.
type Bounds<'a> = &'a [(&'a str, f64, [f64; 2])];

/// Checks that the values of keys lie within their bounds.
///
/// # Errors
/// A message with the key.
pub(super) fn check_bounds(values: Bounds<'_>) -> Result<(), String> {
    for (key, value, [low, high]) in values {
        if !(*low..=*high).contains(value) {
            return Err(format!("method.{key} is {value} but must lie in {low}..={high}"));
        }
    }
    Ok(())
}
