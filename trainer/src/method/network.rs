//! The networks that a method trains and compares: their parts, their views and how their weights change.

use networks::backbone::{ModelConfig, Readout};
use networks::head::{Head, Reads, readout};
use networks::patches::{Normalization, PixelInput};
use networks::unit::Unit;

use serde::{Deserialize, Serialize};

use crate::schedule::Schedule;

/// Specification of a network.
pub struct NetworkSpec {
    /// Name of the network: that of its weights in checkpoints and in metrics, unique within the method.
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
    Own(ModelConfig, Normalization),
}

/// Rule by which the weights of a network change. Exactly one network of a method moves by gradient: the trained network.
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
        /// Whether the average is updated before a step, with the decay of that step, instead of after it.
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
    },
    /// Frozen: the weights come from a file.
    Frozen,
}

/// A frozen network, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrozenWeights {
    /// File or folder of the weights, written by another library or by a run of this program.
    pub weights: String,
    /// Fingerprint of the weights: files with the same one hold the same weights. Always set in a plan.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fingerprint: String,
    /// Backbone that the file describes. Always set in a plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelConfig>,
    /// Normalization of pixels that the file describes. Always set in a plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub normalization: Option<Normalization>,
}

impl NetworkSpec {
    /// Returns the specification of a trained network with the recipe's backbone that sees all of `n_sizes` view sizes.
    pub fn trained(name: &'static str, heads: Vec<Head>, n_sizes: usize) -> Self {
        let sees = (0..n_sizes).map(|size| Sight { size, masked: false }).collect();
        Self { name, backbone: Backbone::OfRecipe, heads, sees, takes_masks: false, moves: Moves::ByGradient }
    }

    /// Units of the network's backbone, where `recipe` is the backbone of the recipe.
    pub fn units(&self, recipe: &ModelConfig) -> Vec<Box<dyn Unit>> {
        self.units_to(self.readout(), recipe)
    }

    /// Units of the network's backbone as in [`NetworkSpec::units`], with the features of `readout` as output.
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
        // A frozen network without a head is compared by all of its features.
        if self.heads.is_empty() && self.moves == Moves::Frozen { Readout::All } else { readout(&self.heads) }
    }

    /// Backbone of the network, where `recipe` is the backbone of the recipe.
    pub fn model<'a>(&'a self, recipe: &'a ModelConfig) -> &'a ModelConfig {
        match &self.backbone {
            Backbone::OfRecipe => recipe,
            Backbone::Own(model, _) => model,
        }
    }

    /// Conversion of pixels into the input of the first unit, where `recipe` is that of the recipe's backbone.
    pub fn input(&self, recipe: PixelInput) -> PixelInput {
        match &self.backbone {
            Backbone::OfRecipe => recipe,
            Backbone::Own(model, normalization) => {
                PixelInput { cell_px: model.cell_px(), normalization: *normalization }
            }
        }
    }
}

impl Moves {
    /// Returns the network whose weights this one follows, if any, and the share of the old weights that stays once the
    /// step before `next_step` has been taken.
    pub fn follows(self, next_step: u64) -> Option<(&'static str, f64)> {
        match self {
            Self::ByGradient | Self::Frozen => None,
            // The end of a step is the same moment as the beginning of the next one.
            Self::Average { of, decay, moves_first } => {
                Some((of, decay.at(if moves_first { next_step } else { next_step.saturating_sub(1) })))
            }
            Self::Copy { of, every_steps, from_step } => {
                let is_due = next_step >= from_step && next_step.is_multiple_of(every_steps);
                Some((of, if is_due { 0.0 } else { 1.0 }))
            }
        }
    }
}

/// Checks that `model`, the recipe's backbone, supports masks if one of `networks` needs them.
///
/// # Errors
/// A message with the key and what is wrong with it.
pub(crate) fn check_masks(networks: &[NetworkSpec], model: &ModelConfig) -> Result<(), String> {
    let refused = |network: &&NetworkSpec| {
        network.takes_masks && network.model(model).masked_units(Readout::Pooled).is_none()
    };
    match networks.iter().find(refused) {
        Some(_) => Err("model.arch: the method masks patches, and this backbone has no tokens to mask: a transformer has".into()),
        None => Ok(()),
    }
}

