//! Gauges of collapse, and warnings about it.

use burn_tensor::Tensor;
use kernels::ops::{matmul, total};
use serde::{Deserialize, Serialize};

use crate::method::TargetDistribution;

/// Number of steps before which a loss at chance level is not judged: networks that learn well can
/// take as long to leave it.
const MIN_STEPS_TO_LEARN: u64 = 200;

/// Subject of a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Concern {
    /// The representation collapses or has collapsed.
    Collapse,
    /// The trained network does no better than chance.
    ChanceLevel,
    /// A rank is slower than the others.
    SlowRank,
    /// A loss or a gradient is not finite, and the step is skipped.
    NotFinite,
    /// Kernels of the device are not used, or compute wrongly.
    Kernels,
}

/// Warning after a row of metrics, which may be repeated after the next ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alert {
    /// What the warning is about.
    pub concern: Concern,
    /// What was seen, and where: texts of alerts with the same subject differ only in numbers.
    pub subject: String,
    /// Text for people.
    pub text: String,
}

impl Alert {
    /// Creates an alert of a collapse, by what was seen.
    fn collapse(subject: impl Into<String>, text: String) -> Self {
        Self { concern: Concern::Collapse, subject: subject.into(), text }
    }
}

/// Statistics of the evaluated network's embeddings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct FeatureHealth {
    /// Mean over channels of the deviation of L2-normalized embeddings, times √D: 1 for directions
    /// spread evenly over the sphere, 0 when all embeddings are equal.
    pub std: f64,
    /// Participation ratio of the covariance's spectrum, (Σλ)² / Σλ²: number of directions that
    /// carry the variance. At most the batch size, and at most D.
    pub effective_rank: f64,
}

/// Measures embeddings `[M, D]`.
pub(crate) fn features(embeddings: Tensor<2>) -> FeatureHealth {
    let [m, d] = embeddings.dims();
    let norm = (embeddings.clone().powi_scalar(2).sum_dim(1) + 1e-12).sqrt();
    let unit = embeddings / norm;
    let centered = unit.clone() - unit.mean_dim(0);
    let variance = centered.clone().powi_scalar(2).mean_dim(0);
    let std = f64::from(variance.sqrt().mean().into_scalar::<f32>()) * (d as f64).sqrt();
    // tr(C) and tr(C²) are the same for the covariance and for the smaller of the Gram matrices.
    let gram = if m < d {
        matmul(centered.clone(), centered.transpose())
    } else {
        matmul(centered.clone().transpose(), centered)
    };
    let squares = f64::from(total(gram.clone().powi_scalar(2)).into_scalar::<f32>());
    let n = m.min(d);
    let diagonal = gram.into_data().try_to_vec::<f32>().unwrap_or_default();
    let trace: f64 = (0..n).map(|i| f64::from(diagonal[i * n + i])).sum();
    let effective_rank = if squares > 0.0 { trace * trace / squares } else { 0.0 };
    FeatureHealth { std, effective_rank }
}

