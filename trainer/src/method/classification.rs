//! Classification: a linear head learns the classes of images, with the backbone.
//!
//! ```text
//! s = W f(x) + b          f(x) one vector per view, [D]; s the scores of C classes
//! t = (1 - ε) y + ε / C   y the shares of the classes of its image, Σ y = 1; ε the smoothing
//! loss = mean -Σ t log softmax(s)         over all views
//! ```
//!
//! y is 1 for the class of an image, unless images are mixed by mixup and cutmix
//! ([`augment::Mixing`]), which is done before they reach the method.
//!
//! The labels are part of the batch. A run reads them from the data set, whose classes and
//! fingerprint its plan records, so that it resumes only with the same labels.

use std::collections::HashSet;

use augment::{Mixing, MultiCrop, SoftLabel};
use burn_tensor::{Device, Tensor, TensorData};
use kernels::ops::{Pairs, cross_entropy};
use networks::ClassHead;
use networks::head::linear::Linear;
use networks::head::{Head, Reads};
use networks::outputs::Outputs;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::check_bounds;
use super::network::NetworkSpec;
use super::{BatchLoss, BatchOutputs, LabelFacts, Method, MethodContext, MethodRecipe, MicroBatchLoss};

/// Name of the network.
const NETWORK: &str = "network";

/// Name of the head.
const HEAD: &str = "head";

/// Number of classes of a plan without images, whose classes are not known.
const UNKNOWN_CLASSES: usize = 1000;

/// Largest standard deviation of initial weights.
const MAX_STD: f32 = 1e3;

/// Smallest and largest parameter of mixup and cutmix.
const ALPHAS: [f64; 2] = [0.01, 100.0];

/// What is subtracted from scores of classes that must not be the largest.
const BEHIND: f32 = 1e30;

/// Settings of classification, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Names of the classes, in the order of the classifier's scores; by default those of the
    /// images, numbers first, by value, then words. Always set in a plan.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<String>,
    /// Fingerprint of the labels of all images. Always set in a plan.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub labels: String,
    /// Standard deviation of the initial weights of the classifier; 0.02 by default.
    #[serde(default = "default_head_std")]
    pub head_std: f32,
    /// Label smoothing: share of an image's label that is distributed evenly over all classes; 0 by
    /// default.
    #[serde(default)]
    pub smoothing: f64,
    /// Mixup: the images of a batch are blended in pairs, and so are their labels. It is the
    /// parameter of the Beta distribution of the shares; 0, the default, for none.
    #[serde(default)]
    pub mixup: f64,
    /// Cutmix: the images of a batch swap boxes in pairs, and their labels are mixed by area. It is
    /// the parameter of the Beta distribution of the areas; 0, the default, for none.
    #[serde(default)]
    pub cutmix: f64,
    /// Probability that a batch is mixed, if mixup or cutmix is on; 1 by default.
    #[serde(default = "default_mix_probability")]
    pub mix_probability: f64,
    /// Probability of cutmix instead of mixup, if both are on; 0.5 by default.
    #[serde(default = "default_cutmix_probability")]
    pub cutmix_probability: f64,
}

fn default_head_std() -> f32 {
    0.02
}

fn default_mix_probability() -> f64 {
    1.0
}

fn default_cutmix_probability() -> f64 {
    0.5
}

impl Config {
    /// Checks smoothing and mixing.
    ///
    /// # Errors
    /// A message with the key.
    fn check_targets(&self) -> Result<(), String> {
        check_bounds(&[
            ("smoothing", self.smoothing, [0.0, 1.0]),
            ("mix_probability", self.mix_probability, [0.0, 1.0]),
            ("cutmix_probability", self.cutmix_probability, [0.0, 1.0]),
        ])?;
        let [low, high] = ALPHAS;
        for (key, alpha) in [("mixup", self.mixup), ("cutmix", self.cutmix)] {
            if alpha != 0.0 && !(low..=high).contains(&alpha) {
                return Err(format!("method.{key} is {alpha} but must be 0 or lie in {low}..={high}"));
            }
        }
        Ok(())
    }

