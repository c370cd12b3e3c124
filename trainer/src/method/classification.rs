//! Classification: a linear head learns the classes of images, with the backbone.
//!
//! ```text
//! s = W f(x) + b          f(x) one vector per view, [D]; s the scores of C classes
//! y                       shares of the classes of the image of a view, [C]; ε the smoothing
//!
//! one class per image     loss = "cross_entropy"
//! t = (1 - ε) y + ε / C   Σ y = 1
//! loss = mean -Σ t log softmax(s)                                  over all views
//!
//! several, one or none    loss = "binary_cross_entropy"
//! t = (1 - ε) y + ε / 2   as timm's BinaryCrossEntropy smooths dense targets
//! loss = mean 1/C Σ (-t log σ(s) - (1 - t) log σ(-s))              over all views
//! ```
//!
//! y is 1 for the classes of an image and 0 for others, unless images are mixed by mixup and cutmix
//! ([`augment::Mixing`]), which is done before they reach the method: a class that both images of a
//! pair have keeps its share of 1, which rounding does not exceed.
//!
//! The labels are part of the batch. A run reads them from the data set, whose classes and
//! fingerprint its plan records, so that it resumes only with the same labels.

use std::collections::HashSet;

use augment::{Mixing, MultiCrop, SoftLabel};
use burn_tensor::{Device, Tensor, TensorData};
use kernels::ops::{Pairs, binary_cross_entropy, cross_entropy};
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

/// Loss of a classifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// Cross-entropy of the softmax over all classes: an image has one class.
    #[default]
    CrossEntropy,
    /// Binary cross-entropy of the sigmoid of each class by itself, the mean over all classes: an
    /// image may have several classes, or none.
    BinaryCrossEntropy,
}

impl LossKind {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

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
    /// Loss: `cross_entropy`, the default, for images of one class each, or `binary_cross_entropy`
    /// for images that may have several classes, such as the lines of a `.cls` member or the list
    /// `labels` in a `.json`. With the latter, an image whose list is empty is one of no class;
    /// images that state nothing about their classes are not shown with either.
    #[serde(default, skip_serializing_if = "LossKind::is_default")]
    pub loss: LossKind,
    /// Standard deviation of the initial weights of the classifier; 0.02 by default.
    #[serde(default = "default_head_std")]
    pub head_std: f32,
    /// Label smoothing: share of an image's label that is distributed evenly over all classes; 0 by
    /// default. With binary cross-entropy, the target of each class moves by that share towards
    /// 0.5.
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
        if let [class] = self.classes.as_slice()
            && self.loss == LossKind::CrossEntropy
        {
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
            loss: self.loss,
            smoothing: self.smoothing,
            mixing: self.mixing(),
        }))
    }

    fn classes(&self) -> Option<&[String]> {
        Some(&self.classes)
    }

    fn is_multi_label(&self) -> bool {
        self.loss == LossKind::BinaryCrossEntropy
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
            loss: LossKind::CrossEntropy,
            head_std: 0.1,
            smoothing: 0.1,
            // Mixed before images reach the method, which `tests/it/ranks.rs` covers.
            mixup: 0.0,
            cutmix: 0.0,
            mix_probability: default_mix_probability(),
            cutmix_probability: default_cutmix_probability(),
        };
        let several = Self { loss: LossKind::BinaryCrossEntropy, ..config.clone() };
        vec![(config, MultiCrop::single(16)), (several, MultiCrop::single(16))]
    }
}

