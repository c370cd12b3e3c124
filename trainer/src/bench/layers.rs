//! Individual layers of a transformer: their results compared with sums in f64, and their times.
//!
//! ```text
//! y = x · Wᵀ + b       gx = g · W       gW = gᵀ · x       gb = Σ_rows g
//! ```
//!
//! Factors are random numbers, rounded to the type of the products, so that sums in f64 are those
//! of the same factors.

use std::ops::Range;
use std::time::Instant;

use burn_tensor::{DType, Device, Distribution, Tensor};
use kernels::device::readback::{DeviceFailure, failure, read_back};
use kernels::ops::{FlatGradient, cast, linear, part, seed};
use serde_json::{Value, json};

use super::Times;
use super::compare::{N_EQUAL, have_same_bits, read_in_f32};
use crate::step::precision::Arithmetic;

/// Rows of each result that are computed in f64, spread evenly.
const N_SAMPLES: usize = 16;

/// Passes of one measurement of time.
const N_PASSES: usize = 10;

/// An affine layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layer {
    /// Name.
    pub name: &'static str,
    /// Width of an input token, D.
    pub input: usize,
    /// Width of an output token, O.
    pub output: usize,
}

/// Largest errors of results, each divided by the root mean square of the exact result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerErrors {
    /// Error of y.
    pub output: f64,
    /// Error of gx.
    pub input_gradient: f64,
    /// Error of gW.
    pub weight_gradient: f64,
    /// Error of gb.
    pub bias_gradient: f64,
}

/// Times and errors of a layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerBench {
    /// Largest errors.
    pub errors: LayerErrors,
    /// Whether three passes gave the same bits.
    pub is_repeatable: bool,
    /// A forward pass.
    pub forward: Times,
    /// A forward and a backward pass.
    pub both: Times,
}

impl Layer {
    /// Returns the affine layers of a transformer block of `width`.
    pub fn in_transformer_block(width: usize) -> [Self; 4] {
        [
            Self { name: "qkv", input: width, output: 3 * width },
            Self { name: "proj", input: width, output: width },
            Self { name: "fc1", input: width, output: 4 * width },
            Self { name: "fc2", input: 4 * width, output: width },
        ]
    }

    /// Returns the floating-point operations of a forward pass over `n_tokens`; a backward pass has
    /// twice as many.
    pub fn flops(self, n_tokens: usize) -> f64 {
        2.0 * n_tokens as f64 * self.input as f64 * self.output as f64
    }
}

impl LayerBench {
    /// Returns whether rounding explains all errors, where products have `arithmetic`, and all
    /// passes gave the same bits.
    pub fn is_right(&self, arithmetic: Arithmetic) -> bool {
        self.errors.are_at_most(&LayerErrors::tolerance(arithmetic)) && self.is_repeatable
    }

    /// Returns the measurements of `layer` on `n_tokens` tokens as JSON, where products have
    /// `arithmetic`.
    pub fn to_json(&self, layer: Layer, n_tokens: usize, arithmetic: Arithmetic) -> Value {
        json!({
            "layer": layer.name,
            "tokens": n_tokens,
            "input": layer.input,
            "output": layer.output,
            "forward_ms": self.forward.median_ms,
            "both_ms": self.both.median_ms,
            "errors": self.errors.to_array(),
            "repeatable": self.is_repeatable,
            "right": self.is_right(arithmetic),
        })
    }
}

impl LayerErrors {
    /// Returns the errors of y, gx, gW and gb.
    pub fn to_array(self) -> [f64; 4] {
        [self.output, self.input_gradient, self.weight_gradient, self.bias_gradient]
    }

    /// Returns the largest errors that rounding explains: results in bf16 have 9 bits, sums of
    /// products of bf16 in f32 are nearly exact, and NVIDIA's GPUs round factors in f32 to 11 bits.
    fn tolerance(arithmetic: Arithmetic) -> Self {
        match arithmetic {
            Arithmetic::Bf16 => {
                Self { output: 3e-2, input_gradient: 3e-2, weight_gradient: 1e-3, bias_gradient: 1e-3 }
            }
            Arithmetic::F32 => {
                Self { output: 5e-3, input_gradient: 5e-3, weight_gradient: 5e-3, bias_gradient: 5e-3 }
            }
        }
    }

    /// Returns whether no error is larger than that of `tolerance` or NaN.
    fn are_at_most(&self, tolerance: &Self) -> bool {
        self.output <= tolerance.output
            && self.input_gradient <= tolerance.input_gradient
            && self.weight_gradient <= tolerance.weight_gradient
            && self.bias_gradient <= tolerance.bias_gradient
    }
}

