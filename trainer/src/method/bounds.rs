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

/// Checks that the value of a key is above 0 and at most `most`.
///
/// # Errors
/// A message with the key.
pub(super) fn check_positive(key: &str, value: f64, most: f64) -> Result<(), String> {
    if value > 0.0 && value <= most {
        return Ok(());
    }
    Err(format!("method.{key} {value} must be above 0 and at most {most}"))
}

/// Checks the decay of a moving average at the start and at the end of a run.
///
/// # Errors
/// A message with the key.
pub(super) fn check_decay(key: &str, decay: [f64; 2]) -> Result<(), String> {
    let [start, end] = decay;
    check_bounds(&[(key, start, [0.0, 1.0]), (key, end, [0.0, 1.0])])
}
