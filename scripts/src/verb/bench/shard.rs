//! `ocelli bench shard`: measures memory, traffic and time of each mode of sharding, with the
//! estimates of `ocelli plan`.

use std::process::ExitCode;

use kernels::device::{DeviceKind, Opened};
use ranks::launch::Launch;
use serde_json::json;
use trainer::Plan;
use trainer::bench::shard::{ShardBench, run as bench};

use session::{connect, plan_on_ranks};
use trainer::bench::memory_gauge::{DevicePool, MemoryGauge};

use crate::cluster::compute;
use crate::memory::MEMORY;
use crate::recipes;

/// Modes that are compared, as a recipe would set them.
const MODES: [(&str, &[&str]); 5] = [
    ("none", &["run.shard=\"none\""]),
    ("grad", &["run.shard=\"grad\""]),
    ("full, all graphs kept", &["run.shard=\"full\"", "run.keep=100000"]),
    ("full, one graph kept", &["run.shard=\"full\"", "run.keep=1"]),
    ("full, none kept", &["run.shard=\"full\"", "run.keep=0"]),
];

/// Flags of `bench shard`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Recipe name or file.
    #[arg(long, default_value = "dino_vits16")]
    recipe: String,
    /// Images per step, over all ranks [default: 8, unless --set optim.batch_size says otherwise].
    #[arg(long)]
    batch: Option<usize>,
    /// Number of timed repeats, after one warm-up run.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Measure only the mode set by the recipe and --set.
    #[arg(long)]
    as_set: bool,
    /// Override a recipe value. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    compute: compute::ComputeFlags,
    /// Print a line of JSON at the end.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let launch = compute::launch()?;
    let device = args.compute.open(&launch)?;
    let run = recipes::load(&args.recipe, &args.overrides)?.run;
    let mut comm = connect::connect(&launch, &run, &device, args.compute.engine)?;
    let n_sharers = connect::n_sharers(&comm, &device)?;
    let mut modes: Vec<(&str, Plan)> = Vec::new();
    if args.as_set {
        modes.push(("as set", plan_mode(args, &[], &launch, &device, n_sharers)?));
    } else {
        let recipe = recipes::load_for_bench(&args.recipe, &args.overrides, args.batch, 8)?;
        let divides_prototypes = trainer::resolve(recipe, 1 << 20)?.method()?.column_group_size() > 1;
        for (name, settings) in MODES {
            let mut settings = settings.to_vec();
            if name == "none" && divides_prototypes {
                // Without sharding, prototypes cannot be divided.
                settings.push("method.prototype_group=1");
            }
            modes.push((name, plan_mode(args, &settings, &launch, &device, n_sharers)?));
        }
    }
    if launch.rank == 0 {
        print_heading(args, &modes[0].1, launch.world_size);
    }
    let pool = DevicePool(&device.device);
    let memory: &dyn MemoryGauge = if device.kind == DeviceKind::Cpu { &MEMORY } else { &pool };
    let mut rows = Vec::new();
    for (name, plan) in &modes {
        let measured;
        (measured, comm) = bench(plan, comm, args.repeats, memory, &device.device)?;
        if launch.rank == 0 {
            print_row(name, &measured);
            rows.push(row_to_json(name, plan, &measured));
        }
    }
    comm.finish()?;
    if args.json && launch.rank == 0 {
        out!("{}", json!({ "ranks": launch.world_size, "modes": rows }));
    }
    Ok(ExitCode::SUCCESS)
}

/// Plans the run of the recipe with further `settings`, with as many kept graphs as fit.
fn plan_mode(
    args: &Args,
    settings: &[&str],
    launch: &Launch,
    device: &Opened,
    n_sharers: usize,
) -> anyhow::Result<Plan> {
    let mut overrides = args.overrides.clone();
    overrides.extend(settings.iter().map(ToString::to_string));
    let recipe = recipes::load_for_bench(&args.recipe, &overrides, args.batch, 8)?;
    Ok(plan_on_ranks(recipe, device, launch, n_sharers)?)
}

/// Prints the settings, and the names of the columns.
fn print_heading(args: &Args, plan: &Plan, world_size: usize) {
    out!(
        "{}, batch {}, {} ranks of {} workers, median of {}",
        args.recipe,
        plan.recipe.optim.batch_size,
        world_size,
        plan.n_workers,
        args.repeats
    );
    out!(
        "MB of a rank               state     plan      peak     plan  received     plan  calls   wait      \
         step       loss"
    );
}

fn print_row(name: &str, bench: &ShardBench) {
    let traffic = bench.traffic;
    out!(
        "{name:<22} {:>9.1} {:>8.1} {:>9.1} {:>8.1} {:>9.1} {:>8.1} {:>6} {:>5.0}% {:>6.0} ms {:>10.4}",
        bench.state_bytes / 1e6,
        bench.planned.state_bytes / 1e6,
        bench.peak_bytes / 1e6,
        bench.planned.peak_bytes() / 1e6,
        traffic.bytes() as f64 / 1e6,
        bench.planned_traffic.bytes() / 1e6,
        traffic.n_collectives(),
        100.0 * bench.wait_ms / bench.step_ms,
        bench.step_ms,
        bench.loss,
    );
}

fn row_to_json(name: &str, plan: &Plan, bench: &ShardBench) -> serde_json::Value {
    json!({
        "mode": name,
        "state_bytes": bench.state_bytes,
        "planned_state_bytes": bench.planned.state_bytes,
        "peak_bytes": bench.peak_bytes,
        "planned_peak_bytes": bench.planned.peak_bytes(),
        "gather_bytes": bench.traffic.gather_bytes,
        "n_gathers": bench.traffic.n_gathers,
        "reduce_bytes": bench.traffic.reduce_bytes,
        "n_reduces": bench.traffic.n_reduces,
        "column_bytes": bench.traffic.column_bytes,
        "small_bytes": bench.traffic.other_bytes,
        "received_bytes": bench.traffic.bytes(),
        "planned_received_bytes": bench.planned_traffic.bytes(),
        "step_ms": bench.step_ms,
        "wait_ms": bench.wait_ms,
        "images_per_s": 1e3 * plan.recipe.optim.batch_size as f64 / bench.step_ms,
        "loss": bench.loss,
    })
}
