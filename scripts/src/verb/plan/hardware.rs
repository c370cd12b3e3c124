//! Hardware that a run is planned for: a GPU by its data sheet, or this machine.

use anyhow::bail;
use kernels::device::Opened;
use trainer::Recipe;
use trainer::bench::step::matrix_peak;
use trainer::cost::ModelCost;
use trainer::estimate::{EFFICIENCY, Fabric, GPUS, Gpu, Latency, Placement, StepTime, step_flops, step_time};
use trainer::step::precision::{Arithmetic, Precision};

use super::flags::Args;
use session::machine;

/// Bytes of a gigabyte.
pub(super) const GB: f64 = 1e9;

/// Rows of the matrix whose product measures a CPU: large enough to reach its rate, small enough to
/// be fast.
const MATRIX_ROWS: usize = 768;

/// Share of a GPU's memory that a run uses.
const USABLE: f64 = 0.8;

/// Bandwidth within a node if no GPU and no flag states it, in GB/s.
const LOCAL_GB_S: f64 = 370.0;

/// Hardware of the ranks.
pub(super) struct Hardware {
    /// Memory of a rank, in bytes.
    pub(super) memory_bytes: f64,
    /// Ranks of a node.
    pub(super) ranks_per_node: usize,
    /// Numbers of ranks to compare.
    pub(super) ranks: Vec<usize>,
    /// Rate of computation.
    speed: Speed,
    /// Types of numbers in computation, memory and transfers.
    pub(super) precision: Precision,
    fabric: Fabric,
}

/// Rate of computation of a rank.
enum Speed {
    /// By the data sheet of a GPU.
    OfGpu(Gpu),
    /// Operations per second that matrix products sustain, and how the number was made.
    Sustained(f64, &'static str),
}

impl Hardware {
    /// Returns the hardware that `args` name; measures this machine if they name no other.
    pub(super) fn from_args(args: &Args, recipe: Option<&Recipe>) -> anyhow::Result<Self> {
        let gpu = match args.gpu.as_str() {
            "cpu" => None,
            name => match Gpu::named(name) {
                Some(gpu) => Some(gpu),
                None => bail!(
                    "unknown GPU {name}: expected one of {}, cpu; for other GPUs, pass --memory-gb and \
                     --tflops",
                    GPUS.map(|gpu| gpu.name).join(", ")
                ),
            },
        };
        let stated = recipe.map_or_else(Precision::default, |recipe| recipe.optim.precision);
        let Precision { head_gather, head_reduce, .. } = stated;
        let precision =
            if args.bf16 { Precision { head_gather, head_reduce, ..Precision::BF16 } } else { stated };
        let is_this_machine = gpu.is_none() && args.tflops.is_none();
        let ranks_per_node = args.ranks_per_node.unwrap_or(if is_this_machine { 1 } else { 8 });
        let memory_gb = args.memory_gb.or(gpu.map(|gpu| USABLE * gpu.memory_gb));
        let link_gb_s = args.local_gb_s.or(gpu.map(|gpu| gpu.link_gb_s)).unwrap_or(LOCAL_GB_S);
        let speed = match (args.tflops, gpu) {
            (Some(tflops), _) => Speed::Sustained(tflops * 1e12, "as given"),
            (None, Some(gpu)) => Speed::OfGpu(gpu),
            (None, None) => {
                let peak = matrix_peak(&Opened::cpu().device, MATRIX_ROWS, precision.compute);
                Speed::Sustained(peak, "measured on this machine: a lower bound on the time")
            }
        };
        let ranks = if is_this_machine { vec![1] } else { vec![1, 8, 64] };
        Ok(Self {
            memory_bytes: memory_gb.map_or_else(
                || machine::rank_resources(ranks_per_node, 1, &Opened::cpu()).bytes,
                |gb| gb * GB,
            ),
            ranks_per_node,
            ranks: if args.ranks.is_empty() { ranks } else { args.ranks.clone() },
            speed,
            precision: precision.with_defaults(gpu.is_some()),
            fabric: Fabric {
                ranks_per_node,
                local_bytes_per_s: link_gb_s * GB,
                node_bytes_per_s: args.node_gb_s * GB,
                local_latency: latency(args.local_us, args.local_short_us),
                node_latency: latency(args.node_us, args.node_short_us),
            },
        })
    }

