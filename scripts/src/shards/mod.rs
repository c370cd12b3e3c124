//! Writing shards: lists, labels, names, encodings, and jobs that rewrite shards.

pub(crate) mod bands;
pub(crate) mod bits;
pub(crate) mod classes;
pub(crate) mod encode;
pub(crate) mod folder_lock;
pub(crate) mod host_queue;
mod image_file;
pub(crate) mod names;
pub(crate) mod pack;
pub(crate) mod pack_job;
pub(crate) mod rewrite;
pub(crate) mod samples;
pub(crate) mod synth;
