//! Semantic segmentation: a decoder on the cells of the grid learns the classes of pixels, with the
//! backbone.
//!
//! ```text
//! s[n] = decoder(f(x))[n]                         scores of C classes for cell n of N; f(x) features, [N, D]
//! s[i, j] = Σ_n m[i, j, n] s[n]                   scores of pixels, interpolated bilinearly
//! loss = mean -log softmax(s[i, j])[y[i, j]]      over the pixels of the batch whose class y is not 255
//! ```
//!
//! The sum over pixels is divided by their number in the global batch, so that the loss depends
//! neither on micro-batches nor on ranks.
//!
//! Masks of views are part of the batch ([`augment::Mask`]). A run reads them from the data set,
//! whose classes and fingerprint its plan records, so that it resumes only with the same masks.
//! Images are not mixed: mixup has no meaning for masks of whole classes.

use std::collections::HashSet;
use std::sync::Arc;

use augment::{IGNORED_CLASS, MultiCrop};
use kernels::ops::pixel_cross_entropy;
use networks::head::pixels::{DecoderSizes, PixelDecoder};
use networks::head::{Head, Reads};
use networks::outputs::Outputs;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::network::NetworkSpec;
use super::{
    BatchLoss, BatchOutputs, Collective, LabelFacts, Method, MethodContext, MethodRecipe, MicroBatchLoss,
};

/// Name of the network.
const NETWORK: &str = "network";

/// Name of the head.
const HEAD: &str = "decoder";

/// Number of classes of a plan without images, whose classes are not known.
const UNKNOWN_CLASSES: usize = 150;

/// Largest number of classes: masks have 8 bits, and the last value marks pixels that do not count.
const MAX_CLASSES: usize = IGNORED_CLASS as usize;

/// Largest standard deviation of initial weights.
const MAX_STD: f32 = 1e3;

/// Largest number of channels of a convolution.
const MAX_WIDTH: usize = 1 << 16;

/// Settings of segmentation, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Names of the classes of pixels, by their values in masks, from 0 on; by default the numbers
    /// up to the highest value. 255 is no class: it marks pixels that do not count. Always set in a
    /// plan.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<String>,
    /// Fingerprint of the masks of all images. Always set in a plan.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub masks: String,
    /// Decoder, which scores the classes of the cells of the grid; `linear` by default.
    #[serde(default)]
    pub decoder: Decoder,
    /// Channels of the convolution of `decoder = "conv"`; 256 by default.
    #[serde(default = "default_decoder_width")]
    pub decoder_width: usize,
    /// Standard deviation of the initial weights of the decoder's last layer; 0.02 by default.
    #[serde(default = "default_head_std")]
    pub head_std: f32,
}

/// Layers of a decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decoder {
    /// A linear layer.
    #[default]
    Linear,
    /// A convolution of 3 × 3 cells, a layer normalization, a GELU and a linear layer.
    Conv,
}

fn default_decoder_width() -> usize {
    256
}

fn default_head_std() -> f32 {
    0.02
}

impl Config {
    /// Returns the layers of the decoder.
    fn layers(&self) -> PixelDecoder {
        match self.decoder {
            Decoder::Linear => PixelDecoder::Linear,
            Decoder::Conv => PixelDecoder::Conv { width: self.decoder_width },
        }
    }

    /// Checks the names of the classes.
    ///
    /// # Errors
    /// A message with the key.
    fn check_classes(&self) -> Result<(), String> {
        if let [class] = self.classes.as_slice() {
            return Err(format!("method.classes lists one class, {class}: pixels are of two at least"));
        }
        if self.classes.len() > MAX_CLASSES {
            return Err(format!(
                "method.classes lists {} classes, but masks have values of at most {MAX_CLASSES}",
                self.classes.len()
            ));
        }
        let mut seen = HashSet::new();
        match self.classes.iter().find(|class| !seen.insert(class.as_str())) {
            Some(class) => Err(format!("method.classes lists {class} twice")),
            None => Ok(()),
        }
    }
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "segmentation";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        self.check_classes()?;
        if !(0.0..=MAX_STD).contains(&self.head_std) {
            return Err(format!("method.head_std is {} but must lie in 0..={MAX_STD}", self.head_std));
        }
        if !(1..=MAX_WIDTH).contains(&self.decoder_width) {
            let width = self.decoder_width;
            return Err(format!("method.decoder_width is {width} but must lie in 1..={MAX_WIDTH}"));
        }
        if cx.views.groups().len() != 1 {
            return Err("views: segmentation takes views of one size".into());
        }
        let n_classes = if self.classes.is_empty() { UNKNOWN_CLASSES } else { self.classes.len() };
        let sizes = DecoderSizes {
            width: cx.model.width(),
            n_classes,
            n_pixels: cx.model.stride_px() * cx.model.stride_px(),
            init_std: self.head_std,
        };
        Ok(Box::new(Segmentation { views: cx.views.clone(), decoder: self.layers(), sizes }))
    }

    fn pixel_classes(&self) -> Option<&[String]> {
        Some(&self.classes)
    }

    fn pixel_decoder(&self) -> Option<PixelDecoder> {
        Some(self.layers())
    }

    fn pixel_labels(&mut self) -> Option<LabelFacts<'_>> {
        Some(LabelFacts { classes: &mut self.classes, fingerprint: &mut self.masks })
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let linear = Self {
            classes: ["sky", "sea", "land"].map(String::from).to_vec(),
            masks: "f".into(),
            decoder: Decoder::Linear,
            decoder_width: 7,
            head_std: 0.2,
        };
        let conv = Self { decoder: Decoder::Conv, ..linear.clone() };
        let mut two_views = MultiCrop::single(16);
        two_views.crops[0].count = 2;
        vec![(linear, MultiCrop::single(16)), (conv, two_views)]
    }
}

