//! Comparison of two plans.

use super::plan::Plan;

/// Keys that may differ between two starts of a run: the fingerprint includes the weights, wherever
/// their list is, and the division of prototypes changes only the rounding.
const FREE_KEYS: [&str; 2] = ["data.weights", "method.prototype_group"];

/// Returns the first key outside `[run]` whose values differ so that a run of one plan cannot be
/// resumed with the other, with both values.
pub(crate) fn difference(plan: &Plan, other: &Plan) -> Option<(String, String, String)> {
    // Where both plans have a fingerprint of the images, the location of shards does not matter.
    let have_fingerprints = plan.data_fingerprint.is_some() && other.data_fingerprint.is_some();
    let values = compared_values(plan, have_fingerprints);
    let other_values = compared_values(other, have_fingerprints);
    for (key, _) in values.iter().chain(&other_values) {
        let value = value_or_absent(&values, key);
        let other_value = value_or_absent(&other_values, key);
        if value != other_value {
            return Some((key.clone(), value, other_value));
        }
    }
    None
}

/// Returns the values of `plan` that must not differ between two starts of a run, with their keys.
fn compared_values(plan: &Plan, have_fingerprints: bool) -> Vec<(String, String)> {
    let mut values = Vec::new();
    for (key, value) in plan.recipe.values() {
        let is_free = FREE_KEYS.contains(&key.as_str()) || (have_fingerprints && key == "data.shards");
        if !key.starts_with("run.") && !is_free {
            values.push((key, value.to_string()));
        }
    }
    values
}

fn value_or_absent(values: &[(String, String)], key: &str) -> String {
    match values.iter().find(|(other, _)| other == key) {
        Some((_, value)) => value.clone(),
        None => "absent".into(),
    }
}

/// Describes the difference between the images of `run`, the plan of a run, and those of `plan`;
/// `None` if both plans do not show any.
pub(crate) fn difference_of_images(run: &Plan, plan: &Plan) -> Option<String> {
    if run.n_samples != plan.n_samples {
        return Some(format!("{} samples there, {} here", run.n_samples, plan.n_samples));
    }
    if are_known_and_differ(run.data_fingerprint.as_ref(), plan.data_fingerprint.as_ref()) {
        return Some("the same number of samples, but different keys, lengths, order or weights".into());
    }
    let have_checksums = run.data_checksums.is_some() && plan.data_checksums.is_some();
    let have_other_bytes = if have_checksums {
        run.data_checksums != plan.data_checksums
    } else {
        are_known_and_differ(run.data_images.as_ref(), plan.data_images.as_ref())
    };
    have_other_bytes.then(|| "the same keys and lengths, but different bytes".into())
}

fn are_known_and_differ(hash: Option<&String>, other: Option<&String>) -> bool {
    hash.is_some() && other.is_some() && hash != other
}

/// Returns `plan` with the length of `other`.
pub(crate) fn with_length_of(plan: &Plan, other: &Plan) -> Plan {
    let mut longer = plan.clone();
    longer.total_steps = other.total_steps;
    longer.recipe.optim.length = other.recipe.optim.length;
    longer
}
