//! Conversion of pixels to tokens: patch projection, class token, registers and position embedding.
//!
//! ```text
//! patches [B, N, Cp²] → [cls; patches · Wᵀ + b] + pos          [B, 1+N, D]
//!                     → [cls; registers; patches]              [B, 1+R+N, D]
//! ```
//!
//! A masked patch is replaced by a token before its position is added (Bao et al. 2022, Zhou et al.
//! 2022).
//!
//! Registers have no position (Darcet et al. 2024). The patch embedding is a matrix product on
//! patch vectors: the same numbers as a strided convolution, with a cheap backward pass.

use std::collections::HashMap;
use std::sync::Mutex;

use burn_tensor::{Tensor, TensorData};
use kernels::ops::{cast, linear, matmul, sequence};

use super::initial_weights::InitialWeights;
use super::pos_embed::Positions;
use crate::features::Features;
use crate::interpolation::{Resampling, matrix};
use crate::leaves::Leaves;
use crate::params::{Init, ParamSpec};
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// Patch projection, class token, registers and position embedding.
pub(in crate::backbone) struct Embed {
    /// Channels of an image.
    pub n_channels: usize,
    /// Side of a patch, in pixels.
    pub patch_px: usize,
    /// Channels of a token.
    pub width: usize,
    /// Cells along a side of the images that the position embedding is made for; it is resampled
    /// for other grids.
    pub grid: usize,
    /// Number of registers.
    pub n_registers: usize,
    /// Rule for the initial weights.
    pub initial_weights: InitialWeights,
    /// Kind of the position embedding.
    pub positions: Positions,
    /// Whether the projection of patches keeps its initial values.
    pub freezes_patches: bool,
    /// Whether there is a token for masked patches.
    pub takes_masks: bool,
    /// Rule for resampling the position embedding.
    pub resampling: Resampling,
    /// Interpolation matrices by grid, computed when needed; a run has a few grids.
    pub matrices: Mutex<HashMap<[usize; 2], TensorData>>,
}

impl Embed {
    /// Returns the position embedding of `grid`, `[1, 1 + N, D]`.
    fn positions(&self, leaves: &Leaves<'_>, grid: [usize; 2]) -> Tensor<3> {
        let embedding = leaves.get::<3>("pos_embed");
        let [_, n, d] = embedding.dims();
        if grid == [self.grid; 2] {
            return embedding;
        }
        let class = embedding.clone().slice([0..1, 0..1]);
        let patches = embedding.slice([0..1, 1..n]).reshape([n - 1, d]);
        let data = {
            // The map stays valid if a holder panics: an entry is inserted whole.
            let mut cache = self.matrices.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            cache
                .entry(grid)
                .or_insert_with(|| {
                    let matrix = matrix(self.grid, grid, self.resampling);
                    TensorData::new(matrix, [grid[0] * grid[1], n - 1])
                })
                .clone()
        };
        let matrix = Tensor::<2>::from_data(data, &patches.device()).cast(patches.dtype());
        let patches = matmul(matrix, patches).reshape([1, grid[0] * grid[1], d]);
        Tensor::cat(vec![class, patches], 1)
    }

    /// Replaces the patches that `group` hides, in `patches` of `[B, N, D]`, by the token for
    /// masked patches.
    fn replace_masked(&self, patches: Tensor<3>, group: &Features, leaves: &Leaves<'_>) -> Tensor<3> {
        let Some(masked) = group.masked.as_ref().filter(|masked| masked.hides && self.takes_masks) else {
            return patches;
        };
        let [b, n, d] = patches.dims();
        let mut hidden = vec![0.0f32; b * n];
        for token in masked.rows.tokens(0, n).into_iter().take(masked.rows.n()) {
            hidden[token] = 1.0;
        }
        let hidden = Tensor::<3>::from_data(TensorData::new(hidden, [b, n, 1]), &patches.device().inner());
        let hidden = hidden.cast(patches.dtype());
        let hidden = if patches.is_autodiff() { hidden.autodiff() } else { hidden };
        let token = leaves.get::<2>("mask_token").reshape([1, 1, d]).cast(patches.dtype());
        patches * (hidden.clone().neg() + 1.0) + hidden * token
    }