struct Segmentation {
    views: MultiCrop,
    decoder: PixelDecoder,
    sizes: DecoderSizes,
}

impl Method for Segmentation {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let head = Head::new(HEAD, Reads::Patches, self.decoder.units(self.sizes));
        vec![NetworkSpec::trained(NETWORK, vec![head], 1)]
    }

    fn evaluated(&self) -> &'static str {
        NETWORK
    }

    fn reads_pixel_classes(&self) -> bool {
        true
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        _: u64,
        peers: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        assert_eq!(batch.masks.len(), batch.trained.len(), "masks of every micro-batch");
        let n_views = self.views.n_views();
        let mut micro_batches = Vec::with_capacity(batch.trained.len());
        let mut n_counted = 0;
        for (outputs, images) in batch.trained.iter().zip(batch.masks) {
            assert_eq!(images.len(), outputs.n_images(), "a mask for every image");
            let mut classes = Vec::new();
            for image in images {
                assert_eq!(image.len(), 1, "the mask of views of one size");
                classes.extend_from_slice(&image[0]);
            }
            n_counted += classes.iter().filter(|class| **class != IGNORED_CLASS).count();
            let side = (classes.len() / (images.len() * n_views).max(1)).isqrt();
            micro_batches.push(PixelClasses { classes: classes.into(), side });
        }
        let n_counted = peers.sum_counts("pixels", n_counted)?;
        // A batch without a pixel that counts has no loss.
        let weight = peers.n_micro_batches() as f64 / n_counted.max(1) as f64;
        Ok(Box::new(SegmentationLoss { micro_batches, n_views, weight }))
    }

    fn collectives(&self) -> Vec<Collective> {
        vec![Collective::Number]
    }

    fn judges_embeddings(&self) -> bool {
        // Images of the same classes need not differ.
        false
    }

    fn uninformed_loss(&self) -> Option<f64> {
        Some((self.sizes.n_classes as f64).ln())
    }
}

/// Classes of the pixels of the views of a micro-batch.
struct PixelClasses {
    /// Classes, `[B·V, S, S]`.
    classes: Arc<[u8]>,
    /// Side of the views, S.
    side: usize,
}

/// Cross-entropy of the pixels of a batch.
struct SegmentationLoss {
    micro_batches: Vec<PixelClasses>,
    /// Number of views of an image.
    n_views: usize,
    /// Weight of the summed loss of a micro-batch: the number of micro-batches over the number of
    /// pixels of the batch that count.
    weight: f64,
}

