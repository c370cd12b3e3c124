//! Outputs of the networks without gradients.

use networks::outputs::{HeadOutputs, Outputs};

/// Outputs of the networks without gradients.
#[derive(Default)]
pub(super) struct Inferred {
    /// Outputs by network and micro-batch.
    pub(super) outputs: Vec<(&'static str, Vec<Outputs>)>,
    /// This rank's columns of the outputs of divided heads, by network and micro-batch of the
    /// column group.
    pub(super) columns: Vec<(&'static str, Vec<HeadOutputs>)>,
}

impl Inferred {
    /// Drops the outputs of all heads, and all levels.
    pub(super) fn drop_heads_and_levels(&mut self) {
        self.columns.clear();
        for (_, outputs) in &mut self.outputs {
            outputs.iter_mut().for_each(Outputs::drop_heads_and_levels);
        }
    }
}
