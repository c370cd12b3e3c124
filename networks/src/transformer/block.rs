//! A block of a transformer: attention and MLP, each after a norm and inside a residual branch.
//!
//! ```text
//! x ← x + drop(ls₁ · attention(norm₁(x)))
//! x ← x + drop(ls₂ · W₂ h(W₁ norm₂(x)))       x in f32, branches in the type that the run computes in
//! h(a) = gelu(a), or silu(a₁) · a₂ with a = [a₁; a₂] (SwiGLU, Shazeer 2020)
//! ```
//!
//! Queries and keys may be rotated by their positions ([`super::rope`]). A branch is not computed
//! for the views for which it is dropped, which saves their share of its time, if they are a tenth
//! of the views or more.

use std::ops::Range;
use std::sync::Arc;

use burn_tensor::Tensor;
use kernels::ops::{
    BranchNorm, KeptSequences, Lengths, SequenceFactors, apply_to_kept, attention, branch, class_attention,
    in_f32, keeps_weights, layer_norm, linear, mlp, rotate, swiglu,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::initial_weights::InitialWeights;
use super::rope::{Rope, TokenRotation};
use crate::draws::{DrawRules, DropRule};
use crate::params::ParamSpec;
use crate::part_name::part_name;
use crate::tokens::Tokens;
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
pub(crate) struct Block {
    /// Name of the undivided unit.
    pub name: String,
    /// Part of a divided block that this is; absent in an undivided block.
    pub part: Option<BlockPart>,
    /// Channels of a token.
    pub width: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Channels of the hidden layer.
    pub hidden: usize,
    /// Kind of the hidden layer.
    pub mlp: MlpKind,
    /// Initial LayerScale; none if absent.
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

/// A part of a divided block: one of its residual branches.
#[derive(Clone)]
pub(crate) struct BlockPart {
    /// Name of the part.
    name: String,
    branch: ResidualBranch,
}

/// A residual branch of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResidualBranch {
    Attention,
    Mlp,
}

impl ResidualBranch {
    /// Returns the index of the branch within its block.
    fn index(self) -> usize {
        match self {
            Self::Attention => 0,
            Self::Mlp => 1,
        }
    }

    /// Returns the number of the branch in the names of its parameters, such as `norm1`.
    fn number(self) -> usize {
        self.index() + 1
    }
}

/// Drop-path rates over the depth of a transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DropPathDepth {
    /// Linear growth from 0 in the first block: DINO.
    #[default]
    Linear,
    /// The same rate in all blocks: DINOv2.
    Uniform,
}

