//! Heads: units that a method puts after a backbone.

pub mod decoder;
pub mod linear;
pub mod mlp;
pub mod pixels;
pub mod projection;
pub mod prototypes;
pub mod unit_prototypes;

use crate::readout::Readout;
use crate::tokens::Tokens;
use crate::unit::{GroupShape, Unit};

/// A head of a network.
pub struct Head {
    /// Name, unique within the network.
    pub name: &'static str,
    /// Input of the head.
    pub reads: Reads,
    /// Units of the head.
    pub units: Vec<Box<dyn Unit>>,
    /// Whether the ranks of a column group divide the columns of the last unit's output among them,
    /// where a run has such groups. No other head may read such a head.
    pub may_divide: bool,
    /// Whether all units run in the passes of a step, slice by slice like a backbone's: for a head
    /// that is a network of its own.
    pub runs_in_passes: bool,
}

/// Input of a head. Everything that depends on it is a method of this type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// One vector per view.
    Pooled,
    /// The cells of the grid.
    Patches,
    /// The masked cells of the grid.
    Masked,
    /// All tokens that the backbone has computed, of which the masked cells are known.
    Tokens,
    /// One vector per view, and the masked cells of the grid.
    PooledAndMasked,
    /// One vector per view, and all cells of the grid, of which the masked ones are known.
    PooledAndCells,
    /// The output of the head of this name, which comes before it.
    Head(&'static str),
}

impl Head {
    /// Creates a head whose columns are never divided.
    pub fn new(name: &'static str, reads: Reads, units: Vec<Box<dyn Unit>>) -> Self {
        Self { name, reads, units, may_divide: false, runs_in_passes: false }
    }

    /// Returns the number of units up to the last one that has several stages, or of all units if
    /// all run in passes. These run in the passes of a step like a backbone's; the units after them
    /// are part of the loss's graph.
    pub fn n_staged(&self) -> usize {
        if self.runs_in_passes {
            return self.units.len();
        }
        self.units.iter().rposition(|unit| unit.n_stages() > 1).map_or(0, |last| last + 1)
    }

    /// Returns whether the columns of the head are divided, given the number of parts of divided
    /// columns.
    pub fn is_divided(&self, n_column_parts: usize) -> bool {
        self.may_divide && n_column_parts > 1
    }
}

impl Reads {
    /// Returns the name of the head that is read; `None` for the backbone.
    pub fn head(self) -> Option<&'static str> {
        match self {
            Self::Head(name) => Some(name),
            Self::Pooled
            | Self::Patches
            | Self::Masked
            | Self::Tokens
            | Self::PooledAndMasked
            | Self::PooledAndCells => None,
        }
    }

    /// Selects the input of a head from the tokens of the backbone of one size of view. The output
    /// of a head, which another head reads, is returned unchanged.
    pub fn select(self, tokens: &Tokens) -> Tokens {
        match self {
            Self::Pooled => tokens.pooled(),
            Self::Patches => tokens.patches(),
            Self::Masked => tokens.masked(),
            Self::Tokens => tokens.clone(),
            Self::PooledAndMasked => tokens.pooled_and_masked(),
            Self::PooledAndCells => tokens.pooled_and_cells(),
            Self::Head(_) => tokens.clone(),
        }
    }

    /// Returns the shape of [`Reads::select`].
    pub fn shape(self, shape: &GroupShape) -> GroupShape {
        match self {
            Self::Pooled => shape.pooled(),
            Self::Patches => GroupShape { n_prefix: 0, ..*shape },
            Self::Masked => {
                GroupShape { n_views: 1, n_prefix: shape.n_masked, grid: [0, 0], n_dropped: 0, ..*shape }
            }
            Self::PooledAndMasked => {
                GroupShape { n_views: 1, n_prefix: shape.n_views + shape.n_masked, grid: [0, 0], ..*shape }
            }
            Self::PooledAndCells => {
                let n_cells = shape.n_views * shape.grid[0] * shape.grid[1];
                GroupShape { n_views: 1, n_prefix: shape.n_views + n_cells, grid: [0, 0], ..*shape }
            }
            Self::Tokens | Self::Head(_) => *shape,
        }
    }

    /// Returns whether the cells of the grid are read by themselves.
    fn has_cells(self) -> bool {
        matches!(self, Self::Patches | Self::Tokens)
    }

    /// Returns whether masked cells are read.
    pub fn has_masked(self) -> bool {
        matches!(self, Self::Masked | Self::PooledAndMasked | Self::PooledAndCells)
    }
}

/// Returns the features that a backbone must return for these heads.
pub fn readout(heads: &[Head]) -> Readout {
    if heads.iter().any(|head| head.reads.has_cells() || head.reads.has_masked()) {
        Readout::All
    } else {
        Readout::Pooled
    }
}

/// Returns the number of units of each head that run in the passes of a step, where the columns of
/// divided heads have `n_column_parts` parts: those up to the last one with several stages, all but
/// the last of a divided head, and all of a head that these heads read.
pub fn staged_units(heads: &[Head], n_column_parts: usize) -> Vec<usize> {
    let mut n_staged = Vec::with_capacity(heads.len());
    for head in heads {
        let is_divided = head.is_divided(n_column_parts);
        n_staged.push(if is_divided { head.units.len() - 1 } else { head.n_staged() });
    }
    // The input of a staged unit must have gone through the passes of the step as well.
    for (index, head) in heads.iter().enumerate().rev() {
        if !head.is_divided(n_column_parts) && head.n_staged() == 0 {
            continue;
        }
        let mut reader = index;
        while let Some(input) = input_head(heads, reader) {
            n_staged[input] = heads[input].units.len();
            reader = input;
        }
    }
    n_staged
}

/// Returns the index of the head that head `reader` reads; `None` if it reads the backbone.
fn input_head(heads: &[Head], reader: usize) -> Option<usize> {
    let name = heads[reader].reads.head()?;
    heads[..reader].iter().position(|head| head.name == name)
}
