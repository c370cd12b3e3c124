//! `ocelli bench device`: checks that a device computes the same as the CPU.

use std::process::ExitCode;

use serde_json::{Map, Value, json};
use trainer::bench::compare::{MAX_VARIATIONS, compare};

use crate::cluster::compute::{self, DeviceFlag};
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

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let recipe = recipes::load_for_bench(&args.recipe, &args.overrides, args.batch, 4)?;
    let mut plan = trainer::resolve(recipe, 1 << 20)?;
    let device = args.device.open()?;
    session::check_types(&plan, &device)?;
    plan.choose_kernels(&device.device)?;
    compute::print_notices();
    let arithmetic = plan.recipe.optim.precision.compute;
    let comparison = compare(&plan, &device.device, args.steps)?;
    out!("{}, batch {}: {} versus the CPU", args.recipe, plan.recipe.optim.batch_size, device.name);
    let mut n_wrong = 0;
    let mut differences = Map::new();
    for checked in comparison.check(arithmetic) {
        let verdict = if checked.is_right() { "right" } else { "WRONG" };
        n_wrong += usize::from(!checked.is_right());
        out!("{:<20} {:9.2e}  of at most {:.0e}  {verdict}", checked.name, checked.difference, checked.most);
        differences.insert(checked.name.replace(' ', "_"), json!(checked.difference));
    }
    if comparison.has_sensitive_gradients(arithmetic) {
        out!(
            "gradients are sensitive here: on the CPU, they change by {:.2e} when weights \
             change by 1e-6, so {MAX_VARIATIONS} times as much is accepted",
            comparison.worst_cpu_variation()
        );
    }
    if n_wrong > 0 {
        out!("  {:<18} {:>9} {:>9}", "unit", "device", "CPU alone");
        for gradient in &comparison.gradients {
            out!("  {:<18} {:9.2e} {:9.2e}", gradient.unit, gradient.difference, gradient.cpu_variation);
        }
    }
    compute::print_notices();
    let n_wrong_products = compute::print_products(&plan.kernels);
    if args.json {
        let differences = Value::Object(differences);
        out!("{}", json!({ "device": device.name, "differences": differences, "losses": comparison.steps }));
    }
    if n_wrong + n_wrong_products > 0 {
        say(format!("error: results of {} differ from the CPU's", device.name));
        return Ok(ExitCode::from(CHECK_FAILED));
    }
    Ok(ExitCode::SUCCESS)
}
