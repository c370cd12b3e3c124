//! Parts that the verbs of `ocelli curate` share: features with the names of their images,
//! clusters, lists, shards and pictures.

pub(crate) mod cells;
pub(crate) mod clusters;
pub(crate) mod comparison_parts;
pub(crate) mod content;
pub(crate) mod groups;
pub(crate) mod input;
pub(crate) mod match_images;
pub(crate) mod others;
pub(crate) mod output;
pub(crate) mod pairs;
pub(crate) mod progress;
pub(crate) mod quality;
pub(crate) mod ranks;
pub(crate) mod saved;
pub(crate) mod threshold;
