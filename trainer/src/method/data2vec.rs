//! data2vec: a student that sees a masked view predicts, at the masked patches, what the last blocks
//! of its moving average output for the whole view (Baevski et al. 2022).
//!
//! ```text
//! the same number of patches is masked in each view, in blocks
//! a_l = output of block l of teacher(all patches)    h = student(a mask token in place of masked patches)
//! y_p = 1/K Σ_{l > L - K} norm(a_lp)                 ŷ_p = W h_p + b          p the masked patches
//! loss = mean over patches and channels of smooth_l1(ŷ_p - y_p)
//! smooth_l1(d) = d² / 2β for |d| < β, |d| - β / 2 otherwise
//! after the step: teacher ← τ · teacher + (1 - τ) · student        τ linear, then constant
//! ```
//!
//! There are L blocks; norm is over the channels of a token, without gain and bias. The teacher is
//! evaluated.
//!
//! Where blocks leave room for fewer patches than the share to be masked, single patches are added,
//! as in DINOv3.

use augment::MultiCrop;
use burn_tensor::Tensor;
use kernels::ops::{add_term, total};
use networks::head::projection::{Normalizes, Projection};
use networks::head::{Head, Reads};
use networks::mask::{BlockMasks, MaskKind, MaskRule, Masking, SmallestBlock, Spread};
use networks::outputs::Outputs;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::{check_decay, check_positive};
use super::feature_regression::{normalized, smooth_l1};
use super::network::{NetworkSpec, SeenViews, UpdateRule};
use super::{BatchLoss, BatchOutputs, Gauges, Method, MethodContext, MethodRecipe, MicroBatchLoss};
use crate::schedule::{Duration, Schedule};

/// Name of the trained network.
const STUDENT: &str = "student";

/// Name of the trained network's moving average.
const TEACHER: &str = "teacher";

/// Name of the trained network's head.
const REGRESSION: &str = "regression";

/// Settings of data2vec, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Number of the teacher's last blocks whose outputs are averaged into targets, K; 6 by
    /// default. All of them if there are fewer.
    #[serde(default = "default_averaged_blocks")]
    pub averaged_blocks: usize,
    /// Difference of a prediction from its target up to which the loss is a square, β; 2 by
    /// default.
    #[serde(default = "default_beta")]
    pub beta: f64,
    /// Share of a view's patches that is masked, in blocks; 0.6 by default.
    #[serde(default = "default_mask_ratio")]
    pub mask_ratio: f64,
    /// Number of patches of the smallest masked block; 16 by default, for grids of 14 × 14.
    #[serde(default = "default_smallest_block")]
    pub smallest_block: usize,
    /// Decay of the teacher's moving average, τ, at the start and after its ramp; 0.9998 for both
    /// by default.
    #[serde(default = "default_teacher_decay")]
    pub teacher_decay: [f64; 2],
    /// Length of time over which the decay of the teacher changes, linearly; the whole run by
    /// default.
    #[serde(default = "default_teacher_decay_ramp")]
    pub teacher_decay_ramp: Duration,
}

fn default_averaged_blocks() -> usize {
    6
}

fn default_beta() -> f64 {
    2.0
}

fn default_mask_ratio() -> f64 {
    0.6
}

fn default_smallest_block() -> usize {
    16
}

fn default_teacher_decay() -> [f64; 2] {
    [0.9998, 0.9998]
}

fn default_teacher_decay_ramp() -> Duration {
    Duration::Percent(100.0)
}

impl Config {
    /// Returns the rule for masks: exactly the same number of patches in every view.
    fn masks(&self) -> MaskRule {
        let kind = MaskKind::Blocks(BlockMasks {
            masked_share: 1.0,
            ratio: [self.mask_ratio; 2],
            spread: Spread::Exact,
            group: 0,
            smallest_block: SmallestBlock::Cells(self.smallest_block),
        });
        MaskRule { size: 0, kind }
    }

