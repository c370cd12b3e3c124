//! Adapters of low rank (LoRA: Hu et al. 2021), which are trained in place of a unit's weights.
//!
//! ```text
//! W' = W + (α / r) · B · A      W [O, D] fixed   A [r, D] ~ U(±1/√D)   B [O, r] zeros at the start
//! gA = (α / r) · Bᵀ · g         gB = (α / r) · g · Aᵀ                  g the gradient of W'
//! ```
//!
//! A unit says which of its weights may have an adapter ([`ParamSpec::adaptable`]), and knows no
//! more about them: it computes with W', a weight in a buffer like any other. The unit's own
//! parameters, the **base**, are in a buffer of their own, so that gradients, sums over ranks and
//! moments are those of the small matrices alone. Biases, gains and all other parameters of the
//! backbone are fixed, as in the paper; heads are trained as without adapters.
//!
//! Other programs see W' under the name of W ([`Adapter::merge`]).

use std::collections::HashMap;

use burn_tensor::{Device, Tensor};
use kernels::device::host::to_host;
use kernels::ops::{LowRank, add_low_rank, low_rank_gradients};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::NetworkError;
use crate::layout::UnitLayout;
use crate::leaves::ParamGrads;
use crate::params::{Init, ParamSpec};
use crate::part_name::base_name;
use crate::tensor::NamedTensor;
use crate::unit::Unit;

/// End of the name of A, after that of its weight.
const A: &str = ".lora_a";

/// End of the name of B.
const B: &str = ".lora_b";

/// Adapters of a backbone, as a recipe writes them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Adapter {
    /// Rank of adapters (LoRA, Hu et al. 2021), pairs of small matrices whose products are added to
    /// weights: those of a transformer's queries, keys and values, and of both layers of its MLP.
    /// The backbone keeps the weights that the run starts from, and only adapters and heads are
    /// trained. Exports have the sums.
    pub rank: usize,
    /// Factor of these products, which is divided by the rank.
    pub alpha: f64,
}

/// Returns whether `unit` has weights that may have an adapter.
pub fn takes_adapters(unit: &dyn Unit) -> bool {
    unit.params().iter().any(|spec| spec.is_adaptable)
}

impl Adapter {
    /// Returns the factor of a product of A and B.
    fn scale(self) -> f32 {
        (self.alpha / self.rank as f64) as f32
    }

    /// Returns the parameters of the adapters of `unit`; none if no weight of it may have one.
    pub fn params(self, unit: &dyn Unit) -> Vec<ParamSpec> {
        let mut params = Vec::new();
        for weight in unit.params().iter().filter(|spec| spec.is_adaptable) {
            let n_outputs = weight.shape[0];
            let n_inputs = weight.numel() / n_outputs;
            // PyTorch's `kaiming_uniform_` with a = √5, as in the authors' code.
            let init = Init::Uniform(1.0 / (n_inputs as f32).sqrt());
            let a = ParamSpec::weight(format!("{}{A}", weight.name), [self.rank, n_inputs], init);
            let b_shape = [n_outputs, self.rank];
            let b = ParamSpec::weight(format!("{}{B}", weight.name), b_shape, Init::Constant(0.0));
            params.push(a.optional());
            params.push(b.optional());
        }
        params
    }

    /// Returns the layout of the buffer of the adapters of `unit` over a shard group of
    /// `group_size` ranks; `None` if it has none.
    pub fn layout(self, unit: &dyn Unit, group_size: usize) -> Option<UnitLayout> {
        let params = self.params(unit);
        if params.is_empty() { None } else { Some(UnitLayout::new(unit.name(), params, group_size)) }
    }

