//! `ocelli bench shard`: measures memory, traffic and time of each mode of sharding, beside the
//! estimates of `ocelli plan`.

use std::process::ExitCode;

use kernels::device::DeviceKind;
use serde_json::json;
use trainer::Plan;
use trainer::bench::shard::{ShardBench, run as bench};
use trainer::estimate::fit;

use super::memory_gauge::gauge;
use session::{connect, machine};

use crate::cluster::compute;
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
    /// Name or file of a recipe.
    #[arg(long, default_value = "dino_vits16")]
    recipe: String,
    /// Images per step, over all ranks [default: 8, unless --set optim.batch_size says otherwise].
    #[arg(long)]
    batch: Option<usize>,
    /// Number of timed repeats, after one warm-up.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Measure only the mode that the recipe and --set specify.
    #[arg(long)]
    as_set: bool,
    /// Change a value of the recipe. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    compute: compute::ComputeFlags,
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let launch = compute::launch()?;
    let device = args.compute.open(&launch)?;
    let run = recipes::load(&args.recipe, &args.overrides)?.run;
    let mut comm = connect::connect(&launch, &run, &device, args.compute.engine)?;
    let n_sharers = connect::n_sharers(&comm, &device)?;
    let plan_of = |more: &[&str]| -> anyhow::Result<Plan> {
        let more = more.iter().map(ToString::to_string);
        let overrides: Vec<String> = args.overrides.iter().cloned().chain(more).collect();
        let mut recipe = recipes::load_for_bench(&args.recipe, &overrides, args.batch, 8)?;
        recipe.run.offload &= device.kind != DeviceKind::Cpu;
        // The data set's size only moves schedules, which a benchmark does not follow.
        let n_local = launch.n_local.unwrap_or(1);
        let room = machine::room(n_local, n_sharers, &device);
        Ok(fit(trainer::resolve(recipe, 1 << 20)?.over(launch.world_size, room)?, room)?)
    };
    let modes: Vec<(&str, Plan)> = if args.as_set {
        vec![("as set", plan_of(&[])?)]
    } else {
        let recipe = recipes::load_for_bench(&args.recipe, &args.overrides, args.batch, 8)?;
        let divides = trainer::resolve(recipe, 1 << 20)?.method()?.column_group_size() > 1;
        MODES
            .into_iter()
            .map(|(name, more)| match name == "none" && divides {
                // Ranks that share nothing divide nothing.
                true => Ok((name, plan_of(&[more, &["method.prototype_group=1"]].concat())?)),
                false => Ok((name, plan_of(more)?)),
            })
            .collect::<anyhow::Result<_>>()?
    };
    if launch.rank == 0 {
        print_heading(args, &modes[0].1, launch.world_size);
    }
    session::check_types(&modes[0].1, &device)?;
    let memory = gauge(&device);
    let mut rows = Vec::new();
    for (name, plan) in &modes {
        let measured;
        (measured, comm) = bench(plan, comm, args.repeats, &*memory, &device.device)?;
        if launch.rank == 0 {
            print_row(name, &measured);
            rows.push(json_of(name, plan, &measured));
        }
    }
    comm.finish()?;
    if args.json && launch.rank == 0 {
        out!("{}", json!({ "ranks": launch.world_size, "modes": rows }));
    }
    Ok(ExitCode::SUCCESS)
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
        "{:<22} {:>9} {:>8} {:>9} {:>8} {:>9} {:>8} {:>6} {:>6} {:>9} {:>10}",
        "MB of a rank",
        "state",
        "plan",
        "peak",
        "plan",
        "received",
        "plan",
        "calls",
        "wait",
        "step",
        "loss"
    );
}

fn print_row(name: &str, bench: &ShardBench) {
    let mb = |bytes: f64| bytes / 1e6;
    let traffic = bench.traffic;
    out!(
        "{name:<22} {:>9.1} {:>8.1} {:>9.1} {:>8.1} {:>9.1} {:>8.1} {:>6} {:>5.0}% {:>6.0} ms {:>10.4}",
        mb(bench.state_bytes),
        mb(bench.planned.state_bytes),
        mb(bench.peak_bytes),
        mb(bench.planned.peak_bytes()),
        mb(traffic.bytes() as f64),
        mb(bench.planned_traffic.bytes()),
        traffic.n_collectives(),
        100.0 * bench.wait_ms / bench.step_ms,
        bench.step_ms,
        bench.loss,
    );
}

fn json_of(name: &str, plan: &Plan, bench: &ShardBench) -> serde_json::Value {
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
