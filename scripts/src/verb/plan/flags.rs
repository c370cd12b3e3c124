//! Flags of `plan`.

use std::path::PathBuf;

use anyhow::bail;

use crate::network_flags::WeightFlags;
use crate::values;

/// Flags of `plan`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli plan --recipe dino_vits16 --gpu a100-40 --ranks 1 8 64\n  ocelli \
        plan --recipe dino_cifar --images 50000\n  ocelli plan --recipe dinov2_vitl14 --gpu h100 --ranks \
        32 --details\n  ocelli plan --recipe dinov2_continue --init dinov2_vits14_pretrain.pth\n  \
        ocelli plan --hours 8 --shards photos/"
)]
pub(crate) struct Args {
    /// Recipe name or file.
    #[arg(long, default_value = "dino_vits16", conflicts_with = "preset")]
    pub(super) recipe: String,
    /// Weights that the run would start with, like --init of `ocelli pretrain`.
    #[arg(long, value_name = "WEIGHTS", conflicts_with = "preset")]
    pub(super) init: Option<PathBuf>,
    #[command(flatten)]
    pub(super) weights: WeightFlags,
    /// Published model, instead of a recipe. It is one of vit-s, vit-b, vit-l, vit-h, vit-g,
    /// vit-7b, resnet50, seer-rg32gf, seer-rg64gf, seer-rg128gf, seer-rg256gf, seer-rg10b.
    #[arg(long, alias = "model")]
    pub(super) preset: Option<String>,
    /// Time of a run, for which a recipe is chosen. Prints what `ocelli pretrain --hours` without
    /// a recipe would choose for the images of --shards and the weights of --init on this machine,
    /// and why.
    #[arg(
        long,
        value_name = "HOURS",
        value_parser = values::hours,
        requires = "shards",
        conflicts_with_all = [
            "recipe", "preset", "gpu", "ranks", "ranks_per_node", "images", "rank_batch",
            "rank_micro_batches", "workers", "memory_gb", "group", "keep", "max_unit_parameters", "bf16",
            "tflops", "local_gb_s", "node_gb_s", "local_us", "local_short_us", "node_us", "node_short_us",
            "node_mttf_h", "write_gb_s", "restart_s", "details", "simulate",
        ]
    )]
    pub(super) hours: Option<f64>,
    /// Images of the run of --hours. They are given as to `ocelli pretrain`.
    #[arg(long, num_args = 1..)]
    pub(super) shards: Vec<String>,
    /// GPU of each rank, whose data sheet gives memory and time: a100-40, a100-80, h100, h200, 4090
    /// or v100; or cpu for this machine.
    #[arg(long, default_value = "cpu", value_name = "NAME")]
    pub(super) gpu: String,
    /// Rank counts to compare [default: 1 8 64 for GPUs, 1 for the CPU].
    #[arg(long, value_name = "N", num_args = 1..)]
    pub(super) ranks: Vec<usize>,
    /// Ranks per node [default: 8 for GPUs, 1 for the CPU].
    #[arg(long, value_name = "N")]
    pub(super) ranks_per_node: Option<usize>,
    /// Number of images in the data set, to convert epochs to steps.
    #[arg(long, value_name = "N", default_value_t = 1_281_167)]
    pub(super) images: u64,
    /// Images per rank and step [default: the recipe's batch size divided by the ranks].
    #[arg(long, hide_short_help = true)]
    pub(super) rank_batch: Option<usize>,
    /// Micro-batches per rank and step [default: from the recipe's optim.micro_batches].
    #[arg(long, alias = "rank-parts", hide_short_help = true)]
    pub(super) rank_micro_batches: Option<usize>,
    /// Worker threads per rank [default: on this machine those of a run, otherwise 1].
    #[arg(long, hide_short_help = true)]
    pub(super) workers: Option<usize>,
    /// Memory per rank, in GB [default: the GPU's, or this machine's memory per rank].
    #[arg(long)]
    pub(super) memory_gb: Option<f64>,
    /// Ranks per shard group in mode `group` [default: the recipe's, or the ranks of a node].
    #[arg(long, hide_short_help = true)]
    pub(super) group: Option<usize>,
    /// Number of backbone units that keep their activations [default: the recipe's, or as many as
    /// fit].
    #[arg(long, hide_short_help = true)]
    pub(super) keep: Option<usize>,
    /// Maximum parameters per backbone unit; larger units are split [default: the recipe's
    /// run.max_unit_parameters].
    #[arg(long, value_name = "NUMBER", hide_short_help = true)]
    pub(super) max_unit_parameters: Option<usize>,
    /// Use bf16 instead of f32. It is used for computation, gathered weights and activations, and
    /// for communicating the backbone's weights and gradients.
    #[arg(long)]
    pub(super) bf16: bool,
    /// Sustained compute rate of a rank, in TFLOP/s [default: from the GPU's data sheet, or
    /// measured on this machine].
    #[arg(long, hide_short_help = true)]
    pub(super) tflops: Option<f64>,
    /// Bandwidth within a node, per rank, in GB/s [default: that of the GPU's link].
    #[arg(long, hide_short_help = true)]
    pub(super) local_gb_s: Option<f64>,
    /// Bandwidth between nodes, per node, in GB/s.
    #[arg(long, default_value_t = 336.0, hide_short_help = true)]
    pub(super) node_gb_s: f64,
    /// Latency of a message of 64 KiB or more within a node, in microseconds.
    #[arg(long, default_value_t = 1.5, hide_short_help = true)]
    pub(super) local_us: f64,
    /// Latency of a shorter message within a node, in microseconds [default: that of --local-us].
    #[arg(long, hide_short_help = true)]
    pub(super) local_short_us: Option<f64>,
    /// Latency of a message of 64 KiB or more between nodes, in microseconds.
    #[arg(long, default_value_t = 6.0, hide_short_help = true)]
    pub(super) node_us: f64,
    /// Latency of a shorter message between nodes, in microseconds [default: that of --node-us].
    #[arg(long, hide_short_help = true)]
    pub(super) node_short_us: Option<f64>,
    /// Mean time to a failure of one node, in hours. In Kokolis et al. 2024, 1,024 GPUs fail every
    /// 7.9 hours.
    #[arg(long, default_value_t = 1011.0, hide_short_help = true)]
    pub(super) node_mttf_h: f64,
    /// Storage write bandwidth of a rank, in GB/s.
    #[arg(long, default_value_t = 1.0, hide_short_help = true)]
    pub(super) write_gb_s: f64,
    /// Time from a failure to the next step, in seconds.
    #[arg(long, default_value_t = 300.0, hide_short_help = true)]
    pub(super) restart_s: f64,
    /// Also print a breakdown of memory, traffic and step time.
    #[arg(long)]
    pub(super) details: bool,
    /// Also simulate checkpoints: shard the model over each rank count and read it back with every
    /// other.
    #[arg(long, hide_short_help = true)]
    pub(super) simulate: bool,
    /// Override a recipe value. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(super) overrides: Vec<String>,
    /// Print a line of JSON at the end.
    #[arg(long)]
    pub(super) json: bool,
}

