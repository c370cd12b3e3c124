//! `ocelli plan`: estimates the needs of a run before it is started.

mod division;
mod flags;
mod hardware;
mod networks;
mod prototypes;
mod rows;
mod table;

use std::process::ExitCode;

use anyhow::bail;
use trainer::Recipe;
use trainer::checkpoint::simulate;
use trainer::cost::{ModelCost, PRESETS, model_cost, preset};
use trainer::estimate::goodput;

use session::open_frozen;

use crate::recipes;
pub(crate) use flags::Args;
use hardware::{GB, Hardware};
use rows::DividedModel;
use table::Line;

const HOUR_S: f64 = 3600.0;

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    flags::check(args)?;
    let PlanRequest { model, divided, batch, recipe, steps } = read_request(args)?;
    let hardware = Hardware::from_args(args, recipe.as_ref())?;
    let batch = batch.unwrap_or_else(|| 16 * hardware.ranks.iter().copied().max().unwrap_or(1));
    networks::print(&model);
    out!("{}", hardware.describe());
    if let Some(steps) = steps {
        out!("{steps} steps of {batch} images");
    }
    out!("");
    let mut lines = Vec::new();
    let mut advice = Vec::new();
    let mut any_fits = false;
    for &world_size in &hardware.ranks {
        let rank_batch = args.images_per_rank(batch, world_size);
        for row in rows::rows(args, &model, recipe.as_ref(), world_size, rank_batch, &hardware) {
            any_fits |= row.fits;
            advice.extend(prototypes::advice(&model, &row, &hardware));
            if let Some(divided) = &divided {
                let divided_rows =
                    rows::rows(args, &divided.model, recipe.as_ref(), world_size, rank_batch, &hardware);
                if let Some(divided_row) = divided_rows.iter().find(|other| other.mode == row.mode) {
                    advice.extend(division::advice(&model, &row, divided, divided_row, &hardware));
                }
            }
            lines.push(Line::new(&model, row, &hardware, steps));
        }
    }
    if lines.is_empty() {
        let size = model.n_parts();
        let key = "method.prototype_group";
        bail!(
            "{key} = {size} does not divide any shard group: make --ranks or --group a multiple of it, \
             such that the layer's elements divide into multiples of 64, or set {key}=1"
        );
    }
    table::print(&lines, args.details);
    for line in &advice {
        out!("{line}");
    }
    if model.n_parts() > 1 {
        out!(
            "omitted: modes whose shard groups method.prototype_group = {} does not divide",
            model.n_parts()
        );
    }
    if hardware.ranks.iter().any(|n| *n > 1) {
        print_goodput(args, &model, &hardware);
    }
    if args.simulate {
        print_simulation(&hardware, &model)?;
    }
    if args.json {
        let line = networks::to_json(&model, lines.iter().map(Line::json).collect());
        out!("{line}");
    }
    if !any_fits {
        bail!("{}", rows::what_would_fit(args, &model, divided.as_ref(), recipe.as_ref(), batch, &hardware));
    }
    Ok(ExitCode::SUCCESS)
}

/// Model to estimate, and its recipe.
struct PlanRequest {
    model: ModelCost,
    /// Model with divided units, if none are so far and some are large.
    divided: Option<DividedModel>,
    /// Images of a step over all ranks, if a recipe states them.
    batch: Option<usize>,
    recipe: Option<Recipe>,
    /// Steps of the run, if a recipe states them.
    steps: Option<u64>,
}

/// Reads the model and the recipe that the flags name.
fn read_request(args: &Args) -> anyhow::Result<PlanRequest> {
    if let Some(name) = &args.preset {
        let Some(model) = preset(name, args.max_unit_parameters) else {
            bail!("unknown preset {name}: expected one of {}", PRESETS.join(", "));
        };
        check_largest_unit(&model, args.max_unit_parameters)?;
        let divided = match args.max_unit_parameters {
            Some(_) => None,
            None => DividedModel::from_model(&model, |bound: usize| preset(name, Some(bound))),
        };
        return Ok(PlanRequest { model, divided, batch: None, recipe: None, steps: None });
    }
    let mut recipe = recipes::load(&args.recipe, &args.overrides)?;
    open_frozen(&mut recipe, None)?;
    recipe.run.max_unit_parameters = args.max_unit_parameters.or(recipe.run.max_unit_parameters);
    let plan = trainer::resolve(recipe.clone(), args.images)?;
    plan.check_division()?;
    let model = model_cost(&plan)?;
    let steps = plan.total_steps;
    let divided = match recipe.run.max_unit_parameters {
        Some(_) => None,
        None => DividedModel::from_model(&model, |bound: usize| {
            let mut plan = plan.clone();
            plan.recipe.run.max_unit_parameters = Some(bound);
            model_cost(&plan).ok()
        }),
    };
    let batch = Some(recipe.optim.batch_size);
    Ok(PlanRequest { model, divided, batch, recipe: Some(recipe), steps: Some(steps) })
}

/// Checks that the units of a preset can be divided as far as `most`.
fn check_largest_unit(model: &ModelCost, most: Option<usize>) -> anyhow::Result<()> {
    let largest = model.largest_unit();
    match most {
        Some(most) if largest > most => bail!(
            "run.max_unit_parameters = {most} is too small: units cannot be split below {largest} \
             parameters; set it to at least that"
        ),
        _ => Ok(()),
    }
}

fn print_goodput(args: &Args, model: &ModelCost, hardware: &Hardware) {
    out!("checkpoints and failures, with one failure per node every {:.0} h:", args.node_mttf_h);
    for &world_size in &hardware.ranks {
        // Frozen networks are not part of a checkpoint.
        let n_others: usize =
            model.others.iter().filter(|network| !network.is_frozen).map(|network| network.numel()).sum();
        let numbers = (1 + model.n_moments) * model.trained.numel() + n_others;
        let bytes = 4.0 * numbers as f64 / world_size as f64;
        let n_nodes = world_size.div_ceil(hardware.ranks_per_node);
        let good = goodput(n_nodes, args.node_mttf_h * HOUR_S, bytes, args.write_gb_s * GB, args.restart_s);
        out!(
            "{world_size:>6} ranks: one failure every {:.1} h; {:.2} GB per rank, {:.1} s to write; best \
             interval {:.1} min; goodput {:.1} %",
            good.mttf_s / HOUR_S,
            bytes / GB,
            good.write_s,
            good.interval_s / 60.0,
            100.0 * good.fraction
        );
    }
}

fn print_simulation(hardware: &Hardware, model: &ModelCost) -> anyhow::Result<()> {
    let world_sizes: Vec<usize> = hardware.ranks.iter().copied().filter(|n| *n > 1).collect();
    let units: Vec<(String, usize)> =
        model.trained.units().map(|unit| (unit.name.clone(), unit.numel)).collect();
    for &from in &world_sizes {
        for &to in &world_sizes {
            let simulation = simulate(&units, from, to).map_err(anyhow::Error::msg)?;
            out!(
                "written by {from} ranks, read by {to}: at most {} unit ranges from {} files per rank and \
                 buffer; manifest {:.1} kB; {:.2} % padding; every element exactly once ({:.0} ms here)",
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