struct Classification {
    views: MultiCrop,
    /// Channels of the features.
    width: usize,
    n_classes: usize,
    /// Standard deviation of the head's initial weights.
    head_std: f32,
    loss: LossKind,
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
            targets.push(match self.loss {
                LossKind::CrossEntropy => {
                    target_distributions(labels, self.n_classes, self.smoothing, &device)
                }
                LossKind::BinaryCrossEntropy => {
                    target_shares(labels, self.n_classes, self.smoothing, &device)
                }
            });
        }
        Ok(Box::new(ClassificationLoss { kind: self.loss, targets }))
    }

    fn judges_embeddings(&self) -> bool {
        // Embeddings that vary along as many directions as there are classes are what a classifier
        // is trained for.
        false
    }

    fn uninformed_loss(&self) -> Option<f64> {
        Some(match self.loss {
            LossKind::CrossEntropy => (self.n_classes as f64).ln(),
            LossKind::BinaryCrossEntropy => 2.0_f64.ln(),
        })
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

/// Returns the shares of each of `n_classes` that images with these labels should have, `[B, 1,
/// C]`: the target of each class is moved by `smoothing` towards 0.5. An image without a label has
/// no class.
fn target_shares(labels: &[SoftLabel], n_classes: usize, smoothing: f64, device: &Device) -> Tensor<3> {
    let floor = (smoothing / 2.0) as f32;
    let label_weight = (1.0 - smoothing) as f32;
    let mut values = vec![0.0_f32; labels.len() * n_classes];
    for (label, row) in labels.iter().zip(values.chunks_exact_mut(n_classes)) {
        for (class, share) in label {
            row[*class as usize] += share;
        }
        for value in row {
            // The shares of a class that both images of a pair have add up to 1, but for rounding.
            *value = floor + label_weight * value.min(1.0);
        }
    }
    Tensor::from_data(TensorData::new(values, [labels.len(), 1, n_classes]), device)
}

/// Loss of a batch.
struct ClassificationLoss {
    kind: LossKind,
    /// Targets of the classes by micro-batch, `[B, 1, C]`.
    targets: Vec<Tensor<3>>,
}

impl BatchLoss for ClassificationLoss {
    fn micro_batch_loss(&self, index: usize, trained: &Outputs) -> MicroBatchLoss {
        let scores = trained.heads.on_views(HEAD, 0);
        let targets = self.targets[index].clone();
        let [b, v, c] = scores.dims();
        match self.kind {
            LossKind::CrossEntropy => {
                let accuracy = accuracy_percent(scores.clone().inner(), targets.clone());
                let loss = cross_entropy(scores, targets, Pairs::All, 1.0) / (b * v) as f64;
                MicroBatchLoss { loss, gauges: vec![("train/accuracy", accuracy)] }
            }
            LossKind::BinaryCrossEntropy => {
                let f1 = f1_percent(scores.clone().inner(), targets.clone());
                let loss = binary_cross_entropy(scores, targets) / (b * v * c) as f64;
                MicroBatchLoss { loss, gauges: vec![("train/f1", f1)] }
            }
        }
    }
}

/// Returns the percentage of views in which a class with the largest share of `targets`,
/// `[B, 1, C]`, has the largest of `scores`, `[B, V, C]`: `[1]`.
fn accuracy_percent(scores: Tensor<3>, targets: Tensor<3>) -> Tensor<1> {
    let is_behind = (targets.clone() - targets.max_dim(2)).lower_elem(0.0).float();
    let score_of_class = (scores.clone() - is_behind * BEHIND).max_dim(2);
    score_of_class.greater_equal(scores.max_dim(2)).float().mean() * 100.0
}

/// Returns the mean over views of the F1 of their classes, in percent: 2 · right / (named +
/// present), the classes named being those with a score above 0 in `scores`, `[B, V, C]`, and those
/// present having a target above 0.5 in `targets`, `[B, 1, C]`. Where no class is present or named,
/// it is 100 %.
fn f1_percent(scores: Tensor<3>, targets: Tensor<3>) -> Tensor<1> {
    let named = scores.greater_elem(0.0).float();
    let present = targets.greater_elem(0.5).float();
    let n_right = (named.clone() * present.clone()).sum_dim(2);
    let n_both = named.sum_dim(2) + present.sum_dim(2);
    let is_empty = n_both.clone().lower_elem(0.5).float();
    let f1 = (n_right * 2.0 + is_empty.clone()) / (n_both + is_empty);
    f1.mean() * 100.0
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
            loss: LossKind::CrossEntropy,
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
        loss_and_gauge(&config, scores, labels, "train/accuracy")
    }

    /// Returns loss and F1 of scores of `[2, 2, 3]` for images with these labels, of which each may
    /// have several classes.
    fn loss_and_f1(scores: &[f32; 12], labels: &[Vec<SoftLabel>], smoothing: f64) -> [f32; 2] {
        let loss = LossKind::BinaryCrossEntropy;
        let config = Config { smoothing, loss, ..config(&["a", "b", "c"]) };
        loss_and_gauge(&config, scores, labels, "train/f1")
    }

    /// Returns loss and the gauge called `gauge` of scores of `[2, 2, 3]`, by the method of
    /// `config`.
    fn loss_and_gauge(
        config: &Config,
        scores: &[f32; 12],
        labels: &[Vec<SoftLabel>],
        gauge: &str,
    ) -> [f32; 2] {
        let method = build(config, MultiCrop::single(16)).unwrap();
        let scores = Tensor::<3>::from_data(TensorData::new(scores.to_vec(), [2, 2, 3]), &Device::flex());
        let detached = [outputs(scores.clone())];
        let score = &|_: &str, x: Tensor<3>| x;
        let batch =
            BatchOutputs { trained: &detached, others: &[], labels, masks: &[], columns: None, score };
        let comm = Communicator::solo();
        let prepared = method.prepare(&batch, 0, Peers::new(&comm, 1)).unwrap();
        let loss = prepared.micro_batch_loss(0, &outputs(scores.autodiff().require_grad()));
        let (name, value) = loss.gauges[0].clone();
        assert_eq!(name, gauge);
        [loss.loss.inner().into_scalar::<f32>(), value.into_scalar::<f32>()]
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

    /// Targets of an image with two classes, smoothed, and of one without a class; the mean of the
    /// losses of all scores is computed by hand. The views have F1 of 1, 2/3, 1 and 0.
    #[test]
    fn images_may_have_several_classes_or_none() {
        let scores: [f32; 12] = [2.0, -1.0, 3.0, -2.0, -0.5, 1.0, -1.0, -2.0, -3.0, 0.5, -1.0, -1.0];
        let labels: [Vec<SoftLabel>; 1] = [vec![vec![(2, 1.0), (0, 1.0)], vec![]]];
        let targets = [[0.95, 0.05, 0.95], [0.05, 0.05, 0.05]];
        let [loss, f1] = loss_and_f1(&scores, &labels, 0.1);
        let expected_f1 = 100.0 * (1.0 + 2.0 / 3.0 + 1.0 + 0.0) / 4.0;
        assert!((f1 - expected_f1).abs() < 1e-4, "{f1} {expected_f1}");
        let mut expected = 0.0;
        for (row, target) in scores.chunks_exact(3).zip([0, 0, 1, 1].map(|image| targets[image])) {
            for (score, share) in row.iter().zip(target) {
                let probability = 1.0 / (1.0 + (-f64::from(*score)).exp());
                expected -= (share * probability.ln() + (1.0 - share) * (1.0 - probability).ln()) / 12.0;
            }
        }
        assert!((f64::from(loss) - expected).abs() < 1e-6, "{loss} {expected}");
    }

    /// A class that both images of a pair have is wholly there, whatever rounding adds to its
    /// shares; others have theirs.
    #[test]
    fn shares_of_mixed_images_add_up() {
        let labels: [SoftLabel; 2] =
            [vec![(1, 0.7), (0, 0.7), (1, 0.300_000_1)], vec![(2, 0.3), (2, 0.700_000_05)]];
        let targets = target_shares(&labels, 3, 0.0, &Device::flex());
        assert_eq!(targets.into_data().try_to_vec::<f32>().unwrap(), [0.7, 1.0, 0.0, 0.0, 0.0, 1.0]);
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
        assert!(build(&config(&[]), single.clone()).is_ok(), "classes that are not known yet");
        let alone = Config { loss: LossKind::BinaryCrossEntropy, ..config(&["a"]) };
        assert!(build(&alone, single).is_ok(), "a class that an image has or not");
    }
}