/// Checks that all numbers are in range.
pub(super) fn check(args: &Args) -> anyhow::Result<()> {
    if args.hours.is_none() && !args.shards.is_empty() {
        bail!(
            "a plan of a recipe opens no images: give their number with --images N, or --hours, which \
             chooses a recipe for them"
        );
    }
    if args.preset.is_some() && !args.weights.words().is_empty() {
        bail!(
            "a published model of --preset has no weights to state facts about: leave out {}",
            args.weights.words().join(" ")
        );
    }
    let positive = [
        ("--tflops", args.tflops.unwrap_or(1.0)),
        ("--local-gb-s", args.local_gb_s.unwrap_or(1.0)),
        ("--memory-gb", args.memory_gb.unwrap_or(1.0)),
        ("--node-gb-s", args.node_gb_s),
        ("--node-mttf-h", args.node_mttf_h),
        ("--write-gb-s", args.write_gb_s),
    ];
    for (flag, value) in positive {
        if !(value > 0.0 && value.is_finite()) {
            bail!("{flag} must be positive, not {value}");
        }
    }
    let not_negative = [
        ("--local-us", args.local_us),
        ("--local-short-us", args.local_short_us.unwrap_or_default()),
        ("--node-us", args.node_us),
        ("--node-short-us", args.node_short_us.unwrap_or_default()),
        ("--restart-s", args.restart_s),
    ];
    for (flag, value) in not_negative {
        if !(value >= 0.0 && value.is_finite()) {
            bail!("{flag} must be finite and not negative, not {value}");
        }
    }
    if args.ranks.contains(&0)
        || args.ranks_per_node == Some(0)
        || args.rank_micro_batches == Some(0)
        || args.workers == Some(0)
    {
        bail!("--ranks, --ranks-per-node, --rank-micro-batches and --workers must be at least 1");
    }
    if args.images == 0 {
        bail!("--images must be at least 1");
    }
    if args.rank_batch == Some(0) || args.group == Some(0) {
        bail!("--rank-batch and --group must be at least 1");
    }
    Ok(())
}
