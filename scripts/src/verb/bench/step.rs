//! `ocelli bench step`: measures the time of a step, by phase.

use std::process::ExitCode;

use kernels::device::{DeviceKind, Opened};
use serde_json::{Map, Value, json};
use trainer::Plan;
use trainer::bench::memory_gauge::{DevicePool, MemoryGauge};
use trainer::bench::step::{matrix_peak, steps};

use super::compare::{CompareFlag, print_figures};
use crate::cluster::compute::{self, DeviceFlag};
use crate::memory::MEMORY;
use crate::recipes;

/// Flags of `bench step`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Recipe name or file.
    #[arg(long, default_value = "dino_vits16")]
    recipe: String,
    /// Images per step [default: 4, unless --set optim.batch_size says otherwise].
    #[arg(long)]
    batch: Option<usize>,
    /// Number of timed repeats, after one warm-up run.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// Number of worker threads; 0 for one per core.
    #[arg(long)]
    workers: Option<usize>,
    /// Matrix size for measuring the device's peak rate [default: 8192 on a GPU, 1024 on the CPU].
    #[arg(long)]
    matrix: Option<usize>,
    /// Measure only the backbone's forward and backward pass, on one global view per image: time,
    /// and additional memory.
    #[arg(long)]
    backbone: bool,
    #[command(flatten)]
    device: DeviceFlag,
    /// Override a recipe value. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    compare: CompareFlag,
    /// Skip checking products, for a device that computes nothing.
    #[arg(long, hide = true)]
    unchecked: bool,
    /// Print a line of JSON at the end.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let before = args.compare.read()?;
    if args.unchecked {
        kernels::product_kernels::disable_checks();
    }
    let device = args.device.open()?;
    let mut recipe = recipes::load_for_bench(&args.recipe, &args.overrides, args.batch, 4)?;
    if let Some(workers) = args.workers {
        recipe.run.workers = workers;
    }
    let mut plan = session::plan_alone(recipe, &device)?;
    plan.choose_kernels(&device.device)?;
    compute::print_notices();
    let mut figures =
        if args.backbone { backbone(args, &plan, &device)? } else { step(args, &plan, &device)? };
    compute::print_notices();
    figures["recipe"] = json!(args.recipe);
    figures["kernels"] = json!(plan.kernels);
    figures["batch_size"] = json!(plan.recipe.optim.batch_size);
    figures["workers"] = json!(plan.n_workers);
    figures["compute"] = json!(plan.recipe.optim.precision.compute);
    figures["device"] = json!(device.name);
    print_figures(before.as_ref(), &figures, args.json);
    Ok(ExitCode::SUCCESS)
}

/// Measures steps and prints the results; returns the figures as JSON.
fn step(args: &Args, plan: &Plan, device: &Opened) -> anyhow::Result<Value> {
    let bench = steps(plan, args.repeats, &device.device)?;
    let total = bench.phases.total_ms();
    let batch_size = plan.recipe.optim.batch_size;
    out!(
        "{}, batch {batch_size}, {} on {}: medians of {}",
        args.recipe,
        match device.kind {
            DeviceKind::Cpu => format!("{} workers", plan.n_workers),
            DeviceKind::Cuda(_) | DeviceKind::Wgpu => "one thread".into(),
        },
        device.name,
        args.repeats
    );
    let mut phases = Map::new();
    for (name, ms) in bench.phases.named() {
        out!("{name:<18} {ms:9.1} ms {:5.1} %", 100.0 * ms / total);
        phases.insert(name.replace(' ', "_"), json!(ms));
    }
    let step_ms = bench.step.median_ms;
    let [shortest, longest] = bench.step.range_ms;
    let rate = 1e3 * batch_size as f64 / step_ms;
    out!("{:<18} {total:9.1} ms", "sum of phases");
    out!("{:<18} {step_ms:9.1} ms  {rate:.2} images/s; {shortest:.1} to {longest:.1} ms", "step");
    if let Some(products) = bench.products {
        let alone_ms = products.ms;
        let share = 100.0 * alone_ms / step_ms;
        let rate = products.flops / alone_ms / 1e9;
        out!(
            "{:<18} {alone_ms:9.1} ms {share:5.1} % of the step; alone, {rate:.3} TFLOP/s",
            "matrix products alone"
        );
    }
    let arithmetic = plan.recipe.optim.precision.compute;
    let side = if device.kind == DeviceKind::Cpu { 1024 } else { 8192 };
    let peak = matrix_peak(&device.device, args.matrix.unwrap_or(side), arithmetic);
    let achieved = bench.flops.needed / (step_ms / 1e3);
    out!(
        "{:<18} {:9.3} TFLOP/s, {:.1} % of {:.3} for one large product; {:.2} operations per necessary one",
        "matrix products",
        achieved / 1e12,
        100.0 * achieved / peak,
        peak / 1e12,
        bench.flops.with_recomputation / bench.flops.needed
    );
    // On the CPU, the peak is that of this process.
    let memory = bench.peak_bytes.unwrap_or(MEMORY.peak_bytes() as u64);
    out!("{:<18} {:9.2} GB", "memory, peak", memory as f64 / 1e9);
    Ok(json!({
        "images_per_s": rate,
        "step_ms": step_ms,
        "step_range_ms": bench.step.range_ms,
        "phases_ms": phases,
        "products_ms": bench.products.map(|products| products.ms),
        "tflops": achieved / 1e12,
        "matrix_peak_tflops": peak / 1e12,
        "memory_bytes": memory,
        "graphs_kept": plan.keep,
        "segment": plan.segment,
    }))
}

/// Measures the backbone alone and prints the results; returns the figures as JSON.
fn backbone(args: &Args, plan: &Plan, device: &Opened) -> anyhow::Result<Value> {
    let pool = DevicePool(&device.device);
    let memory: &dyn MemoryGauge = if device.kind == DeviceKind::Cpu { &MEMORY } else { &pool };
    let costs = trainer::bench::backbone::backbone(plan, args.repeats, memory, &device.device)?;
    out!(
        "{} backbone, {} px, batch {}, forward and backward, median of {}; peak memory",
        args.recipe,
        plan.recipe.model.image_px(),
        plan.recipe.optim.batch_size,
        args.repeats
    );
    let on_workers = format!("units, {} workers, graphs kept", plan.n_workers);
    let rows = [
        ("whole_graph", "one graph, one thread", costs.whole_graph),
        ("kept", "units, one thread, graphs kept", costs.kept),
        ("recomputed", "units, one thread, recomputed", costs.recomputed),
        ("workers", &on_workers, costs.workers),
    ];
    let mut figures = Map::new();
    for (key, name, cost) in rows {
        let share = cost.ms / costs.whole_graph.ms;
        let mb = cost.peak_bytes as f64 / 1e6;
        out!("{name:<32} {:9.1} ms  {share:.3} x one graph {mb:9.1} MB", cost.ms);
        figures.insert(format!("{key}_ms"), json!(cost.ms));
        figures.insert(format!("{key}_peak_bytes"), json!(cost.peak_bytes));
    }
    Ok(Value::Object(figures))
}
