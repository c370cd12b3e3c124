//! One binary for everything that spans crates.

#![allow(clippy::unwrap_used, missing_docs)]

/// Recipes with absurd values; slow.
mod abuse;
/// The arrows between crates, folders and files.
mod architecture;
/// What the program says of bad input, and with which exit code.
mod bad_input;
/// Runs that begin with weights, with a checkpoint, or with more steps.
mod beginnings;
/// Every kernel of a step, compiled for NVIDIA GPUs without one.
#[cfg(feature = "cuda")]
mod cuda_kernels;
/// Damage that a program could pass over.
mod damage;
/// The same batches whatever ranks, threads and restarts.
mod data_path;
/// Features as files.
mod embed;
/// Protocols, settings and bad sets.
mod evaluation;
/// The shell examples, run as they stand.
mod examples;
/// What happens to a run from outside, and recipes that make no sense.
mod faults;
/// Shards from servers, stores and commands, over lines that break.
mod fetch;
/// Shards that other tools wrote.
mod foreign;
/// Networks whose weights come from a file and stay as they are.
mod frozen;
/// Pixels that Pillow and torchvision made.
mod golden;
/// A GPU, or a software one, beside the CPU.
#[cfg(feature = "wgpu")]
mod gpu;
/// Unit by unit against one graph.
mod gradients;
mod graph;
/// Weights in and out of other libraries.
mod interop;
/// JPEG files of every kind beside Pillow.
mod jpeg;
/// The scripts that start ranks without a launcher.
mod launchers;
/// Methods and backbones from shards to an exported backbone.
mod methods;
/// Runs over processes, started by mpirun, and what becomes of them when one dies.
#[cfg(feature = "mpi")]
mod mpi;
/// What is not there without the feature `mpi`.
#[cfg(not(feature = "mpi"))]
mod mpi_left_out;
/// Two nodes, and the cable between them.
#[cfg(feature = "mpi")]
mod mpi_nodes;
/// mpirun, and what its ranks say.
#[cfg(feature = "mpi")]
mod mpirun;
/// Output that cannot be written.
mod output;
/// Folders and lists of images into shards and back.
mod pack;
/// Lists of URLs into shards.
mod pack_urls;
/// What a run will need, said before it is started.
mod plan;
/// Data preparation, as a user runs it.
mod prep;
/// Ranks as threads train as one rank does.
mod ranks;
/// The lines of the README, as they stand.
mod readme;
/// Recipes beside what was published of them.
mod recipes;
/// A page about runs, and the list of them.
mod report;
/// Killed and stopped runs continue bit for bit.
mod resume;
/// Passwords, signatures and commands in shard lists.
mod secrets;
/// HTTP and S3 servers, faithful and not.
mod servers;
/// Images with masks, and images with several classes.
mod several;
/// A long run of the data path; slow.
mod soak;
/// Source files, parsed.
mod sources;
/// The cache, compressed shards, checksums and promises.
mod storage;
/// Folders of temporary data, tiny recipes and the program itself.
mod support;
/// `ocelli track` against a server that answers as MLflow does.
mod tracking;
/// How weights and gradients travel between ranks, and what is computed with them.
mod travel;
/// The verbs, as a user calls them.
mod verbs;
