//! `ocelli plan`: estimates the needs of a run before it is started.

mod choice;
mod flags;
mod hardware;
mod table;
mod units;

use std::process::ExitCode;

use anyhow::bail;
use pipeline::Storage;
use pipeline::words::{counted, thousands};
use session::{
    Initial, check_initial_weights, few_images_warning, initial_model, open_frozen, resident, trained_head,
    validation_interval,
};
use trainer::checkpoint::simulate;
use trainer::cost::{ModelCost, UnitCost, checked_preset, model_cost};
use trainer::estimate::{
    CandidateEstimate, DividedModel, Planner, PlannerSettings, goodput, plan_to_json, step_flops,
};
use trainer::{Plan, Recipe};

use self::units::{GB, HOUR_S};
use crate::console::print_paragraph;
use crate::forecast::MemoryNeed;
use crate::initial::hints_for_run;
use crate::progress::{format_duration, format_time};
use crate::recipes;
use crate::training::check_hints;
pub(crate) use flags::Args;

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    flags::check(args)?;
    if let Some(hours) = args.hours {
        return choice::print(args, hours, storage);
    }
    let PlanRequest { model, divided, plan } = read_request(args)?;
    let recipe = plan.as_ref().map(|plan| &plan.recipe);
    // Minutes become steps only where the run begins.
    let has_known_length = recipe.is_some_and(|recipe| recipe.optim.length.minutes().is_none());
    let steps = plan.as_ref().filter(|_| has_known_length).map(|plan| plan.total_steps);
    let is_this_machine = hardware::is_this_machine(args);
    let ranks: &[usize] = match args.ranks.as_slice() {
        [] if is_this_machine => &[1],
        [] => &[1, 8, 64],
        ranks => ranks,
    };
    let settings = settings(args, recipe, ranks);
    let hardware = hardware::read_hardware(args, recipe, &model, &settings, ranks[0])?;
    print_networks(&model);
    if let Some(plan) = &plan
        && let Some(warning) = few_images_warning(plan, args.init.is_some())
    {
        print_paragraph(0, &format!("warning: {warning}"));
    }
    print_paragraph(0, &hardware::describe(&hardware));
    if let Some(steps) = steps {
        let images = counted(settings.batch_size as u64, "image");
        prose!("{} of {images}", counted(steps, "step"));
    }
    out!("");
    let planner = Planner { model: &model, hardware: &hardware, settings: &settings };
    let mut lines = Vec::new();
    let mut advice = Vec::new();
    for &world_size in ranks {
        for candidate in planner.candidates(world_size, settings.images_per_rank(world_size)) {
            let line = planner.estimate(candidate, steps);
            advice.extend(advise(&planner, &line, divided.as_ref()));
            lines.push(line);
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
    table::print(&model, &lines, args.details);
    if let Some(plan) = plan.as_ref().filter(|_| has_known_length) {
        print_validation(plan, args.images - plan.n_samples, &model, &lines[0]);
    }
    for line in &advice {
        print_paragraph(0, line);
    }
    let needs = match &plan {
        Some(plan) if is_this_machine => memory_needs(plan, &model, &lines, hardware.fabric.ranks_per_node),
        _ => Vec::new(),
    };
    print_memory_needs(&lines, &needs);
    if model.n_parts() > 1 {
        prose!(
            "omitted: modes whose shard groups method.prototype_group = {} does not divide",
            model.n_parts()
        );
    }
    if ranks.iter().any(|n| *n > 1) {
        print_goodput(args, &model, ranks, hardware.fabric.ranks_per_node);
    }
    if args.simulate {
        print_simulation(ranks, &model)?;
    }
    if args.json {
        let mut table = plan_to_json(&model, &lines);
        for (index, need) in needs.iter().enumerate() {
            table["rows"][index]["process_bytes"] = need.needed_bytes.into();
        }
        out!("{table}");
    }
    if !lines.iter().any(|line| line.candidate.fits) {
        bail!("{}", planner.what_would_fit(ranks, divided.as_ref()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Model to estimate, and its recipe.
struct PlanRequest {
    model: ModelCost,
    /// Model with divided units, if none are so far and some are large.
    divided: Option<DividedModel>,
    /// Plan of the recipe, if there is one.
    plan: Option<Plan>,
}

/// Reads the model and the recipe that the flags name.
fn read_request(args: &Args) -> anyhow::Result<PlanRequest> {
    if let Some(name) = &args.preset {
        let model = checked_preset(name, args.max_unit_parameters)?;
        let is_divided = args.max_unit_parameters.is_some();
        let divided = if is_divided { None } else { DividedModel::from_preset(&model) };
        return Ok(PlanRequest { model, divided, plan: None });
    }
    let initial =
        Initial { weights: args.init.clone(), hints: hints_for_run(&args.weights)?, ..Initial::default() };
    let mut recipe = recipes::load_with_model(&args.recipe, &args.overrides, |weights| {
        initial_model(&initial, None, weights).map_err(|error| error.to_string())
    })?;
    if recipe.init.is_none() {
        check_hints(&initial)?;
    }
    check_initial_weights(&recipe, &initial)?;
    open_frozen(&mut recipe, None)?;
    recipe.run.max_unit_parameters = args.max_unit_parameters.or(recipe.run.max_unit_parameters);
    let held_out = (args.images as f64 * recipe.data.validation.unwrap_or_default()).round();
    let plan = trainer::resolve(recipe, args.images.saturating_sub(held_out as u64))?;
    plan.check_unit_sizes()?;
    let model = model_cost(&plan)?;
    let is_divided = plan.recipe.run.max_unit_parameters.is_some();
    let divided = if is_divided { None } else { DividedModel::from_plan(&model, &plan) };
    Ok(PlanRequest { model, divided, plan: Some(plan) })
}

/// Returns the settings of the flags, or else of the recipe.
fn settings(args: &Args, recipe: Option<&Recipe>, ranks: &[usize]) -> PlannerSettings {
    let ranks_per_node = hardware::ranks_per_node(args);
    let stated = match recipe {
        Some(recipe) => PlannerSettings::from_recipe(recipe, ranks_per_node),
        None => {
            let batch_size = 16 * ranks.iter().copied().max().unwrap_or(1);
            PlannerSettings::for_batch_size(batch_size, ranks_per_node)
        }
    };
    PlannerSettings {
        rank_batch: args.rank_batch,
        rank_micro_batches: args.rank_micro_batches,
        group_size: args.group.unwrap_or(stated.group_size),
        keep: args.keep.or(stated.keep),
        workers: hardware::n_workers(args, recipe),
        ..stated
    }
}

/// Returns the memory of the processes that run `plan` on this machine in each way of `lines`, of
/// which there are at most `ranks_per_node`.
fn memory_needs(
    plan: &Plan,
    model: &ModelCost,
    lines: &[CandidateEstimate],
    ranks_per_node: usize,
) -> Vec<MemoryNeed> {
    let mut needs = Vec::with_capacity(lines.len());
    for line in lines {
        let placement = &line.candidate.placement;
        let n_local = placement.world_size.min(ranks_per_node);
        needs.push(MemoryNeed::from_processes(&resident(plan, model, placement, 0, None), n_local));
    }
    needs
}

/// Prints the memory that each of `lines` needs on this machine.
fn print_memory_needs(lines: &[CandidateEstimate], needs: &[MemoryNeed]) {
    for (line, need) in lines.iter().zip(needs) {
        let mode = match lines {
            [_] => String::new(),
            _ => format!("{}: ", ranks_and_mode(line)),
        };
        prose!(
            "{mode}needs about {} of memory on this machine: the peak, a checkpoint, the program, views, \
             and what the allocator keeps",
            need.in_words()
        );
    }
}

/// Names a way to distribute the model: `8 ranks, full`.
fn ranks_and_mode(line: &CandidateEstimate) -> String {
    let ranks = counted(line.candidate.placement.world_size as u64, "rank");
    format!("{ranks}, {}", line.candidate.mode())
}

/// Prints how often a run of `plan` that learns from labels or masks is validated while it trains,
/// and how long that takes a rank, as in the estimate `line`, on the `n_held_out` images that it
/// holds out.
fn print_validation(plan: &Plan, n_held_out: u64, model: &ModelCost, line: &CandidateEstimate) {
    if trained_head(&plan.recipe).is_none() {
        return;
    }
    let interval = validation_interval(plan.recipe.run.probe_every_steps, plan.total_steps);
    // Also before the first step, and after the last.
    let times = counted(1 + plan.total_steps.div_ceil(interval), "time");
    if n_held_out == 0 {
        prose!("validated {times}, on the images of --val-shards or a tenth of the others: not in the time");
        return;
    }
    let mut flops = 0.0;
    for unit in &model.trained.backbone {
        flops += unit.flops;
    }
    // Those of a unit are of all views of an image; one is evaluated.
    let n_views: usize = plan.multicrop().groups().iter().map(|group| group.n_views).sum();
    let step_flops = step_flops(model, &line.candidate.placement).with_recomputation;
    let seconds = line.time.compute_s * n_held_out as f64 * flops / (n_views as f64 * step_flops);
    prose!(
        "validated {times}, on {} that are held out, in about {} each: not in the time",
        counted(n_held_out, "image"),
        format_duration(seconds)
    );
}

/// Prints the networks and their sizes.
fn print_networks(model: &ModelCost) {
    prose!(
        "{}: backbone {:.1} M parameters in {}, head {:.1} M in {}",
        model.name,
        UnitCost::total_numel(&model.trained.backbone) as f64 / 1e6,
        counted(model.trained.backbone.len() as u64, "unit"),
        UnitCost::total_numel(&model.trained.head) as f64 / 1e6,
        model.trained.head.len()
    );
    let n_adapters = model.trained.n_adapters();
    if n_adapters > 0 {
        prose!("adapters: {:.2} M parameters, in place of those of the backbone", n_adapters as f64 / 1e6);
    }
    if model.n_fixed > 0 {
        prose!("the first {} of the backbone: never trained", counted(model.n_fixed as u64, "unit"));
    }
    for network in &model.others {
        let kind = if network.is_frozen { ", frozen" } else { "" };
        prose!("also {}: {:.1} M parameters{kind}", network.name, network.numel() as f64 / 1e6);
    }
}

/// Returns lines about settings with which the candidate of `line` would take less time or memory,
/// or fit.
fn advise(planner: &Planner<'_>, line: &CandidateEstimate, divided: Option<&DividedModel>) -> Vec<String> {
    let head = ranks_and_mode(line);
    let fits = if line.candidate.fits { "" } else { ", which fits" };
    let step_s = line.time.step_s;
    let peak_gb = line.candidate.memory.peak_bytes() / GB;
    let mut lines = Vec::new();
    if let Some(advice) = planner.prototype_group_advice(line) {
        lines.push(format!(
            "{head}: method.prototype_group = {} would take {:.3} s per step instead of {step_s:.3}, and \
             {:.2} GB instead of {peak_gb:.2}{}",
            advice.value,
            advice.step_s,
            advice.peak_bytes / GB,
            if advice.fits { fits } else { "" }
        ));
    }
    if let Some(advice) = divided.and_then(|divided| planner.max_unit_parameters_advice(line, divided)) {
        lines.push(format!(
            "{head}: run.max_unit_parameters = {} would take {:.2} GB instead of {peak_gb:.2}, and {:.3} s \
             per step instead of {step_s:.3}{fits}",
            advice.value,
            advice.peak_bytes / GB,
            advice.step_s
        ));
    }
    lines
}

fn print_goodput(args: &Args, model: &ModelCost, ranks: &[usize], ranks_per_node: usize) {
    let node_mttf = format_duration(args.node_mttf_h * HOUR_S);
    prose!("checkpoints and failures, with one failure per node every {node_mttf}:");
    for &world_size in ranks {
        let bytes = 4.0 * model.checkpoint_numel() as f64 / world_size as f64;
        let n_nodes = world_size.div_ceil(ranks_per_node);
        let good = goodput(n_nodes, args.node_mttf_h * HOUR_S, bytes, args.write_gb_s * GB, args.restart_s);
        let text = format!(
            "  {}: one failure every {}; {:.2} GB per rank, {} to write; best interval {}; goodput {:.1} %",
            counted(world_size as u64, "rank"),
            format_duration(good.mttf_s),
            bytes / GB,
            format_time(good.write_s),
            format_duration(good.interval_s),
            100.0 * good.fraction
        );
        print_paragraph(4, &text);
    }
}

fn print_simulation(ranks: &[usize], model: &ModelCost) -> anyhow::Result<()> {
    let units: Vec<(String, usize)> =
        model.trained.units().map(|unit| (unit.name.clone(), unit.numel)).collect();
    for &from in ranks.iter().filter(|n| **n > 1) {
        for &to in ranks.iter().filter(|n| **n > 1) {
            let simulation = simulate(&units, from, to).map_err(anyhow::Error::msg)?;
            let written_by = counted(from as u64, "rank");
            prose!(
                "written by {written_by}, read by {}: at most {} from {} per rank and buffer; manifest \
                 {:.1} kB; {:.2} % padding; every element exactly once ({} here)",
                thousands(to as u64),
                counted(simulation.max_reads as u64, "unit range"),
                counted(simulation.max_files as u64, "file"),
                simulation.manifest_bytes as f64 / 1e3,
                100.0 * simulation.padding,
                format_time(simulation.seconds)
            );
        }
    }
    Ok(())
}