    /// Adds each adapter among `tensors`, the parameters of a network, to its weight, and removes
    /// it. Returns the other parameters in their order.
    ///
    /// # Errors
    /// [`NetworkError::Weights`] for an adapter without its weight or its other matrix, or of
    /// another shape.
    pub fn merge(self, tensors: Vec<NamedTensor>) -> Result<Vec<NamedTensor>, NetworkError> {
        let mut factors: HashMap<String, NamedTensor> = HashMap::new();
        let mut merged = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            if tensor.name.ends_with(A) || tensor.name.ends_with(B) {
                factors.insert(tensor.name.clone(), tensor);
            } else {
                merged.push(tensor);
            }
        }
        for tensor in &mut merged {
            let a = factors.remove(&format!("{}{A}", tensor.name));
            let b = factors.remove(&format!("{}{B}", tensor.name));
            match (a, b) {
                (None, None) => {}
                (Some(a), Some(b)) => self.add(tensor, &a, &b)?,
                (Some(one), None) | (None, Some(one)) => return Err(incomplete(one.name)),
            }
        }
        match factors.into_keys().min() {
            Some(name) => Err(incomplete(name)),
            None => Ok(merged),
        }
    }

    /// Adds the product of `a` and `b` to `weight`, as a step does.
    fn add(self, weight: &mut NamedTensor, a: &NamedTensor, b: &NamedTensor) -> Result<(), NetworkError> {
        let n_outputs = weight.shape.first().copied().unwrap_or_default();
        let n_inputs = weight.values.len().checked_div(n_outputs).unwrap_or_default();
        check_shape(weight, [n_outputs, n_inputs])?;
        check_shape(a, [self.rank, n_inputs])?;
        check_shape(b, [n_outputs, self.rank])?;
        let n_a = a.values.len();
        let place = LowRank {
            weight: 0..weight.values.len(),
            a: 0..n_a,
            b: n_a..n_a + b.values.len(),
            rank: self.rank,
        };
        let device = Device::flex();
        let factors = Tensor::<1>::from_floats(&[&a.values[..], &b.values].concat()[..], &device);
        let values = Tensor::<1>::from_floats(&weight.values[..], &device);
        weight.values = to_host(add_low_rank(&values, &factors, &[place], self.scale()));
        Ok(())
    }
}

/// Returns the parameters of `unit`, all of them fixed but weights that may have an adapter: a step
/// computes their gradients, from which those of the adapters follow.
pub fn base_params(unit: &dyn Unit) -> Vec<ParamSpec> {
    let params = unit.params().into_iter();
    params.map(|spec| if spec.is_adaptable { spec } else { spec.fixed() }).collect()
}

/// Returns the layout of the buffer of the base of `unit`, a unit of a backbone with adapters, over
/// a shard group of `group_size` ranks. It has the name of the unit if the unit has no adapters.
pub fn base_layout(unit: &dyn Unit, group_size: usize) -> UnitLayout {
    let params = base_params(unit);
    if takes_adapters(unit) {
        UnitLayout::new(&base_name(unit.name()), params, group_size)
    } else {
        UnitLayout::new(unit.name(), params, group_size)
    }
}

/// The adapters of a unit and its base, in their buffers.
#[derive(Debug, Clone, Copy)]
pub struct UnitAdapters<'a> {
    /// Settings of the adapters.
    pub adapter: Adapter,
    /// Layout of the base.
    pub base: &'a UnitLayout,
    /// Layout of the adapters.
    pub adapters: &'a UnitLayout,
}

/// Indices of a weight and of its adapter within their layouts.
#[derive(Clone, Copy)]
struct AdaptedWeight {
    weight: usize,
    a: usize,
    b: usize,
}

impl UnitAdapters<'_> {
    /// Returns the base with all adapters added to their weights, `[padded]`, given both buffers in
    /// f32.
    pub fn merged(&self, base: &Tensor<1>, adapters: &Tensor<1>) -> Tensor<1> {
        let weights = self.weights();
        let places: Vec<LowRank> = weights.iter().map(|weight| self.place(*weight)).collect();
        add_low_rank(base, adapters, &places, self.adapter.scale())
    }

    /// Returns the gradients of the adapters in the buffer `adapters`, given those of the merged
    /// weights.
    pub fn gradients(&self, adapters: &Tensor<1>, mut merged: ParamGrads) -> ParamGrads {
        let mut parts: Vec<Option<Tensor<1>>> = vec![None; self.adapters.params.len()];
        for weight in self.weights() {
            let Some(grad) = merged.take(self.base, weight.weight) else { continue };
            let grads = low_rank_gradients(&grad, adapters, &self.place(weight), self.adapter.scale());
            parts[weight.a] = Some(grads.a);
            parts[weight.b] = Some(grads.b);
        }
        ParamGrads::ByParameter { parts, device: adapters.device() }
    }

    /// Returns the weights that have an adapter.
    fn weights(&self) -> Vec<AdaptedWeight> {
        let mut weights = Vec::new();
        for (weight, slot) in self.base.params.iter().enumerate() {
            let name = &slot.spec.name;
            if let Some(a) = self.adapters.position(&format!("{name}{A}"))
                && let Some(b) = self.adapters.position(&format!("{name}{B}"))
            {
                weights.push(AdaptedWeight { weight, a, b });
            }
        }
        weights
    }

    /// Returns the places of a weight and of its adapter in their buffers.
    fn place(&self, AdaptedWeight { weight, a, b }: AdaptedWeight) -> LowRank {
        LowRank {
            weight: self.base.params[weight].range(),
            a: self.adapters.params[a].range(),
            b: self.adapters.params[b].range(),
            rank: self.adapter.rank,
        }
    }
}

