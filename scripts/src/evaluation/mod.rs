//! Parts that the verbs of evaluation share: flags, networks, and the display of scores.
pub(crate) mod flags;
pub(crate) mod image_sets;
pub(crate) mod in_training;
pub(crate) mod network;
pub(crate) mod record;
pub(crate) mod scores;