    /// Returns the mixing of images, if they are mixed.
    fn mixing(&self) -> Option<Mixing> {
        let Self { mixup, cutmix, .. } = *self;
        if mixup == 0.0 && cutmix == 0.0 {
            return None;
        }
        let probability = self.mix_probability;
        Some(Mixing { mixup, cutmix, probability, cutmix_probability: self.cutmix_probability })
    }
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "classification";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        if let [class] = self.classes.as_slice() {
            return Err(format!("method.classes lists one class, {class}: a classifier needs at least two"));
        }
        let mut seen = HashSet::new();
        if let Some(class) = self.classes.iter().find(|class| !seen.insert(class.as_str())) {
            return Err(format!("method.classes lists {class} twice"));
        }
        if !(0.0..=MAX_STD).contains(&self.head_std) {
            return Err(format!("method.head_std is {} but must lie in 0..={MAX_STD}", self.head_std));
        }
        self.check_targets()?;
        if cx.views.groups().len() != 1 {
            return Err("views: classification takes views of one size".into());
        }
        let n_classes = if self.classes.is_empty() { UNKNOWN_CLASSES } else { self.classes.len() };
        let width = cx.model.width();
        Ok(Box::new(Classification {
            views: cx.views.clone(),
            width,
            n_classes,
            head_std: self.head_std,
            smoothing: self.smoothing,
            mixing: self.mixing(),
        }))
    }

    fn classes(&self) -> Option<&[String]> {
        Some(&self.classes)
    }

    fn labels(&mut self) -> Option<LabelFacts<'_>> {
        Some(LabelFacts { classes: &mut self.classes, fingerprint: &mut self.labels })
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let classes = ["cat", "dog", "hen", "horse", "owl"].map(String::from).to_vec();
        let config = Self {
            classes,
            labels: "f".into(),
            head_std: 0.1,
            smoothing: 0.1,
            // Mixed before images reach the method, which `tests/it/ranks.rs` covers.
            mixup: 0.0,
            cutmix: 0.0,
            mix_probability: default_mix_probability(),
            cutmix_probability: default_cutmix_probability(),
        };
        vec![(config, MultiCrop::single(16))]
    }
}

struct Classification {
    views: MultiCrop,
    /// Channels of the features.
    width: usize,
    n_classes: usize,
    /// Standard deviation of the head's initial weights.
    head_std: f32,
    /// Share of a label that is distributed over all classes.
    smoothing: f64,
    mixing: Option<Mixing>,
}

impl Method for Classification {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn mixing(&self) -> Option<Mixing> {
        self.mixing
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let unit = Linear {
            name: ClassHead::UNIT.into(),
            input: self.width,
            output: self.n_classes,
            init_std: self.head_std,
        };
        let head = Head::new(HEAD, Reads::Pooled, vec![Box::new(unit)]);
        vec![NetworkSpec::trained(NETWORK, vec![head], 1)]
    }

    fn evaluated(&self) -> &'static str {
        NETWORK
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        _: u64,
        _: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        assert_eq!(batch.labels.len(), batch.trained.len(), "labels of every micro-batch");
        let mut targets = Vec::with_capacity(batch.trained.len());
        for (outputs, labels) in batch.trained.iter().zip(batch.labels) {
            assert_eq!(labels.len(), outputs.n_images(), "a label for every image");
            let device = outputs.features[0].x.device();
            targets.push(target_distributions(labels, self.n_classes, self.smoothing, &device));
        }
        Ok(Box::new(ClassificationLoss { targets }))
    }

    fn judges_embeddings(&self) -> bool {
        // Embeddings that vary along as many directions as there are classes are what a classifier
        // is trained for.
        false
    }

    fn uninformed_loss(&self) -> Option<f64> {
        Some((self.n_classes as f64).ln())
    }
}

/// Returns the distributions over `n_classes` that images with these labels should have,
/// `[B, 1, C]`: a share `smoothing` of each label belongs to all classes.
///
/// # Panics
/// If an image has no label: it would be trained to have no class, and runs do not show it.
fn target_distributions(
    labels: &[SoftLabel],
    n_classes: usize,
    smoothing: f64,
    device: &Device,
) -> Tensor<3> {
    let floor = (smoothing / n_classes as f64) as f32;
    let label_weight = (1.0 - smoothing) as f32;
    let mut values = vec![floor; labels.len() * n_classes];
    for (label, row) in labels.iter().zip(values.chunks_exact_mut(n_classes)) {
        assert!(!label.is_empty(), "an image without a label is never shown");
        for (class, share) in label {
            row[*class as usize] += label_weight * *share;
        }
    }
    Tensor::from_data(TensorData::new(values, [labels.len(), 1, n_classes]), device)
}

