//! Settings of SwAV.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::method::MethodContext;
use crate::method::bounds::check_positive;
use crate::method::prototype_group::{check_prototype_group, default_prototype_group};
use crate::schedule::Duration;

/// Settings of SwAV, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Number of prototypes, K.
    pub prototypes: usize,
    /// Channels of the head's hidden layers; one layer of 2048 by default.
    #[serde(default = "default_hidden")]
    pub head_hidden: Vec<usize>,
    /// Channels of the head's output, the embedding; 128 by default.
    #[serde(default = "default_output")]
    pub head_output: usize,
    /// Whether the head's hidden layers are normalized over the batch; true by default: SwAV's are,
    /// SEER's are not.
    #[serde(default = "default_batch_norm")]
    pub head_batch_norm: bool,
    /// Temperature of the predictions, τ; 0.1 by default.
    #[serde(default = "default_temperature")]
    pub temperature: f64,
    /// Temperature of the assignments, ε: smaller is sharper; 0.05 by default.
    #[serde(default = "default_epsilon")]
    pub epsilon: f64,
    /// Number of Sinkhorn-Knopp iterations; 3 by default.
    #[serde(default = "default_iterations")]
    pub sinkhorn_iterations: usize,
    /// Length of time at the start during which the prototypes are frozen; 313 steps by default.
    #[serde(default = "default_freeze")]
    pub freeze_prototypes: Duration,
    /// Number of images in the queue; 0, the default, for no queue.
    #[serde(default)]
    pub queue: usize,
    /// Length of time before the queue begins to fill; 15 epochs by default.
    #[serde(default = "default_queue_start")]
    pub queue_start: Duration,
    /// Number of ranks that divide the prototypes among themselves; with 1, the default, each rank
    /// scores all of them. A rank scores its part for the images of the whole group, and gathers
    /// only that part: with many prototypes, this takes less memory and traffic. It must divide the
    /// prototypes and the ranks of a shard group, and the number of parameters of a prototype layer
    /// must be a multiple of 64 times the number of these ranks. Losses differ only by rounding.
    #[serde(default = "default_prototype_group")]
    pub prototype_group: usize,
}

fn default_hidden() -> Vec<usize> {
    vec![2048]
}

fn default_output() -> usize {
    128
}

fn default_batch_norm() -> bool {
    true
}

fn default_temperature() -> f64 {
    0.1
}

fn default_epsilon() -> f64 {
    0.05
}

fn default_iterations() -> usize {
    3
}

fn default_freeze() -> Duration {
    Duration::Steps(313)
}

fn default_queue_start() -> Duration {
    Duration::Epochs(15.0)
}

impl Config {
    /// Checks the settings.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub(super) fn validate(&self, cx: &MethodContext) -> Result<(), String> {
        if self.prototypes < 2 || self.head_output == 0 || self.head_hidden.contains(&0) {
            return Err("method.prototypes must be at least 2, method.head_output and every number of \
                 method.head_hidden at least 1"
                .into());
        }
        check_positive("temperature", self.temperature, 1e3)?;
        check_positive("epsilon", self.epsilon, 1e3)?;
        check_prototype_group(self.prototype_group, "method.prototypes", self.prototypes)?;
        if self.sinkhorn_iterations == 0 {
            return Err("method.sinkhorn_iterations must be at least 1".into());
        }
        let batch_size = cx.length.batch_size;
        if batch_size < 2 {
            return Err("optim.batch_size 1: assignments are balanced over at least two images".into());
        }
        if self.queue > 1 << 24 {
            return Err(format!("method.queue {} must be at most {}", self.queue, 1 << 24));
        }
        if self.queue > 0 && self.queue < batch_size {
            return Err(format!(
                "method.queue {} is smaller than optim.batch_size {batch_size}: it must hold a batch, or \
                 be 0",
                self.queue
            ));
        }
        let n_views: usize = cx.views.groups().iter().map(|group| group.n_views).sum();
        if n_views < 2 {
            return Err("views: SwAV needs at least two views, one to predict the other".into());
        }
        Ok(())
    }
}
