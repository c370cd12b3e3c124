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
use networks::head::mlp::Mlp;
use networks::head::{Head, Reads};
use networks::mask::{BlockMasks, MaskKind, MaskRule, Masking, SmallestBlock, Spread};
use networks::outputs::Outputs;
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
    const TITLE: &'static str = "masked toy";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        let kind = MaskKind::Blocks(BlockMasks {
            masked_share: self.masked_share,
            ratio: [0.2, 0.6],
            spread: Spread::Exact,
            group: 0,
            smallest_block: SmallestBlock::Cells(4),
        });
        let rule = MaskRule { size: 0, kind };
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

impl Toy {
    fn head(&self, name: &'static str, reads: Reads, input: usize) -> Head {
        let mlp = Mlp { name: format!("{name}.mlp"), input, hidden: 7, output: self.k, init_std: 0.5 };
        Head::new(name, reads, vec![Box::new(mlp)])
    }

    /// Returns the heads of both networks.
    fn shared_heads(&self) -> Vec<Head> {
        vec![self.head("scores", Reads::Pooled, self.width), self.head("cells", Reads::Masked, self.width)]
    }
}

impl Method for Toy {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn masks(&self) -> Option<MaskRule> {
        Some(self.rule)
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let mut learner_heads = self.shared_heads();
        learner_heads.push(self.head("guess", Reads::Head("cells"), self.k));
        let update_rule =
            UpdateRule::Average { source: "learner", decay: self.decay, updates_before_step: false };
        let sees = vec![
            SeenViews { size: 0, masking: Masking::Replaced },
            SeenViews { size: 1, masking: Masking::Shown },
        ];
        vec![
            NetworkSpec {
                update_rule,
                takes_masks: true,
                ..NetworkSpec::trained("average", self.shared_heads(), 1)
            },
            NetworkSpec { sees, takes_masks: true, ..NetworkSpec::trained("learner", learner_heads, 2) },
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
    fn micro_batch_loss(&self, index: usize, learner: &Outputs) -> MicroBatchLoss {
        let target = &self.targets[index];
        let rows = learner.heads.masked(0);
        assert_eq!(rows, target.heads.masked(0), "both networks have the same masks");
        let on_masked = learner.heads.on_masked("guess", 0).zip(target.heads.on_masked("cells", 0));
        let masked_loss = on_masked.map(|(guesses, targets)| {
            let [r, _, k] = guesses.dims();
            let errors = (guesses - targets.autodiff()).powi_scalar(2).reshape([r, k]).mean_dim(1);
            let weights =
                Tensor::<1>::from_floats(&rows.weights()[..], &errors.device().inner()).reshape([r, 1]);
            (errors * weights.autodiff()).sum() / rows.cells.len() as f64
        });
        let scores = learner.heads.on_views("scores", 0);
        let target_scores = target.heads.on_views("scores", 0).autodiff();
        let view_loss = (scores - target_scores).powi_scalar(2).mean();
        // The smaller views have no target but must have a gradient.
        let small_view_loss = learner.heads.on_views("scores", 1).powi_scalar(2).mean();
        let gauge = match &masked_loss {
            Some(masked_loss) => masked_loss.clone().inner(),
            None => small_view_loss.clone().inner().zeros_like(),
        };
        let mut loss = view_loss + small_view_loss;
        if let Some(masked_loss) = masked_loss {
            loss = loss + masked_loss;
        }
        MicroBatchLoss { loss, gauges: vec![("train/hidden", gauge)] }
    }
}