impl BatchLoss for SegmentationLoss {
    fn micro_batch_loss(&self, index: usize, trained: &Outputs) -> MicroBatchLoss {
        let PixelClasses { classes, side } = &self.micro_batches[index];
        let scores = trained.heads.on_views(HEAD, 0);
        let [b, n, c] = scores.dims();
        let scores = scores.reshape([b * self.n_views, n / self.n_views, c]);
        let grid = trained.features[0].grid();
        let loss = pixel_cross_entropy(scores, grid, classes, [*side; 2]) * self.weight;
        MicroBatchLoss { loss, gauges: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use augment::ViewMasks;
    use burn_tensor::{Device, Tensor, TensorData};
    use networks::ModelConfig;
    use networks::outputs::{HeadOutput, HeadOutputs};
    use networks::tokens::Tokens;
    use ranks::communicator::Communicator;

    use super::*;
    use crate::schedule::RunLength;

    fn config(classes: &[&str]) -> Config {
        Config {
            classes: classes.iter().map(ToString::to_string).collect(),
            masks: "f".into(),
            decoder: Decoder::Conv,
            decoder_width: 8,
            head_std: 0.02,
        }
    }

    fn build(config: &Config, views: MultiCrop) -> Result<Box<dyn Method>, String> {
        let length = RunLength { n_samples: 100, batch_size: 4, total_steps: 10 };
        config.build(&MethodContext { views, model: ModelConfig::examples().remove(0), length, seed: 0 })
    }

    /// Returns the outputs of a network for one image, whose views of one cell each have these
    /// scores of two classes.
    fn outputs(scores: &[[f32; 2]]) -> Outputs {
        let n = scores.len();
        let features = vec![Tokens::on_grid(Tensor::zeros([n, 1, 2], &Device::flex()), [1, 1])];
        let scores = Tensor::from_data(TensorData::new(scores.concat(), [1, n, 2]), &Device::flex());
        let by_name = BTreeMap::from([(HEAD, vec![HeadOutput::from_views(scores)])]);
        Outputs::new(features.clone(), HeadOutputs::new(1, &features, by_name))
    }

    /// Returns the mean loss of micro-batches of one image each, with these scores and masks.
    fn loss(scores: &[[f32; 2]], masks: &[[u8; 4]]) -> f64 {
        let method = build(&config(&["sea", "land"]), MultiCrop::single(16)).unwrap();
        let trained: Vec<Outputs> = scores.iter().map(|scores| outputs(&[*scores])).collect();
        let masks: Vec<Vec<ViewMasks>> = masks.iter().map(|mask| vec![vec![mask.to_vec()]]).collect();
        mean_loss(method.as_ref(), &trained, &masks)
    }

    /// Returns the mean loss of micro-batches with these outputs and masks.
    fn mean_loss(method: &dyn Method, trained: &[Outputs], masks: &[Vec<ViewMasks>]) -> f64 {
        let comm = Communicator::solo();
        let batch =
            BatchOutputs { trained, others: &[], labels: &[], masks, columns: None, score: &|_, x| x };
        let prepared = method.prepare(&batch, 0, Peers::new(&comm, trained.len())).unwrap();
        let mut sum = 0.0;
        for (index, outputs) in trained.iter().enumerate() {
            sum += f64::from(prepared.micro_batch_loss(index, outputs).loss.into_scalar::<f32>());
        }
        sum / trained.len() as f64
    }

    /// Each pixel that counts has the same weight, however many its image has.
    #[test]
    fn pixels_count_equally_in_all_images() {
        let scores = [[0.0, 1.0], [2.0, 0.0]];
        let losses: Vec<[f64; 2]> = scores
            .iter()
            .map(|scores| {
                let sum: f64 = scores.iter().map(|score| f64::from(*score).exp()).sum();
                scores.map(|score| sum.ln() - f64::from(score))
            })
            .collect();
        let all = loss(&scores, &[[0, 0, 1, 1], [0, 1, 1, 1]]);
        let expected = (2.0 * losses[0][0] + 2.0 * losses[0][1] + losses[1][0] + 3.0 * losses[1][1]) / 8.0;
        assert!((all - expected).abs() < 1e-6, "{all} {expected}");
        let some = loss(&scores, &[[0, 255, 255, 1], [255, 255, 1, 255]]);
        let expected = (losses[0][0] + losses[0][1] + losses[1][1]) / 3.0;
        assert!((some - expected).abs() < 1e-6, "{some} {expected}");
        assert_eq!(loss(&scores, &[[255; 4]; 2]), 0.0, "no pixel counts");
    }

    /// Two views of one cell, of which the first is all sea and the second all land.
    #[test]
    fn each_view_is_compared_with_its_own_mask() {
        let mut views = MultiCrop::single(16);
        views.crops[0].count = 2;
        let method = build(&config(&["sea", "land"]), views).unwrap();
        let trained = [outputs(&[[5.0, -5.0], [-5.0, 5.0]])];
        let mut losses = Vec::new();
        for mask in [[0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]] {
            losses.push(mean_loss(method.as_ref(), &trained, &[vec![vec![mask.to_vec()]]]));
        }
        assert!(losses[0] < 1e-3 && losses[1] > 8.0, "{losses:?}");
    }

    #[test]
    #[should_panic(expected = "masks of every micro-batch")]
    fn a_batch_without_masks_is_never_trained_on() {
        loss(&[[0.0, 1.0]], &[]);
    }

    #[test]
    fn settings_that_cannot_be_run_are_refused_with_their_key() {
        let single = MultiCrop::single(16);
        let names: Vec<String> = (0..256).map(|class| class.to_string()).collect();
        let many = Config { classes: names, ..config(&[]) };
        let steep = Config { head_std: f32::NAN, ..config(&[]) };
        let narrow = Config { decoder_width: 0, ..config(&[]) };
        for (config, views, words) in [
            (config(&["a"]), single.clone(), "method.classes lists one class, a"),
            (config(&["a", "b", "a"]), single.clone(), "method.classes lists a twice"),
            (many, single.clone(), "method.classes lists 256 classes"),
            (steep, single.clone(), "method.head_std is NaN"),
            (narrow, single.clone(), "method.decoder_width is 0 but must lie in 1..=65536"),
            (config(&[]), MultiCrop::dino(16, 8, 2), "views: segmentation takes views of one size"),
        ] {
            let reason = build(&config, views).err().unwrap();
            assert!(reason.contains(words), "{reason}");
        }
        assert!(build(&config(&[]), single).is_ok(), "classes that are not known yet");
    }
}
