//! Conversion of pixels to tokens: patch projection, class token, registers and position embedding.
//!
//! ```text
//! patches [B, N, Cp²] → [cls; patches · Wᵀ + b] + pos          [B, 1+N, D]
//!                     → [cls; registers; patches]              [B, 1+R+N, D], packed to [T, D] for all sizes of views
//! ```
//!
//! A masked patch is replaced by a token before its position is added (Bao et al. 2022, Zhou et al.
//! 2022), or dropped before anything is computed of it (He et al. 2022).
//!
//! Registers have no position (Darcet et al. 2024). The patch embedding is a matrix product on
//! patch vectors: the same numbers as a strided convolution, with a cheap backward pass.

use std::sync::Arc;

use burn_tensor::{Tensor, TensorData};
use kernels::ops::{in_f32, linear, select_rows, sequence};

use super::initial_weights::InitialWeights;
use super::pos_embed::Positions;
use super::position_table::PositionTable;
use crate::leaves::Leaves;
use crate::mask::Masking;
use crate::params::{Init, ParamSpec};
use crate::tokens::{Sequences, Tokens};
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// Patch projection, class token, registers and position embedding.
pub(crate) struct Embed {
    /// Channels of an image.
    pub n_channels: usize,
    /// Side of a patch, in pixels.
    pub patch_px: usize,
    /// Channels of a token.
    pub width: usize,
    /// Table of the position embedding.
    pub table: PositionTable,
    /// Whether there is a class token.
    pub has_class_token: bool,
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
}

impl Embed {
    /// Returns the number of prefix tokens.
    fn n_prefix(&self) -> usize {
        usize::from(self.has_class_token) + self.n_registers
    }

    /// Returns the position embedding of `grid`, `[1 + N, D]`, or `[N, D]` without a class token.
    fn positions(&self, leaves: &Leaves<'_>, grid: [usize; 2]) -> Tensor<2> {
        let values = leaves.get::<3>("pos_embed").reshape([self.table.n_rows(), self.width]);
        self.table.rows(values, grid)
    }

    /// Replaces the masked patches of `group`, in `patches` of `[n·N, D]`, by the token for masked
    /// patches, if the network sees it in their place.
    fn replace_masked(&self, patches: Tensor<2>, group: &Sequences, leaves: &Leaves<'_>) -> Tensor<2> {
        let Some(masked) = &group.masked else { return patches };
        if masked.masking != Masking::Replaced || !self.takes_masks {
            return patches;
        }
        let [n_rows, d] = patches.dims();
        let mut hidden = vec![0.0f32; n_rows];
        for token in masked.rows.tokens(0, group.n_grid_cells()).into_iter().take(masked.rows.n()) {
            hidden[token] = 1.0;
        }
        let hidden = Tensor::<2>::from_data(TensorData::new(hidden, [n_rows, 1]), &patches.device().inner());
        let hidden = hidden.cast(patches.dtype());
        let hidden = if patches.is_autodiff() { hidden.autodiff() } else { hidden };
        let token = leaves.get::<2>("mask_token").reshape([1, d]).cast(patches.dtype());
        patches * (hidden.clone().neg() + 1.0) + hidden * token
    }

    /// Returns the tokens of sequences that have all patches, `patches` of `[n·N, D]`: `[T, D]`.
    fn complete_sequences(&self, patches: Tensor<2>, group: &Sequences, cx: &Context<'_>) -> Tensor<2> {
        let leaves = cx.leaves;
        let d = self.width;
        let b = group.n;
        let patches = self.replace_masked(patches, group, leaves).reshape([b, group.n_grid_cells(), d]);
        let class = self.has_class_token.then(|| leaves.get::<3>("cls_token"));
        let x = match (self.positions, class) {
            // The residual stream has the type of the parameters, as with a position embedding.
            (Positions::Rope, Some(class)) => Tensor::cat(vec![class.expand([b, 1, d]), in_f32(patches)], 1),
            (Positions::Rope, None) => in_f32(patches),
            (_, Some(class)) => sequence(class, patches, self.positions(leaves, group.grid).unsqueeze()),
            (_, None) => in_f32(patches) + self.positions(leaves, group.grid).unsqueeze(),
        };
        let x = self.with_registers(x, leaves);
        let [_, n, _] = x.dims();
        x.reshape([b * n, d])
    }

    /// Inserts registers after the class token of `x`, `[B, 1 + N, D]`.
    fn with_registers(&self, x: Tensor<3>, leaves: &Leaves<'_>) -> Tensor<3> {
        if self.n_registers == 0 {
            return x;
        }
        let [b, n, d] = x.dims();
        let registers = leaves.get::<3>("reg_token").expand([b, self.n_registers, d]);
        if !self.has_class_token {
            return Tensor::cat(vec![registers, x], 1);
        }
        let class = x.clone().slice([0..b, 0..1]);
        let patches = x.slice([0..b, 1..n]);
        Tensor::cat(vec![class, registers, patches], 1)
    }