    /// Describes the hardware and how its numbers were made.
    pub(super) fn describe(&self) -> String {
        let memory = format!("{:.1} GB of memory per rank", self.memory_bytes / GB);
        match self.speed {
            Speed::OfGpu(gpu) => format!(
                "{}: {memory}, out of {}; 16-bit time at {:.0} % of its data sheet ({} TFLOP/s, {} GB/s), \
                 which predicts published runs within a factor of 1.5; the one step measured with ocelli \
                 took eight times as long (docs/gpus.md){}",
                gpu.name,
                gpu.memory_gb,
                100.0 * EFFICIENCY,
                gpu.tflops,
                gpu.memory_gb_s,
                if self.precision.compute == Arithmetic::F32 {
                    "\nthis recipe computes in 32 bits: pass --bf16 or --set optim.precision.compute=bf16"
                } else {
                    ""
                }
            ),
            Speed::Sustained(flops, how) => format!("{memory}; {:.3} TFLOP/s, {how}", flops / 1e12),
        }
    }

    /// Estimates the time of a step.
    pub(super) fn step(&self, model: &ModelCost, placement: &Placement) -> StepTime {
        let compute_s = match self.speed {
            Speed::OfGpu(gpu) => gpu.compute_s(model, placement),
            Speed::Sustained(flops, _) => step_flops(model, placement).with_recomputation / flops,
        };
        step_time(model, placement, &self.fabric, compute_s)
    }
}

/// Converts latencies from microseconds; that of short messages is by default that of long ones.
fn latency(long_us: f64, short_us: Option<f64>) -> Latency {
    Latency { short_s: short_us.unwrap_or(long_us) * 1e-6, long_s: long_us * 1e-6 }
}

#[cfg(test)]
mod tests {
    use ranks::topology::Sharding;

    use super::*;
    use crate::recipes;

    /// Published runs: recipe, GPU, number of GPUs, images of each, whether activations are
    /// recomputed, and seconds of a step.
    const PUBLISHED: [(&str, &str, usize, usize, bool, f64); 6] = [
        // DINO's README: 100 epochs of ImageNet on 8 GPUs in 1.75 days.
        ("dino_vits16", "v100", 8, 64, false, 0.604),
        // DINOv2's model card: 22,000 hours of A100s for 625,000 steps.
        ("dinov2_vitg14", "a100-80", 256, 12, false, 0.495),
        // DINOv2's README: 125,000 steps on 32 GPUs in about a day.
        ("dinov2_vitl16", "a100-80", 32, 64, false, 0.69),
        // DINOv2's README: 3.3 days on 96 GPUs for 625,000 steps.
        ("dinov2_vitl14", "a100-80", 96, 32, false, 0.456),
        // SwAV's README: an epoch of ImageNet in 3 min 40 s on 64 GPUs.
        ("swav_resnet50", "v100", 64, 64, false, 0.703),
        // SEER: 8,704 images in 6.125 s on 512 GPUs, with activation checkpoints.
        ("seer_regnety_256gf", "v100", 512, 17, true, 6.125),
    ];

    #[test]
    fn published_runs_come_out_within_a_factor_of_one_and_a_half() {
        for (name, gpu, world_size, rank_batch, recomputes, published_s) in PUBLISHED {
            let recipe = recipes::load(name, &[]).unwrap();
            let precision = recipe.optim.precision;
            let model = trainer::cost::model_cost(&trainer::resolve(recipe, 1 << 20).unwrap()).unwrap();
            let placement = Placement {
                world_size,
                group_size: world_size,
                sharding: Sharding::Full,
                segment: 1,
                keep: if recomputes { 0 } else { model.trained.backbone.len() },
                rank_batch,
                rank_micro_batches: 1,
                workers: 1,
                precision,
                exact_sums: true,
                offload: false,
            };
            let ratio = Gpu::named(gpu).unwrap().compute_s(&model, &placement) / published_s;
            assert!((1.0 / 1.5..1.5).contains(&ratio), "{name}: {ratio:.2} of the published time");
        }
    }
}
