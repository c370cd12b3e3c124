//! Individual operations between the matrix products of a transformer: results and gradients
//! compared with those of the CPU's kernels in f32, for the same inputs.

use burn_tensor::{DType, Device, Distribution, Tensor};
use kernels::device::readback::DeviceFailure;
use kernels::ops::{
    Lengths, Pairs, attention, cast, cross_entropy, gelu, layer_norm, seed, swiglu, unit_rows,
};
use serde_json::{Value, json};

use super::compare::{N_EQUAL, difference, have_same_bits, read_in_f32};
use crate::step::precision::Arithmetic;

/// Heads of the attention.
const N_HEADS: usize = 6;

/// An operation, and inputs for it.
#[derive(Debug, Clone, Copy)]
pub struct Operation {
    /// Name.
    pub name: &'static str,
    /// Shapes of the inputs.
    pub shapes: &'static [[usize; 3]],
    /// Whether the operation has the type of the products; otherwise it is always f32.
    pub has_type_of_products: bool,
    run: fn(&[Tensor<3>]) -> Tensor<3>,
}

/// Attention over the tokens of each image of `qkv`, `[B, N, 3·D]`.
fn attention_of_images(qkv: Tensor<3>) -> Tensor<3> {
    let [b, n, d3] = qkv.dims();
    let y = attention(qkv.reshape([b * n, d3]), &Lengths::equal(b, n), N_HEADS);
    y.reshape([b, n, d3 / 3])
}

/// Operations of ViT-S, on global and on local views.
pub const OPERATIONS: [Operation; 7] = [
    Operation {
        name: "attention, global",
        shapes: &[[8, 197, 1152]],
        has_type_of_products: true,
        run: |inputs| attention_of_images(inputs[0].clone()),
    },
    Operation {
        name: "attention, local",
        shapes: &[[32, 37, 1152]],
        has_type_of_products: true,
        run: |inputs| attention_of_images(inputs[0].clone()),
    },
    Operation {
        name: "GELU",
        shapes: &[[8, 197, 1536]],
        has_type_of_products: true,
        run: |inputs| gelu(inputs[0].clone()),
    },
    Operation {
        name: "SwiGLU",
        shapes: &[[8, 197, 2048]],
        has_type_of_products: true,
        run: |inputs| swiglu(inputs[0].clone()),
    },
    Operation {
        name: "layer norm",
        shapes: &[[8, 197, 384], [1, 1, 384], [1, 1, 384]],
        has_type_of_products: false,
        run: |inputs| {
            let gamma = inputs[1].clone().reshape([384]);
            layer_norm(inputs[0].clone(), gamma, inputs[2].clone().reshape([384]), 1e-6)
        },
    },
    Operation {
        name: "unit rows",
        shapes: &[[1, 640, 256]],
        has_type_of_products: false,
        run: |inputs| unit_rows(inputs[0].clone().reshape([640, 256]), 1e-12).unsqueeze(),
    },
    Operation {
        name: "cross-entropy",
        shapes: &[[16, 10, 8192]],
        has_type_of_products: false,
        run: |inputs| {
            let [b, _, k] = inputs[0].dims();
            let targets = Tensor::full([b, 2, k], 1.0 / k as f64, &inputs[0].device());
            cross_entropy(inputs[0].clone(), targets, Pairs::Others, 0.1).reshape([1, 1, 1])
        },
    },
];

/// Largest differences from the CPU, relative to its largest number.
#[derive(Debug, Clone, Copy)]
pub struct OperationDifferences {
    /// Difference of the result.
    pub result: f64,
    /// Difference of the gradients of all inputs.
    pub gradients: f64,
    /// Whether three passes gave the same bits.
    pub is_repeatable: bool,
}

/// Result of an operation and gradients of its inputs, on the host.
struct Pass {
    result: Vec<f32>,
    gradients: Vec<Vec<f32>>,
}

impl Operation {
    /// Type of the operation when matrix products use `arithmetic`.
    pub fn dtype(&self, arithmetic: Arithmetic) -> DType {
        if self.has_type_of_products { arithmetic.dtype() } else { DType::F32 }
    }

    /// Returns whether all passes gave the same bits and rounding can explain `differences` when
    /// matrix products use `arithmetic`.
    pub fn accepts(&self, differences: &OperationDifferences, arithmetic: Arithmetic) -> bool {
        let tolerance = self.tolerance(arithmetic);
        let is_close = differences.result <= tolerance && differences.gradients <= tolerance;
        is_close && differences.is_repeatable
    }

