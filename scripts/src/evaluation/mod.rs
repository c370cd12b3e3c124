//! What the verbs of evaluation share: flags, and how scores are shown.

pub(crate) mod flags;
pub(crate) mod in_training;
pub(crate) mod record;
pub(crate) mod scores;
