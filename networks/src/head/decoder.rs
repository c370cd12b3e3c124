//! A decoder: a transformer that predicts cells from the tokens of others (MAE: He et al. 2022;
//! I-JEPA: Assran et al. 2023).
//!
//! ```text
//! z_i = W x_i + b + p(i)                 the tokens x that an encoder has computed, p fixed sines and cosines
//! q_j = m + p(j)                         a mask token m for every masked cell j
//! [z; q] → blocks → norm → W' q_j + b'   one sequence for each view and block of masked cells
//! ```
//!
//! Prefix tokens, such as a class token, have no position.

use std::sync::Arc;

use burn_tensor::Tensor;
use kernels::ops::{linear, select_rows};

use crate::draws::DropRule;
use crate::interpolation::Resampling;
use crate::params::{Init, ParamSpec};
use crate::readout::Readout;
use crate::tokens::{Masked, SequenceRole, Sequences, Tokens};
use crate::transformer::block::{Block, MlpKind, QkvBias};
use crate::transformer::initial_weights::{InitialWeights, Initialization};
use crate::transformer::norm::Norm;
use crate::transformer::position_table::PositionTable;
use crate::unit::{Context, Cost, Elements, GroupShape, StageOutput, Unit};

/// Ratio of the hidden channels of an MLP to the width.
const MLP_RATIO: usize = 4;

/// Number that norms add to the variance.
const EPSILON: f64 = 1e-6;

/// Standard deviation of the initial mask token.
const MASK_TOKEN_STD: f32 = 0.02;

/// A decoder.
#[derive(Debug, Clone)]
pub struct Decoder {
    /// Prefix of the names of its units.
    pub name: &'static str,
    /// Channels of the encoder's tokens.
    pub input: usize,
    /// Channels of the decoder's tokens.
    pub width: usize,
    /// Number of blocks.
    pub depth: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Channels of a prediction.
    pub output: usize,
    /// Cells along a side of the grid of a view that the positions are made for.
    pub side: usize,
    /// Whether the encoder has a class token.
    pub has_class_token: bool,
    /// Rule for the initial weights.
    pub initialization: Initialization,
    /// Standard deviation of truncated normal initial weights.
    pub init_std: f32,
}

impl Decoder {
    /// Checks the sizes that the units rely on. `prefix` begins the keys: `method.decoder`.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub fn validate(&self, prefix: &str) -> Result<(), String> {
        if self.width == 0 || self.depth == 0 || self.heads == 0 {
            return Err(format!("{prefix}_width, {prefix}_depth and {prefix}_heads must be at least 1"));
        }
        if !self.width.is_multiple_of(self.heads) || !self.width.is_multiple_of(4) {
            return Err(format!(
                "{prefix}_width {} must be a multiple of 4 and of {prefix}_heads {}",
                self.width, self.heads
            ));
        }
        Ok(())
    }

    /// Returns the units.
    pub fn units(&self) -> Vec<Box<dyn Unit>> {
        let initial_weights =
            InitialWeights { rule: self.initialization, std: self.init_std, token_std: None };
        let n_before = usize::from(self.has_class_token);
        let resampling = Resampling { offset: 0.0, antialias: false };
        let mut units: Vec<Box<dyn Unit>> = vec![Box::new(QueryEmbed {
            name: format!("{}.embed", self.name),
            input: self.input,
            width: self.width,
            table: PositionTable::new(n_before, self.side, resampling),
            initial_weights,
        })];
        for index in 0..self.depth {
            units.push(Box::new(Block {
                name: format!("{}.blocks.{index}", self.name),
                part: None,
                width: self.width,
                heads: self.heads,
                hidden: MLP_RATIO * self.width,
                mlp: MlpKind::Gelu,
                layer_scale: None,
                drop_rule: DropRule::default(),
                initial_weights,
                epsilon: EPSILON,
                qkv_bias: QkvBias::All,
                rope: None,
            }));
        }
        units.push(Box::new(Norm {
            name: format!("{}.norm", self.name),
            width: self.width,
            readout: Readout::All,
            epsilon: EPSILON,
            has_local: false,
        }));
        units.push(Box::new(Predict {
            name: format!("{}.predict", self.name),
            width: self.width,
            output: self.output,
            initial_weights,
        }));
        units
    }
}

