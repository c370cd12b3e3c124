//! Rehearsal of what a run does beside its steps: a run that is given minutes is as long as its
//! steps, its evaluations and the pictures of its report together.

use std::sync::Arc;
use std::time::Instant;

use augment::Transform;
use eval::{EvalError, FeatureKind, ImageSet, Source, features, retrieval};
use kernels::device::Device;
use networks::Network;
use networks::probe::Probe;
use pipeline::{Dataset, NoProgress};
use trainer::run::{RunTimes, probes_left_s};
use trainer::{Plan, TrainError};

use crate::error::SessionError;
use crate::retrieval::Search;

/// Number of images whose features are timed.
const N_TIMED: u64 = 32;

/// Seconds of drawing beside the features of images: views before the first step; attention,
/// neighbors and the page after the last. Not measured: a guess for two cores.
const DRAWING_S: f64 = 2.0;

/// Times of a rehearsal, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rehearsal {
    /// An evaluation by each probe.
    probes_s: Vec<f64>,
    /// Two views of an image, as the search of views needs them; 0 if a run has none.
    searched_image_s: f64,
    /// The features of an image, as the pictures of the report need them; 0 if a run has none.
    pictured_image_s: f64,
    /// Drawing of pictures beside these features.
    drawing_s: f64,
}

impl Rehearsal {
    /// Creates that of a rank on which nothing is timed, with `n_probes` probes.
    pub(crate) fn untimed(n_probes: usize) -> Self {
        Self { probes_s: vec![0.0; n_probes], searched_image_s: 0.0, pictured_image_s: 0.0, drawing_s: 0.0 }
    }

    /// Returns all times as a list, to be sent to other ranks.
    pub(crate) fn to_list(&self) -> Vec<f64> {
        let mut list = vec![self.searched_image_s, self.pictured_image_s, self.drawing_s];
        list.extend(&self.probes_s);
        list
    }

    /// Returns the times of a list of [`Rehearsal::to_list`].
    pub(crate) fn from_list(list: &[f64]) -> Self {
        Self {
            probes_s: list[3..].to_vec(),
            searched_image_s: list[0],
            pictured_image_s: list[1],
            drawing_s: list[2],
        }
    }
}

/// What a run does beside its steps.
pub(crate) struct ExtraWork<'a> {
    /// How long each part takes.
    pub(crate) rehearsal: Rehearsal,
    /// Probes of the run, but for the search of views.
    pub(crate) probes: &'a [Box<dyn Probe>],
    /// Search of views.
    pub(crate) search: Search,
    /// Number of images of the data set.
    pub(crate) n_samples: u64,
    /// Returns the number of images of which the report needs features, given the number of steps
    /// and of images in each.
    pub(crate) n_pictured: fn(u64, usize) -> u64,
}

impl ExtraWork<'_> {
    /// Returns the seconds of everything that the run of `plan` does beside its steps after the
    /// first `done`, whose checkpoints take as long as in `run_times`. How much that is depends on
    /// its length.
    pub(crate) fn seconds(&self, run_times: &RunTimes, plan: &Plan, done: u64) -> f64 {
        let times = &self.rehearsal;
        let mut probes_s = probes_left_s(plan, self.probes, &times.probes_s, done);
        if done == 0 {
            probes_s += times.probes_s.iter().sum::<f64>();
        }
        // What a run watches is scored once more after the last step, by the weights of its result.
        for (probe, probe_s) in self.probes.iter().zip(&times.probes_s) {
            if probe.watched().is_some() {
                probes_s += probe_s;
            }
        }
        let n_searched = self.search.n_images(plan) * self.search.n_evaluations(plan, done);
        let search_s = n_searched as f64 * times.searched_image_s;
        let n_pictured = (self.n_pictured)(plan.total_steps, plan.recipe.optim.batch_size);
        let pictures_s = n_pictured.min(self.n_samples) as f64 * times.pictured_image_s + times.drawing_s;
        probes_s + run_times.best_checkpoints_s(plan, self.probes, done) + search_s + pictures_s
    }
}

/// Evaluates each of `probes` with a random network of `plan`, and times them, with the features of
/// a few images of `dataset` if these are on a disk, and with a search of their views if
/// `is_searched`.
///
/// # Errors
/// [`SessionError::Train`] if a probe fails.
pub(crate) fn rehearse(
    plan: &Plan,
    dataset: &Arc<Dataset>,
    device: &Device,
    probes: &mut [Box<dyn Probe>],
    is_searched: bool,
) -> Result<Rehearsal, SessionError> {
    let recipe = &plan.recipe;
    let mut rehearsal = Rehearsal::untimed(0);
    if probes.is_empty() && !dataset.is_local() {
        return Ok(rehearsal);
    }
    let network = Network::random(&recipe.model, recipe.data.pixels(), recipe.seed, plan.n_workers, device);
    for probe in probes.iter_mut() {
        let start = Instant::now();
        if let Err(reason) = probe.rehearse(&network) {
            let name = probe.name().to_string();
            return Err(SessionError::Train(TrainError::Probe { name, reason }));
        }
        rehearsal.probes_s.push(start.elapsed().as_secs_f64());
    }
    let has_pictures = recipe.evaluated_px().is_multiple_of(recipe.model.stride_px());
    if dataset.is_local() && has_pictures {
        // Nobody has asked for pictures and the search: a failure is reported where they are made.
        match time_images(plan, dataset, &network, is_searched) {
            Ok(times) => {
                rehearsal.pictured_image_s = times.pictured_s;
                rehearsal.searched_image_s = times.searched_s;
                rehearsal.drawing_s = DRAWING_S;
            }
            Err(error) => tracing::debug!("features could not be timed: {error}"),
        }
    }
    Ok(rehearsal)
}