    /// Returns as JSON the `differences` that were found when matrix products used `arithmetic`.
    pub fn to_json(&self, differences: &OperationDifferences, arithmetic: Arithmetic) -> Value {
        json!({
            "operation": self.name,
            "differences": [differences.result, differences.gradients],
            "repeatable": differences.is_repeatable,
            "right": self.accepts(differences, arithmetic),
        })
    }

    /// Returns the largest difference that rounding can explain when matrix products use
    /// `arithmetic`.
    fn tolerance(&self, arithmetic: Arithmetic) -> f64 {
        // Products in f32 may round their factors to 11 bits (TF32).
        if self.dtype(arithmetic) == DType::BF16 { 3e-2 } else { 5e-3 }
    }

    /// Compares the operation on `device` with the CPU.
    ///
    /// # Errors
    /// [`DeviceFailure`].
    pub fn compare(
        &self,
        arithmetic: Arithmetic,
        device: &Device,
    ) -> Result<OperationDifferences, DeviceFailure> {
        let cpu = Device::flex();
        cpu.seed(1);
        let normal = Distribution::Normal(0.0, 1.0);
        let dtype = self.dtype(arithmetic);
        let inputs: Vec<Tensor<3>> =
            self.shapes.iter().map(|shape| rounded(Tensor::random(*shape, normal, &cpu), dtype)).collect();
        let result_shape = (self.run)(&inputs).dims();
        let g = rounded(Tensor::random(result_shape, normal, &cpu), dtype);
        let exact = self.pass(&inputs, &g, DType::F32, &cpu)?;
        let first = self.pass(&inputs, &g, dtype, device)?;
        let mut is_repeatable = true;
        for _ in 1..N_EQUAL {
            is_repeatable &= self.pass(&inputs, &g, dtype, device)?.has_bits_of(&first);
        }
        let mut gradients = 0.0f64;
        for (expected, actual) in exact.gradients.iter().zip(&first.gradients) {
            gradients = gradients.max(difference(expected, actual));
        }
        Ok(OperationDifferences {
            result: difference(&exact.result, &first.result),
            gradients,
            is_repeatable,
        })
    }

    /// Runs the operation forwards and backwards in `dtype` on `device`, for inputs and a gradient
    /// on the host.
    fn pass(
        &self,
        inputs: &[Tensor<3>],
        g: &Tensor<3>,
        dtype: DType,
        device: &Device,
    ) -> Result<Pass, DeviceFailure> {
        let mut leaves: Vec<Tensor<3>> = Vec::with_capacity(inputs.len());
        for input in inputs {
            leaves.push(cast(input.clone().to_device(device), dtype).autodiff().require_grad());
        }
        let y = (self.run)(&leaves);
        // Scalars of losses are f32.
        let g = cast(g.clone().to_device(device), y.dtype());
        let mut grads = seed(y.clone(), g).backward();
        let mut gradients = Vec::with_capacity(leaves.len());
        for leaf in &leaves {
            let gradient = leaf.grad_remove(&mut grads).expect("autodiff has a gradient for each leaf");
            gradients.push(read_in_f32(gradient)?);
        }
        Ok(Pass { result: read_in_f32(y.inner())?, gradients })
    }
}

impl Pass {
    fn has_bits_of(&self, other: &Self) -> bool {
        let mut pairs = self.gradients.iter().zip(&other.gradients);
        have_same_bits(&self.result, &other.result) && pairs.all(|(a, b)| have_same_bits(a, b))
    }
}

/// Rounds numbers to `dtype`, and returns them in f32.
fn rounded(values: Tensor<3>, dtype: DType) -> Tensor<3> {
    cast(cast(values, dtype), DType::F32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The CPU equals itself in f32, and is close in bf16.
    #[test]
    fn cpu_operations_are_within_their_tolerance() {
        for operation in OPERATIONS {
            let exact = operation.compare(Arithmetic::F32, &Device::flex()).unwrap();
            assert!(exact.is_repeatable, "{operation:?}: {exact:?}");
            assert_eq!([exact.result, exact.gradients], [0.0; 2], "{operation:?}");
            let rounded = operation.compare(Arithmetic::Bf16, &Device::flex()).unwrap();
            assert!(operation.accepts(&rounded, Arithmetic::Bf16), "{operation:?}: {rounded:?}");
            assert_eq!(rounded.result > 0.0, operation.has_type_of_products, "{operation:?}: {rounded:?}");
        }
    }
}