/// Checks the properties of a method's list of networks that the rest of the program relies on.
///
/// # Errors
/// A message in words that says what is wrong with the list.
pub(crate) fn check(networks: &[NetworkSpec]) -> Result<(), String> {
    let n_trained = networks.iter().filter(|network| network.moves == Moves::ByGradient).count();
    if n_trained != 1 {
        return Err(format!("{n_trained} networks move by gradient, and it must be one"));
    }
    for (number, network) in networks.iter().enumerate() {
        let (name, before) = (network.name, &networks[..number]);
        if before.iter().any(|other| other.name == name) {
            return Err(format!("two networks are called {name}"));
        }
        if let Some((of, _)) = network.moves.follows(0) {
            let trained = networks.iter().find(|other| other.moves == Moves::ByGradient);
            let Some(other) = before.iter().chain(trained).find(|other| other.name == of) else {
                return Err(format!("the network {name} follows {of}, which does not come before it"));
            };
            if other.backbone != network.backbone {
                return Err(format!("the network {name} follows {of}, which has another backbone"));
            }
            let has = |head: &Head| {
                other.heads.iter().find(|found| found.name == head.name).is_some_and(|found| {
                    let params = |head: &Head| -> Vec<_> {
                        head.units.iter().map(|unit| (unit.name().to_string(), unit.params())).collect()
                    };
                    params(found) == params(head)
                })
            };
            if let Some(head) = network.heads.iter().find(|head| !has(head)) {
                return Err(format!("the network {name} follows {of}, which has no such head {}", head.name));
            }
        }
        if network.sees.iter().any(|sight| sight.masked) && !network.takes_masks {
            return Err(format!("the network {name} is to see masks and takes none"));
        }
        for (i, head) in network.heads.iter().enumerate() {
            if head.reads == Reads::Masked && head.n_staged() > 0 {
                return Err(format!(
                    "the head {} of the network {name} has statistics over masked cells",
                    head.name
                ));
            }
            let earlier = &network.heads[..i];
            if earlier.iter().any(|other| other.name == head.name) {
                return Err(format!("two heads of the network {name} are called {}", head.name));
            }
            let is_there = |read: &'static str| earlier.iter().any(|other| other.name == read);
            if let Some(read) = head.reads.head().filter(|read| !is_there(read)) {
                let head = head.name;
                return Err(format!(
                    "the head {head} of the network {name} reads {read}, which is not before it"
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(name: &'static str, reads: Reads) -> Head {
        Head { name, reads, units: Vec::new() }
    }

    fn follower(name: &'static str, of: &'static str, heads: Vec<Head>) -> NetworkSpec {
        let moves = Moves::Copy { of, every_steps: 2, from_step: 4 };
        NetworkSpec { moves, ..NetworkSpec::trained(name, heads, 1) }
    }

    #[test]
    fn lists_that_cannot_be_run_are_refused() {
        let trained = || NetworkSpec::trained("a", vec![head("x", Reads::Pooled)], 1);
        let refused = |networks: Vec<NetworkSpec>, why: &str| {
            let error = check(&networks).unwrap_err();
            assert!(error.contains(why), "{error}");
        };
        assert_eq!(check(&[trained(), follower("b", "a", vec![head("x", Reads::Pooled)])]), Ok(()));
        assert_eq!(
            check(&[follower("b", "a", Vec::new()), trained()]),
            Ok(()),
            "the trained network is known"
        );
        refused(vec![], "0 networks move by gradient");
        refused(vec![trained(), trained()], "2 networks move by gradient");
        refused(vec![trained(), follower("a", "a", vec![])], "two networks are called a");
        refused(vec![trained(), follower("b", "c", vec![])], "follows c");
        refused(vec![trained(), follower("b", "c", vec![]), follower("c", "a", vec![])], "follows c");
        refused(vec![trained(), follower("b", "a", vec![head("y", Reads::Pooled)])], "no such head y");
        let twice = vec![head("x", Reads::Pooled), head("x", Reads::Patches)];
        refused(vec![NetworkSpec::trained("a", twice, 1)], "two heads");
        let backwards = vec![head("x", Reads::Head("y")), head("y", Reads::Pooled)];
        refused(vec![NetworkSpec::trained("a", backwards, 1)], "reads y");
    }

    #[test]
    fn copies_are_made_from_a_step_on() {
        let moves = follower("b", "a", Vec::new()).moves;
        let stays: Vec<f64> = (1..9).map(|next| moves.follows(next).unwrap().1).collect();
        assert_eq!(stays, [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
    }
}
