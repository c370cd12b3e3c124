//! Comparison of two plans.

use super::plan::Plan;

/// Returns the first key outside `[run]` in which the plans differ, with both values.
pub(crate) fn difference(plan: &Plan, other: &Plan) -> Option<(String, String, String)> {
    let flat = |plan: &Plan, other: &Plan| {
        // The fingerprint holds the weights, wherever their list is.
        let is_compared = |key: &str| !key.starts_with("run.") && key != "data.weights";
        let values = plan.recipe.values().into_iter().filter(|(key, _)| is_compared(key));
        let mut flat: Vec<(String, String)> = values.map(|(key, value)| (key, value.to_string())).collect();
        flat.push(("n_samples".into(), plan.n_samples.to_string()));
        if !plan.data_fingerprint.is_empty() && !other.data_fingerprint.is_empty() {
            flat.push(("data_fingerprint".into(), plan.data_fingerprint.clone()));
        }
        flat
    };
    let (a, b) = (flat(plan, other), flat(other, plan));
    let find = |key: &String, list: &[(String, String)]| {
        list.iter().find(|(k, _)| k == key).map_or("absent".into(), |(_, value)| value.clone())
    };
    a.iter().chain(&b).map(|(key, _)| (key.clone(), find(key, &a), find(key, &b))).find(|(_, x, y)| x != y)
}

/// Returns `plan` with the length of `other`.
pub(crate) fn with_length_of(plan: &Plan, other: &Plan) -> Plan {
    let mut longer = plan.clone();
    longer.total_steps = other.total_steps;
    longer.recipe.optim.length = other.recipe.optim.length;
    longer
}
