//! Conversion of f32 to f64 by their decimal digits.

/// Converts an f32 to the f64 with the same decimal digits: 0.1, not 0.10000000149.
pub(crate) fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

/// Converts each of `values` as [`decimal`] does.
pub(crate) fn decimals(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(decimal).collect()
}
