//! Values of pixels that stand for no data, and values that use a part of their bits.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::AugmentError;

/// Largest floating-point value of a pixel: larger ones stand for no data, and would overflow in a
/// resize.
const LARGEST_FLOAT: f32 = 1e30;

/// Pixels that stand for no data. In images of floating point, NaN, infinities and numbers beyond
/// 10³⁰ do in any case.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NoData {
    /// Value that marks pixels without data, such as -9999; if absent, only NaN and the like do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<f32>,
    /// Value that pixels without data get: `"mean"`, the mean of the other pixels of their image
    /// and channel, or a number.
    pub fill: Fill,
}

/// Value that pixels without data get.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Fill {
    /// A value that the image's other pixels give.
    Rule(FillRule),
    /// This number.
    Number(f32),
    /// NaN, for sums that leave such pixels out.
    #[serde(skip)]
    Missing,
}

/// Value that the other pixels of an image give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FillRule {
    /// Their mean in the same channel.
    Mean,
}

impl Fill {
    /// The mean of the other pixels of the same image and channel.
    pub const MEAN: Self = Self::Rule(FillRule::Mean);

    /// The number, if it is one.
    pub fn number(self) -> Option<f32> {
        match self {
            Self::Number(number) => Some(number),
            Self::Rule(_) | Self::Missing => None,
        }
    }
}

impl Default for Fill {
    fn default() -> Self {
        Self::MEAN
    }
}

impl NoData {
    /// Returns whether `value` stands for no data.
    fn matches(&self, value: f32) -> bool {
        is_invalid(value) || self.value == Some(value)
    }

    /// Fills the pixels that stand for no data, in each channel of `n_pixels`.
    ///
    /// # Errors
    /// [`AugmentError::Decode`] for a channel without data, which has no mean.
    pub(crate) fn fill(&self, values: &mut [f32], n_pixels: usize) -> Result<(), AugmentError> {
        for (index, channel) in values.chunks_exact_mut(n_pixels.max(1)).enumerate() {
            let n_missing = channel.iter().filter(|value| self.matches(**value)).count();
            if n_missing == 0 {
                continue;
            }
            let fill = match self.fill {
                Fill::Number(number) => number,
                Fill::Missing => f32::NAN,
                Fill::MEAN if n_missing == channel.len() => {
                    return Err(AugmentError::Decode(format!("no pixel of channel {} has data", index + 1)));
                }
                Fill::MEAN => {
                    let data = channel.iter().filter(|value| !self.matches(**value));
                    let sum: f64 = data.map(|value| f64::from(*value)).sum();
                    (sum / (channel.len() - n_missing) as f64) as f32
                }
            };
            for value in channel.iter_mut().filter(|value| self.matches(**value)) {
                *value = fill;
            }
        }
        Ok(())
    }
}

/// Checks that all `values` are numbers of a magnitude that does not overflow in a resize.
///
/// # Errors
/// [`AugmentError::Decode`] with the first value that is not.
pub(crate) fn check_numbers(values: &[f32]) -> Result<(), AugmentError> {
    match values.iter().find(|value| is_invalid(**value)) {
        None => Ok(()),
        Some(value) => Err(AugmentError::Decode(format!(
            "a pixel is {value}: not a number, or a marker of missing data (data.no_data sets what such \
             pixels become)"
        ))),
    }
}

/// Returns whether `value` is NaN, infinite or so large that it stands for no data.
fn is_invalid(value: f32) -> bool {
    value.is_nan() || value.abs() > LARGEST_FLOAT
}

/// Scales 16-bit `values` that use only `bits` bits, so that the largest one becomes 65535. NaN is
/// unchanged.
///
/// # Errors
/// [`AugmentError::Decode`] for a value of more than `bits` bits.
pub(crate) fn scale_to_all_bits(values: &mut [f32], bits: u8) -> Result<(), AugmentError> {
    let largest = f32::from(u16::MAX >> (16 - bits));
    let factor = f64::from(u16::MAX) / f64::from(largest);
    for value in values {
        if *value > largest {
            return Err(too_many_bits(*value, bits));
        }
        *value = (f64::from(*value) * factor) as f32;
    }
    Ok(())
}

/// Returns the error for a pixel of more than `bits` bits.
pub(crate) fn too_many_bits(value: f32, bits: u8) -> AugmentError {
    AugmentError::Decode(format!("a pixel is {value}, more than data.bits_used = {bits} allows"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(no_data: NoData, values: &[f32]) -> Result<Vec<f32>, AugmentError> {
        let mut values = values.to_vec();
        no_data.fill(&mut values, 4).map(|()| values)
    }

    #[test]
    fn pixels_without_data_are_filled() {
        let values = [1.0, -9999.0, 3.0, f32::NAN, 5.0, 6.0, 7.0, 8.0];
        let mean = NoData { value: Some(-9999.0), fill: Fill::MEAN };
        assert_eq!(filled(mean, &values).expect("filled"), [1.0, 2.0, 3.0, 2.0, 5.0, 6.0, 7.0, 8.0]);
        let number = NoData { value: None, fill: Fill::Number(0.5) };
        assert_eq!(filled(number, &values).expect("filled"), [1.0, -9999.0, 3.0, 0.5, 5.0, 6.0, 7.0, 8.0]);
        let missing = NoData { value: Some(8.0), fill: Fill::Missing };
        let output = filled(missing, &values).expect("filled");
        let is_missing: Vec<bool> = output.iter().map(|value| value.is_nan()).collect();
        assert_eq!(is_missing, [false, false, false, true, false, false, false, true]);
        // A channel without any data has no mean, whatever the other channels hold.
        let none = [f32::INFINITY, f32::NAN, -2e30, f32::NEG_INFINITY, 1.0, 1.0, 1.0, 1.0];
        let error = filled(NoData::default(), &none).expect_err("refused");
        assert!(matches!(&error, AugmentError::Decode(reason) if reason.contains("channel 1")), "{error}");
    }

    #[test]
    fn scaled_values_use_all_bits() {
        let mut values = [0.0, 1.0, 4095.0];
        scale_to_all_bits(&mut values, 12).expect("scaled");
        assert_eq!(values[2], 65_535.0);
        assert!((values[1] - 16.0037).abs() < 1e-3);
        assert!(matches!(scale_to_all_bits(&mut [4096.0], 12), Err(AugmentError::Decode(_))));
    }

    fn parse(text: &str) -> serde_json::Result<NoData> {
        serde_json::from_str(text)
    }

    #[test]
    fn fill_is_mean_or_a_number_in_recipes() {
        assert_eq!(parse("{\"value\": -9999}").expect("parsed").fill, Fill::MEAN);
        assert_eq!(parse("{\"fill\": \"mean\"}").expect("parsed"), NoData::default());
        assert_eq!(parse("{\"fill\": 2}").expect("parsed").fill, Fill::Number(2.0));
        assert!(parse("{\"fill\": \"median\"}").is_err() && parse("{\"fill\": null}").is_err());
        for no_data in [NoData::default(), NoData { value: Some(1.5), fill: Fill::Number(0.0) }] {
            let text = serde_json::to_string(&no_data).expect("text");
            assert_eq!(parse(&text).expect("parsed"), no_data, "{text}");
        }
    }
}
