//! `ocelli bench device`: checks that a device computes the same as the CPU.

use std::process::ExitCode;

use serde_json::json;
use trainer::bench::compare::compare;
use trainer::step::precision::Arithmetic;

use crate::cluster::compute;
use crate::cluster::compute::{DeviceFlag, print_products};
use crate::console::say;
use crate::exit::CHECK_FAILED;
use crate::recipes;

/// Flags of `bench device`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Recipe name or file.
    #[arg(long, default_value = "dino_shapes")]
    recipe: String,
    /// Images per step [default: 4, unless --set optim.batch_size says otherwise].
    #[arg(long)]
    batch: Option<usize>,
    /// Number of steps to compare losses over.
    #[arg(long, default_value_t = 5)]
    steps: u64,
    #[command(flatten)]
    device: DeviceFlag,
    /// Override a recipe value. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Print a line of JSON at the end.
    #[arg(long)]
    json: bool,
}

/// Largest accepted ratio of a device's difference in gradients to the CPU's own variation, where
/// that is more than the tolerance: the gradients of some units jump by random amounts.
const MAX_VARIATIONS: f64 = 4.0;

/// Largest differences that are accepted: rounding in another order, and on tensor cores.
struct Tolerance {
    embeddings: f64,
    loss: f64,
    gradients: f64,
    steps: f64,
}

impl Tolerance {
    fn new(arithmetic: Arithmetic) -> Self {
        match arithmetic {
            // Products may round their factors to 10 bits and more (TF32).
            Arithmetic::F32 => Self { embeddings: 1e-2, loss: 1e-3, gradients: 2e-2, steps: 1e-2 },
            Arithmetic::Bf16 => Self { embeddings: 5e-2, loss: 1e-2, gradients: 2e-1, steps: 5e-2 },
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let recipe = recipes::load_for_bench(&args.recipe, &args.overrides, args.batch, 4)?;
    let mut plan = trainer::resolve(recipe, 1 << 20)?;
    let device = args.device.open()?;
    session::check_types(&plan, &device)?;
    compute::choose_kernels(&mut plan, &device)?;
    let tolerance = Tolerance::new(plan.recipe.optim.precision.compute);
    let differences = compare(&plan, &device.device, args.steps)?;
    out!("{}, batch {}: {} versus the CPU", args.recipe, plan.recipe.optim.batch_size, device.name);
    let cpu_variation = differences.worst_cpu_variation();
    let most_in_gradients = tolerance.gradients.max(MAX_VARIATIONS * cpu_variation);
    let rows = [
        ("embeddings", differences.embeddings, tolerance.embeddings),
        ("loss", differences.loss, tolerance.loss),
        ("gradients", differences.worst_gradient(), most_in_gradients),
        ("losses of steps", differences.worst_step(), tolerance.steps),
    ];
    let mut n_wrong = 0;
    for (name, difference, most) in rows {
        // NaN is wrong as well.
        let is_right = difference <= most;
        n_wrong += usize::from(!is_right);
        out!(
            "{name:<20} {difference:9.2e}  of at most {most:.0e}  {}",
            if is_right { "right" } else { "WRONG" }
        );
    }
    if most_in_gradients > tolerance.gradients {
        out!(
            "gradients are sensitive here: on the CPU, they change by {cpu_variation:.2e} when weights \
             change by 1e-6, so {MAX_VARIATIONS} times as much is accepted"
        );
    }
    if n_wrong > 0 {
        out!("  {:<18} {:>9} {:>9}", "unit", "device", "CPU alone");
        for gradient in &differences.gradients {
            out!("  {:<18} {:9.2e} {:9.2e}", gradient.unit, gradient.difference, gradient.cpu_variation);
        }
    }
    compute::print_notices();
    let n_wrong_products = print_products(&plan.kernels);
    if args.json {
        let rows: serde_json::Map<String, serde_json::Value> =
            rows.iter().map(|(name, difference, _)| (name.replace(' ', "_"), json!(difference))).collect();
        out!("{}", json!({ "device": device.name, "differences": rows, "losses": differences.steps }));
    }
    if n_wrong + n_wrong_products > 0 {
        say(format!("error: results of {} differ from the CPU's", device.name));
        return Ok(ExitCode::from(CHECK_FAILED));
    }
    Ok(ExitCode::SUCCESS)
}
