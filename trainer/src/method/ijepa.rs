//! I-JEPA: a predictor tells the features of blocks of patches from those of a context around them
//! (Assran et al. 2023).
//!
//! ```text
//! M target blocks and a context of other patches are drawn in each view (networks::mask::TargetMasks)
//! z = context network(patches of the context)          y = target network(all patches)
//! ŷ_p = predictor(z, positions of a block)             p the patches of the block, block by block
//! loss = mean over blocks and patches of smooth_l1(ŷ_p, norm(y_p))      norm without gain and bias
//! after the step: target network ← m · target network + (1 - m) · context network      m linear to 1
//! ```
//!
//! Targets are smoothed by the squared difference below 1, and by the difference above. The target
//! network is evaluated. A backbone without a class token is read as the mean of its patches, as in
//! the paper.

use augment::MultiCrop;
use burn_tensor::Tensor;
use networks::Initialization;
use networks::head::decoder::Decoder;
use networks::head::{Head, Reads};
use networks::mask::{MaskKind, MaskRule, Masking, TargetMasks};
use networks::outputs::Outputs;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::check_decay;
use super::feature_regression::{normalized, smooth_l1};
use super::network::{NetworkSpec, SeenViews, UpdateRule};
use super::{BatchLoss, BatchOutputs, Gauges, Method, MethodContext, MethodRecipe, MicroBatchLoss};
use crate::schedule::Schedule;

/// Name of the trained network.
const CONTEXT: &str = "context";

/// Name of the trained network's moving average.
const TARGET: &str = "target";

/// Name of the trained network's head.
const PREDICTOR: &str = "predictor";

/// Difference of a feature from its target up to which the loss is a square.
const BETA: f64 = 1.0;

/// Settings of I-JEPA, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Channels of the predictor's tokens; 384 by default.
    #[serde(default = "default_predictor_width")]
    pub predictor_width: usize,
    /// Number of the predictor's blocks; 6 by default, 12 for the largest networks.
    #[serde(default = "default_predictor_depth")]
    pub predictor_depth: usize,
    /// Number of the predictor's attention heads, those of the backbone in the paper; 6 by default.
    #[serde(default = "default_predictor_heads")]
    pub predictor_heads: usize,
    /// Standard deviation of the predictor's initial weights, 0.02 by default; see
    /// `model.init_std`.
    #[serde(default = "default_predictor_init_std")]
    pub predictor_init_std: f32,
    /// Number of target blocks; 4 by default.
    #[serde(default = "default_target_blocks")]
    pub target_blocks: usize,
    /// Smallest and largest share of the patches in a target block; 0.15 and 0.2 by default.
    #[serde(default = "default_target_scale")]
    pub target_scale: [f64; 2],
    /// Smallest and largest ratio of a target block's sides; 0.75 and 1.5 by default.
    #[serde(default = "default_target_aspect")]
    pub target_aspect: [f64; 2],
    /// Smallest and largest share of the patches in the context block, before those of targets are
    /// left out; 0.85 and 1 by default.
    #[serde(default = "default_context_scale")]
    pub context_scale: [f64; 2],
    /// Number of patches that a context has more than; 10 by default, for grids of 14 × 14.
    #[serde(default = "default_min_context")]
    pub min_context: usize,
    /// Decay of the target network's moving average at the start and at the end of the run; 0.996
    /// and 1 by default.
    #[serde(default = "default_teacher_decay")]
    pub teacher_decay: [f64; 2],
}

fn default_predictor_width() -> usize {
    384
}

fn default_predictor_depth() -> usize {
    6
}

fn default_predictor_heads() -> usize {
    6
}

fn default_predictor_init_std() -> f32 {
    0.02
}

fn default_target_blocks() -> usize {
    4
}

fn default_target_scale() -> [f64; 2] {
    [0.15, 0.2]
}

fn default_target_aspect() -> [f64; 2] {
    [0.75, 1.5]
}

fn default_context_scale() -> [f64; 2] {
    [0.85, 1.0]
}

fn default_min_context() -> usize {
    10
}

fn default_teacher_decay() -> [f64; 2] {
    [0.996, 1.0]
}

impl Config {
    fn masks(&self) -> TargetMasks {
        TargetMasks {
            n_targets: self.target_blocks,
            target_scale: self.target_scale,
            target_aspect: self.target_aspect,
            context_scale: self.context_scale,
            min_context: self.min_context,
        }
    }

