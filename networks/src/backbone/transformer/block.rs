//! A block of a transformer: attention and MLP, each after a norm and inside a residual branch.
//!
//! ```text
//! x ← x + drop(ls₁ · attention(norm₁(x)))
//! x ← x + drop(ls₂ · W₂ h(W₁ norm₂(x)))       x in f32, branches in the type that the run computes in
//! h(a) = gelu(a), or silu(a₁) · a₂ with a = [a₁; a₂] (SwiGLU, Shazeer 2020)
//! ```
//!
//! Queries and keys may be rotated by their positions ([`super::rope`]). Views for which a branch
//! is dropped are left out of it, which saves their share of its time, where they are a tenth or
//! more.

use std::sync::Arc;

use burn_tensor::Tensor;
use kernels::ops::{
    attention, attention_weights, branch, in_f32, layer_norm, linear, mlp, on_kept, rotate, swiglu,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::initial_weights::InitialWeights;
use super::rope::Rope;
use crate::draws::{CoordinateRule, DropRule};
use crate::features::Features;
use crate::params::ParamSpec;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// The hidden layer of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MlpKind {
    /// One product and a GELU.
    #[default]
    Gelu,
    /// Two products, one of which gates the other by its SiLU.
    Swiglu,
}

impl MlpKind {
    /// Returns the number of products of the hidden layer.
    fn n_products(self) -> usize {
        match self {
            Self::Gelu => 1,
            Self::Swiglu => 2,
        }
    }
}

/// Attention and MLP, each after a norm and inside a residual branch; or one of them, as a part of
/// the divided block.
#[derive(Clone)]
pub(in crate::backbone) struct Block {
    /// Name of the undivided unit.
    pub name: String,
    /// The residual branch that this part of a divided block has, by name and number; absent for
    /// both.
    pub part: Option<(String, usize)>,
    /// Channels of a token.
    pub width: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Channels of the hidden layer.
    pub hidden: usize,
    /// Kind of the hidden layer.
    pub mlp: MlpKind,
    /// Initial LayerScale; absent for none.
    pub layer_scale: Option<f32>,
    /// Rule by which branches are dropped for views.
    pub drop_rule: DropRule,
    /// Rule for the initial weights.
    pub initial_weights: InitialWeights,
    /// Number that norms add to the variance.
    pub epsilon: f64,
    /// Biases of queries, keys and values.
    pub qkv_bias: QkvBias,
    /// Rotary positions; absent for none.
    pub rope: Option<Arc<Rope>>,
}

/// Number of the residual branch of attention.
const ATTENTION: usize = 0;

/// Number of the residual branch of the MLP.
const MLP: usize = 1;

/// Drop-path rates over the depth of a transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DropPathDepth {
    /// Growth from 0 in the first block: DINO.
    #[default]
    Linear,
    /// The same rate in all blocks: DINOv2.
    Uniform,
}

impl DropPathDepth {
    /// Returns the ratio of the rate of block `number` of `depth` to that of the last one.
    pub(in crate::backbone) fn share(self, number: usize, depth: usize) -> f32 {
        match self {
            Self::Linear => number as f32 / (depth - 1).max(1) as f32,
            Self::Uniform => 1.0,
        }
    }
}

/// Biases of queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QkvBias {
    /// All three have one.
    #[default]
    All,
    /// Keys have none: DINOv3.
    WithoutKeys,
    /// None.
    None,
}

impl Block {
    /// Returns queries, keys and values of `x`, `[B·V, P + N, 3·D]`, where `features` of view group
    /// `group` has the grid.
    fn qkv(&self, cx: &Context<'_>, group: usize, features: &Features, x: Tensor<3>) -> Tensor<3> {
        let weight = cx.leaves.stored::<2>("attn.qkv.weight");
        let qkv = linear(cx.rounded(x), weight.clone(), self.qkv_bias(cx, &weight));
        match &self.rope {
            Some(rope) => {
                let rotations = rope.rotations(features.grid, cx.draws.coordinates.get(group));
                rotate(qkv, self.heads, &rotations)
            }
            None => qkv,
        }
    }