/// Returns the error about the matrix `name` of an adapter, which is not complete.
fn incomplete(name: String) -> NetworkError {
    NetworkError::Weights { name, reason: "is of an adapter that is not complete".into() }
}

/// Checks that `tensor` is a matrix of this shape, with its values.
fn check_shape(tensor: &NamedTensor, shape: [usize; 2]) -> Result<(), NetworkError> {
    let [n_rows, n_columns] = shape;
    let numel = n_rows * n_columns;
    if tensor.shape == shape && tensor.values.len() == numel && numel > 0 {
        return Ok(());
    }
    let reason = format!("has shape {:?}, which does not fit its adapter", tensor.shape);
    Err(NetworkError::Weights { name: tensor.name.clone(), reason })
}

#[cfg(test)]
mod tests {
    use burn_tensor::DType;

    use super::*;
    use crate::backbone::{ModelConfig, Readout};
    use crate::init::fill;

    const ADAPTER: Adapter = Adapter { rank: 2, alpha: 6.0 };

    /// Returns the units of all backbones.
    fn units() -> Vec<Box<dyn Unit>> {
        ModelConfig::examples().iter().flat_map(|model| model.units(Readout::All)).collect()
    }

    /// Returns random values for the buffer of `layout`.
    fn values(layout: &UnitLayout, seed: u64) -> Tensor<1> {
        let mut values = vec![0.0; layout.padded];
        fill(Init::Normal(0.5), seed, &layout.name, 0, &mut values[..layout.numel]);
        Tensor::from_floats(&values[..], &Device::flex())
    }

    fn matrix(name: &str, shape: [usize; 2], values: &[f32]) -> NamedTensor {
        NamedTensor { name: name.into(), shape: shape.to_vec(), values: values.to_vec() }
    }

    /// By hand: the product is [[1, 2, 3], [3, 4, 5]], and its factor 6 / 2.
    #[test]
    fn a_product_is_added_to_its_weight() {
        let tensors = vec![
            matrix("w", [2, 3], &[10.0, 20.0, 30.0, 40.0, 50.0, 60.0]),
            matrix("w.lora_a", [2, 3], &[1.0, 2.0, 3.0, 1.0, 0.0, -1.0]),
            matrix("other", [1, 1], &[5.0]),
            matrix("w.lora_b", [2, 2], &[1.0, 0.0, 2.0, 1.0]),
        ];
        let merged = ADAPTER.merge(tensors).unwrap();
        let expected = matrix("w", [2, 3], &[13.0, 26.0, 39.0, 49.0, 62.0, 75.0]);
        assert_eq!(merged, [expected, matrix("other", [1, 1], &[5.0])]);
    }

    #[test]
    fn adapters_that_do_not_fit_are_refused() {
        let weight = matrix("w", [2, 1], &[1.0, 2.0]);
        let a = matrix("w.lora_a", [2, 1], &[1.0, 2.0]);
        let b = matrix("w.lora_b", [2, 2], &[1.0; 4]);
        let long = matrix("w.lora_b", [3, 2], &[1.0; 6]);
        let untrue = NamedTensor { values: vec![1.0], ..a.clone() };
        assert!(ADAPTER.merge(vec![weight.clone(), a.clone(), b.clone()]).is_ok());
        for tensors in [
            vec![weight.clone(), a.clone()],
            vec![a.clone(), b.clone()],
            vec![weight.clone(), a, long],
            vec![weight, untrue, b],
        ] {
            let error = ADAPTER.merge(tensors).unwrap_err();
            assert!(error.to_string().contains("adapter"), "{error}");
        }
    }

