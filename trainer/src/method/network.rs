//! The networks that a method trains and compares: their parts, their views and how their weights
//! change.

use std::collections::BTreeMap;

use networks::backbone::{ModelConfig, Readout};
use networks::head::{Head, readout};
use networks::patches::{Normalization, PixelInput, Pixels};
use networks::unit::Unit;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schedule::Schedule;

/// Specification of a network.
pub struct NetworkSpec {
    /// Name of the network: that of its weights in checkpoints and in metrics, unique within the
    /// method.
    pub name: &'static str,
    /// Backbone of the network.
    pub backbone: Backbone,
    /// Heads of the network; a head that reads another one comes after it.
    pub heads: Vec<Head>,
    /// Views that the network sees.
    pub sees: Vec<Sight>,
    /// Whether the backbone has a token for masked patches.
    pub takes_masks: bool,
    /// Rule by which the weights change.
    pub moves: Moves,
}

/// Views of one size as a network sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sight {
    /// Number of the view size.
    pub size: usize,
    /// Whether masked patches are hidden from the network.
    pub masked: bool,
}

/// The backbone of a network.
#[derive(Debug, Clone, PartialEq)]
pub enum Backbone {
    /// The recipe's backbone.
    OfRecipe,
    /// A backbone of its own, with the normalization of its pixels.
    Own(Box<ModelConfig>, Normalization),
}

/// Rule by which the weights of a network change. Exactly one network of a method moves by
/// gradient: the trained network.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Moves {
    /// Update by gradient: the trained network.
    ByGradient,
    /// Moving average of another network, which comes before it or is the trained network.
    Average {
        /// Name of the other network.
        of: &'static str,
        /// Decay of the average, by step: share of the old weights that stays.
        decay: Schedule,
        /// Whether the average is updated before a step, with the decay of that step, instead of
        /// after it.
        moves_first: bool,
    },
    /// Copy of the weights of another network, which comes before it or is the trained network.
    Copy {
        /// Name of the other network.
        of: &'static str,
        /// Steps between two copies.
        every_steps: u64,
        /// Steps before the first copy.
        from_step: u64,
        /// Most copies after the first one.
        max_updates: u64,
    },
    /// Frozen: the weights come from a file.
    Frozen,
}

/// A frozen network, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FrozenWeights {
    /// File or folder of the weights, written by another library or by a run of this program.
    pub weights: String,
    /// Fingerprint of the weights: files with the same one hold the same weights. Always set in a
    /// plan.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fingerprint: String,
    /// Backbone that the file describes. Always set in a plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelConfig>,
    /// Normalization of pixels that the file describes. Always set in a plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub normalization: Option<Normalization>,
    /// Shapes of the parameters of its heads, by name. Set in a plan where the network has heads.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub heads: BTreeMap<String, Vec<usize>>,
    /// Whether the network was trained with masked patches. Set in a plan where the network has
    /// heads.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub saw_masks: bool,
}

/// A frozen network of a method's settings.
pub struct FrozenEntry<'a> {
    /// Name that the method has for it.
    pub name: &'static str,
    /// Source of its weights.
    pub weights: &'a mut FrozenWeights,
    /// Whether it has the heads of the run that trained it.
    pub has_heads: bool,
}

impl NetworkSpec {
    /// Returns the specification of a trained network with the recipe's backbone that sees all of
    /// `n_sizes` view sizes.
    pub fn trained(name: &'static str, heads: Vec<Head>, n_sizes: usize) -> Self {
        let sees = (0..n_sizes).map(|size| Sight { size, masked: false }).collect();
        Self { name, backbone: Backbone::OfRecipe, heads, sees, takes_masks: false, moves: Moves::ByGradient }
    }

    /// Returns whether initial weights of a run are those of this network.
    pub fn starts_from_weights(&self) -> bool {
        self.backbone == Backbone::OfRecipe && self.moves != Moves::Frozen
    }

    /// Units of the network's backbone, where `recipe` is the backbone of the recipe.
    pub fn units(&self, recipe: &ModelConfig) -> Vec<Box<dyn Unit>> {
        self.units_to(self.readout(), recipe)
    }

    /// Units of the network's backbone as in [`NetworkSpec::units`], with the features of `readout`
    /// as output.
    pub fn units_to(&self, readout: Readout, recipe: &ModelConfig) -> Vec<Box<dyn Unit>> {
        let model = self.model(recipe);
        let masked = self.takes_masks.then(|| model.masked_units(readout)).flatten();
        masked.unwrap_or_else(|| model.units(readout))
    }

    /// Numbers of the view sizes that the network sees.
    pub fn sizes(&self) -> Vec<usize> {
        self.sees.iter().map(|sight| sight.size).collect()
    }

    /// Features that the network's backbone outputs.
    pub fn readout(&self) -> Readout {
        // A network that another one is compared with, and that has no head, is compared by all of
        // its features.
        let is_compared = matches!(self.moves, Moves::Frozen | Moves::Copy { .. });
        if self.heads.is_empty() && is_compared { Readout::All } else { readout(&self.heads) }
    }

    /// Backbone of the network, where `recipe` is the backbone of the recipe.
    pub fn model<'a>(&'a self, recipe: &'a ModelConfig) -> &'a ModelConfig {
        match &self.backbone {
            Backbone::OfRecipe => recipe,
            Backbone::Own(model, _) => model,
        }
    }

    /// Conversion of pixels into the input of the first unit, where `recipe` is that of the
    /// recipe's backbone.
    pub fn input(&self, recipe: PixelInput) -> PixelInput {
        match &self.backbone {
            Backbone::OfRecipe => recipe,
            Backbone::Own(model, normalization) => {
                let pixels = Pixels { normalization: normalization.clone(), depth: recipe.pixels.depth };
                PixelInput { cell_px: model.cell_px(), pixels }
            }
        }
    }
}

impl Moves {
    /// Returns the name of the network that this one copies from time to time, if it does.
    pub fn copies(self) -> Option<&'static str> {
        match self {
            Self::Copy { of, .. } => Some(of),
            Self::ByGradient | Self::Average { .. } | Self::Frozen => None,
        }
    }

    /// Returns the network whose weights this one follows, if any, and the share of the old weights
    /// that stays once the step before `next_step` has been taken.
    pub fn follows(self, next_step: u64) -> Option<(&'static str, f64)> {
        match self {
            Self::ByGradient | Self::Frozen => None,
            // The end of a step is the same moment as the beginning of the next one.
            Self::Average { of, decay, moves_first } => {
                Some((of, decay.at(if moves_first { next_step } else { next_step.saturating_sub(1) })))
            }
            Self::Copy { of, every_steps, from_step, max_updates } => {
                let is_due = next_step.checked_sub(from_step).is_some_and(|since| {
                    since.is_multiple_of(every_steps) && since / every_steps <= max_updates
                });
                Some((of, if is_due { 0.0 } else { 1.0 }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_made_from_a_step_on() {
        let stays = |max_updates| -> Vec<f64> {
            let moves = Moves::Copy { of: "a", every_steps: 2, from_step: 4, max_updates };
            (1..9).map(|next| moves.follows(next).unwrap().1).collect()
        };
        assert_eq!(stays(u64::MAX), [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
        assert_eq!(stays(1), [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0]);
        assert_eq!(stays(0), [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
    }
}