/// Returns the masked cells of `group`.
///
/// # Panics
/// If none were drawn: a bug in the method, which draws masks for the views that it decodes.
fn masked(group: &Sequences) -> &Masked {
    group.masked.as_ref().expect("a method with a decoder masks cells")
}

/// First unit: a projection of the encoder's tokens, and the tokens of masked cells.
struct QueryEmbed {
    name: String,
    /// Channels of the encoder's tokens.
    input: usize,
    width: usize,
    table: PositionTable,
    initial_weights: InitialWeights,
}

/// Sequences of visible tokens and queries, as rows of two tensors, one after the other.
struct QuerySequences {
    rows: Vec<u32>,
    group: Sequences,
}

impl QuerySequences {
    /// Lists the tokens of `group`, and after them the queries for each block of masked cells.
    fn new(group: &Sequences) -> Self {
        let masked = masked(group);
        let n_blocks = masked.rows.n_blocks;
        let n_tokens = group.n_tokens() as u32;
        let mut rows = Vec::new();
        let mut cells = Vec::with_capacity(group.n * n_blocks);
        let mut first_token = 0;
        let mut query = n_tokens;
        for sequence in 0..group.n {
            let visible = match &group.cells {
                Some(cells) => cells[sequence].clone(),
                None => (0..group.n_grid_cells()).collect(),
            };
            let length = (group.n_prefix + visible.len()) as u32;
            let masked_cells = &masked.rows.cells[sequence];
            for block in masked_cells.chunks((masked_cells.len() / n_blocks).max(1)) {
                rows.extend(first_token..first_token + length);
                rows.extend(query..query + block.len() as u32);
                query += block.len() as u32;
                cells.push([&visible[..], block].concat());
            }
            first_token += length;
        }
        let group = Sequences { n: cells.len(), cells: Some(Arc::new(cells)), ..group.clone() };
        Self { rows, group }
    }
}

impl QueryEmbed {
    /// Returns the tokens with their positions, and the queries, of a stream of one group.
    fn embed(&self, tokens: &Tokens, cx: &Context<'_>) -> Tokens {
        let group = tokens.only_group();
        let table =
            self.table.rows(cx.leaves.get::<3>("pos_embed").reshape([-1, self.width as i32]), group.grid);
        let n_before = self.table.n_before as u32;
        let weight = cx.leaves.stored::<2>("weight");
        let x = linear(cx.rounded(tokens.x.clone()), weight, cx.leaves.bias("bias"));
        let mut rows = Vec::with_capacity(group.n_tokens());
        // The first row, of zeros, is that of prefix tokens, which only networks with a class token
        // have.
        group.for_each_cell(|cell| rows.push(cell.map_or(0, |cell| n_before + cell as u32)));
        let x = x + select_rows(table.clone(), &rows.into());
        let cells = masked(group).rows.cells.iter().flatten();
        let rows: Vec<u32> = cells.map(|cell| n_before + *cell as u32).collect();
        let queries = select_rows(table, &rows.into()) + cx.leaves.get::<2>("mask_token");
        let sequences = QuerySequences::new(group);
        let x = select_rows(Tensor::cat(vec![x, queries], 0), &sequences.rows.into());
        Tokens::new(x, vec![sequences.group])
    }
}