/// Seconds of an image.
struct ImageTimes {
    /// Of its features.
    pictured_s: f64,
    /// Of the search of its two views; 0 without one.
    searched_s: f64,
}

/// Times the features of a few images of `dataset`, and a search of their views if `is_searched`.
fn time_images(
    plan: &Plan,
    dataset: &Arc<Dataset>,
    network: &Network,
    is_searched: bool,
) -> Result<ImageTimes, EvalError> {
    let source = Source::Shards(Arc::clone(dataset));
    let transform = Transform::new(plan.recipe.evaluated_px() as u32);
    let rules = plan.recipe.data.rules();
    let images = ImageSet::open_some(source, transform, rules, "the training set", N_TIMED)?;
    let n_images = images.len().max(1) as f64;
    // The first pass compiles kernels and reads files.
    features(None, network, &images, FeatureKind::LAST_LEVEL, &NoProgress)?;
    let start = Instant::now();
    features(None, network, &images, FeatureKind::LAST_LEVEL, &NoProgress)?;
    let pictured_s = start.elapsed().as_secs_f64() / n_images;
    let mut searched_s = 0.0;
    if is_searched {
        let start = Instant::now();
        retrieval(network, &images, &NoProgress)?;
        searched_s = start.elapsed().as_secs_f64() / n_images;
    }
    Ok(ImageTimes { pictured_s, searched_s })
}

#[cfg(test)]
mod tests {
    use networks::NamedTensor;
    use networks::probe::WatchedScore;
    use trainer::Recipe;

    use super::*;

    /// A probe that follows the recipe.
    struct Scores {
        is_watched: bool,
    }

    impl Probe for Scores {
        fn name(&self) -> &str {
            "scores"
        }

        fn watched(&self) -> Option<WatchedScore> {
            self.is_watched.then(|| WatchedScore { name: "top1".into(), ..WatchedScore::default() })
        }

        fn run(
            &mut self,
            _network: &Network,
            _heads: &[NamedTensor],
            _step: u64,
        ) -> Result<Vec<(String, f64)>, String> {
            Ok(Vec::new())
        }
    }

    /// By hand, of 400 steps of 64 images: probes at the start and after 100, 200, 300 and 400; 512
    /// images searched at the start, after every 50 and with random weights; pictures of one image
    /// for every step. In 399 steps, half as many images are searched.
    #[test]
    fn extra_work_depends_on_the_length_of_the_run() {
        let text = include_str!("../../scripts/recipes/lejepa_cifar.toml");
        let mut plan = trainer::resolve(Recipe::parse(text, "test", &[]).unwrap(), 10_000).unwrap();
        plan.recipe.run.probe_every_steps = 100;
        let probes: Vec<Box<dyn Probe>> = vec![Box::new(Scores { is_watched: false })];
        let extra_work = ExtraWork {
            rehearsal: Rehearsal {
                probes_s: vec![7.0],
                searched_image_s: 0.5,
                pictured_image_s: 0.25,
                drawing_s: 2.0,
            },
            probes: &probes,
            search: Search { recorded: None, is_possible: true, n_samples: 10_000 },
            n_samples: 10_000,
            n_pictured: |n_steps, _| n_steps,
        };
        let times = RunTimes::default();
        plan.total_steps = 400;
        assert_eq!(extra_work.seconds(&times, &plan, 0), 5.0 * 7.0 + 10.0 * 512.0 * 0.5 + 400.0 * 0.25 + 2.0);
        assert_eq!(
            extra_work.seconds(&times, &plan, 200),
            2.0 * 7.0 + 5.0 * 512.0 * 0.5 + 400.0 * 0.25 + 2.0
        );
        plan.total_steps = 399;
        assert_eq!(extra_work.seconds(&times, &plan, 0), 5.0 * 7.0 + 10.0 * 256.0 * 0.5 + 399.0 * 0.25 + 2.0);
        // The number that the run watches is scored once more at its end, also after a resumption.
        let watched: Vec<Box<dyn Probe>> = vec![Box::new(Scores { is_watched: true })];
        let validated = ExtraWork { probes: &watched, rehearsal: extra_work.rehearsal.clone(), ..extra_work };
        let unwatched = ExtraWork { probes: &probes, rehearsal: validated.rehearsal.clone(), ..validated };
        for done in [0, 200, 399] {
            let more_s = validated.seconds(&times, &plan, done) - unwatched.seconds(&times, &plan, done);
            assert_eq!(more_s, 7.0, "after {done} steps");
        }
        let few = ExtraWork { n_samples: 40, ..unwatched };
        assert_eq!(few.seconds(&times, &plan, 399), 256.0 * 0.5 + 40.0 * 0.25 + 2.0);
    }

    #[test]
    fn a_rehearsal_survives_its_way_to_other_ranks() {
        let rehearsal = Rehearsal {
            probes_s: vec![4.0, 5.0],
            searched_image_s: 1.0,
            pictured_image_s: 2.0,
            drawing_s: 3.0,
        };
        assert_eq!(Rehearsal::from_list(&rehearsal.to_list()), rehearsal);
        assert_eq!(Rehearsal::untimed(2).to_list(), [0.0; 5]);
    }
}
