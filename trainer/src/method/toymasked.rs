//! A method for tests with masked views: the trained network predicts what another network outputs
//! for hidden patches.
//!
//! ```text
//! c, t = cells(learner(masked x)), cells(average(x))         at the masked cells, [R, K]      g = guess(c)
//! s, u = scores(learner(masked x)), scores(average(x))       pooled, [B, V, K]
//! loss = 1/(B V) Σ_views mean_{masked cells of the view} (g - t)²  +  mean (s - u)²
//! ```

use augment::MultiCrop;
use burn_tensor::Tensor;
use networks::features::Outputs;
use networks::head::mlp::Mlp;
use networks::head::{Head, Reads};
use networks::mask::{MaskRule, Spread};
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::network::{NetworkSpec, SeenViews, UpdateRule};
use super::{BatchLoss, BatchOutputs, Method, MethodContext, MethodRecipe, MicroBatchLoss};
use crate::schedule::Schedule;

/// Settings of the toy method.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Channels of both heads, K.
    pub scores: usize,
    /// Share of the views that are masked.
    pub masked_share: f64,
}

impl MethodRecipe for Config {
    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        let rule = MaskRule {
            size: 0,
            masked_share: self.masked_share,
            ratio: [0.2, 0.6],
            spread: Spread::Exact,
            group: 0,
            smallest_block: networks::mask::SmallestBlock::Cells(4),
        };
        rule.validate()?;
        let views = cx.views.clone();
        let width = cx.model.width();
        let decay = Schedule::cosine(0.9, 1.0, cx.length.total_steps);
        Ok(Box::new(Toy { k: self.scores, rule, views, width, decay }))
    }

    fn examples() -> Vec<(Self, MultiCrop)> {
        // With few masked views, some micro-batches have none.
        let views = MultiCrop::dino(16, 8, 2);
        let few = Self { scores: 4, masked_share: 0.1 };
        vec![(Self { scores: 4, masked_share: 0.6 }, views.clone()), (few, views)]
    }
}

struct Toy {
    k: usize,
    rule: MaskRule,
    views: MultiCrop,
    width: usize,
    decay: Schedule,
}

struct ToyLoss {
    /// Outputs of the average, by micro-batch.
    targets: Vec<Outputs>,
}

impl Method for Toy {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn masks(&self) -> Option<MaskRule> {
        Some(self.rule)
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let head = |name: &'static str, reads, input| {
            let mlp = Mlp { name: format!("{name}.mlp"), input, hidden: 7, output: self.k, init_std: 0.5 };
            Head::new(name, reads, vec![Box::new(mlp)])
        };
        let both =
            || vec![head("scores", Reads::Pooled, self.width), head("cells", Reads::Masked, self.width)];
        let guess = head("guess", Reads::Head("cells"), self.k);
        let update_rule =
            UpdateRule::Average { source: "learner", decay: self.decay, updates_before_step: false };
        let masked = |name, heads, n_sizes| NetworkSpec {
            takes_masks: true,
            ..NetworkSpec::trained(name, heads, n_sizes)
        };
        let sees = vec![SeenViews { size: 0, masked: true }, SeenViews { size: 1, masked: false }];
        vec![
            NetworkSpec { update_rule, ..masked("average", both(), 1) },
            NetworkSpec {
                sees,
                ..masked("learner", [both(), vec![guess]].into_iter().flatten().collect(), 2)
            },
        ]
    }

    fn evaluated(&self) -> &'static str {
        "average"
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        _: u64,
        _: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        Ok(Box::new(ToyLoss { targets: batch.network_outputs("average").to_vec() }))
    }
}

impl BatchLoss for ToyLoss {
    fn micro_batch_loss(&self, number: usize, learner: &Outputs) -> MicroBatchLoss {
        let target = &self.targets[number];
        let rows = learner.heads.masked(0);
        assert_eq!(rows, target.heads.masked(0), "both networks have the same masks");
        let on_masked = learner.heads.on_masked("guess", 0).zip(target.heads.on_masked("cells", 0));
        let hidden = on_masked.map(|(given, wanted)| {
            let [r, _, k] = given.dims();
            let off = (given - wanted.autodiff()).powi_scalar(2).reshape([r, k]).mean_dim(1);
            let weights =
                Tensor::<1>::from_floats(&rows.weights()[..], &off.device().inner()).reshape([r, 1]);
            (off * weights.autodiff()).sum() / rows.cells.len() as f64
        });
        let pooled = |outputs: &Outputs| outputs.heads.on_views("scores", 0);
        let seen = (pooled(learner) - pooled(target).autodiff()).powi_scalar(2).mean();
        // The smaller views have no target but must have a gradient.
        let small = learner.heads.on_views("scores", 1).powi_scalar(2).mean();
        let gauge = hidden.clone().map_or_else(|| small.clone().inner().zeros_like(), Tensor::inner);
        let loss = hidden.into_iter().fold(seen + small, |loss, hidden| loss + hidden);
        MicroBatchLoss { loss, gauges: vec![("train/hidden", gauge)] }
    }
}