/// Cross-entropy of a batch.
struct ClassificationLoss {
    /// Distributions over the classes by micro-batch, `[B, 1, C]`.
    targets: Vec<Tensor<3>>,
}

impl BatchLoss for ClassificationLoss {
    fn micro_batch_loss(&self, index: usize, trained: &Outputs) -> MicroBatchLoss {
        let scores = trained.heads.on_views(HEAD, 0);
        let targets = self.targets[index].clone();
        let [b, v, _] = scores.dims();
        let accuracy = accuracy_percent(scores.clone().inner(), targets.clone());
        let loss = cross_entropy(scores, targets, Pairs::All, 1.0) / (b * v) as f64;
        MicroBatchLoss { loss, gauges: vec![("train/accuracy", accuracy)] }
    }
}

/// Returns the percentage of views in which a class with the largest share of `targets`,
/// `[B, 1, C]`, has the largest of `scores`, `[B, V, C]`: `[1]`.
fn accuracy_percent(scores: Tensor<3>, targets: Tensor<3>) -> Tensor<1> {
    let is_behind = (targets.clone() - targets.max_dim(2)).lower_elem(0.0).float();
    let score_of_class = (scores.clone() - is_behind * BEHIND).max_dim(2);
    score_of_class.greater_equal(scores.max_dim(2)).float().mean() * 100.0
}

#[cfg(test)]
mod tests {
    use ranks::communicator::Communicator;

    use super::*;
    use crate::schedule::RunLength;
    use networks::ModelConfig;
    use networks::outputs::{HeadOutput, HeadOutputs};
    use networks::tokens::Tokens;

    fn config(classes: &[&str]) -> Config {
        let classes = classes.iter().map(ToString::to_string).collect();
        Config {
            classes,
            labels: "f".into(),
            head_std: 0.02,
            smoothing: 0.0,
            mixup: 0.0,
            cutmix: 0.0,
            mix_probability: 1.0,
            cutmix_probability: 0.5,
        }
    }

    fn build(config: &Config, views: MultiCrop) -> Result<Box<dyn Method>, String> {
        let length = RunLength { n_samples: 100, batch_size: 4, total_steps: 10 };
        config.build(&MethodContext { views, model: ModelConfig::examples().remove(0), length, seed: 0 })
    }

    /// Returns the outputs of a network whose head has these scores of `[B, V, C]`.
    fn outputs(scores: Tensor<3>) -> Outputs {
        let [b, v, _] = scores.dims();
        let features = vec![Tokens::vectors(Tensor::zeros([b * v, 2], &Device::flex()))];
        let heads = HeadOutputs::new(b, &features, [(HEAD, vec![HeadOutput::from_views(scores)])].into());
        Outputs::new(features, heads)
    }

    /// Returns loss and accuracy of scores of `[2, 2, 3]` for images with these labels.
    fn loss_and_accuracy(scores: &[f32; 12], labels: &[Vec<SoftLabel>], smoothing: f64) -> [f32; 2] {
        let config = Config { smoothing, ..config(&["a", "b", "c"]) };
        let method = build(&config, MultiCrop::single(16)).unwrap();
        let scores = Tensor::<3>::from_data(TensorData::new(scores.to_vec(), [2, 2, 3]), &Device::flex());
        let detached = [outputs(scores.clone())];
        let score = &|_: &str, x: Tensor<3>| x;
        let batch = BatchOutputs { trained: &detached, others: &[], labels, columns: None, score };
        let comm = Communicator::solo();
        let prepared = method.prepare(&batch, 0, Peers::new(&comm, 1)).unwrap();
        let loss = prepared.micro_batch_loss(0, &outputs(scores.autodiff().require_grad()));
        let (name, accuracy) = loss.gauges[0].clone();
        assert_eq!(name, "train/accuracy");
        [loss.loss.inner().into_scalar::<f32>(), accuracy.into_scalar::<f32>()]
    }

