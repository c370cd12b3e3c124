//! Conversion of tensors to another element type.
//!
//! ```text
//! y = x, rounded if y has fewer bits      gx = gy in the type of x
//! ```

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor};
use half::bf16;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, elements, flex_dtype, like};
use super::math::over_rows;
use super::number::{Number, convert};

/// Converts `x` to `dtype`.
pub fn cast<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    match (flex_dtype(&x), dtype) {
        _ if x.dtype() == dtype => x,
        (Some(DType::F32), DType::BF16) | (Some(DType::BF16), DType::F32) => run(Cast { dtype }, [x.into()]),
        _ => x.cast(dtype),
    }
}

#[derive(Debug, Clone)]
struct Cast {
    dtype: DType,
}

impl Kernel<Flex, 1> for Cast {
    /// Element type of the input.
    type Saved = DType;

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, DType) {
        let dtype = x.dtype();
        (in_dtype(&x, self.dtype), dtype)
    }

    fn backward(&self, dtype: DType, grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        [Some(in_dtype(&grad, dtype))]
    }
}

/// Converts `x` to `dtype`. Both types are f32 or bf16.
pub(super) fn in_dtype(x: &FlexTensor, dtype: DType) -> FlexTensor {
    match (x.dtype(), dtype) {
        (DType::F32, DType::BF16) => convert_elements::<f32, bf16>(x),
        (DType::BF16, DType::F32) => convert_elements::<bf16, f32>(x),
        _ => x.clone(),
    }
}

fn convert_elements<A: Number, B: Number>(x: &FlexTensor) -> FlexTensor {
    let x = contiguous(x);
    let values = elements::<A>(&x);
    let mut y = vec![B::default(); values.len()];
    over_rows(&mut y, 1024, |row, y| convert(&values[row * 1024..][..y.len()], y));
    like(&x, y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{backward, devices, leaves};

    #[test]
    fn equals_burns_cast_forward_and_backward() {
        for device in devices() {
            if !device.supports_dtype(DType::BF16) {
                continue;
            }
            let x = leaves(&device, &[[3, 5, 737]], 1).remove(0);
            let y = cast(cast(x.clone().swap_dims(1, 2), DType::BF16), DType::F32);
            let expected = x.clone().swap_dims(1, 2).cast(DType::BF16).cast(DType::F32);
            y.clone().inner().into_data().assert_eq(&expected.clone().inner().into_data(), true);
            let grad = x.grad(&backward(y)).expect("a leaf");
            let expected_grad = x.grad(&backward(expected)).expect("a leaf");
            grad.into_data().assert_eq(&expected_grad.into_data(), true);
        }
    }
}
