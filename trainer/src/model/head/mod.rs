//! Heads: what a method puts behind a backbone.

pub(crate) mod mlp;
pub(crate) mod prototypes;

use super::unit::Unit;

/// A head. Either the student and every follower have one, or only the student.
pub struct Head {
    /// Its name, which is unique within the method.
    pub name: &'static str,
    /// What it reads.
    pub reads: Reads,
    /// Who has one.
    pub on: On,
    /// Its units.
    pub units: Vec<Box<dyn Unit>>,
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

/// Who has a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// The student and every follower.
    Both,
    /// The student.
    Student,
}