    /// Returns the tokens `[T, D]` of sequences that have the cells `visible`, whose patches are
    /// `patches` of `[M, D]`.
    fn visible_sequences(
        &self,
        patches: Tensor<2>,
        group: &Sequences,
        visible: &[Vec<usize>],
        cx: &Context<'_>,
    ) -> Tensor<2> {
        let d = self.width;
        let mut patches = in_f32(patches);
        let mut prefix = Vec::new();
        let mut class = self.has_class_token.then(|| cx.leaves.get::<3>("cls_token").reshape([1, d]));
        if self.positions != Positions::Rope {
            let table = self.positions(cx.leaves, group.grid);
            let first = usize::from(self.has_class_token);
            let rows: Vec<u32> = visible.iter().flatten().map(|cell| (first + cell) as u32).collect();
            patches = patches + select_rows(table.clone(), &rows.into());
            class = class.map(|class| class + table.slice([0..1, 0..d]));
        }
        prefix.extend(class);
        if self.n_registers > 0 {
            prefix.push(cx.leaves.get::<3>("reg_token").reshape([self.n_registers, d]));
        }
        if prefix.is_empty() {
            return patches;
        }
        let n_prefix = self.n_prefix() as u32;
        let mut rows = Vec::new();
        let mut next = n_prefix;
        for cells in visible {
            rows.extend(0..n_prefix);
            rows.extend(next..next + cells.len() as u32);
            next += cells.len() as u32;
        }
        prefix.push(patches);
        select_rows(Tensor::cat(prefix, 0), &rows.into())
    }
}

/// Returns the cells that the network sees of each sequence of `group` if masked cells are dropped;
/// `None` if they are not.
fn visible_cells(group: &Sequences) -> Option<Vec<Vec<usize>>> {
    let masked = group.masked.as_ref().filter(|masked| masked.masking == Masking::Dropped)?;
    Some(masked.rows.visible_cells(group.n_grid_cells()))
}

impl Unit for Embed {
    fn name(&self) -> &str {
        ".embed"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let d = self.width;
        let p = self.patch_px;
        let c = self.n_channels;
        let n = self.table.n_rows();
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
            Positions::Learned => Some(ParamSpec::weight("pos_embed", [1, n, d], table)),
            Positions::SinCos => {
                let PositionTable { side, n_before, .. } = self.table;
                let init = Init::SinCos { side, n_before, width: d };
                Some(ParamSpec::weight("pos_embed", [1, n, d], init).fixed())
            }
            Positions::Rope => None,
        };
        let mut params = Vec::from(patches);
        if self.has_class_token {
            params.push(ParamSpec::weight("cls_token", [1, 1, d], self.initial_weights.class_token()));
        }
        params.extend(positions);
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

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        let mut sizes = Vec::with_capacity(streams.len());
        for tokens in &streams {
            let group = tokens.only_group();
            let visible = visible_cells(group);
            let mut pixels = tokens.x.clone();
            if let Some(visible) = &visible {
                let n_cells = group.n_grid_cells();
                let mut rows = Vec::new();
                for (sequence, cells) in visible.iter().enumerate() {
                    rows.extend(cells.iter().map(|cell| (sequence * n_cells + cell) as u32));
                }
                pixels = select_rows(pixels, &rows.into());
            }
            let weight = cx.leaves.matrix("patch_embed.proj.weight");
            let patches = linear(cx.rounded(pixels), weight, cx.leaves.bias("patch_embed.proj.bias"));
            let x = match &visible {
                Some(visible) => self.visible_sequences(patches, group, visible, cx),
                None => self.complete_sequences(patches, group, cx),
            };
            let sequences =
                Sequences { n_prefix: self.n_prefix(), cells: visible.map(Arc::new), ..group.clone() };
            sizes.push(Tokens::new(x, vec![sequences]));
        }
        vec![Tokens::pack(sizes)].into()
    }

    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let width = self.width;
        let p = self.patch_px;
        let outputs: Vec<GroupShape> =
            groups.iter().map(|group| GroupShape { n_prefix: self.n_prefix(), width, ..*group }).collect();
        let patches: usize = groups.iter().map(GroupShape::n_rows).sum();
        let tokens: usize = outputs.iter().map(GroupShape::n_rows).sum();
        let flops = 2.0 * patches as f64 * (self.n_channels * p * p * width) as f64;
        (Cost::new(flops, Elements::wide(2.0 * (tokens * width) as f64)), outputs)
    }
}
