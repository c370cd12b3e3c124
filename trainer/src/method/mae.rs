//! MAE: a masked autoencoder, whose encoder sees some patches, and whose decoder predicts the pixels
//! of the others (He et al. 2022).
//!
//! ```text
//! a share of each view's patches is masked at random; the encoder gets only the others
//! ŷ_p = decoder(encoder(visible patches), positions of all)         p the masked patches
//! loss = mean_p mean (ŷ_p - y_p)²      y_p the pixels of a patch, with mean 0 and variance 1 in each patch
//! ```
//!
//! There is no teacher. Only the encoder is evaluated and exported.

use augment::MultiCrop;
use burn_tensor::Tensor;
use networks::Initialization;
use networks::head::decoder::Decoder;
use networks::head::{Head, Reads};
use networks::mask::{MaskKind, MaskRule, Masking, RandomMasks};
use networks::outputs::Outputs;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::network::{NetworkSpec, SeenViews};
use super::{BatchLoss, BatchOutputs, Method, MethodContext, MethodRecipe, MicroBatchLoss};

/// Name of the network.
const ENCODER: &str = "encoder";

/// Name of the head.
const DECODER: &str = "decoder";

/// Number that is added to the variance of a patch.
const EPSILON: f64 = 1e-6;

/// Settings of MAE, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Share of a view's patches that is masked; 0.75 by default.
    #[serde(default = "default_mask_ratio")]
    pub mask_ratio: f64,
    /// Channels of the decoder's tokens; 512 by default.
    #[serde(default = "default_decoder_width")]
    pub decoder_width: usize,
    /// Number of the decoder's blocks; 8 by default.
    #[serde(default = "default_decoder_depth")]
    pub decoder_depth: usize,
    /// Number of the decoder's attention heads; 16 by default.
    #[serde(default = "default_decoder_heads")]
    pub decoder_heads: usize,
    /// Whether the pixels that are predicted have mean 0 and variance 1 in each patch; true by
    /// default.
    #[serde(default = "default_normalize_pixels")]
    pub normalize_pixels: bool,
}

fn default_mask_ratio() -> f64 {
    0.75
}

fn default_decoder_width() -> usize {
    512
}

fn default_decoder_depth() -> usize {
    8
}

fn default_decoder_heads() -> usize {
    16
}

fn default_normalize_pixels() -> bool {
    true
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "MAE";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        if !(self.mask_ratio > 0.0 && self.mask_ratio < 1.0) {
            return Err(format!("method.mask_ratio {} must be above 0 and below 1", self.mask_ratio));
        }
        if cx.views.groups().len() != 1 {
            return Err("views: MAE predicts the pixels of views of one size".into());
        }
        let model = &cx.model;
        let cell_px = model.cell_px();
        let decoder = Decoder {
            name: DECODER,
            input: model.width(),
            width: self.decoder_width,
            depth: self.decoder_depth,
            heads: self.decoder_heads,
            output: model.n_channels() * cell_px * cell_px,
            side: model.image_px() / cell_px,
            has_class_token: model.has_class_token(),
            initialization: Initialization::Xavier,
            init_std: 0.02,
        };
        decoder.validate("method.decoder")?;
        Ok(Box::new(Mae { config: self.clone(), views: cx.views.clone(), decoder }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let normalized = Self {
            mask_ratio: 0.75,
            decoder_width: 8,
            decoder_depth: 1,
            decoder_heads: 2,
            normalize_pixels: true,
        };
        let plain = Self { mask_ratio: 0.5, normalize_pixels: false, ..normalized.clone() };
        let views = MultiCrop::dino(16, 8, 0);
        vec![(normalized, views.clone()), (plain, views)]
    }
}

struct Mae {
    config: Config,
    views: MultiCrop,
    decoder: Decoder,
}

impl Method for Mae {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn masks(&self) -> Option<MaskRule> {
        Some(MaskRule { size: 0, kind: MaskKind::Random(RandomMasks { ratio: self.config.mask_ratio }) })
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let head = Head { runs_in_passes: true, ..Head::new(DECODER, Reads::Tokens, self.decoder.units()) };
        let sees = vec![SeenViews { size: 0, masking: Masking::Dropped }];
        vec![NetworkSpec { sees, ..NetworkSpec::trained(ENCODER, vec![head], 1) }]
    }

    fn evaluated(&self) -> &'static str {
        ENCODER
    }

    fn reads_pixels(&self) -> bool {
        true
    }

    fn prepare(&self, _: &BatchOutputs<'_>, _: u64, _: Peers<'_>) -> Result<Box<dyn BatchLoss>, EngineError> {
        Ok(Box::new(MaeLoss { normalizes: self.config.normalize_pixels }))
    }
}

/// MAE's loss of a batch.
struct MaeLoss {
    /// Whether the pixels of each patch are normalized.
    normalizes: bool,
}

impl MaeLoss {
    /// Returns the pixels of the masked patches, `[R, C·p·p]`.
    fn targets(&self, encoder: &Outputs) -> Tensor<2> {
        let pixels = encoder.pixels[0].masked().x;
        if !self.normalizes {
            return pixels;
        }
        let [_, n] = pixels.dims();
        let centered = pixels.clone() - pixels.mean_dim(1);
        // The unbiased variance, as in the official code.
        let variance = (centered.clone() * centered.clone()).sum_dim(1) / (n as f64 - 1.0).max(1.0);
        centered / (variance + EPSILON).sqrt()
    }
}

impl BatchLoss for MaeLoss {
    fn micro_batch_loss(&self, _: usize, encoder: &Outputs) -> MicroBatchLoss {
        // Every view has masked patches.
        let predicted = encoder.heads.on_masked(DECODER, 0).expect("masked patches").squeeze_dim::<2>(1);
        let difference = predicted - self.targets(encoder).autodiff();
        MicroBatchLoss { loss: (difference.clone() * difference).mean(), gauges: Vec::new() }
    }
}
