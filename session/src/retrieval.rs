//! Probe of the retrieval of views, which every run has that is long enough: whether it learns can
//! be seen without labels.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use augment::Transform;
use eval::row::{EVALUATIONS, EvaluationRow, ImageSetInfo, Number, append};
use eval::scores::number_row;
use eval::{ImageSet, RANDOM_NETWORK, RETRIEVAL, Retrieval, Source, retrieval};
use networks::probe::Probe;
use networks::{NamedTensor, Network};
use pipeline::{Dataset, Progress};
use trainer::Plan;

use crate::error::SessionError;
use crate::evaluated_network::Origin;
use crate::head::trained_head;

/// Number of evaluations in a run.
const EVALUATIONS_PER_RUN: u64 = 8;

/// Number of training images for one image that is searched. Ten evaluations of two views each are
/// then 20 forward passes for 50 images, each of which takes two views or more forward and
/// backward, and often through a teacher: 3 to 7 % of a run's work.
const TRAINED_PER_IMAGE: u64 = 50;

/// Fewest images whose number says something.
const LEAST_IMAGES: u64 = 32;

/// Most parameters of a backbone that is gathered by one process for this probe.
const MOST_PARAMETERS: usize = 500_000_000;

/// A search of views among images of a run: the network under training, beside one with random
/// weights.
pub struct RetrievalProbe {
    images: ImageSet,
    workdir: PathBuf,
    plan: Plan,
    /// Percent that random weights find, once it is recorded.
    random_percent: Option<f64>,
    /// Creates the receiver of the progress of an evaluation after a number of steps.
    new_progress: fn(u64) -> Box<dyn Progress>,
}

impl RetrievalProbe {
    /// Creates the probe of the run of `plan`, whose length is final, in `workdir`, on images of
    /// `dataset`, spread evenly: `run.retrieval_images` of them, or fewer in a short run. `None` if
    /// too few images would be left, for images that would have to be fetched, for a backbone that
    /// one process should not gather, and for a run that learns from labels or masks, which is to
    /// ignore differences between images of a class. All ranks create it.
    ///
    /// # Errors
    /// [`SessionError::Eval`] if a shard cannot be read.
    pub fn for_run(
        plan: &Plan,
        dataset: &Arc<Dataset>,
        workdir: &Path,
        new_progress: fn(u64) -> Box<dyn Progress>,
    ) -> Result<Option<Self>, SessionError> {
        let search = Search::new(plan, dataset, workdir);
        let n_images = search.n_images(plan);
        if n_images == 0 {
            return Ok(None);
        }
        let source = Source::Shards(Arc::clone(dataset));
        let transform = Transform::new(plan.recipe.evaluated_px() as u32);
        let images =
            ImageSet::open_some(source, transform, plan.recipe.data.rules(), "the training set", n_images)?;
        Ok(Some(Self {
            images,
            workdir: workdir.to_path_buf(),
            plan: plan.clone(),
            random_percent: search.recorded.map(|recorded| recorded.random_percent),
            new_progress,
        }))
    }

    /// Returns the number of views that are searched.
    pub fn n_views(&self) -> usize {
        2 * self.images.len()
    }

    /// Returns the percent that random weights find. If no start of the run has recorded it, it is
    /// measured and recorded now.
    fn random_percent(&mut self, network: &Network, step: u64) -> Result<f64, SessionError> {
        if let Some(percent) = self.random_percent {
            return Ok(percent);
        }
        let random = network.with_random_weights(0);
        let found = self.measure(&random, step)?;
        self.record(&random, RANDOM_NETWORK, 0, found)?;
        self.random_percent = Some(found.percent);
        Ok(found.percent)
    }

    fn measure(&self, network: &Network, step: u64) -> Result<Retrieval, SessionError> {
        let progress = (self.new_progress)(step);
        Ok(retrieval(network, &self.images, &*progress)?)
    }

    /// Adds `found` to the evaluations of the run, as a number of the network `name` after `step`
    /// steps.
    fn record(&self, network: &Network, name: &str, step: u64, found: Retrieval) -> Result<(), SessionError> {
        let origin = Origin {
            network_name: name,
            step: Some(step),
            recipe: Some(&self.plan.recipe.name),
            transform: self.images.transform,
            checkpoint: None,
        };
        let test = ImageSetInfo { set: self.images.name.clone(), images: Some(self.images.len()) };
        let number = Number::new("found", found.percent);
        let row = EvaluationRow {
            protocol_in_words: Some("views whose nearest other view is of the same image".into()),
            ..number_row(RETRIEVAL, number, test, origin.describe(network)?)
        };
        if let Err(error) = append(&self.workdir, &[row]) {
            tracing::warn!("could not record the retrieval of step {step}: {error}");
        }
        Ok(())
    }

    fn evaluate(&mut self, network: &Network, step: u64) -> Result<Vec<(String, f64)>, SessionError> {
        let random_percent = self.random_percent(network, step)?;
        let found = self.measure(network, step)?;
        self.record(network, self.plan.evaluated()?, step, found)?;
        Ok(vec![(RETRIEVAL.into(), found.percent), ("random_weights".into(), random_percent)])
    }
}

impl Probe for RetrievalProbe {
    fn name(&self) -> &str {
        "views"
    }

    fn interval(&self, _every_steps: u64, total_steps: u64) -> u64 {
        interval(total_steps)
    }

