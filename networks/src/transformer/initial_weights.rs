//! Initial values of a transformer's weights.
//!
//! ```text
//! trunc_normal   W ~ N(0, σ²) cut at ±2           patches and their bias ~ U(±1/√fan_in), as PyTorch's convolution
//! xavier         W ~ U(±√(6 / (fan_in + fan_out)))  queries, keys and values separately; biases zero
//! ```
//!
//! The second is MoCo v3's (Chen, Xie and He 2021), with a class token of standard deviation 10⁻⁶.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::params::Init;

/// A rule for initial weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Initialization {
    /// Truncated normal numbers: timm, DINO.
    #[default]
    TruncNormal,
    /// Uniform numbers by fan-in and fan-out: MoCo v3.
    Xavier,
}

/// A rule for initial weights with its standard deviation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct InitialWeights {
    /// The rule.
    pub rule: Initialization,
    /// Standard deviation of truncated normal numbers.
    pub std: f32,
    /// Standard deviation of the class token and registers; absent if they follow the rule.
    pub token_std: Option<f32>,
}

impl InitialWeights {
    /// Checks the bounds of every value.
    ///
    /// # Errors
    /// A message with the key and what is wrong with it.
    pub(crate) fn validate(&self) -> Result<(), String> {
        for (key, std) in [("init_std", Some(self.std)), ("token_std", self.token_std)] {
            if let Some(std) = std.filter(|std| !(0.0..=1.0).contains(std)) {
                return Err(format!("model.{key} {std} must lie in 0..=1"));
            }
        }
        Ok(())
    }

    /// Returns the initial values of a matrix from `inputs` to `outputs` channels.
    pub(crate) fn matrix(self, outputs: usize, inputs: usize) -> Init {
        match self.rule {
            Initialization::TruncNormal => Init::TruncNormal(self.std),
            Initialization::Xavier => Init::Uniform((6.0 / (outputs + inputs) as f32).sqrt()),
        }
    }

    /// Returns the initial values of weight and bias of the projection of patches of `inputs`
    /// numbers to `outputs` channels.
    pub(crate) fn patches(self, outputs: usize, inputs: usize) -> [Init; 2] {
        match self.rule {
            // timm draws convolutions like PyTorch: uniform in ±1/√fan_in.
            Initialization::TruncNormal => [Init::Uniform(1.0 / (inputs as f32).sqrt()); 2],
            Initialization::Xavier => [self.matrix(outputs, inputs), Init::Constant(0.0)],
        }
    }

    /// Returns the initial values of the class token.
    pub(crate) fn class_token(self) -> Init {
        match (self.token_std, self.rule) {
            (Some(std), _) => Init::Normal(std),
            (None, Initialization::TruncNormal) => Init::TruncNormal(self.std),
            (None, Initialization::Xavier) => Init::Normal(1e-6),
        }
    }

    /// Returns the initial values of registers.
    pub(crate) fn registers(self) -> Init {
        self.token_std.map_or(Init::TruncNormal(self.std), Init::Normal)
    }
}
