//! The verbs, one file each.

pub(crate) mod bench;
pub(crate) mod bench_device;
pub(crate) mod bench_loader;
pub(crate) mod bench_shard;
pub(crate) mod bench_step;
pub(crate) mod doctor;
pub(crate) mod export;
pub(crate) mod pack;
mod pack_urls;
pub(crate) mod plan;
pub(crate) mod prep;
pub(crate) mod pretrain;
pub(crate) mod probe;
pub(crate) mod quickstart;
pub(crate) mod shards;
