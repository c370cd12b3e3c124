//! Networks of a plan, as text and as JSON.

use serde_json::{Value, json};
use trainer::cost::{ModelCost, UnitCost};

/// Returns the number of parameters of units.
fn numel(units: &[UnitCost]) -> usize {
    units.iter().map(|unit| unit.numel).sum()
}

/// Prints the networks and their sizes.
pub(super) fn print(model: &ModelCost) {
    out!(
        "{}: backbone {:.1} M parameters in {} units, head {:.1} M in {}",
        model.name,
        numel(&model.trained.backbone) as f64 / 1e6,
        model.trained.backbone.len(),
        numel(&model.trained.head) as f64 / 1e6,
        model.trained.head.len()
    );
    for network in &model.others {
        let kind = if network.is_frozen { ", frozen" } else { "" };
        out!("also {}: {:.1} M parameters{kind}", network.name, network.numel() as f64 / 1e6);
    }
}

/// Returns the networks and the `rows` of the table as JSON.
pub(super) fn to_json(model: &ModelCost, rows: Vec<Value>) -> Value {
    let mut others = Vec::new();
    for network in &model.others {
        others.push(json!({
            "name": network.name,
            "parameters": network.numel(),
            "is_frozen": network.is_frozen,
        }));
    }
    json!({
        "model": model.name,
        "parameters": model.trained.numel(),
        "head_parameters": numel(&model.trained.head),
        "others": others,
        "moments": model.n_moments,
        "rows": rows,
    })
}
