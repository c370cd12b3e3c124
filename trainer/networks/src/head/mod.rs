//! Heads: what a method puts behind a backbone.

pub mod mlp;
pub mod projection;
pub mod prototypes;
pub mod unit_prototypes;

use super::backbone::Readout;
use super::features::Features;
use super::unit::Unit;

/// A head. Either the student and every follower have one, or only the student.
pub struct Head {
    /// Its name, which is unique within the method.
    pub name: &'static str,
    /// What it reads.
    pub reads: Reads,
    /// Networks that have one.
    pub on: On,
    /// Its units.
    pub units: Vec<Box<dyn Unit>>,
}

impl Head {
    /// Units up to the last one that has several stages: those go through the passes of a step like a backbone's. What
    /// follows is part of the loss's graph.
    pub fn n_staged(&self) -> usize {
        self.units.iter().rposition(|unit| unit.n_stages() > 1).map_or(0, |last| last + 1)
    }
}

/// What a head reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// One vector a view.
    Pooled,
    /// The cells of the grid.
    Patches,
    /// What the head of this name gives, which comes before it.
    Head(&'static str),
}

impl Reads {
    /// What a head that reads the backbone is given of `features`.
    pub fn of_backbone(self, features: &Features) -> Option<Features> {
        match self {
            Self::Pooled => Some(features.pooled()),
            Self::Patches => Some(features.patches()),
            Self::Head(_) => None,
        }
    }
}

/// Features that must leave a backbone with these heads behind it.
pub fn readout(heads: &[Head]) -> Readout {
    match heads.iter().any(|head| head.reads == Reads::Patches) {
        true => Readout::All,
        false => Readout::Pooled,
    }
}

/// Networks that have a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// The student and every follower.
    Both,
    /// The student.
    Student,
}
