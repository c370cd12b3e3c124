//! Hardware that a run is planned for: a GPU by its data sheet, or this machine.

use anyhow::bail;
use kernels::device::Opened;
use session::machine;
use trainer::Recipe;
use trainer::bench::speed::{Load, machine_speed};
use trainer::cost::ModelCost;
use trainer::estimate::{EFFICIENCY, Fabric, GPUS, Gpu, Hardware, Latency, PlannerSettings, Speed};
use trainer::step::precision::{Arithmetic, Precision};

use super::flags::Args;
use super::units::GB;

/// Share of a GPU's memory that a run uses.
const USABLE: f64 = 0.8;

/// Bandwidth within a node if no GPU and no flag states it, in GB/s.
const LOCAL_GB_S: f64 = 370.0;

/// Returns whether the flags name no other hardware than this machine.
pub(super) fn is_this_machine(args: &Args) -> bool {
    args.gpu == "cpu" && args.tflops.is_none()
}

/// Returns the number of ranks on a node.
pub(super) fn ranks_per_node(args: &Args) -> usize {
    args.ranks_per_node.unwrap_or(if is_this_machine(args) { 1 } else { 8 })
}

/// Returns the number of workers of a rank.
pub(super) fn n_workers(args: &Args, recipe: Option<&Recipe>) -> usize {
    if let Some(workers) = args.workers {
        return workers;
    }
    if !is_this_machine(args) {
        return 1;
    }
    match recipe.map_or(0, |recipe| recipe.run.workers) {
        0 => machine::rank_resources(ranks_per_node(args), 1, &Opened::cpu()).n_workers,
        workers => workers,
    }
}

/// Returns the hardware that the flags name. If they name no other, measures this machine with the
/// share of a step of `model` that each of `world_size` ranks has.
pub(super) fn read_hardware(
    args: &Args,
    recipe: Option<&Recipe>,
    model: &ModelCost,
    settings: &PlannerSettings,
    world_size: usize,
) -> anyhow::Result<Hardware> {
    let gpu = Gpu::named(&args.gpu);
    if gpu.is_none() && args.gpu != "cpu" {
        bail!(
            "unknown GPU {}: expected one of {}, cpu; for other GPUs, pass --memory-gb and --tflops",
            args.gpu,
            GPUS.map(|gpu| gpu.name).join(", ")
        );
    }
    let stated = recipe.map_or_else(Precision::default, |recipe| recipe.optim.precision);
    let Precision { head_gather, head_reduce, .. } = stated;
    let precision =
        if args.bf16 { Precision { head_gather, head_reduce, ..Precision::BF16 } } else { stated };
    let ranks_per_node = ranks_per_node(args);
    let memory_gb = args.memory_gb.or(gpu.map(|gpu| USABLE * gpu.memory_gb));
    let link_gb_s = args.local_gb_s.or(gpu.map(|gpu| gpu.link_gb_s)).unwrap_or(LOCAL_GB_S);
    let speed = match (args.tflops, gpu) {
        (Some(tflops), _) => Speed::Sustained(tflops * 1e12),
        (None, Some(gpu)) => Speed::DataSheet(gpu),
        (None, None) => {
            let rank_batch = settings.images_per_rank(world_size);
            let n_micro_batches = settings.micro_batches_per_rank(world_size, rank_batch);
            let load = Load::new(rank_batch, n_micro_batches, settings.workers, precision.compute);
            Speed::Measured(machine_speed(model, load, &Opened::cpu().device))
        }
    };
    Ok(Hardware {
        memory_bytes: match memory_gb {
            Some(gb) => gb * GB,
            None => machine::rank_resources(ranks_per_node, 1, &Opened::cpu()).bytes,
        },
        speed,
        precision: precision.with_defaults(gpu.is_some()),
        is_gpu: gpu.is_some(),
        fabric: Fabric {
            ranks_per_node,
            local_bytes_per_s: link_gb_s * GB,
            node_bytes_per_s: args.node_gb_s * GB,
            local_latency: latency(args.local_us, args.local_short_us),
            node_latency: latency(args.node_us, args.node_short_us),
        },
    })
}

/// Converts latencies from microseconds; that of short messages is by default that of long ones.
fn latency(long_us: f64, short_us: Option<f64>) -> Latency {
    Latency { short_s: short_us.unwrap_or(long_us) * 1e-6, long_s: long_us * 1e-6 }
}

/// Describes `hardware` and how its numbers were made.
pub(super) fn describe(hardware: &Hardware) -> String {
    let memory = format!("{:.1} GB of memory per rank", hardware.memory_bytes / GB);
    match hardware.speed {
        Speed::DataSheet(gpu) => format!(
            "{}: {memory}, out of {}; 16-bit time at {:.0} % of its data sheet ({} TFLOP/s, {} GB/s), \
             which predicts published runs within a factor of 1.5; a step of an earlier version of ocelli \
             took 3.4 times as long (docs/gpus.md){}",
            gpu.name,
            gpu.memory_gb,
            100.0 * EFFICIENCY,
            gpu.tflops,
            gpu.memory_gb_s,
            if hardware.precision.compute == Arithmetic::F32 {
                "\nthis recipe computes in 32 bits: pass --bf16 or --set optim.precision.compute=bf16"
            } else {
                ""
            }
        ),
        Speed::Measured(speed) => format!(
            "{memory}; about {:.3} TFLOP/s and {:.1} GB/s, measured on this machine with products and \
             activations of a step",
            speed.flops_per_s / 1e12,
            speed.bytes_per_s / GB
        ),
        Speed::Sustained(flops) => format!("{memory}; {:.3} TFLOP/s, as given", flops / 1e12),
    }
}