    fn validate(&self, cx: &MethodContext) -> Result<(), String> {
        if self.target_blocks == 0 {
            return Err("method.target_blocks must be at least 1".into());
        }
        for (key, [low, high]) in [("target_scale", self.target_scale), ("context_scale", self.context_scale)]
        {
            if !(low > 0.0 && low <= high && high <= 1.0) {
                return Err(format!("method.{key} [{low}, {high}] must be ascending, above 0 and at most 1"));
            }
        }
        let [low, high] = self.target_aspect;
        if !(low > 0.0 && low <= high && high <= 100.0) {
            return Err(format!(
                "method.target_aspect [{low}, {high}] must be ascending, above 0 and at most 100"
            ));
        }
        if !(0.0..=1.0).contains(&self.predictor_init_std) {
            return Err(format!("method.predictor_init_std {} must lie in 0..=1", self.predictor_init_std));
        }
        check_decay("teacher_decay", self.teacher_decay)?;
        let groups = cx.views.groups();
        let [group] = groups[..] else {
            return Err("views: I-JEPA predicts blocks of views of one size".into());
        };
        let side = group.size_px as usize / cx.model.cell_px();
        let smallest = self.masks().smallest_context([side; 2]);
        if smallest <= self.min_context {
            return Err(format!(
                "method.min_context {} must be below {smallest}, the patches of the smallest context block \
                 on a grid of {side} × {side}",
                self.min_context
            ));
        }
        Ok(())
    }
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "I-JEPA";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        self.validate(cx)?;
        let model = &cx.model;
        let decoder = Decoder {
            name: PREDICTOR,
            input: model.width(),
            width: self.predictor_width,
            depth: self.predictor_depth,
            heads: self.predictor_heads,
            output: model.width(),
            side: model.image_px() / model.cell_px(),
            has_class_token: model.has_class_token(),
            initialization: Initialization::TruncNormal,
            init_std: self.predictor_init_std,
        };
        decoder.validate("method.predictor")?;
        let decay = Schedule::linear(self.teacher_decay[0], self.teacher_decay[1], cx.length.total_steps);
        Ok(Box::new(Ijepa { masks: self.masks(), views: cx.views.clone(), decoder, decay }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let four = Self {
            predictor_width: 8,
            predictor_depth: 1,
            predictor_heads: 2,
            predictor_init_std: 0.2,
            target_blocks: 4,
            target_scale: [0.15, 0.2],
            target_aspect: [0.75, 1.5],
            context_scale: [0.85, 1.0],
            min_context: 2,
            teacher_decay: [0.9, 1.0],
        };
        let one = Self { target_blocks: 1, target_scale: [0.3, 0.5], ..four.clone() };
        let views = MultiCrop::dino(16, 8, 0);
        vec![(four, views.clone()), (one, views)]
    }
}

struct Ijepa {
    masks: TargetMasks,
    views: MultiCrop,
    decoder: Decoder,
    decay: Schedule,
}

impl Method for Ijepa {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn masks(&self) -> Option<MaskRule> {
        Some(MaskRule { size: 0, kind: MaskKind::Targets(self.masks) })
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let head = Head { runs_in_passes: true, ..Head::new(PREDICTOR, Reads::Tokens, self.decoder.units()) };
        let update_rule =
            UpdateRule::Average { source: CONTEXT, decay: self.decay, updates_before_step: false };
        let sees = vec![SeenViews { size: 0, masking: Masking::Dropped }];
        vec![
            NetworkSpec { update_rule, ..NetworkSpec::trained(TARGET, Vec::new(), 1) },
            NetworkSpec { sees, ..NetworkSpec::trained(CONTEXT, vec![head], 1) },
        ]
    }

    fn evaluated(&self) -> &'static str {
        TARGET
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        _: u64,
        _: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let targets = batch.network_outputs(TARGET).iter().map(target_features).collect();
        Ok(Box::new(IjepaLoss { targets }))
    }

    fn scheduled_values(&self, step: u64) -> Gauges {
        vec![("knobs/teacher_decay", self.decay.at(step))]
    }
}

/// Returns the normalized features of the patches of all target blocks, `[R, D]`.
fn target_features(outputs: &Outputs) -> Tensor<2> {
    normalized(outputs.features[0].masked().x)
}

/// I-JEPA's loss of a batch.
struct IjepaLoss {
    /// Features of the patches of target blocks, `[R, D]`, by micro-batch.
    targets: Vec<Tensor<2>>,
}

impl BatchLoss for IjepaLoss {
    fn micro_batch_loss(&self, index: usize, context: &Outputs) -> MicroBatchLoss {
        // Every view has target blocks.
        let predicted = context.heads.on_masked(PREDICTOR, 0).expect("target blocks").squeeze_dim::<2>(1);
        let loss = smooth_l1(predicted, &self.targets[index], BETA);
        MicroBatchLoss { loss, gauges: Vec::new() }
    }
}
