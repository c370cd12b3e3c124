//! Rows of metrics, and the warnings that follow from them.

use burn_tensor::Tensor;

use super::health::{self, Alert};
use crate::method::{MATCH_LOSS, Method};
use crate::recipe::plan::Plan;
use crate::schedule::ScheduledValues;
use crate::step::StepReport;

/// Builds the row of a step. `embeddings` `[B·V, D]` are those of the global batch.
pub(crate) fn metrics_row(
    plan: &Plan,
    step: u64,
    scheduled_values: &ScheduledValues,
    report: &StepReport,
    embeddings: Tensor<2>,
    timing: &[(&'static str, f64)],
    method: &dyn Method,
) -> Vec<(String, f64)> {
    let samples = (step + 1) as f64 * plan.recipe.optim.batch_size as f64;
    let health = health::features(embeddings);
    let phases = &report.phases;
    let mut row = vec![
        ("train/loss", report.loss),
        ("train/grad_norm", report.grad_norm),
        ("train/finite", f64::from(u8::from(report.finite))),
        ("train/epoch", samples / plan.n_samples as f64),
        ("train/samples", samples),
        ("knobs/lr", scheduled_values.lr),
        ("knobs/weight_decay", scheduled_values.weight_decay),
        ("health/feature_std", health.std),
        ("health/effective_rank", health.effective_rank),
        ("time/targets_ms", phases.targets_ms),
        ("time/forward_ms", phases.forward_ms),
        ("time/head_ms", phases.head_ms),
        ("time/backward_ms", phases.backward_ms),
        ("time/update_ms", phases.update_ms),
        ("time/rank_wait_ms", phases.wait_ms),
    ];
    row.extend(method.scheduled_values(step));
    row.extend_from_slice(timing);
    row.extend_from_slice(&report.gauges);
    row.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// Returns the warnings of a collapse that follow from the row.
pub(crate) fn collapse_alerts(
    plan: &Plan,
    step: u64,
    report: &StepReport,
    row: &[(String, f64)],
    method: &dyn Method,
) -> Vec<Alert> {
    let mut health = health::FeatureHealth { std: 1.0, effective_rank: f64::MAX };
    if method.judges_embeddings() {
        health.std = find_value(row, "health/feature_std").unwrap_or(health.std);
        health.effective_rank = find_value(row, "health/effective_rank").unwrap_or(health.effective_rank);
    }
    let grace_steps = plan.warmup_steps.max(plan.total_steps / 10);
    let uninformed = method.uninformed_loss();
    let mut targets = Vec::new();
    for target in method.target_distributions() {
        if let Some(entropy) = find_value(row, target.entropy) {
            targets.push((target, entropy));
        }
    }
    // Other terms of a method's loss do not show whether the trained network predicts its targets.
    let loss = find_value(row, MATCH_LOSS).unwrap_or(report.loss);
    let mut alerts = health::diagnose(step, grace_steps, loss, uninformed, &targets, health);
    for alert in &mut alerts {
        alert.text = format!("step {step}: {}", alert.text);
    }
    alerts
}

/// Returns the value `name` of a row.
fn find_value(row: &[(String, f64)], name: &str) -> Option<f64> {
    row.iter().find(|(key, _)| key == name).map(|(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{pair, plans};
    use crate::run::Concern;
    use crate::step::{Phases, Votes};

    /// A collapse to uniform targets is reported for every method with prototypes, whatever the
    /// name of its entropy gauge.
    #[test]
    fn uniform_targets_are_reported_for_every_method() {
        let mut n_reported = 0;
        for plan in plans(&[]) {
            let method = plan.method().unwrap();
            let Some(target) = method.target_distributions().pop() else { continue };
            let uniform = target.uniform_entropy;
            let report = StepReport {
                loss: uniform / 2.0,
                grad_norm: 1.0,
                finite: true,
                phases: Phases::default(),
                gauges: Vec::new(),
                embeddings: Vec::new(),
                votes: Votes::default(),
            };
            let sharp_row = [(target.entropy.to_string(), uniform / 2.0)];
            let alerts = collapse_alerts(&plan, 100, &report, &sharp_row, method.as_ref());
            assert!(alerts.is_empty(), "{}", pair(&plan));
            let uniform_row = [(target.entropy.to_string(), uniform)];
            let alerts = collapse_alerts(&plan, 100, &report, &uniform_row, method.as_ref());
            let is_reported = alerts.iter().any(|alert| alert.concern == Concern::Collapse);
            assert!(is_reported, "{}", pair(&plan));
            n_reported += 1;
        }
        assert!(n_reported >= 4, "DINO and SwAV on two backbones each: {n_reported}");
    }
}
