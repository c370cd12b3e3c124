//! `ocelli plan`: estimates the needs of a run before it is started.

mod networks;

use std::process::ExitCode;

use anyhow::bail;
use kernels::device::Opened;
use ranks::topology::Sharding;
use ranks::wire::Wire;
use serde_json::json;
use trainer::Recipe;
use trainer::estimate::{
    Fabric, ModelCost, PRESETS, Placement, goodput, max_kept_graphs, memory, of_plan, preset, simulate,
    step_time, traffic,
};
use trainer::step::precision::Precision;

use crate::cluster::machine;
use crate::{frozen, recipes};

const GB: f64 = 1e9;
const HOUR_S: f64 = 3600.0;

/// Flags of `plan`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli plan --recipe dino_vits16 --ranks 1 8 64")]
pub(crate) struct Args {
    /// Name or file of a recipe.
    #[arg(long, default_value = "dino_vits16", conflicts_with = "preset")]
    recipe: String,
    /// Published model, in place of a recipe: vit-s, vit-b, vit-l, vit-h, vit-g, vit-7b, resnet50, seer-rg32gf,
    /// seer-rg64gf, seer-rg128gf, seer-rg256gf, seer-rg10b.
    #[arg(long, alias = "model")]
    preset: Option<String>,
    /// Numbers of ranks to compare.
    #[arg(long, num_args = 1.., default_values_t = [1, 8, 64])]
    ranks: Vec<usize>,
    /// Ranks per node.
    #[arg(long, default_value_t = 8)]
    ranks_per_node: usize,
    /// Images per rank and step [default: the recipe's batch size divided by the ranks].
    #[arg(long)]
    rank_batch: Option<usize>,
    /// Micro-batches per rank and step [default: from the recipe's optim.micro_batches].
    #[arg(long, alias = "rank-parts")]
    rank_micro_batches: Option<usize>,
    /// Worker threads per rank; 1 for a GPU.
    #[arg(long, default_value_t = 1)]
    workers: usize,
    /// Memory per rank, in GB [default: this machine's memory per rank].
    #[arg(long)]
    memory_gb: Option<f64>,
    /// Ranks of a shard group in the row `group` [default: the recipe's, or those of a node].
    #[arg(long)]
    group: Option<usize>,
    /// Backbone units that keep their graph [default: the recipe's, or as many as fit].
    #[arg(long)]
    keep: Option<usize>,
    /// Send gathered weights and gradients of the backbone as bf16.
    #[arg(long)]
    bf16: bool,
    /// Compute throughput per rank, in TFLOP/s.
    #[arg(long, default_value_t = 400.0)]
    tflops: f64,
    /// Bandwidth within a node, per rank, in GB/s.
    #[arg(long, default_value_t = 370.0)]
    local_gb_s: f64,
    /// Bandwidth between nodes, per node, in GB/s.
    #[arg(long, default_value_t = 336.0)]
    node_gb_s: f64,
    /// Latency of a message within a node, in microseconds.
    #[arg(long, default_value_t = 1.5)]
    local_us: f64,
    /// Latency of a message between nodes, in microseconds.
    #[arg(long, default_value_t = 6.0)]
    node_us: f64,
    /// Mean time to a failure of one node, in hours. 1,024 GPUs in Kokolis et al. 2024 fail every 7.9 hours.
    #[arg(long, default_value_t = 1011.0)]
    node_mttf_h: f64,
    /// Write bandwidth of a rank to storage, in GB/s.
    #[arg(long, default_value_t = 1.0)]
    write_gb_s: f64,
    /// Time from a failure to the next step, in seconds.
    #[arg(long, default_value_t = 300.0)]
    restart_s: f64,
    /// Also simulate checkpoints: shard the model over each number of ranks and read it back on every other.
    #[arg(long)]
    simulate: bool,
    /// Change a value of the recipe. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
}

/// One way to distribute a model over some ranks.
struct PlanRow {
    mode: &'static str,
    placement: Placement,
    fits: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    check(args)?;
    let PlanRequest { model, batch, recipe } = asked(args)?;
    networks::print(&model);
    let limit = args
        .memory_gb
        .map_or_else(|| machine::room(args.ranks_per_node, 1, &Opened::cpu()).bytes, |gb| gb * GB);
    out!("memory of a rank: {:.1} GB; computing {} TFLOP/s", limit / GB, args.tflops);
    out!("GB per rank; saving a checkpoint needs memory for another copy of the state beyond the peak");
    out!(
        "{:>6} {:<6} {:>5} {:>6} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "ranks",
        "mode",
        "group",
        "batch",
        "keep",
        "state",
        "grads",
        "gather",
        "graphs",
        "peak GB",
        "moved GB",
        "compute",
        "ring",
        "tree",
        "step s"
    );
    let mut lines = Vec::new();
    let mut any_fits = false;
    for &world_size in &args.ranks {
        let rank_batch = args.rank_batch.unwrap_or_else(|| batch.div_ceil(world_size));
        for row in rows(args, &model, recipe.as_ref(), world_size, rank_batch, limit) {
            any_fits |= row.fits;
            lines.push(print_row(args, &model, &row));
        }
    }
    print_goodput(args, &model);
    if args.simulate {
        print_simulation(args, &model)?;
    }
    if args.json {
        let line = networks::described(&model, lines);
        out!("{line}");
    }
    if !any_fits {
        bail!("{}", what_would_fit(args, &model, recipe.as_ref(), batch, limit));
    }
    Ok(ExitCode::SUCCESS)
}

