//! What the verbs of `ocelli curate` share: flags, ranks, and output.

mod call;
mod flags;
mod input;
mod output;

pub(crate) use call::{Call, bars, finish};
pub(crate) use flags::{CellFlags, ClusterFlags, ThresholdFlag};
pub(crate) use input::{InputFlags, OtherFlags};
pub(crate) use output::{OutputFlags, draw_pairs};
