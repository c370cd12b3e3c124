//! Element types of the tensors that CPU kernels read and write. The kernels compute in f32.

use std::borrow::Cow;

use burn_tensor::DType;
use bytemuck::Pod;
use half::bf16;
use multiversion::multiversion;

/// An element type: f32 or bf16.
pub trait Number: burn_tensor::Element + Pod + Default {
    /// The tensor data type of these elements.
    const DTYPE: DType;

    /// Returns the number in f32.
    fn wide(self) -> f32;
    /// Returns the number nearest to `value`; ties are rounded to even.
    fn nearest(value: f32) -> Self;
    /// Returns the bits of the nearest bf16.
    fn bf16_bits(self) -> u16;
}

impl Number for f32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }

    #[inline(always)]
    fn nearest(value: f32) -> Self {
        value
    }

    /// Rounds in integer arithmetic, which vectorizes: half of the value of the last bit that is
    /// kept is added, less one if that bit is zero, so that a carry reaches it if the number is to
    /// be rounded up.
    #[inline(always)]
    fn bf16_bits(self) -> u16 {
        let bits = self.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // Rounding could turn a NaN into an infinity.
        let quiet = (bits >> 16) | 0x40;
        (if self.is_nan() { quiet } else { rounded }) as u16
    }
}

impl Number for bf16 {
    const DTYPE: DType = DType::BF16;

    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn nearest(value: f32) -> Self {
        Self::from_bits(value.bf16_bits())
    }

    #[inline(always)]
    fn bf16_bits(self) -> u16 {
        self.to_bits()
    }
}

/// Sets every element of `y` to the number nearest to that of `x`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
pub(crate) fn convert<A: Number, B: Number>(x: &[A], y: &mut [B]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = B::nearest(x.wide());
    }
}

/// Returns `values` in f32; borrowed if they are f32 already.
pub(crate) fn wide<T: Number>(values: &[T]) -> Cow<'_, [f32]> {
    match T::DTYPE {
        DType::F32 => Cow::Borrowed(bytemuck::cast_slice(values)),
        _ => {
            let mut wide = vec![0.0; values.len()];
            convert(values, &mut wide);
            Cow::Owned(wide)
        }
    }
}

/// Converts `values` to the nearest values of type `T`.
pub(crate) fn nearest<T: Number>(values: Vec<f32>) -> Vec<T> {
    match T::DTYPE {
        DType::F32 => bytemuck::cast_vec(values),
        _ => {
            let mut nearest = vec![T::default(); values.len()];
            convert(&values, &mut nearest);
            nearest
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference: the crate `half`.
    #[test]
    fn bf16_rounding_matches_half() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits((u32::from(high) << 16) | low);
                let rounded = bf16::nearest(value);
                let expected = bf16::from_f32(value);
                assert!(
                    rounded.to_bits() == expected.to_bits(),
                    "{value:e}: {rounded} instead of {expected}"
                );
                assert!(rounded.wide().to_bits() == expected.to_f32().to_bits(), "{rounded}");
            }
        }
    }
}
