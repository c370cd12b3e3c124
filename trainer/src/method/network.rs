//! The networks that a method trains and compares: their parts, their views and the rules by which
//! their weights are updated.
//!
//! Shards, gathers, checkpoints, estimates and exports are made from the list of networks, and know
//! each network by its name. A network that sees no views in training, such as the average of a
//! distilled student, costs only its memory.
//!
//! A frozen network is sharded and gathered like the others. It normalizes with its running
//! statistics, so that its output for an image does not depend on the batch. Its weights are read
//! from their file at every start, and checkpoints leave them out.

use std::collections::BTreeMap;

use networks::adapter::Adapter;
use networks::backbone::{ModelConfig, Readout};
use networks::head::{Head, readout};
use networks::mask::Masking;
use networks::patches::{Normalization, PixelInput, Pixels};
use networks::unit::Unit;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schedule::Schedule;

/// Specification of a network.
pub struct NetworkSpec {
    /// Name of the network in checkpoints and metrics, unique within the method.
    pub name: &'static str,
    /// Backbone of the network.
    pub backbone: Backbone,
    /// Heads of the network. A head that reads another one comes after it.
    pub heads: Vec<Head>,
    /// Views that the network sees, and what it sees of their masked patches. A network without
    /// views does not run in a step; its weights only follow another network. In the outputs of a
    /// network that sees masked patches as they are ([`Masking::Shown`]), they are known, too.
    pub sees: Vec<SeenViews>,
    /// Whether the backbone has a token for masked patches. It needs one if it is shown in their
    /// place ([`Masking::Replaced`]), and if a head reads masked cells
    /// ([`Reads::has_masked`](networks::head::Reads::has_masked)). A network that follows another
    /// one has the same parameters, and so the same value, whatever it sees. Where masked patches
    /// are dropped and heads read all tokens, none is needed.
    pub takes_masks: bool,
    /// Number of the last levels of the backbone, such as a transformer's blocks, whose tokens the
    /// network outputs ([`Outputs::levels`](networks::outputs::Outputs::levels)); all of them if
    /// the backbone has fewer. Zero for the trained network.
    pub n_levels: usize,
    /// Rule by which the weights are updated.
    pub update_rule: UpdateRule,
}

/// Views of one size that a network sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenViews {
    /// Index of the view size.
    pub size: usize,
    /// What the network sees of masked patches.
    pub masking: Masking,
}

/// The backbone of a network.
#[derive(Debug, Clone, PartialEq)]
pub enum Backbone {
    /// The recipe's backbone.
    Recipe,
    /// Another backbone, with the normalization of its pixels.
    Custom(Box<ModelConfig>, Normalization),
}

/// Rule by which the weights of a network are updated. Exactly one network of a method is updated
/// by gradient: the trained network.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UpdateRule {
    /// Update by gradient: the trained network.
    Gradient,
    /// Moving average of another network, which comes before it or is the trained network.
    Average {
        /// Name of the other network.
        source: &'static str,
        /// Decay of the average by step: the factor of the old weights.
        decay: Schedule,
        /// Whether the average is updated before a step, with the decay of that step, instead of
        /// after it.
        updates_before_step: bool,
    },
    /// Copy of the weights of another network, which comes before it or is the trained network.
    Copy {
        /// Name of the other network.
        source: &'static str,
        /// Steps between two copies.
        every_steps: u64,
        /// Step before which the first copy is made.
        from_step: u64,
        /// Maximum number of copies after the first one; `None` for any number.
        max_updates: Option<u64>,
    },
    /// No update: the weights come from a file.
    Frozen,
}

/// A frozen network, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FrozenWeights {
    /// File or folder of the weights, written by another library or by a run of ocelli.
    pub weights: String,
    /// Fingerprint of the weights: files with the same fingerprint have the same weights. Always
    /// set in a plan.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fingerprint: String,
    /// Backbone that the file describes. Always set in a plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelConfig>,
    /// Normalization of pixels that the file describes. Always set in a plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub normalization: Option<Normalization>,
    /// Shapes of the parameters of its heads, by name. Set in a plan if the network has heads.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub heads: BTreeMap<String, Vec<usize>>,
    /// Whether the network was trained with masked patches. Set in a plan if the network has heads.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub saw_masks: bool,
}

/// A frozen network in the settings of a method.
pub struct FrozenEntry<'a> {
    /// Name of the network in the method.
    pub name: &'static str,
    /// Source of its weights.
    pub weights: &'a mut FrozenWeights,
    /// Whether the heads of the run that trained it are needed.
    pub has_heads: bool,
}

impl NetworkSpec {
    /// Returns the specification of a trained network with the recipe's backbone that sees all of
    /// `n_sizes` view sizes.
    pub fn trained(name: &'static str, heads: Vec<Head>, n_sizes: usize) -> Self {
        let sees = (0..n_sizes).map(|size| SeenViews { size, masking: Masking::Shown }).collect();
        Self {
            name,
            backbone: Backbone::Recipe,
            heads,
            sees,
            takes_masks: false,
            n_levels: 0,
            update_rule: UpdateRule::Gradient,
        }
    }

    /// Returns whether a run that starts from weights starts this network from them.
    pub fn starts_from_weights(&self) -> bool {
        self.backbone == Backbone::Recipe && self.update_rule != UpdateRule::Frozen
    }