/// Model to estimate, and its recipe.
struct PlanRequest {
    model: ModelCost,
    /// Images of a step over all ranks.
    batch: usize,
    recipe: Option<Recipe>,
}

fn asked(args: &Args) -> anyhow::Result<PlanRequest> {
    if let Some(name) = &args.preset {
        let Some(model) = preset(name) else {
            bail!("unknown preset {name}: it is one of {}", PRESETS.join(", "));
        };
        let batch = 16 * args.ranks.iter().copied().max().unwrap_or(1);
        return Ok(PlanRequest { model, batch, recipe: None });
    }
    let mut recipe = recipes::load(&args.recipe, &args.overrides)?;
    frozen::open(&mut recipe, None)?;
    // The data set's size only moves schedules.
    let model = of_plan(&trainer::resolve(recipe.clone(), 1 << 20)?)?;
    Ok(PlanRequest { model, batch: recipe.optim.batch_size, recipe: Some(recipe) })
}

fn check(args: &Args) -> anyhow::Result<()> {
    let positive = [
        ("--tflops", args.tflops),
        ("--local-gb-s", args.local_gb_s),
        ("--node-gb-s", args.node_gb_s),
        ("--node-mttf-h", args.node_mttf_h),
        ("--write-gb-s", args.write_gb_s),
    ];
    if let Some((flag, value)) = positive.iter().find(|(_, value)| !(*value > 0.0 && value.is_finite())) {
        bail!("{flag} is {value} and must be positive");
    }
    if args.ranks.contains(&0)
        || args.ranks_per_node == 0
        || args.rank_micro_batches == Some(0)
        || args.workers == 0
    {
        bail!("--ranks, --ranks-per-node, --rank-micro-batches and --workers count from 1");
    }
    if args.rank_batch == Some(0) || args.group == Some(0) {
        bail!("--rank-batch and --group count from 1");
    }
    Ok(())
}

/// Returns a row for each mode with `world_size` ranks. Other settings are those of `args`, or else of `recipe`.
fn rows(
    args: &Args,
    model: &ModelCost,
    recipe: Option<&Recipe>,
    world_size: usize,
    rank_batch: usize,
    limit: f64,
) -> Vec<PlanRow> {
    let mut precision = recipe.map_or_else(Precision::default, |recipe| recipe.optim.precision);
    if args.bf16 {
        (precision.gather, precision.reduce) = (Wire::Bf16, Wire::Bf16);
    }
    let set_group = recipe.map(|recipe| recipe.run.shard_group).filter(|group| *group > 0);
    let group = args.group.or(set_group).unwrap_or(args.ranks_per_node);
    let set_micro_batches = recipe.map_or(1, |recipe| recipe.optim.micro_batches / world_size);
    let rank_micro_batches = args.rank_micro_batches.unwrap_or(set_micro_batches).clamp(1, rank_batch);
    let set_keep = args.keep.or(recipe.and_then(|recipe| recipe.run.keep));
    let mut modes = vec![("none", Sharding::None, 1)];
    if world_size > 1 {
        modes.push(("grad", Sharding::Grad, world_size));
        modes.push(("full", Sharding::Full, world_size));
        if group > 1 && group < world_size && world_size.is_multiple_of(group) {
            modes.push(("group", Sharding::Full, group));
        }
    }
    let row = |(mode, sharding, group_size)| {
        let workers = args.workers.min(rank_batch);
        let placement = Placement {
            world_size,
            group_size,
            sharding,
            keep: 0,
            rank_batch,
            rank_micro_batches,
            workers,
            precision,
            offload: false,
        };
        let keep = set_keep.or_else(|| max_kept_graphs(model, &placement, limit)).unwrap_or(0);
        let placement = Placement { keep: keep.min(model.trained.backbone.len()), ..placement };
        PlanRow { mode, placement, fits: memory(model, &placement).needed_bytes() <= limit }
    };
    modes.into_iter().map(row).collect()
}

fn fabric(args: &Args) -> Fabric {
    Fabric {
        ranks_per_node: args.ranks_per_node,
        local_bytes_per_s: args.local_gb_s * GB,
        node_bytes_per_s: args.node_gb_s * GB,
        local_latency_s: args.local_us * 1e-6,
        node_latency_s: args.node_us * 1e-6,
        flops: args.tflops * 1e12,
    }
}