    /// Inserts registers after the class token of `x`, `[B, 1 + N, D]`.
    fn with_registers(&self, x: Tensor<3>, leaves: &Leaves<'_>) -> Tensor<3> {
        if self.n_registers == 0 {
            return x;
        }
        let [b, n, d] = x.dims();
        let registers = leaves.get::<3>("reg_token").expand([b, self.n_registers, d]);
        let class = x.clone().slice([0..b, 0..1]);
        let patches = x.slice([0..b, 1..n]);
        Tensor::cat(vec![class, registers, patches], 1)
    }
}

impl Unit for Embed {
    fn name(&self) -> &str {
        ".embed"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let d = self.width;
        let p = self.patch_px;
        let c = self.n_channels;
        let n = self.grid * self.grid;
        let [init, bias] = self.initial_weights.patches(d, c * p * p);
        let mut patches = [
            ParamSpec::weight("patch_embed.proj.weight", [d, c, p, p], init),
            ParamSpec { init: bias, ..ParamSpec::vector("patch_embed.proj.bias", d, 0.0) },
        ];
        patches = patches.map(|param| ParamSpec { projects_patches: true, ..param });
        if self.freezes_patches {
            patches = patches.map(ParamSpec::fixed);
        }
        let table = Init::TruncNormal(self.initial_weights.std);
        let positions = match self.positions {
            Positions::Learned => Some(ParamSpec::weight("pos_embed", [1, 1 + n, d], table)),
            Positions::SinCos => {
                let init = Init::SinCos { side: self.grid, n_before: 1, width: d };
                Some(ParamSpec::weight("pos_embed", [1, 1 + n, d], init).fixed())
            }
            Positions::Rope => None,
        };
        let class = ParamSpec::weight("cls_token", [1, 1, d], self.initial_weights.class_token());
        let mut params: Vec<ParamSpec> = patches.into_iter().chain([class]).chain(positions).collect();
        if self.takes_masks {
            // Networks that were trained without masks have no such token.
            params.push(ParamSpec::weight("mask_token", [1, d], Init::Constant(0.0)).optional());
        }
        if self.n_registers > 0 {
            params.push(ParamSpec::weight(
                "reg_token",
                [1, self.n_registers, d],
                self.initial_weights.registers(),
            ));
        }
        params
    }

    fn forward(&self, _: usize, groups: Vec<Features>, cx: &Context<'_>) -> StageOutput {
        let d = self.width;
        groups
            .iter()
            .map(|group| {
                let weight = cx.leaves.matrix("patch_embed.proj.weight");
                let patches =
                    linear(cx.rounded(group.x.clone()), weight, cx.leaves.bias("patch_embed.proj.bias"));
                let patches = self.replace_masked(patches, group, cx.leaves);
                let class = cx.leaves.get::<3>("cls_token");
                let x = match self.positions {
                    Positions::Rope => {
                        // The residual stream has the type of the parameters, as with a position
                        // embedding.
                        let [b, _, _] = patches.dims();
                        let patches = cast(patches, class.dtype());
                        Tensor::cat(vec![class.expand([b, 1, d]), patches], 1)
                    }
                    Positions::Learned | Positions::SinCos => {
                        sequence(class, patches, self.positions(cx.leaves, group.grid))
                    }
                };
                let x = self.with_registers(x, cx.leaves);
                Features { n_prefix: 1 + self.n_registers, ..group.with(x) }
            })
            .collect::<Vec<_>>()
            .into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let width = self.width;
        let p = self.patch_px;
        let outputs: Vec<GroupShape> = groups
            .iter()
            .map(|group| GroupShape { n_prefix: 1 + self.n_registers, width, ..*group })
            .collect();
        let patches: usize = groups.iter().map(GroupShape::n_rows).sum();
        let tokens: usize = outputs.iter().map(GroupShape::n_rows).sum();
        let flops = 2.0 * patches as f64 * (self.n_channels * p * p * width) as f64;
        (Cost::new(flops, Elements::wide(2.0 * (tokens * width) as f64)), outputs)
    }
}