impl Unit for QueryEmbed {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let d = self.width;
        let init = self.initial_weights.matrix(d, self.input);
        let side = self.table.side;
        let positions = Init::SinCos { side, n_before: self.table.n_before, width: d };
        vec![
            ParamSpec::weight("weight", [d, self.input], init),
            ParamSpec::vector("bias", d, 0.0),
            ParamSpec::weight("mask_token", [1, d], Init::Normal(MASK_TOKEN_STD)),
            ParamSpec::weight("pos_embed", [1, self.table.n_rows(), d], positions).fixed(),
        ]
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        streams.iter().map(|tokens| self.embed(tokens, cx)).collect::<Vec<_>>().into()
    }

    /// Counts a graph that holds the input, and the tokens before and after queries join them.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let mut cost = Cost::default();
        let mut outputs = Vec::with_capacity(groups.len());
        for group in groups {
            let rows = group.n_rows() as f64;
            let width = self.width as f64;
            let output = self.output_shape(group);
            let flops = 2.0 * rows * width * self.input as f64;
            let wide = width * (2.0 * rows + group.n_masked as f64 + output.n_rows() as f64);
            cost = cost + Cost::new(flops, Elements::wide(wide + rows * self.input as f64));
            outputs.push(output);
        }
        (cost, outputs)
    }
}

impl QueryEmbed {
    /// Returns the shape of the sequences of tokens and queries.
    fn output_shape(&self, group: &GroupShape) -> GroupShape {
        let n_views = group.n_views * group.n_mask_blocks;
        let n_queries = group.n_masked / n_views.max(1);
        // Cells of the grid that are neither visible nor queried.
        let n_dropped = group.n_dropped.saturating_sub(n_queries);
        let n_repeated = n_queries.saturating_sub(group.n_dropped);
        let n_prefix = group.n_prefix + n_repeated;
        GroupShape { n_views, n_prefix, n_dropped, width: self.width, ..*group }
    }
}

/// Last unit: a linear layer on the tokens of masked cells.
struct Predict {
    name: String,
    width: usize,
    output: usize,
    initial_weights: InitialWeights,
}

impl Predict {
    /// Returns the predictions of the masked cells of a stream of one group.
    fn predict(&self, tokens: &Tokens, cx: &Context<'_>) -> Tokens {
        let group = tokens.only_group();
        let masked = masked(group);
        let n_blocks = masked.rows.n_blocks;
        let mut rows = Vec::with_capacity(masked.rows.n());
        for (sequence, range) in tokens.lengths().ranges().enumerate() {
            let n_queries = masked.rows.cells[sequence / n_blocks].len() / n_blocks;
            rows.extend((range.end - n_queries) as u32..range.end as u32);
        }
        let x = select_rows(tokens.x.clone(), &rows.into());
        let y = linear(cx.rounded(x), cx.leaves.stored("weight"), cx.leaves.bias("bias"));
        let n = masked.rows.n();
        let cells = Sequences {
            masked: Some(masked.clone()),
            role: SequenceRole::MaskedCells,
            ..Sequences::vectors(n)
        };
        Tokens::new(y, vec![cells])
    }
}

impl Unit for Predict {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> Vec<ParamSpec> {
        let init = self.initial_weights.matrix(self.output, self.width);
        let weight = ParamSpec::weight("weight", [self.output, self.width], init);
        vec![weight, ParamSpec::vector("bias", self.output, 0.0)]
    }

    fn forward(&self, _: usize, streams: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
        streams.iter().map(|tokens| self.predict(tokens, cx)).collect::<Vec<_>>().into()
    }

    /// Counts a graph that holds the tokens of masked cells, and the predictions in the loss.
    fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
        let n: usize = groups.iter().map(|group| group.n_masked).sum();
        let flops = 2.0 * (n * self.width * self.output) as f64;
        let graph = Elements::wide((n * (self.width + 3 * self.output)) as f64);
        let mut outputs = Vec::with_capacity(groups.len());
        for group in groups {
            outputs.push(GroupShape {
                n_views: 1,
                n_prefix: group.n_masked,
                grid: [0, 0],
                n_dropped: 0,
                width: self.output,
                ..*group
            });
        }
        (Cost::new(flops, graph), outputs)
    }
}
