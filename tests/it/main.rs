//! One binary for all tests that span crates.

#![allow(clippy::unwrap_used, missing_docs)]

/// Recipes with absurd values; slow.
mod abuse;
/// Dependencies between crates, folders and files.
mod architecture;
/// Messages and exit codes for bad input.
mod bad_input;
/// Decoding of images of many channels.
mod bands;
/// Runs that begin with weights, with a checkpoint, or with more steps.
mod beginnings;
/// Pages in a browser.
mod browser;
/// Images of many channels from a folder to an export.
mod channels;
/// Classes and masks that commands must neither drop nor mistake for others.
mod classes;
/// Comparison of images with others, in parts.
mod comparison_parts;
/// Kernels for NVIDIA GPUs, run on the CPU.
mod cuda_attention;
/// Every kernel of a step, compiled for NVIDIA GPUs without one.
#[cfg(feature = "cuda")]
mod cuda_kernels;
/// Launches of a step, on a driver that computes nothing.
#[cfg(feature = "cuda")]
mod cuda_launches;
/// Curation of images.
mod curate;
/// Damage that could go unnoticed.
mod damage;
/// Equal batches for any ranks, threads and restarts.
mod data_path;
/// Disturbances of runs over ranks.
#[cfg(feature = "mpi")]
mod disturbances;
/// Files of features.
mod embed;
/// Protocols, settings and bad sets.
mod evaluation;
/// The shell examples, run unchanged.
mod examples;
/// External faults during a run, and inconsistent recipes.
mod faults;
/// Shards from servers, stores and commands, over connections that break.
mod fetch;
/// Classifiers that are trained with labels.
mod finetune;
/// Time and memory that a run says it needs.
mod forecast;
/// Shards that other tools wrote.
mod foreign;
/// Networks whose weights come from a file and are not trained.
mod frozen;
/// Comparison with pixels of Pillow and torchvision.
mod golden;
/// Comparison of a GPU, or a software one, with the CPU.
#[cfg(feature = "wgpu")]
mod gpu;
/// Gradients unit by unit, and of batches that are uploaded.
mod gradients;
/// Directed graphs.
mod graph;
/// Help of all commands.
mod help;
/// Runs that are given hours.
mod hours;
/// Identity of data in caches, resumed runs and parts.
mod identity;
/// Container images.
mod images;
/// Weights from and for other libraries.
mod interop;
/// JPEG files of every kind, compared with Pillow.
mod jpeg;
/// The scripts that start ranks without a launcher.
mod launchers;
/// Whether a run learns, without labels.
mod learning;
/// Python libraries on the same networks and images.
mod libraries;
/// Messages of the program, compared with those in a file.
mod messages;
/// Methods and backbones from shards to an exported backbone.
mod methods;
/// Mistaken commands and their answers.
mod mistakes;
/// Shares of sources and weights of images.
mod mixing;
/// Runs of several processes, started by mpirun, and their end if one dies.
#[cfg(feature = "mpi")]
mod mpi;
/// Behavior without the feature `mpi`.
#[cfg(not(feature = "mpi"))]
mod mpi_left_out;
/// Two nodes, whose connection is cut.
#[cfg(feature = "mpi")]
mod mpi_nodes;
/// mpirun, and the messages of its ranks.
#[cfg(feature = "mpi")]
mod mpirun;
/// Several classes per image, and classes that are shown equally often.
mod multilabel;
/// Steps over cables of any speed, compared with their estimates; slow.
#[cfg(feature = "mpi")]
mod network;
/// Two nodes on this machine.
#[cfg(feature = "mpi")]
mod nodes;
/// Model cards: what a network began with.
mod origins;
/// Folders, archives and lists in other layouts.
mod others;
/// Output that cannot be written.
mod output;
/// Packing folders and lists of images into shards, and extracting them.
mod pack;
/// Packing lists of URLs into shards.
mod pack_urls;
/// Commands of the README and its pages.
mod pages;
/// Parquet files instead of shards.
mod parquet_sets;
/// Preparation in parts, as one job does it.
mod parts;
/// TIFF and GIF files of other programs.
mod pictures;
/// Estimates of `ocelli plan`.
mod plan;
/// Data preparation.
mod prep;
/// The Python module.
mod python;
/// Ranks as threads, which train like one rank.
mod ranks;
/// The commands of the README, run unchanged.
mod readme;
/// Recipes, compared with the published ones.
mod recipes;
/// A page about runs, and the list of them.
mod report;
/// Killed and stopped runs continue bit for bit.
mod resume;
/// The end of a run: scores, export, and the next commands.
mod run_end;
/// Passwords, signatures and commands in shard lists.
mod secrets;
/// Networks that are trained to label pixels, with masks.
mod segment;
/// HTTP and S3 servers, with and without faults.
mod servers;
/// Images with masks, and images with several classes.
mod several;
/// The scripts for Slurm, on a small cluster.
#[cfg(feature = "mpi")]
mod slurm;
/// A long run of the data path; slow.
mod soak;
/// Disturbed runs on several ranks, for a time that is set.
#[cfg(feature = "mpi")]
mod soak_ranks;
/// Source files, parsed.
mod sources;
/// The stages of DINOv3, and its distillation.
mod stages;
/// The cache, compressed shards and checksums.
mod storage;
/// Folders of temporary data, tiny recipes and the program itself.
mod support;
/// `ocelli track` against a server that responds like MLflow.
mod tracking;
/// Transfer of weights and gradients between ranks, and computation in bf16.
mod travel;
/// Runs that are validated while they train, and end early.
mod validation;
/// Bits in use, and pixels without data.
mod values;
/// The verbs of the program.
mod verbs;
/// Output at the widths of terminals.
mod widths;
