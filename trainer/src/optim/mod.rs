//! The optimizer over flat shards, and the update of followers.

mod adamw;
mod clip;
#[cfg(feature = "cube")]
mod cube;
pub(crate) mod follow;
mod layer_rates;
#[cfg(feature = "cuda")]
mod native;
mod optimizer;
mod runs;
mod sgd;
pub(crate) mod state;
mod weights;

pub(crate) use self::adamw::AdamW;
pub(crate) use self::clip::{ClipRule, Decision};
pub(crate) use self::layer_rates::LayerRates;
pub(crate) use self::optimizer::{Clip, Optimizer, QueuedStepNorms, Rule};
pub(crate) use self::sgd::{Adaptation, RateRule, Sgd};