    /// Three of four views have the largest score at their class; the mean of their cross-entropies
    /// is computed by hand.
    #[test]
    fn loss_is_the_cross_entropy_of_the_classes() {
        let scores: [f32; 12] = [0.0, 1.0, 2.0, 0.0, 0.0, 3.0, 2.0, 1.0, 0.0, 0.0, 1.0, 0.0];
        let labels: [Vec<SoftLabel>; 1] = [vec![vec![(2, 1.0)], vec![(0, 1.0)]]];
        let [loss, accuracy] = loss_and_accuracy(&scores, &labels, 0.0);
        assert_eq!(accuracy, 75.0);
        let mut expected = 0.0;
        for (row, class) in scores.chunks_exact(3).zip([2, 2, 0, 0]) {
            let sum: f64 = row.iter().map(|score| f64::from(*score).exp()).sum();
            expected += (sum.ln() - f64::from(row[class])) / 4.0;
        }
        assert!((f64::from(loss) - expected).abs() < 1e-6, "{loss} {expected}");
    }

    /// A mixed image counts as a hit where the class that it has most of has the largest score.
    #[test]
    fn labels_are_mixed_and_smoothed() {
        let scores: [f32; 12] = [0.0, 1.0, 2.0, 0.0, 3.0, 0.0, 2.0, 1.0, 0.0, 0.0, 1.0, 0.0];
        let labels: [Vec<SoftLabel>; 1] = [vec![vec![(2, 0.75), (1, 0.25)], vec![(1, 0.5), (0, 0.5)]]];
        let targets = [[0.1, 0.275, 0.625], [0.45, 0.45, 0.1]];
        let [loss, accuracy] = loss_and_accuracy(&scores, &labels, 0.3);
        assert_eq!(accuracy, 75.0, "of equal shares, either is a hit");
        let mut expected = 0.0;
        for (row, target) in scores.chunks_exact(3).zip([0, 0, 1, 1].map(|image| targets[image])) {
            let sum: f64 = row.iter().map(|score| f64::from(*score).exp()).sum();
            for (score, share) in row.iter().zip(target) {
                expected += share * (sum.ln() - f64::from(*score)) / 4.0;
            }
        }
        assert!((f64::from(loss) - expected).abs() < 1e-6, "{loss} {expected}");
    }

    #[test]
    #[should_panic(expected = "an image without a label is never shown")]
    fn an_image_without_a_label_is_never_trained_on() {
        loss_and_accuracy(&[0.0; 12], &[vec![vec![(2, 1.0)], vec![]]], 0.0);
    }

    #[test]
    #[should_panic(expected = "labels of every micro-batch")]
    fn a_batch_without_labels_is_never_trained_on() {
        loss_and_accuracy(&[0.0; 12], &[], 0.0);
    }

    #[test]
    fn settings_that_cannot_be_run_are_refused_with_their_key() {
        let single = MultiCrop::single(16);
        let steep = Config { head_std: -1.0, ..config(&[]) };
        let smooth = Config { smoothing: 1.5, ..config(&[]) };
        let mixed = Config { mixup: 1e-3, ..config(&[]) };
        let cut = Config { cutmix: f64::NAN, ..config(&[]) };
        let often = Config { mix_probability: -0.5, ..config(&[]) };
        for (config, views, words) in [
            (config(&["a"]), single.clone(), "method.classes lists one class, a"),
            (config(&["a", "b", "a"]), single.clone(), "method.classes lists a twice"),
            (steep, single.clone(), "method.head_std is -1"),
            (smooth, single.clone(), "method.smoothing is 1.5 but must lie in 0..=1"),
            (mixed, single.clone(), "method.mixup is 0.001 but must be 0 or lie in 0.01..=100"),
            (cut, single.clone(), "method.cutmix is NaN"),
            (often, single.clone(), "method.mix_probability is -0.5"),
            (config(&[]), MultiCrop::dino(16, 8, 2), "views: classification takes views of one size"),
        ] {
            let reason = build(&config, views).err().unwrap();
            assert!(reason.contains(words), "{reason}");
        }
        assert!(build(&config(&[]), single).is_ok(), "classes that are not known yet");
    }
}
