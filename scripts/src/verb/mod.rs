//! Verbs of the program, one file or folder each.

pub(crate) mod bench;
pub(crate) mod curate;
pub(crate) mod doctor;
pub(crate) mod embed;
pub(crate) mod export;
pub(crate) mod finetune;
pub(crate) mod plan;
pub(crate) mod pretrain;
pub(crate) mod probe;
pub(crate) mod quickstart;
pub(crate) mod recipe;
pub(crate) mod report;
pub(crate) mod runs;
mod segment;
pub(crate) mod shards;
pub(crate) mod shell;
pub(crate) mod track;