    fn qkv_bias(&self, cx: &Context<'_>, weight: &Tensor<2>) -> Tensor<1> {
        let d = self.width;
        let zeros = |len: usize| {
            let zeros = in_f32(Tensor::<1>::zeros([len], &weight.device().inner()).cast(weight.dtype()));
            if weight.is_autodiff() { zeros.autodiff() } else { zeros }
        };
        match self.qkv_bias {
            QkvBias::All => cx.leaves.bias("attn.qkv.bias"),
            QkvBias::WithoutKeys => {
                let bias = cx.leaves.get::<1>("attn.qkv.bias");
                Tensor::cat(vec![bias.clone().slice(0..d), zeros(d), bias.slice(2 * d..3 * d)], 0)
            }
            QkvBias::None => zeros(3 * d),
        }
    }

    fn attend(&self, cx: &Context<'_>, group: usize, features: &Features, x: Tensor<3>) -> Tensor<3> {
        let x = attention(self.qkv(cx, group, features, x), self.heads);
        linear(x, cx.leaves.stored("attn.proj.weight"), cx.leaves.bias("attn.proj.bias"))
    }

    fn mlp(&self, cx: &Context<'_>, x: Tensor<3>) -> Tensor<3> {
        let [first, second] = ["mlp.fc1", "mlp.fc2"]
            .map(|l| (cx.leaves.stored(&format!("{l}.weight")), cx.leaves.bias(&format!("{l}.bias"))));
        match self.mlp {
            MlpKind::Gelu => mlp(cx.rounded(x), first, second),
            MlpKind::Swiglu => linear(swiglu(linear(cx.rounded(x), first.0, first.1)), second.0, second.1),
        }
    }

    /// Returns whether the unit has the residual branch `number`: attention is 0, the MLP 1.
    fn has(&self, number: usize) -> bool {
        self.part.as_ref().is_none_or(|(_, branch)| *branch == number)
    }

    /// Adds the residual branch `number`, which `f` computes, to `x` of `[B·V, N, D]`.
    fn residual(
        &self,
        cx: &Context<'_>,
        [group, number]: [usize; 2],
        x: Tensor<3>,
        f: impl FnOnce(Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let name = |part: &str| format!("norm{}.{part}", number + 1);
        let gain = cx.leaves.get(&name("weight"));
        let bias = cx.leaves.get(&name("bias"));
        let (h, skip) = branch(x, gain, bias, self.epsilon, cx.types.products);
        let scale = self.layer_scale.map(|_| cx.leaves.get(&format!("ls{}.gamma", number + 1)));
        let factors = cx.draws.factors(group, number);
        skip.join(on_kept(h, factors, f), scale, factors)
    }
}

impl Unit for Block {
    fn name(&self) -> &str {
        self.part.as_ref().map_or(&self.name, |(name, _)| name)
    }

    fn export_name(&self) -> &str {
        &self.name
    }

    fn parts(&self, _: usize) -> Option<Vec<Box<dyn Unit>>> {
        let part = |number: usize| -> Box<dyn Unit> {
            Box::new(Self { part: Some((format!("{}/{number}", self.name), number)), ..self.clone() })
        };
        Some(vec![part(ATTENTION), part(MLP)])
    }

