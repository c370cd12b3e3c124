//! Values of a view as bytes, and back.

use crate::format::{Depth, PixelFormat};

use super::Bands;

/// Appends `values` to `out` in the type of `depth`, with the lowest byte first; whole numbers are rounded, halves to even, and
/// clamped.
pub(crate) fn store(values: &[f32], depth: Depth, out: &mut Vec<u8>) {
    match depth {
        // `as` clamps to the range of the type.
        Depth::Eight => out.extend(values.iter().map(|value| value.round_ties_even() as u8)),
        Depth::Sixteen => {
            out.extend(values.iter().flat_map(|value| (value.round_ties_even() as u16).to_le_bytes()));
        }
        Depth::Float => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
    }
}

impl Bands {
    /// Creates an image of `width_px` from the bytes of a view in `format`, `[C, H, W]`.
    pub fn of_bytes(bytes: &[u8], format: PixelFormat, width_px: u32) -> Self {
        let values: Vec<f32> = match format.depth {
            Depth::Eight => bytes.iter().map(|byte| f32::from(*byte)).collect(),
            Depth::Sixteen => {
                bytes.as_chunks().0.iter().map(|pair| f32::from(u16::from_le_bytes(*pair))).collect()
            }
            Depth::Float => bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect(),
        };
        let height_px = values.len() / (format.n_channels * width_px as usize).max(1);
        Self { width_px, height_px: height_px as u32, depth: format.depth, values }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_hold_every_value_of_their_type(values in proptest::collection::vec(any::<u16>(), 12)) {
            let format = PixelFormat { n_channels: 3, depth: Depth::Sixteen };
            let floats: Vec<f32> = values.iter().map(|value| f32::from(*value)).collect();
            for depth in [Depth::Sixteen, Depth::Float] {
                let mut bytes = Vec::new();
                store(&floats, depth, &mut bytes);
                let back = Bands::of_bytes(&bytes, PixelFormat { depth, ..format }, 2);
                prop_assert_eq!((back.width_px, back.height_px, &back.values), (2, 2, &floats));
            }
        }
    }

    #[test]
    fn values_are_rounded_and_clamped() {
        let mut bytes = Vec::new();
        store(&[-3.0, 0.5, 1.5, 254.6, 300.0], Depth::Eight, &mut bytes);
        assert_eq!(bytes, [0, 0, 2, 255, 255]);
    }
}