    /// Searches the views. Nobody has asked for it: a failure is reported, and the run continues.
    fn run(
        &mut self,
        network: &Network,
        _heads: &[NamedTensor],
        step: u64,
    ) -> Result<Vec<(String, f64)>, String> {
        match self.evaluate(network, step) {
            Ok(numbers) => Ok(numbers),
            Err(error) => {
                tracing::warn!("step {step}: the views could not be searched: {error}");
                Ok(Vec::new())
            }
        }
    }
}

/// Search of views that a run has, before its length is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Search {
    /// What an earlier start of the run has recorded.
    pub(crate) recorded: Option<Recorded>,
    /// Whether the images and the network of the run can be searched.
    pub(crate) is_possible: bool,
    /// Number of images of the data set.
    pub(crate) n_samples: u64,
}

impl Search {
    /// Describes the search of the run of `plan`, of any length, in `workdir`, on `dataset`.
    pub(crate) fn new(plan: &Plan, dataset: &Dataset, workdir: &Path) -> Self {
        let recipe = &plan.recipe;
        let is_possible = trained_head(recipe).is_none()
            && recipe.evaluated_px().is_multiple_of(recipe.model.stride_px())
            && dataset.is_local()
            && recipe.model.n_params() <= MOST_PARAMETERS;
        Self { recorded: recorded(workdir), is_possible, n_samples: dataset.n_samples() }
    }

    /// Returns the number of images that are searched in a run of the length of `plan`; 0 for none.
    pub(crate) fn n_images(&self, plan: &Plan) -> u64 {
        if !self.is_possible {
            return 0;
        }
        match &self.recorded {
            // A run that became longer asks the same question of the same images.
            Some(recorded) if plan.recipe.run.retrieval_images > 0 => recorded.n_images,
            _ => n_images(plan, self.n_samples),
        }
    }

    /// Returns how often they are searched in a run of the length of `plan` after its first `done`
    /// steps, by the network and by random weights.
    pub(crate) fn n_evaluations(&self, plan: &Plan, done: u64) -> u64 {
        let is_random_due = self.recorded.is_none();
        let is_start = done == 0;
        plan.n_due(interval(plan.total_steps), done) + u64::from(is_start) + u64::from(is_random_due)
    }
}

/// Returns the number of steps between two evaluations of a run of `total_steps`.
fn interval(total_steps: u64) -> u64 {
    total_steps.div_ceil(EVALUATIONS_PER_RUN)
}

/// What an earlier start of a run has recorded of random weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Recorded {
    n_images: u64,
    random_percent: f64,
}

/// Reads what the run in `workdir` has recorded of random weights; `None` if it has not.
fn recorded(workdir: &Path) -> Option<Recorded> {
    let text = fs::read_to_string(workdir.join(EVALUATIONS)).ok()?;
    for line in text.lines() {
        let Ok(row) = serde_json::from_str::<EvaluationRow>(line) else { continue };
        if row.metric == RETRIEVAL && row.about.network == RANDOM_NETWORK {
            let n_images = row.test.images? as u64;
            return Some(Recorded { n_images, random_percent: row.number.value()? });
        }
    }
    None
}

/// Returns the number of images that are searched in a run of `plan` on `n_samples` images; 0 for
/// none. It is a power of two unless the recipe says less, so that runs of about the same length
/// search equally many and can be compared.
fn n_images(plan: &Plan, n_samples: u64) -> u64 {
    let n_trained = plan.total_steps.saturating_mul(plan.recipe.optim.batch_size as u64);
    let affordable = n_trained / TRAINED_PER_IMAGE;
    let n_images = affordable.min(n_samples);
    if n_images < LEAST_IMAGES {
        return 0;
    }
    let rounded = 1 << n_images.ilog2();
    rounded.min(plan.recipe.run.retrieval_images as u64)
}

#[cfg(test)]
mod tests {
    use trainer::Recipe;

    use super::*;

    /// Returns a plan of `total_steps` steps of 64 images.
    fn plan(total_steps: u64) -> Plan {
        let text = include_str!("../../scripts/recipes/lejepa_cifar.toml");
        let mut plan = trainer::resolve(Recipe::parse(text, "test", &[]).unwrap(), 10_000).unwrap();
        plan.total_steps = total_steps;
        plan
    }

    /// Images of a step are 64, and of every 50 that are trained on one is searched.
    #[test]
    fn longer_runs_search_more_images() {
        let search = Search { recorded: None, is_possible: true, n_samples: 10_000 };
        for (steps, n_images) in [(24, 0), (25, 32), (49, 32), (50, 64), (399, 256), (400, 512), (9999, 512)]
        {
            assert_eq!(search.n_images(&plan(steps)), n_images, "{steps}");
        }
        assert_eq!(Search { n_samples: 100, ..search }.n_images(&plan(400)), 64);
        assert_eq!(Search { is_possible: false, ..search }.n_images(&plan(400)), 0);
        let recorded = Some(Recorded { n_images: 128, random_percent: 1.0 });
        assert_eq!(Search { recorded, ..search }.n_images(&plan(400)), 128, "as before it became longer");
    }

    /// By hand: 80 steps are evaluated at the start, after 10, 20, 30 and so on, and once with
    /// random weights.
    #[test]
    fn evaluations_are_counted() {
        let search = Search { recorded: None, is_possible: true, n_samples: 10_000 };
        assert_eq!(search.n_evaluations(&plan(80), 0), 10);
        assert_eq!(search.n_evaluations(&plan(80), 30), 6, "a fork");
        let recorded = Some(Recorded { n_images: 128, random_percent: 1.0 });
        assert_eq!(Search { recorded, ..search }.n_evaluations(&plan(80), 30), 5);
    }
}