    fn params(&self) -> Vec<ParamSpec> {
        let d = self.width;
        let hidden = self.hidden;
        let n_products = self.mlp.n_products();
        // Several products that are stored as one matrix have the initial values of separate
        // matrices.
        let weight = |name: &str, n_each: usize, n_products: usize, input| {
            let init = self.initial_weights.matrix(n_each, input);
            ParamSpec::weight(format!("{name}.weight"), [n_products * n_each, input], init)
        };
        let bias = |name: &str, n| ParamSpec::vector(format!("{name}.bias"), n, 0.0);
        let gain = |name: &str| ParamSpec::vector(format!("{name}.weight"), d, 1.0);
        let scale = |name: &str| self.layer_scale.map(|value| ParamSpec::vector(name, d, value));
        let mut params = Vec::new();
        if self.has(ATTENTION) {
            params.extend([gain("norm1"), bias("norm1", d), weight("attn.qkv", d, 3, d)]);
            params.extend([weight("attn.proj", d, 1, d), bias("attn.proj", d)]);
            params.extend((self.qkv_bias != QkvBias::None).then(|| bias("attn.qkv", 3 * d)));
            params.extend(scale("ls1.gamma"));
        }
        if self.has(MLP) {
            params.extend([gain("norm2"), bias("norm2", d), weight("mlp.fc1", hidden, n_products, d)]);
            params.extend([bias("mlp.fc1", n_products * hidden), weight("mlp.fc2", d, 1, hidden)]);
            params.push(bias("mlp.fc2", d));
            params.extend(scale("ls2.gamma"));
        }
        params
    }

    fn forward(&self, _: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        groups
            .into_iter()
            .enumerate()
            .map(|(group, features)| {
                let mut x = features.x.clone();
                if self.has(ATTENTION) {
                    x = self.residual(cx, [group, ATTENTION], x, |h| self.attend(cx, group, &features, h));
                }
                if self.has(MLP) {
                    x = self.residual(cx, [group, MLP], x, |h| self.mlp(cx, h));
                }
                features.with(x)
            })
            .collect::<Vec<_>>()
            .into()
    }

    /// Counts a graph that holds per token, in f32, the normalized inputs of both norms; and in the
    /// type of products, beside the attention weights, the outputs of both norms, queries, keys and
    /// values, outputs of attention and branches, and the hidden layer: before its GELU, or with
    /// gates both halves before, and their product; with LayerScale also what it scales, of all
    /// sequences. Measured with `ocelli bench shard` on CPUs; GPUs keep the GELU too.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let width = self.width as f64;
        let hidden = self.hidden as f64;
        let products = (1 + self.mlp.n_products()) as f64;
        let hidden_kept = match self.mlp {
            MlpKind::Gelu => hidden,
            MlpKind::Swiglu => 3.0 * hidden,
        };
        let [attends, has_mlp] = [ATTENTION, MLP].map(|number| f64::from(u8::from(self.has(number))));
        let n_branches = attends + has_mlp;
        (
            groups
                .iter()
                .map(|group| {
                    let rows = group.n_rows() as f64;
                    let n = group.n_tokens() as f64;
                    let computed = self.drop_rule.computed_share(group.drops);
                    let flops_of_token = attends * (8.0 * width * width + 4.0 * n * width)
                        + has_mlp * 2.0 * products * width * hidden;
                    let flops = rows * flops_of_token;
                    // Inputs and outputs of both norms are those of all views, and the selected
                    // ones are copies.
                    let copies = if computed < 1.0 { n_branches * computed * width } else { 0.0 };
                    let of_branches =
                        attends * (4.0 * width + self.heads as f64 * n) + has_mlp * (width + hidden_kept);
                    let scaled = if self.layer_scale.is_some() { n_branches * width } else { 0.0 };
                    let graph = Elements {
                        wide: rows * n_branches * width,
                        products: rows * (n_branches * width + scaled + copies + computed * of_branches),
                        ..Elements::default()
                    };
                    let flops = computed * flops;
                    Cost { flops, graph }
                })
                .sum(),
            groups.to_vec(),
        )
    }

    fn attention(&self, features: &Features, cx: &Context<'_>) -> Option<Tensor<4>> {
        if !self.has(ATTENTION) {
            return None;
        }
        let gain = cx.leaves.get("norm1.weight");
        let bias = cx.leaves.get("norm1.bias");
        let x = layer_norm(features.x.clone(), gain, bias, self.epsilon);
        Some(attention_weights(self.qkv(cx, 0, features, x), self.heads))
    }

    fn drop_rule(&self) -> DropRule {
        self.drop_rule
    }

    fn coordinate_rule(&self) -> CoordinateRule {
        self.rope.as_ref().map(|rope| rope.rule).unwrap_or_default()
    }
}