    /// Adapters of the network, where `recipe` are those of the recipe. Only networks that start
    /// from the weights of a run have them: the trained one, and those that follow it.
    pub fn adapter(&self, recipe: Option<Adapter>) -> Option<Adapter> {
        recipe.filter(|_| self.starts_from_weights())
    }

    /// Units of the network's backbone. `recipe` is the backbone of the recipe.
    pub fn units(&self, recipe: &ModelConfig) -> Vec<Box<dyn Unit>> {
        self.units_to(self.readout(), recipe)
    }

    /// Units of the network's backbone as in [`NetworkSpec::units`], whose output are the features
    /// of `readout`.
    pub fn units_to(&self, readout: Readout, recipe: &ModelConfig) -> Vec<Box<dyn Unit>> {
        let model = self.model(recipe);
        let masked = self.takes_masks.then(|| model.masked_units(readout)).flatten();
        masked.unwrap_or_else(|| model.units(readout))
    }

    /// Indices of the units of the backbone that end the levels of the network's outputs. `recipe`
    /// is the backbone of the recipe.
    pub fn level_units(&self, recipe: &ModelConfig) -> Vec<usize> {
        let mut units = self.model(recipe).levels().units;
        units.split_off(units.len().saturating_sub(self.n_levels))
    }

    /// Indices of the view sizes that the network sees.
    pub fn sizes(&self) -> Vec<usize> {
        self.sees.iter().map(|views| views.size).collect()
    }

    /// Features that the network's backbone outputs.
    pub fn readout(&self) -> Readout {
        // The outputs of a network that is not trained are targets: without heads, all of its
        // tokens.
        let is_compared = self.update_rule != UpdateRule::Gradient;
        if self.heads.is_empty() && is_compared { Readout::All } else { readout(&self.heads) }
    }

    /// Backbone of the network. `recipe` is the backbone of the recipe.
    pub fn model<'a>(&'a self, recipe: &'a ModelConfig) -> &'a ModelConfig {
        match &self.backbone {
            Backbone::Recipe => recipe,
            Backbone::Custom(model, _) => model,
        }
    }

    /// Conversion of pixels into the input of the first unit. `recipe` is the conversion for the
    /// recipe's backbone.
    pub fn input(&self, recipe: PixelInput) -> PixelInput {
        match &self.backbone {
            Backbone::Recipe => recipe,
            Backbone::Custom(model, normalization) => {
                let pixels = Pixels { normalization: normalization.clone(), depth: recipe.pixels.depth };
                PixelInput { cell_px: model.cell_px(), pixels }
            }
        }
    }
}

impl UpdateRule {
    /// Returns the name of the network that is copied, if the rule is [`UpdateRule::Copy`].
    pub fn copied_network(self) -> Option<&'static str> {
        match self {
            Self::Copy { source, .. } => Some(source),
            Self::Gradient | Self::Average { .. } | Self::Frozen => None,
        }
    }

    /// Returns the network from which the weights are updated between the step before `next_step`
    /// and `next_step`, if there is one, and the factor of the old weights.
    pub fn source_and_decay(self, next_step: u64) -> Option<(&'static str, f64)> {
        match self {
            Self::Gradient | Self::Frozen => None,
            Self::Average { source, decay, updates_before_step } => {
                // An update after a step and one before the next step happen at the same time.
                let step = if updates_before_step { next_step } else { next_step.saturating_sub(1) };
                Some((source, decay.at(step)))
            }
            Self::Copy { source, every_steps, from_step, max_updates } => {
                let is_due = match next_step.checked_sub(from_step) {
                    Some(elapsed) => {
                        elapsed.is_multiple_of(every_steps)
                            && max_updates.is_none_or(|most| elapsed / every_steps <= most)
                    }
                    None => false,
                };
                Some((source, if is_due { 0.0 } else { 1.0 }))
            }
        }
    }
}

/// Returns the trained network among `networks`.
pub(crate) fn find_trained(networks: &[NetworkSpec]) -> Option<&NetworkSpec> {
    networks.iter().find(|network| network.update_rule == UpdateRule::Gradient)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the factors of the old weights before steps 1 to 8 of a network that is copied every
    /// two steps from step 4 on.
    fn copy_decays(max_updates: Option<u64>) -> Vec<f64> {
        let rule = UpdateRule::Copy { source: "a", every_steps: 2, from_step: 4, max_updates };
        (1..9).map(|next_step| rule.source_and_decay(next_step).unwrap().1).collect()
    }

    /// Returns the units that end the last `n_levels` levels of a transformer of two blocks.
    fn level_units(n_levels: usize) -> Vec<usize> {
        let spec = NetworkSpec { n_levels, ..NetworkSpec::trained("a", Vec::new(), 1) };
        spec.level_units(&ModelConfig::examples()[0])
    }

    #[test]
    fn levels_are_the_last_ones_or_all() {
        assert_eq!([level_units(0), level_units(1), level_units(9)], [vec![], vec![2], vec![1, 2]]);
    }

    #[test]
    fn copies_begin_at_their_first_step_and_end_after_the_maximum_number() {
        assert_eq!(copy_decays(None), [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
        assert_eq!(copy_decays(Some(1)), [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0]);
        assert_eq!(copy_decays(Some(0)), [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
    }
}
