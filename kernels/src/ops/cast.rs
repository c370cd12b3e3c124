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

/// Returns `x` in `dtype`.
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

/// Returns `x`, in f32 or bf16, in `dtype`, which is one of them.
pub(super) fn in_dtype(x: &FlexTensor, dtype: DType) -> FlexTensor {
    match (x.dtype(), dtype) {
        (DType::F32, DType::BF16) => converted::<f32, bf16>(x),
        (DType::BF16, DType::F32) => converted::<bf16, f32>(x),
        _ => x.clone(),
    }
}

fn converted<A: Number, B: Number>(x: &FlexTensor) -> FlexTensor {
    let x = contiguous(x);
    let values = elements::<A>(&x);
    let mut y = vec![B::default(); values.len()];
    over_rows(&mut y, 1024, |row, y| convert(&values[row * 1024..][..y.len()], y));
    like(&x, y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::twin::{devices, leaves};

    #[test]
    fn it_is_burns_cast_forwards_and_backwards() {
        for device in devices().iter().filter(|device| device.supports_dtype(DType::BF16)) {
            let x = leaves(device, &[[3, 5, 737]], 1).remove(0);
            let both = [cast as fn(Tensor<3>, DType) -> Tensor<3>, |x, dtype| x.cast(dtype)];
            let [ours, burns] = both.map(|f| {
                let y = f(f(x.clone().swap_dims(1, 2), DType::BF16), DType::F32);
                let grads = (y.clone() * y.clone().inner().autodiff()).sum().backward();
                [y.inner(), x.grad(&grads).expect("a leaf")]
            });
            for (a, b) in ours.into_iter().zip(burns) {
                a.into_data().assert_eq(&b.into_data(), true);
            }
        }
    }
}