    fn validate(&self, cx: &MethodContext) -> Result<(), String> {
        if self.averaged_blocks == 0 || self.smallest_block == 0 {
            return Err("method.averaged_blocks and method.smallest_block must be at least 1".into());
        }
        check_positive("beta", self.beta, 1e6)?;
        if !(self.mask_ratio > 0.0 && self.mask_ratio < 1.0) {
            return Err(format!("method.mask_ratio {} must be above 0 and below 1", self.mask_ratio));
        }
        check_decay("teacher_decay", self.teacher_decay)?;
        let groups = cx.views.groups();
        let [group] = groups[..] else {
            return Err("views: data2vec masks views of one size".into());
        };
        let side = group.size_px as usize / cx.model.cell_px();
        let n_patches = side * side;
        if n_patches as f64 * self.mask_ratio < 1.0 {
            return Err(format!(
                "method.mask_ratio {} masks none of the {n_patches} patches of a view",
                self.mask_ratio
            ));
        }
        Ok(())
    }
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "data2vec";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        self.validate(cx)?;
        let ramp_steps = cx.length.steps("method.teacher_decay_ramp", &self.teacher_decay_ramp)?;
        let [start, end] = self.teacher_decay;
        // A ramp without steps is over before the first one.
        let start = if ramp_steps == 0 { end } else { start };
        let decay = Schedule::linear(start, end, ramp_steps);
        let config = self.clone();
        let views = cx.views.clone();
        let width = cx.model.width();
        Ok(Box::new(Data2vec { config, views, width, decay }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let two_blocks = Self {
            averaged_blocks: 2,
            beta: 0.5,
            mask_ratio: 0.6,
            smallest_block: 2,
            teacher_decay: [0.9, 0.99],
            teacher_decay_ramp: Duration::Steps(6),
        };
        let all_blocks = Self {
            averaged_blocks: 100,
            beta: 2.0,
            mask_ratio: 0.3,
            smallest_block: 4,
            teacher_decay_ramp: Duration::Percent(0.0),
            ..two_blocks.clone()
        };
        let views = MultiCrop::dino(16, 8, 0);
        vec![(two_blocks, views.clone()), (all_blocks, views)]
    }
}

struct Data2vec {
    config: Config,
    views: MultiCrop,
    /// Channels of the backbone's features, and of targets.
    width: usize,
    decay: Schedule,
}

impl Data2vec {
    /// Returns the head that predicts targets: a linear layer.
    fn head(&self) -> Head {
        let unit = Projection {
            name: format!("{REGRESSION}.linear"),
            widths: vec![self.width, self.width],
            normalizes: Normalizes::Nothing,
            has_biases: true,
        };
        Head::new(REGRESSION, Reads::Masked, vec![Box::new(unit)])
    }
}

impl Method for Data2vec {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn masks(&self) -> Option<MaskRule> {
        Some(self.config.masks())
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let update_rule =
            UpdateRule::Average { source: STUDENT, decay: self.decay, updates_before_step: false };
        let n_levels = self.config.averaged_blocks;
        let sees = vec![SeenViews { size: 0, masking: Masking::Replaced }];
        // The teacher sees all patches, but has the parameters of the student.
        let teacher = NetworkSpec { takes_masks: true, ..NetworkSpec::trained(TEACHER, Vec::new(), 1) };
        let student =
            NetworkSpec { takes_masks: true, ..NetworkSpec::trained(STUDENT, vec![self.head()], 1) };
        vec![NetworkSpec { update_rule, n_levels, ..teacher }, NetworkSpec { sees, ..student }]
    }

    fn evaluated(&self) -> &'static str {
        TEACHER
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        _: u64,
        _: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let targets = batch.network_outputs(TEACHER).iter().map(target_features).collect();
        Ok(Box::new(Data2vecLoss { targets, beta: self.config.beta }))
    }

    fn scheduled_values(&self, step: u64) -> Gauges {
        vec![("knobs/teacher_decay", self.decay.at(step))]
    }
}

/// Returns the mean over levels of the normalized tokens of the masked patches, `[R, D]`; `None` if
/// no patch is masked.
fn target_features(outputs: &Outputs) -> Option<Tensor<2>> {
    if outputs.heads.masked(0).n() == 0 {
        return None;
    }
    let mut sum: Option<Tensor<2>> = None;
    for level in &outputs.levels {
        let x = normalized(level[0].masked().x);
        sum = Some(add_term(sum, x));
    }
    // The number of blocks is at least one.
    Some(sum.expect("a level of the teacher") / outputs.levels.len() as f64)
}

/// data2vec's loss of a batch.
struct Data2vecLoss {
    /// Targets of the masked patches, `[R, D]`, by micro-batch; `None` for one without masked
    /// patches.
    targets: Vec<Option<Tensor<2>>>,
    beta: f64,
}

impl BatchLoss for Data2vecLoss {
    fn micro_batch_loss(&self, index: usize, student: &Outputs) -> MicroBatchLoss {
        let predicted = student.heads.on_masked(REGRESSION, 0);
        let loss = match predicted.zip(self.targets[index].as_ref()) {
            // All views have the same number of masked patches, and so have the micro-batches.
            Some((predicted, targets)) => smooth_l1(predicted.squeeze_dim::<2>(1), targets, self.beta),
            // In a batch of views that are smaller than the first ones, that may be none.
            None => total(student.features[0].x.clone()) * 0.0,
        };
        MicroBatchLoss { loss, gauges: Vec::new() }
    }
}