impl DropPathDepth {
    /// Returns the ratio of the rate of block `index` of `depth` to the rate of the last one.
    pub(crate) fn share(self, index: usize, depth: usize) -> f32 {
        match self {
            Self::Linear => index as f32 / (depth - 1).max(1) as f32,
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

/// A stream of tokens that passes through a block.
struct Stream<'a> {
    cx: &'a Context<'a>,
    /// Lengths of the sequences.
    lengths: Lengths,
    /// Indices of the groups.
    groups: Range<usize>,
    /// Rotations of queries and keys; absent without rotary positions.
    rotation: Option<TokenRotation>,
}

impl<'a> Stream<'a> {
    fn new(block: &Block, tokens: &Tokens, first_group: usize, cx: &'a Context<'a>) -> Self {
        let groups = first_group..first_group + tokens.groups.len();
        let mut rotation = None;
        if let Some(rope) = &block.rope {
            rotation = Some(rope.rotation(tokens, cx.draws.coordinates.get(groups.clone())));
        }
        Self { cx, lengths: tokens.lengths(), groups, rotation }
    }

    /// Returns the factors of the sequences in `branch`; `None` without stochastic depth.
    fn factors(&self, branch: ResidualBranch) -> Option<Vec<f32>> {
        self.cx.draws.factors(self.groups.clone(), branch.index())
    }

    /// Returns factors of the sequences with the sequences' lengths.
    fn by_sequence<'f>(&'f self, factors: Option<&'f [f32]>) -> Option<SequenceFactors<'f>> {
        factors.map(|factors| SequenceFactors { factors, lengths: &self.lengths })
    }
}

impl Block {
    /// Returns queries, keys and values of the tokens `x` of the sequences `kept`, `[T, 3·D]`.
    fn qkv(&self, stream: &Stream<'_>, x: Tensor<2>, kept: &KeptSequences) -> Tensor<2> {
        let cx = stream.cx;
        let weight = cx.leaves.stored::<2>("attn.qkv.weight");
        let qkv = linear(cx.rounded(x), weight.clone(), self.qkv_bias(cx, &weight));
        let Some(TokenRotation { rotations, rows }) = &stream.rotation else { return qkv };
        match &kept.tokens {
            Some(tokens) => {
                let kept_rows: Vec<u32> = tokens.iter().map(|token| rows[*token as usize]).collect();
                rotate(qkv, self.heads, rotations, &kept_rows.into())
            }
            None => rotate(qkv, self.heads, rotations, rows),
        }
    }

    fn qkv_bias(&self, cx: &Context<'_>, weight: &Tensor<2>) -> Tensor<1> {
        let d = self.width;
        match self.qkv_bias {
            QkvBias::All => cx.leaves.bias("attn.qkv.bias"),
            QkvBias::WithoutKeys => {
                let bias = cx.leaves.get::<1>("attn.qkv.bias");
                let parts = vec![bias.clone().slice(0..d), zero_bias(d, weight), bias.slice(2 * d..3 * d)];
                Tensor::cat(parts, 0)
            }
            QkvBias::None => zero_bias(3 * d, weight),
        }
    }

    fn attend(&self, stream: &Stream<'_>, x: Tensor<2>, kept: &KeptSequences) -> Tensor<2> {
        let leaves = stream.cx.leaves;
        let x = attention(self.qkv(stream, x, kept), &kept.lengths, self.heads);
        linear(x, leaves.stored("attn.proj.weight"), leaves.bias("attn.proj.bias"))
    }

    fn mlp(&self, cx: &Context<'_>, x: Tensor<2>) -> Tensor<2> {
        let first = cx.linear_params("mlp.fc1");
        let second = cx.linear_params("mlp.fc2");
        match self.mlp {
            MlpKind::Gelu => mlp(cx.rounded(x), first, second),
            MlpKind::Swiglu => linear(swiglu(linear(cx.rounded(x), first.0, first.1)), second.0, second.1),
        }
    }

    /// Returns whether the unit has the residual branch `branch`.
    fn has(&self, branch: ResidualBranch) -> bool {
        match &self.part {
            Some(part) => part.branch == branch,
            None => true,
        }
    }

    /// Returns the first of the unit's residual branches.
    fn first_branch(&self) -> ResidualBranch {
        match &self.part {
            Some(part) => part.branch,
            None => ResidualBranch::Attention,
        }
    }

    /// Returns the norm at the start of `branch`.
    fn norm(&self, cx: &Context<'_>, branch: ResidualBranch) -> BranchNorm {
        BranchNorm {
            gamma: cx.leaves.get(&format!("norm{}.weight", branch.number())),
            beta: cx.leaves.get(&format!("norm{}.bias", branch.number())),
            epsilon: self.epsilon,
            products: cx.types.products,
        }
    }

    /// Returns the scale of the channels of `branch`, if it has one.
    fn channel_scale(&self, cx: &Context<'_>, branch: ResidualBranch) -> Option<Tensor<1>> {
        self.layer_scale.map(|_| cx.leaves.get(&format!("ls{}.gamma", branch.number())))
    }

    /// Returns the output of `branch` for its normalized input `h`, `[T, D]`. `factors` are those
    /// of the sequences.
    fn branch_output(
        &self,
        stream: &Stream<'_>,
        branch: ResidualBranch,
        h: Tensor<2>,
        factors: Option<&[f32]>,
    ) -> Tensor<2> {
        apply_to_kept(h, &stream.lengths, factors, |h, kept| match branch {
            ResidualBranch::Attention => self.attend(stream, h, kept),
            ResidualBranch::Mlp => self.mlp(stream.cx, h),
        })
    }

    /// Adds the unit's residual branches to the tokens `x` of `stream`, `[T, D]`.
    fn add_branches(&self, stream: &Stream<'_>, x: Tensor<2>) -> Tensor<2> {
        let cx = stream.cx;
        let first = self.first_branch();
        let (h, skip) = branch(x, self.norm(cx, first));
        let factors = stream.factors(first);
        let b = self.branch_output(stream, first, h, factors.as_deref());
        let scale = self.channel_scale(cx, first);
        if self.part.is_some() {
            return skip.join(b, scale, stream.by_sequence(factors.as_deref()));
        }
        let second = ResidualBranch::Mlp;
        let norm = self.norm(cx, second);
        let (h, skip) = skip.join_and_branch(b, scale, stream.by_sequence(factors.as_deref()), norm);
        let factors = stream.factors(second);
        let b = self.branch_output(stream, second, h, factors.as_deref());
        skip.join(b, self.channel_scale(cx, second), stream.by_sequence(factors.as_deref()))
    }

    /// Creates the part of the block that has only `branch`.
    fn branch_part(&self, branch: ResidualBranch) -> Self {
        let name = part_name(&self.name, branch.index());
        Self { part: Some(BlockPart { name, branch }), ..self.clone() }
    }

    /// Returns a weight `[n_products * n_each, n_inputs]`. Several products that are stored as one
    /// matrix have the initial values of separate matrices.
    fn weight(&self, name: &str, n_each: usize, n_products: usize, n_inputs: usize) -> ParamSpec {
        let init = self.initial_weights.matrix(n_each, n_inputs);
        ParamSpec::weight(name, [n_products * n_each, n_inputs], init)
    }

    /// Returns a LayerScale; `None` if the block has none.
    fn scale(&self, name: &str) -> Option<ParamSpec> {
        self.layer_scale.map(|value| ParamSpec::vector(name, self.width, value))
    }
}

/// Returns a bias of zeros on the device of `weight`.
fn zero_bias(len: usize, weight: &Tensor<2>) -> Tensor<1> {
    let zeros = in_f32(Tensor::<1>::zeros([len], &weight.device().inner()).cast(weight.dtype()));
    if weight.is_autodiff() { zeros.autodiff() } else { zeros }
}

impl Unit for Block {
    fn name(&self) -> &str {
        match &self.part {
            Some(part) => &part.name,
            None => &self.name,
        }
    }

    fn parts(&self, _: usize) -> Option<Vec<Box<dyn Unit>>> {
        let attention = self.branch_part(ResidualBranch::Attention);
        Some(vec![Box::new(attention), Box::new(self.branch_part(ResidualBranch::Mlp))])
    }

    fn params(&self) -> Vec<ParamSpec> {
        let d = self.width;
        let hidden = self.hidden;
        let n_products = self.mlp.n_products();
        let mut params = Vec::new();
        if self.has(ResidualBranch::Attention) {
            params.push(ParamSpec::vector("norm1.weight", d, 1.0));
            params.push(ParamSpec::vector("norm1.bias", d, 0.0));
            params.push(self.weight("attn.qkv.weight", d, 3, d).adaptable());
            params.push(self.weight("attn.proj.weight", d, 1, d));
            params.push(ParamSpec::vector("attn.proj.bias", d, 0.0));
            if self.qkv_bias != QkvBias::None {
                params.push(ParamSpec::vector("attn.qkv.bias", 3 * d, 0.0));
            }
            params.extend(self.scale("ls1.gamma"));
        }
        if self.has(ResidualBranch::Mlp) {
            params.push(ParamSpec::vector("norm2.weight", d, 1.0));
            params.push(ParamSpec::vector("norm2.bias", d, 0.0));
            params.push(self.weight("mlp.fc1.weight", hidden, n_products, d).adaptable());
            params.push(ParamSpec::vector("mlp.fc1.bias", n_products * hidden, 0.0));
            params.push(self.weight("mlp.fc2.weight", d, 1, hidden).adaptable());
            params.push(ParamSpec::vector("mlp.fc2.bias", d, 0.0));
            params.extend(self.scale("ls2.gamma"));
        }
        params
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut outputs = Vec::with_capacity(streams.len());
        let mut first_group = 0;
        for tokens in streams {
            let stream = Stream::new(self, &tokens, first_group, cx);
            first_group = stream.groups.end;
            let x = self.add_branches(&stream, tokens.x.clone());
            outputs.push(tokens.with(x));
        }
        outputs.into()
    }

    /// Counts a graph that holds, per token:
    ///
    /// - in f32, the normalized inputs of both norms;
    /// - in the type of products, the attention weights, the outputs of both norms, queries, keys
    ///   and values, the outputs of attention and branches, and the hidden layer: before its GELU,
    ///   or with gates both halves before the activation, and their product;
    /// - with LayerScale also its input, for all sequences.
    ///
    /// Measured on CPUs; GPUs keep the output of the GELU too.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let width = self.width as f64;
        let hidden = self.hidden as f64;
        let products = (1 + self.mlp.n_products()) as f64;
        let hidden_kept = match self.mlp {
            MlpKind::Gelu => hidden,
            MlpKind::Swiglu => 3.0 * hidden,
        };
        let n_attention = f64::from(u8::from(self.has(ResidualBranch::Attention)));
        let n_mlps = f64::from(u8::from(self.has(ResidualBranch::Mlp)));
        let n_branches = n_attention + n_mlps;
        let mut costs = Vec::with_capacity(groups.len());
        for group in groups {
            let rows = group.n_rows() as f64;
            let n = group.n_tokens() as f64;
            let computed = self.drop_rule.computed_share(group.drops);
            let token_flops = n_attention * (8.0 * width * width + 4.0 * n * width)
                + n_mlps * 2.0 * products * width * hidden;
            let flops = computed * (rows * token_flops);
            // Inputs and outputs of both norms are those of all views, and the selected ones are
            // copies.
            let copies = if computed < 1.0 { n_branches * computed * width } else { 0.0 };
            let heads = n_attention * self.heads as f64;
            let mut inner = n_attention * 4.0 * width + n_mlps * (width + hidden_kept);
            let mut log_sums = heads;
            if keeps_weights(group.n_tokens()) {
                inner += heads * n;
                log_sums = 0.0;
            }
            let scaled = if self.layer_scale.is_some() { n_branches * width } else { 0.0 };
            let graph = Elements {
                wide: rows * (n_branches * width + computed * log_sums),
                products: rows * (n_branches * width + scaled + copies + computed * inner),
                ..Elements::default()
            };
            // The gradient at the hidden layer, which the gradients of the first product wait for.
            let hidden_gradient =
                Elements::products(rows * n_mlps * computed * self.mlp.n_products() as f64 * hidden);
            costs.push(Cost { inner_gradients: hidden_gradient, ..Cost::new(flops, graph) });
        }
        (costs.into_iter().sum(), groups.to_vec())
    }

    fn class_attention(&self, tokens: &Tokens, cx: &Context<'_>) -> Option<Tensor<3>> {
        if !self.has(ResidualBranch::Attention) {
            return None;
        }
        let gain = cx.leaves.get("norm1.weight");
        let bias = cx.leaves.get("norm1.bias");
        let x = layer_norm(tokens.x.clone(), gain, bias, self.epsilon);
        let stream = Stream::new(self, tokens, 0, cx);
        let all = KeptSequences { lengths: stream.lengths.clone(), tokens: None };
        Some(class_attention(self.qkv(&stream, x, &all), &all.lengths, self.heads))
    }

    fn draw_rules(&self) -> DrawRules {
        let coordinates = self.rope.as_ref().map(|rope| rope.rule).unwrap_or_default();
        DrawRules { drop: self.drop_rule, coordinates }
    }
}