/// Measures `layer` on `n_tokens` tokens, `repeats` times.
///
/// # Errors
/// [`DeviceFailure`].
pub fn measure(
    layer: Layer,
    n_tokens: usize,
    arithmetic: Arithmetic,
    repeats: usize,
    device: &Device,
) -> Result<LayerBench, DeviceFailure> {
    let factors = Factors::random(layer, n_tokens, arithmetic, device);
    // Also warms up: sizes are checked at their first use, which takes longer.
    let first = factors.pass().read()?;
    let errors = first.errors(&factors.read()?, layer);
    let mut is_repeatable = true;
    for _ in 1..N_EQUAL {
        is_repeatable &= factors.pass().read()?.has_bits_of(&first);
    }
    let forward = times(repeats, device, || drop(factors.forward()))?;
    let both = times(repeats, device, || drop(factors.pass()))?;
    Ok(LayerBench { errors, is_repeatable, forward, both })
}

/// Returns the times of a call of `run`, each the mean of several calls including the device's
/// work.
fn times(repeats: usize, device: &Device, run: impl Fn()) -> Result<Times, DeviceFailure> {
    let mut all = Vec::with_capacity(repeats.max(1));
    for _ in 0..repeats.max(1) {
        device.sync().map_err(|error| failure(&error))?;
        let start = Instant::now();
        for _ in 0..N_PASSES {
            run();
        }
        device.sync().map_err(|error| failure(&error))?;
        all.push(start.elapsed().as_secs_f64() * 1e3 / N_PASSES as f64);
    }
    Ok(Times::new(all))
}

/// Inputs of a layer, its parameters, and the gradient at its results.
struct Factors {
    layer: Layer,
    /// `[1, M, D]`.
    x: Tensor<3>,
    /// W, then b, as in the buffer of a unit.
    parameters: Tensor<1>,
    /// Gradient at y, `[1, M, O]`.
    g: Tensor<3>,
}

/// Results of a pass on the device.
struct Results {
    y: Tensor<3>,
    gx: Tensor<3>,
    /// gW, then gb.
    gradient: Tensor<1>,
}

/// Factors or results on the host.
struct Numbers {
    /// x, or gx.
    x: Vec<f32>,
    /// W and b, or their gradients.
    parameters: Vec<f32>,
    /// g, or y.
    g: Vec<f32>,
}

impl Factors {
    fn random(layer: Layer, n_tokens: usize, arithmetic: Arithmetic, device: &Device) -> Self {
        let normal = Distribution::Normal(0.0, 1.0);
        let dtype = arithmetic.dtype();
        device.seed(1);
        let n_parameters = layer.input * layer.output + layer.output;
        Self {
            layer,
            x: cast(Tensor::random([1, n_tokens, layer.input], normal, device), dtype),
            parameters: cast(Tensor::random([n_parameters], normal, device), dtype),
            g: cast(Tensor::random([1, n_tokens, layer.output], normal, device), dtype),
        }
    }

    fn weight_range(&self) -> Range<usize> {
        0..self.layer.input * self.layer.output
    }

    fn bias_range(&self) -> Range<usize> {
        let n_weights = self.weight_range().end;
        n_weights..n_weights + self.layer.output
    }

    fn weight(&self) -> Tensor<2> {
        part(&self.parameters, self.weight_range()).reshape([self.layer.output, self.layer.input])
    }

    /// Returns the bias, in the type in which the device adds it.
    fn bias(&self) -> Tensor<1> {
        let bias = part(&self.parameters, self.bias_range());
        if self.x.device() == Device::flex() { cast(bias, DType::F32) } else { bias }
    }

    fn forward(&self) -> Tensor<3> {
        linear(self.x.clone(), self.weight(), self.bias())
    }

    /// Runs the layer forwards and backwards.
    fn pass(&self) -> Results {
        let x = self.x.clone().autodiff().require_grad();
        let missing = "autodiff has a gradient for each leaf";
        if let Some(mut gradient) = FlatGradient::on_device_of(&self.parameters) {
            let weight = gradient.leaf(self.weight(), self.weight_range());
            let bias = gradient.leaf(self.bias(), self.bias_range());
            let y = linear(x.clone(), weight, bias);
            let mut grads = seed(y.clone(), self.g.clone()).backward();
            let gradient = gradient.finish(&mut grads);
            return Results { y: y.inner(), gx: x.grad_remove(&mut grads).expect(missing), gradient };
        }
        let weight = self.weight().autodiff().require_grad();
        let bias = self.bias().autodiff().require_grad();
        let y = linear(x.clone(), weight.clone(), bias.clone());
        let mut grads = seed(y.clone(), self.g.clone()).backward();
        let weight = cast(weight.grad_remove(&mut grads).expect(missing), DType::F32);
        let n_weights = self.weight_range().end;
        let bias = cast(bias.grad_remove(&mut grads).expect(missing), DType::F32);
        let gradient = Tensor::cat(vec![weight.reshape([n_weights]), bias], 0);
        Results { y: y.inner(), gx: x.grad_remove(&mut grads).expect(missing), gradient }
    }

    fn read(&self) -> Result<Numbers, DeviceFailure> {
        Ok(Numbers {
            x: read_in_f32(self.x.clone())?,
            parameters: read_back(cast(self.parameters.clone(), DType::F32))?,
            g: read_in_f32(self.g.clone())?,
        })
    }
}

