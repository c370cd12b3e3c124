//! Comparison of two plans.

use super::plan::Plan;

/// Keys that may differ between two starts of a run: the fingerprint holds weights, wherever their
/// list is, and who divides prototypes changes rounding alone.
const FREE_KEYS: [&str; 2] = ["data.weights", "method.prototype_group"];

/// Returns the first key outside `[run]` in which the plans differ so that one cannot go on with a
/// run of the other, with both values.
pub(crate) fn difference(plan: &Plan, other: &Plan) -> Option<(String, String, String)> {
    let flat = |plan: &Plan, other: &Plan| {
        // Where images are known by what they are, it does not matter where they are.
        let are_known = !plan.data_fingerprint.is_empty() && !other.data_fingerprint.is_empty();
        let is_free = |key: &str| FREE_KEYS.contains(&key) || (are_known && key == "data.shards");
        let is_compared = |key: &str| !key.starts_with("run.") && !is_free(key);
        let values = plan.recipe.values().into_iter().filter(|(key, _)| is_compared(key));
        values.map(|(key, value)| (key, value.to_string())).collect::<Vec<_>>()
    };
    let a = flat(plan, other);
    let b = flat(other, plan);
    let find = |key: &String, list: &[(String, String)]| {
        list.iter().find(|(k, _)| k == key).map_or("absent".into(), |(_, value)| value.clone())
    };
    a.iter().chain(&b).map(|(key, _)| (key.clone(), find(key, &a), find(key, &b))).find(|(_, x, y)| x != y)
}

/// Returns how the images of `there`, the plan of a run, differ from those of `here`; `None` if
/// they are the same as far as both plans tell.
pub(crate) fn difference_of_images(there: &Plan, here: &Plan) -> Option<String> {
    if there.n_samples != here.n_samples {
        return Some(format!("{} samples there, {} here", there.n_samples, here.n_samples));
    }
    let differ = |there: &str, here: &str| !there.is_empty() && !here.is_empty() && there != here;
    if differ(&there.data_fingerprint, &here.data_fingerprint) {
        return Some("as many samples, but other keys, lengths, order or weights".into());
    }
    let have_checksums = !there.data_checksums.is_empty() && !here.data_checksums.is_empty();
    let have_other_bytes = if have_checksums {
        there.data_checksums != here.data_checksums
    } else {
        differ(&there.data_images, &here.data_images)
    };
    have_other_bytes.then(|| "the same keys and lengths, but other bytes".into())
}

/// Returns `plan` with the length of `other`.
pub(crate) fn with_length_of(plan: &Plan, other: &Plan) -> Plan {
    let mut longer = plan.clone();
    longer.total_steps = other.total_steps;
    longer.recipe.optim.length = other.recipe.optim.length;
    longer
}
