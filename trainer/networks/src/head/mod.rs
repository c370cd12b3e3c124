//! Heads: what a method puts behind a backbone.

pub mod mlp;
pub mod projection;
pub mod prototypes;
pub mod unit_prototypes;

use crate::backbone::Readout;
use crate::features::Features;
use crate::unit::{GroupShape, Unit};

/// A head of a network.
pub struct Head {
    /// Its name, which is unique within the network.
    pub name: &'static str,
    /// What it reads.
    pub reads: Reads,
    /// Its units.
    pub units: Vec<Box<dyn Unit>>,
}

/// What a head reads. Everything that depends on it is a method of this type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// One vector a view.
    Pooled,
    /// The cells of the grid.
    Patches,
    /// The masked cells of the grid.
    Masked,
    /// The output of the head of this name, which comes before it.
    Head(&'static str),
}

impl Head {
    /// Number of units up to the last one that has several stages. Those go through the passes of a step like a
    /// backbone's; the units behind them are part of the loss's graph.
    pub fn n_staged(&self) -> usize {
        self.units.iter().rposition(|unit| unit.n_stages() > 1).map_or(0, |last| last + 1)
    }
}

impl Reads {
    /// The head that is read, if it is not the backbone.
    pub fn head(self) -> Option<&'static str> {
        match self {
            Self::Head(name) => Some(name),
            Self::Pooled | Self::Patches | Self::Masked => None,
        }
    }

    /// The input of a head, given the backbone's features of one size of view. A head's output is read as it is.
    pub fn select(self, features: &Features) -> Features {
        match self {
            Self::Pooled => features.pooled(),
            Self::Patches => features.patches(),
            Self::Masked => features.masked(),
            Self::Head(_) => features.clone(),
        }
    }

    /// The shape of [`Reads::select`].
    pub fn shape(self, shape: &GroupShape) -> GroupShape {
        match self {
            Self::Pooled => shape.pooled(),
            Self::Patches => GroupShape { n_prefix: 0, ..*shape },
            // As if all were masked.
            Self::Masked => GroupShape { n_prefix: 0, ..*shape },
            Self::Head(_) => *shape,
        }
    }
}

/// Features that must leave a backbone with these heads behind it.
pub fn readout(heads: &[Head]) -> Readout {
    match heads.iter().any(|head| matches!(head.reads, Reads::Patches | Reads::Masked)) {
        true => Readout::All,
        false => Readout::Pooled,
    }
}