fn print_row(args: &Args, model: &ModelCost, row: &PlanRow) -> serde_json::Value {
    let placement = &row.placement;
    let (memory, moved) = (memory(model, placement), traffic(model, placement));
    let time = step_time(model, placement, &fabric(args));
    let moved_bytes = moved.gather_bytes + moved.reduce_bytes + moved.replica_bytes;
    let keep = match placement.keep {
        n if n == model.trained.backbone.len() => "all".to_string(),
        n => n.to_string(),
    };
    out!(
        "{:>6} {:<6} {:>5} {:>6} {:>7} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>8.2} {:>8.3} {:>8.3} {:>8.3} {:>8.3}{}",
        placement.world_size,
        row.mode,
        placement.group_size,
        placement.rank_batch,
        keep,
        memory.state_bytes / GB,
        memory.gradient_bytes / GB,
        memory.gathered_bytes / GB,
        (memory.activation_bytes + memory.input_bytes + memory.work_bytes) / GB,
        memory.peak_bytes() / GB,
        moved_bytes / GB,
        time.compute_s,
        time.ring_s,
        time.tree_s,
        time.step_s,
        if row.fits { "" } else { "  does not fit" }
    );
    json!({
        "ranks": placement.world_size,
        "mode": row.mode,
        "group": placement.group_size,
        "rank_batch": placement.rank_batch,
        "keep": placement.keep,
        "fits": row.fits,
        "state_bytes": memory.state_bytes,
        "gradient_bytes": memory.gradient_bytes,
        "gathered_bytes": memory.gathered_bytes,
        "input_bytes": memory.input_bytes,
        "activation_bytes": memory.activation_bytes,
        "work_bytes": memory.work_bytes,
        "peak_bytes": memory.peak_bytes(),
        "checkpoint_bytes": memory.checkpoint_bytes,
        "gather_bytes": moved.gather_bytes,
        "reduce_bytes": moved.reduce_bytes,
        "replica_bytes": moved.replica_bytes,
        "n_gathers": moved.n_gathers,
        "n_reduces": moved.n_reduces,
        "compute_s": time.compute_s,
        "ring_s": time.ring_s,
        "tree_s": time.tree_s,
        "step_s": time.step_s,
    })
}

fn print_goodput(args: &Args, model: &ModelCost) {
    out!("checkpoints and failures, a node failing once in {:.0} h:", args.node_mttf_h);
    for &world_size in &args.ranks {
        let moving: usize =
            model.others.iter().filter(|network| !network.is_frozen).map(|network| network.numel()).sum();
        let numbers = (1 + model.n_moments) * model.trained.numel() + moving;
        let bytes = 4.0 * numbers as f64 / world_size as f64;
        let n_nodes = world_size.div_ceil(args.ranks_per_node);
        let good = goodput(n_nodes, args.node_mttf_h * HOUR_S, bytes, args.write_gb_s * GB, args.restart_s);
        out!(
            "{world_size:>6} ranks: one failure in {:.1} h; {:.2} GB per rank, {:.1} s to write; best interval \
             {:.1} min; goodput {:.1} %",
            good.mttf_s / HOUR_S,
            bytes / GB,
            good.write_s,
            good.interval_s / 60.0,
            100.0 * good.fraction
        );
    }
}

fn print_simulation(args: &Args, model: &ModelCost) -> anyhow::Result<()> {
    let others: Vec<usize> = args.ranks.iter().copied().filter(|n| *n > 1).collect();
    for &from in &others {
        for &to in &others {
            let simulation = simulate(model, from, to).map_err(anyhow::Error::msg)?;
            out!(
                "written by {from} ranks, read by {to}: at most {} reads from {} files a rank and buffer; manifest \
                 {:.1} kB; {:.2} % padding; every element once ({:.0} ms here)",
                simulation.max_reads,
                simulation.max_files,
                simulation.manifest_bytes as f64 / 1e3,
                100.0 * simulation.padding,
                1e3 * simulation.seconds
            );
        }
    }
    Ok(())
}

/// Describes the changes with which a mode would fit.
fn what_would_fit(
    args: &Args,
    model: &ModelCost,
    recipe: Option<&Recipe>,
    batch: usize,
    limit: f64,
) -> String {
    let mut said = format!("nothing fits into {:.1} GB a rank.", limit / GB);
    let largest = args.ranks.iter().copied().max().unwrap_or(1);
    let rank_batch = |world: usize| args.rank_batch.unwrap_or_else(|| batch.div_ceil(world));
    let fits = |world: usize, images: usize| {
        rows(args, model, recipe, world, images, limit).iter().any(|row| row.fits)
    };
    let ranks = (0..14).map(|log| 1usize << log).find(|world| fits(*world, rank_batch(*world)));
    if let Some(world) = ranks {
        said += &format!(" {world} ranks would.");
    }
    if let Some(images) = (1..rank_batch(largest)).rev().find(|images| fits(largest, *images)) {
        said += &format!(" {largest} ranks with {images} images each would.");
    }
    let one = rows(args, model, recipe, largest, 1, limit);
    let least = one.iter().map(|row| memory(model, &Placement { keep: 0, ..row.placement }).needed_bytes());
    said += &format!(
        " One image on each of {largest} ranks takes {:.1} GB.",
        least.fold(f64::INFINITY, f64::min) / GB
    );
    said
}
