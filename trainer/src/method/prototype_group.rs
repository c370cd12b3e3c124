//! The key `method.prototype_group`: the number of ranks among which prototypes are divided.

/// Default of the key: prototypes are not divided.
pub(super) fn default_prototype_group() -> usize {
    1
}

/// Checks that `prototypes`, the value of `key`, is divisible by `size` ranks.
///
/// # Errors
/// A message with the key.
pub(super) fn check_prototype_group(size: usize, key: &str, prototypes: usize) -> Result<(), String> {
    if size == 0 || !prototypes.is_multiple_of(size) {
        return Err(format!(
            "method.prototype_group {size} does not divide {key} {prototypes} into equal parts: choose a \
             divisor, or 1"
        ));
    }
    Ok(())
}