    /// The unit computes with weights that are those of its base at the start, and those of an
    /// export after that. Only weights that may have an adapter change.
    #[test]
    fn merged_weights_are_those_of_an_export() {
        let mut n_adapted = 0;
        for unit in units() {
            let base = base_layout(unit.as_ref(), 2);
            assert_eq!(base.padded, unit.layout(2).padded, "{}", unit.name());
            assert_eq!(base.export_name, unit.layout(2).export_name, "{}", unit.name());
            let Some(layout) = ADAPTER.layout(unit.as_ref(), 2) else {
                assert_eq!((base.name.as_str(), takes_adapters(unit.as_ref())), (unit.name(), false));
                continue;
            };
            n_adapted += 1;
            let adapters = UnitAdapters { adapter: ADAPTER, base: &base, adapters: &layout };
            let weights = values(&base, 1);
            let zeros = Tensor::zeros([layout.padded], &Device::flex());
            assert_eq!(to_host(adapters.merged(&weights, &zeros)), to_host(weights.clone()));
            let factors = values(&layout, 2);
            let merged = base.tensors(&to_host(adapters.merged(&weights, &factors)));
            let plain = base.tensors(&to_host(weights));
            let all = [&plain[..], &layout.tensors(&to_host(factors))].concat();
            assert_eq!(ADAPTER.merge(all).unwrap(), merged, "{}", unit.name());
            for ((slot, plain), merged) in base.params.iter().zip(&plain).zip(&merged) {
                assert_eq!(plain != merged, slot.spec.is_adaptable, "{}", plain.name);
            }
        }
        assert!(n_adapted > 6, "transformers have adapters: {n_adapted} units");
    }

    /// Returns the matrix `name` of the buffer `flat`.
    fn factor(layout: &UnitLayout, name: &str, flat: &Tensor<1>) -> Tensor<2> {
        let slot = &layout.params[layout.position(name).unwrap()];
        let shape: [usize; 2] = slot.spec.shape.as_slice().try_into().unwrap();
        flat.clone().slice([slot.range()]).reshape(shape)
    }

    /// Gradients are those of autodiff's graph of the formula.
    #[test]
    fn gradients_are_those_of_the_formula() {
        let models = ModelConfig::examples();
        let mut units = models[0].units(Readout::All).into_iter();
        let unit = units.find(|unit| takes_adapters(unit.as_ref())).unwrap();
        let base = base_layout(unit.as_ref(), 1);
        let layout = ADAPTER.layout(unit.as_ref(), 1).unwrap();
        let adapters = UnitAdapters { adapter: ADAPTER, base: &base, adapters: &layout };
        let flat = values(&layout, 3);
        let gradient = values(&base, 4);
        let tracked = flat.clone().autodiff().require_grad();
        let mut loss = Tensor::<1>::zeros([1], &Device::flex()).autodiff();
        let mut parts = Vec::new();
        for slot in &base.params {
            let grad = gradient.clone().slice([slot.range()]);
            parts.push(slot.spec.is_adaptable.then(|| grad.clone()));
            if !slot.spec.is_adaptable {
                continue;
            }
            let name = &slot.spec.name;
            let a = factor(&layout, &format!("{name}{A}"), &tracked);
            let b = factor(&layout, &format!("{name}{B}"), &tracked);
            let product = b.matmul(a) * 3.0;
            let numel = slot.spec.numel();
            loss = loss + (product.reshape([numel]) * grad.autodiff()).sum();
        }
        let expected = to_host(tracked.grad(&loss.backward()).unwrap());
        let merged = ParamGrads::ByParameter { parts, device: Device::flex() };
        let actual = to_host(adapters.gradients(&flat, merged).flat(&layout, DType::F32));
        assert_eq!(actual.len(), expected.len());
        for (actual, expected) in actual.iter().zip(&expected) {
            assert!((actual - expected).abs() <= 1e-4 * expected.abs().max(1.0), "{actual} {expected}");
        }
    }

    #[test]
    fn backbones_that_take_adapters_are_named() {
        let names = ModelConfig::names_with_adapters();
        assert!(!names.is_empty());
        for model in ModelConfig::examples() {
            let table = toml::Table::try_from(&model).unwrap();
            let is_named = names.iter().any(|name| Some(name.as_str()) == table["arch"].as_str());
            let takes = model.units(Readout::All).iter().any(|unit| takes_adapters(unit.as_ref()));
            assert_eq!(is_named, takes, "{model:?}");
        }
    }
}
