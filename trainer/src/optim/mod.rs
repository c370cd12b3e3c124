//! The optimizer over flat shards, and the update of followers.

mod adamw;
mod clip;
#[cfg(feature = "cube")]
mod cube;
pub(crate) mod follow;
mod optimizer;
mod rates;
mod runs;
mod sgd;
pub(crate) mod state;

pub(crate) use self::adamw::AdamW;
pub(crate) use self::clip::ClipRule;
pub(crate) use self::optimizer::{Norms, Optimizer, Rule};
pub(crate) use self::rates::LayerRates;
pub(crate) use self::sgd::{Adaptation, RateRule, Sgd};
