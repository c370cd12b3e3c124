//! Conversion of the values of a view to bytes.

use multiversion::multiversion;

use crate::format::Depth;

/// Appends `values` to `out` in the type of `depth`, the lowest byte first. Whole numbers are
/// rounded, half to even, and clamped.
pub(crate) fn store(values: &[f32], depth: Depth, out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + values.len() * depth.bytes(), 0);
    write(values, depth, &mut out[start..]);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn write(values: &[f32], depth: Depth, out: &mut [u8]) {
    // `as` clamps to the range of the type.
    match depth {
        Depth::Eight => {
            for (out, value) in out.iter_mut().zip(values) {
                *out = value.round_ties_even() as u8;
            }
        }
        Depth::Sixteen => {
            for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *out = (value.round_ties_even() as u16).to_le_bytes();
            }
        }
        Depth::Float => {
            for (out, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *out = value.to_le_bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::bands::Bands;
    use crate::format::PixelFormat;

    proptest! {
        #[test]
        fn stored_values_are_read_back_exactly(values in proptest::collection::vec(any::<u16>(), 12)) {
            let format = PixelFormat { n_channels: 3, depth: Depth::Sixteen };
            let floats: Vec<f32> = values.iter().map(|value| f32::from(*value)).collect();
            for depth in [Depth::Sixteen, Depth::Float] {
                let mut bytes = Vec::new();
                store(&floats, depth, &mut bytes);
                let bands = Bands::from_bytes(&bytes, PixelFormat { depth, ..format }, 2);
                prop_assert_eq!((bands.width_px, bands.height_px, &bands.values), (2, 2, &floats));
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
