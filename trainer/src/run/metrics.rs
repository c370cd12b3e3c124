//! A row of metrics, and its warnings.

use burn_tensor::Tensor;

use super::health::{self, Concern};
use crate::method::{MATCH_LOSS, Method};
use crate::recipe::plan::Plan;
use crate::schedule::ScheduledValues;
use crate::step::StepReport;

/// Builds the row of a step. `embeddings` `[B·V, D]` are those of the global batch.
pub(crate) fn row_of(
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

/// Returns the warnings of a collapse that the row gives rise to.
pub(crate) fn collapse_warnings(
    plan: &Plan,
    step: u64,
    report: &StepReport,
    row: &[(String, f64)],
    method: &dyn Method,
) -> Vec<(Concern, String)> {
    let value = |name: &str| row.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
    let health = health::FeatureHealth {
        std: value("health/feature_std").unwrap_or(1.0),
        effective_rank: value("health/effective_rank").unwrap_or(f64::MAX),
    };
    let grace_steps = plan.warmup_steps.max(plan.total_steps / 10);
    let uninformed = method.uninformed_loss();
    let targets = method.target_distributions();
    let targets =
        targets.into_iter().filter_map(|target| value(target.entropy).map(|entropy| (target, entropy)));
    // Other terms of a method's loss do not show whether the trained network predicts its targets.
    let loss = value(MATCH_LOSS).unwrap_or(report.loss);
    let warnings =
        health::diagnose(step, grace_steps, loss, uninformed, &targets.collect::<Vec<_>>(), health);
    warnings.into_iter().map(|(concern, warning)| (concern, format!("step {step}: {warning}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{pair, plans};
    use crate::step::{Phases, Votes};

    /// Uniform targets are reported for every method with prototypes, whatever the name of its
    /// entropy gauge.
    #[test]
    fn uniform_targets_are_told_of_every_method() {
        let mut n_told = 0;
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
            let row = |entropy: f64| vec![(target.entropy.to_string(), entropy)];
            let said = |entropy| collapse_warnings(&plan, 100, &report, &row(entropy), method.as_ref());
            assert!(said(uniform / 2.0).is_empty(), "{}", pair(&plan));
            assert!(
                said(uniform).iter().any(|(concern, _)| *concern == Concern::Collapse),
                "{}",
                pair(&plan)
            );
            n_told += 1;
        }
        assert!(n_told >= 4, "DINO and SwAV on two backbones each: {n_told}");
    }
}
