//! What `ocelli pretrain --hours` would choose without a recipe.

use std::process::ExitCode;

use pipeline::Storage;
use pipeline::secrets::redact_list;
use report::shell_quote;
use serde_json::json;
use session::{Advice, Initial};

use super::flags::Args;
use crate::cluster::compute::DeviceFlag;
use crate::console::print_paragraph;
use crate::initial::hints_for_run;
use crate::recipes;
use crate::training::check_hints;

/// Prints the choice for a run of `hours` and its reasons, and the command with its recipe.
pub(super) fn print(args: &Args, hours: f64, storage: &Storage) -> anyhow::Result<ExitCode> {
    recipes::check_length(args.hours, &args.overrides)?;
    let initial =
        Initial { weights: args.init.clone(), hints: hints_for_run(&args.weights)?, ..Initial::default() };
    check_hints(&initial)?;
    let device = DeviceFlag::default().open()?;
    let advice = recipes::choose(hours, &args.shards, &args.overrides, &initial, &device, storage)?;
    for line in &advice.lines {
        print_paragraph(0, line);
    }
    if let Some(warning) = &advice.warning {
        print_paragraph(0, &format!("warning: {warning}"));
    }
    let command = command(args, hours, &advice);
    out!("\nthe command for it:\n  {command}");
    if args.json {
        let recipe = &advice.recipe.name;
        out!("{}", json!({ "recipe": recipe, "settings": advice.settings, "command": command }));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the command that trains the recipe of `advice` for `hours`, from the weights of the
/// flags if it begins with them, as these describe them.
fn command(args: &Args, hours: f64, advice: &Advice) -> String {
    let mut words = vec![format!("ocelli pretrain --recipe {} --hours {hours}", advice.recipe.name)];
    for setting in advice.settings.iter().chain(&args.overrides) {
        words.push(format!("--set {}", shell_quote(setting)));
    }
    if let Some(weights) = &advice.weights {
        words.push(format!("--init {}", shell_quote(&weights.display().to_string())));
        words.extend(args.weights.words());
    }
    words.push("--shards".into());
    words.extend(args.shards.iter().map(|spec| shell_quote(&redact_list(spec))));
    words.push("--workdir runs/mine".into());
    words.join(" ")
}
