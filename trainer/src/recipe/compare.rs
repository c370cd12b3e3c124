//! Comparison of two plans.

use super::plan::Plan;

/// Keys that may differ between two starts of a run: the fingerprint holds weights, wherever their list is, and who divides
/// prototypes changes rounding alone.
const FREE_KEYS: [&str; 2] = ["data.weights", "method.prototype_group"];

/// Returns the first key outside `[run]` in which the plans differ so that one cannot go on with a run of the other, with both values.
pub(crate) fn difference(plan: &Plan, other: &Plan) -> Option<(String, String, String)> {
    let flat = |plan: &Plan, other: &Plan| {
        let is_compared = |key: &str| !key.starts_with("run.") && !FREE_KEYS.contains(&key);
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