/// Returns alerts about signs of collapse; empty if there are none. `uninformed` is the loss at
/// chance level, and every target has its mean entropy. There are no alerts before `grace_steps`.
pub(crate) fn diagnose(
    step: u64,
    grace_steps: u64,
    loss: f64,
    uninformed: Option<f64>,
    targets: &[(TargetDistribution, f64)],
    features: FeatureHealth,
) -> Vec<Alert> {
    let mut alerts = Vec::new();
    if step < grace_steps {
        return alerts;
    }
    if let Some(uninformed) = uninformed
        && step >= MIN_STEPS_TO_LEARN
        && (loss - uninformed).abs() < 0.005 * uninformed
    {
        let text = format!(
            "the loss {loss:.4} is still at chance level ({uninformed:.4}): the network does \
             not learn; try a higher learning rate or lower temperatures"
        );
        alerts.push(Alert { concern: Concern::ChanceLevel, subject: "loss".into(), text });
    }
    for (target, entropy) in targets {
        let TargetDistribution { uniform_entropy, sharpness_key, .. } = target;
        if *entropy > 0.995 * uniform_entropy {
            let text = format!(
                "the targets give every prototype the same probability: collapse to uniform; \
                 make the targets sharper (a lower {sharpness_key})"
            );
            alerts.push(Alert::collapse(format!("{} uniform", target.entropy), text));
        } else if *entropy < 0.01 && uninformed.is_some_and(|uninformed| loss < 0.05 * uninformed) {
            let text = format!(
                "the targets give one prototype all probability and the network predicts it: \
                 collapse to one output; make the targets softer (a higher {sharpness_key})"
            );
            alerts.push(Alert::collapse(format!("{} of one output", target.entropy), text));
        }
    }
    let FeatureHealth { std, effective_rank } = features;
    if std < 0.02 {
        let text = format!(
            "all embeddings of a batch are nearly one vector (spread {std:.4} of 1): \
             the representation has collapsed"
        );
        alerts.push(Alert::collapse("spread of embeddings", text));
    }
    if effective_rank < 1.5 {
        let text = format!(
            "the embeddings vary along only {effective_rank:.1} directions: the representation is collapsing"
        );
        alerts.push(Alert::collapse("rank of embeddings", text));
    }
    alerts
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_tensor::{Device, Distribution};

    #[test]
    fn spread_embeddings_are_healthy_and_collapsed_ones_are_not() {
        let device = Device::flex();
        device.seed(0);
        let noise = Tensor::<2>::random([256, 16], Distribution::Normal(0.0, 1.0), &device);
        let spread = features(noise.clone());
        assert!((spread.std - 1.0).abs() < 0.05 && spread.effective_rank > 13.0, "{spread:?}");
        let one = features(Tensor::ones([256, 16], &device) + noise.clone() * 1e-3);
        assert!(one.std < 0.02, "{one:?}");
        let line = noise.slice([0..256, 0..1]).matmul(Tensor::ones([1, 16], &device));
        assert!(features(line).effective_rank < 1.5);
    }

    /// Returns the alerts after step 300.
    fn alerts_for(loss: f64, entropy: f64, features: FeatureHealth) -> Vec<Alert> {
        let target =
            TargetDistribution { entropy: "entropy", uniform_entropy: 8.0, sharpness_key: "method.temp" };
        diagnose(300, 10, loss, Some(8.0), &[(target, entropy)], features)
    }

    #[test]
    fn each_kind_of_collapse_has_an_alert() {
        let healthy = FeatureHealth { std: 0.8, effective_rank: 30.0 };
        let collapsed = FeatureHealth { std: 0.001, effective_rank: 1.0 };
        assert!(alerts_for(5.0, 4.0, healthy).is_empty());
        assert_eq!(alerts_for(7.99, 4.0, healthy)[0].concern, Concern::ChanceLevel);
        // Targets that are too soft, and those that are too sharp.
        for (loss, entropy, change) in [(6.0, 7.99, "lower method.temp"), (0.1, 0.001, "higher method.temp")]
        {
            let alert = alerts_for(loss, entropy, healthy).remove(0);
            assert_eq!(alert.concern, Concern::Collapse);
            assert!(alert.text.contains(change), "{}", alert.text);
        }
        let alerts = alerts_for(5.0, 4.0, collapsed);
        assert_eq!(alerts[0].concern, Concern::Collapse);
        assert!(alerts[0].text.contains("the representation has collapsed"), "{alerts:?}");
        assert_ne!(alerts[0].subject, alerts[1].subject, "the number of directions is another sign");
        assert!(diagnose(5, 10, 8.0, Some(8.0), &[], healthy).is_empty());
        assert!(diagnose(199, 10, 8.0, Some(8.0), &[], healthy).is_empty(), "too early to judge");
    }
}