impl Results {
    fn read(self) -> Result<Numbers, DeviceFailure> {
        Ok(Numbers {
            x: read_in_f32(self.gx)?,
            parameters: read_back(self.gradient)?,
            g: read_in_f32(self.y)?,
        })
    }
}

impl Numbers {
    fn has_bits_of(&self, other: &Self) -> bool {
        have_same_bits(&self.x, &other.x)
            && have_same_bits(&self.parameters, &other.parameters)
            && have_same_bits(&self.g, &other.g)
    }

    /// Compares results with sums in f64 of `factors`.
    fn errors(&self, factors: &Self, layer: Layer) -> LayerErrors {
        let Layer { input: d, output: o, .. } = layer;
        let n_tokens = factors.x.len() / d;
        let (weight, bias) = factors.parameters.split_at(o * d);
        let (weight_gradient, bias_gradient) = self.parameters.split_at(o * d);
        let tokens = samples(n_tokens);
        let y = tokens.iter().map(|m| {
            let x = &factors.x[m * d..(m + 1) * d];
            let row = weight.chunks_exact(d).zip(bias).map(|(w, b)| dot(x, w) + f64::from(*b));
            (row.collect(), &self.g[m * o..(m + 1) * o])
        });
        let gx = tokens.iter().map(|m| {
            let g = &factors.g[m * o..(m + 1) * o];
            (weighted_sum(g.iter().copied(), weight, d), &self.x[m * d..(m + 1) * d])
        });
        let outputs = samples(o);
        let gw = outputs.iter().map(|index| {
            let g = factors.g.iter().skip(*index).step_by(o).copied();
            (weighted_sum(g, &factors.x, d), &weight_gradient[index * d..(index + 1) * d])
        });
        let gb = weighted_sum(std::iter::repeat_n(1.0, n_tokens), &factors.g, o);
        LayerErrors {
            output: largest_error(y),
            input_gradient: largest_error(gx),
            weight_gradient: largest_error(gw),
            bias_gradient: largest_error(std::iter::once((gb, bias_gradient))),
        }
    }
}

/// Returns up to [`N_SAMPLES`] of `0..n`, the first and the last among them.
fn samples(n: usize) -> Vec<usize> {
    let n_samples = n.min(N_SAMPLES);
    (0..n_samples).map(|i| i * (n - 1) / (n_samples - 1).max(1)).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Returns the sum of `rows`, each times its weight: `[width]`.
fn weighted_sum(weights: impl Iterator<Item = f32>, rows: &[f32], width: usize) -> Vec<f64> {
    let mut sum = vec![0.0; width];
    for (weight, row) in weights.zip(rows.chunks_exact(width)) {
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum += f64::from(weight) * f64::from(*value);
        }
    }
    sum
}

/// Returns the largest difference of pairs of an exact and a computed row, divided by the root mean
/// square of the exact rows.
fn largest_error<'n>(rows: impl Iterator<Item = (Vec<f64>, &'n [f32])>) -> f64 {
    let mut largest = 0.0f64;
    let mut squares = 0.0;
    let mut n = 0usize;
    for (exact, computed) in rows {
        for (exact, computed) in exact.iter().zip(computed) {
            let error = (exact - f64::from(*computed)).abs();
            if error.is_nan() {
                return f64::NAN;
            }
            largest = largest.max(error);
            squares += exact * exact;
            n += 1;
        }
    }
    largest / (squares / n.max(1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the errors of a pass whose results are changed by `change`.
    fn errors_after(factors: &Factors, numbers: &Numbers, change: fn(&mut Numbers)) -> LayerErrors {
        let mut results = factors.pass().read().unwrap();
        change(&mut results);
        results.errors(numbers, factors.layer)
    }

    /// A layer on the CPU is correct in both types, and an error of one element is detected.
    #[test]
    fn errors_of_single_elements_are_detected() {
        let layer = Layer { name: "layer", input: 24, output: 40 };
        let device = Device::flex();
        for arithmetic in [Arithmetic::F32, Arithmetic::Bf16] {
            let measured = measure(layer, 100, arithmetic, 1, &device).unwrap();
            assert!(measured.is_right(arithmetic), "{measured:?}");
            let factors = Factors::random(layer, 100, arithmetic, &device);
            let numbers = factors.read().unwrap();
            let errors = errors_after(&factors, &numbers, |results| results.g[0] += 5.0);
            assert!(errors.output > 0.1);
            let errors = errors_after(&factors, &numbers, |results| results.x[1] += 5.0);
            assert!(errors.input_gradient > 0.1);
            let errors = errors_after(&factors, &numbers, |results| results.parameters[2] += 5.0);
            assert!(errors.weight_gradient > 0.1);
            let errors = errors_after(&factors, &numbers, |results| results.parameters[24 * 40 + 39] += 5.0);
            assert!(errors.bias_gradient > 0.1);
            let errors = errors_after(&factors, &numbers, |results| results.g[0] = f32::NAN);
            assert!(errors.output.is_nan());
        }
    }
}
