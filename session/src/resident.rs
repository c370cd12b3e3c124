//! Memory of a process that trains on the CPU: what it needs beside what a plan counts, which is
//! the state and the activations of steps.
//!
//! ```text
//! held        the program, its libraries, opened images and initial weights, as measured
//! step        the peak of a step while a checkpoint is written, by the plan
//! evaluation  where it exceeds the passes of a step, whose memory is free between steps: the network, a batch of
//!             64 images at most, and the features of the images of a probe
//! unused      memory that the allocator keeps for blocks of other sizes, a share of step and evaluation
//! workers     what the allocator and products keep for each thread that computes
//! data        views of the batch in use and of those ahead of it, and images that are being decoded
//! ```

use augment::MultiCrop;
use pipeline::{Dataset, LoaderConfig};
use trainer::Plan;
use trainer::cost::{ModelCost, UnitCost};
use trainer::estimate::{Memory, Placement, memory};

use crate::machine;

/// Memory that mimalloc keeps beside what is in use, as a share of that: a run of `dinov2_continue`
/// with a ViT-S/14, 64 images a step and two workers held 21.6 GB, where a step and a checkpoint
/// take 17.6. Both constants are set so that this and five recipes are within about 10 %, as
/// `scripts/bench/resident.py` measures them.
const UNUSED_SHARE: f64 = 0.33;

/// Bytes that are kept for each thread that computes: `lejepa_cifar` and `dino_cifar` held 18 to 27
/// MB more for each of two to eight.
const WORKER_BYTES: f64 = 22e6;

/// Bytes of a decoded photograph and of its decoder, as a multiple of its bytes in a file: a JPEG
/// has about a tenth of the bytes of its pixels.
const DECODED_RATIO: f64 = 20.0;

/// Number of images whose mean size is taken for that of all.
const SAMPLED_IMAGES: u64 = 256;

/// Bytes of an f32.
const F32: f64 = 4.0;

/// Memory of a process at its peak, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Resident {
    /// Memory that the process has held before the run.
    pub held_bytes: f64,
    /// Peak of a step during which a checkpoint is written.
    pub step_bytes: f64,
    /// Memory of an evaluation that is not that of a step's passes.
    pub evaluation_bytes: f64,
    /// Memory that the allocator keeps unused.
    pub unused_bytes: f64,
    /// Memory that is kept for each thread that computes.
    pub worker_bytes: f64,
    /// Views, and images that are being decoded.
    pub data_bytes: f64,
}

impl Resident {
    /// Returns the sum of all parts.
    pub fn bytes(&self) -> f64 {
        let beside = self.unused_bytes + self.worker_bytes + self.data_bytes;
        self.held_bytes + self.step_bytes + self.evaluation_bytes + beside
    }
}

/// Estimates the memory of this process if it runs `plan`, whose model costs `model`, on the CPU
/// with `placement`, and probes the features of `n_probed` images. `dataset` are the images, if
/// they are open.
pub fn resident(
    plan: &Plan,
    model: &ModelCost,
    placement: &Placement,
    n_probed: usize,
    dataset: Option<&Dataset>,
) -> Resident {
    let step = memory(model, placement);
    let step_bytes = step.needed_bytes();
    let evaluation_bytes = beyond_passes(evaluation_bytes(plan, model, n_probed), &step, n_probed > 0);
    Resident {
        held_bytes: machine::resident_bytes().unwrap_or_default(),
        step_bytes,
        evaluation_bytes,
        unused_bytes: UNUSED_SHARE * (step_bytes + evaluation_bytes),
        worker_bytes: WORKER_BYTES * placement.workers as f64,
        data_bytes: data_bytes(plan, placement.rank_batch, dataset.map_or(0.0, mean_image_bytes)),
    }
}

/// Returns the bytes of an evaluation: the network twice, while it is collected, a batch of images,
/// and the features of `n_probed` images in a vector that grows to twice its length.
fn evaluation_bytes(plan: &Plan, model: &ModelCost, n_probed: usize) -> f64 {
    let recipe = &plan.recipe;
    let weights = 2.0 * F32 * UnitCost::total_numel(&model.trained.backbone) as f64;
    let features = 2.0 * F32 * (n_probed * recipe.model.width()) as f64;
    // A size that is no multiple of the stride is refused where images are evaluated.
    let size_px = recipe.evaluated_px().next_multiple_of(recipe.model.stride_px());
    let batch = eval::extraction_bytes(&recipe.model, recipe.data.format(), size_px);
    weights + features + batch
}

/// Returns how much an evaluation of `evaluation_bytes` adds to the peak of `step`. Within a run it
/// replaces the passes, after a run the whole step.
fn beyond_passes(evaluation_bytes: f64, step: &Memory, is_within_run: bool) -> f64 {
    let replaced = if is_within_run { step.pass_bytes() } else { step.needed_bytes() };
    (evaluation_bytes - replaced).max(0.0)
}

/// Returns the bytes of the data path of a rank with `rank_batch` images a step, whose files have
/// `image_bytes` on average: the views of a batch are kept until it has been used, and as many
/// batches as the loader may open are ahead of it. An image of these is either read or decoded.
fn data_bytes(plan: &Plan, rank_batch: usize, image_bytes: f64) -> f64 {
    let loader = LoaderConfig::default();
    let pixel_bytes = plan.recipe.data.format().bytes_per_pixel();
    let mut view_bytes = 0.0_f64;
    for (_, multicrop) in plan.view_mix().choices() {
        view_bytes = view_bytes.max((pixel_bytes * n_pixels(multicrop)) as f64);
    }
    let batch_views = rank_batch as f64 * view_bytes;
    let read =
        (rank_batch as f64 * image_bytes * loader.prefetch_batches as f64).min(loader.max_bytes as f64);
    let ahead = (loader.prefetch_batches as f64 * batch_views).max(read);
    batch_views + ahead + DECODED_RATIO * plan.n_data_threads as f64 * image_bytes
}

/// Returns the number of pixels of all views of an image.
fn n_pixels(multicrop: &MultiCrop) -> usize {
    let groups = multicrop.groups();
    groups.iter().map(|group| group.n_views * (group.size_px * group.size_px) as usize).sum()
}

/// Returns the mean bytes of the encoded images of `dataset`, by a few spread over it.
fn mean_image_bytes(dataset: &Dataset) -> f64 {
    let mut n: u64 = 0;
    let mut sum = 0;
    for id in dataset.spread(SAMPLED_IMAGES) {
        n += 1;
        sum += dataset.sample_bytes(id);
    }
    sum as f64 / n.max(1) as f64
}

#[cfg(test)]
mod tests {
    use trainer::Recipe;
    use trainer::cost::model_cost;

    use super::*;

    /// Returns the plan of `lejepa_cifar` for batches of `batch_size` images.
    fn plan(batch_size: usize) -> Plan {
        let text = include_str!("../../scripts/recipes/lejepa_cifar.toml");
        let sets = [format!("optim.batch_size={batch_size}"), "optim.length={steps=4}".to_string()];
        trainer::resolve(Recipe::parse(text, "lejepa_cifar", &sets).unwrap(), 1000).unwrap()
    }

    /// Returns the memory of a run of `plan` with a probe of `n_probed` images.
    fn resident_of(plan: &Plan, n_probed: usize) -> Resident {
        let model = model_cost(plan).unwrap();
        resident(plan, &model, &Placement::from_plan(plan), n_probed, None)
    }

    /// By hand: views of 64 images, of the batch in use and of three more.
    #[test]
    fn views_of_four_batches_are_counted() {
        let plan = plan(64);
        let pixels = n_pixels(&plan.multicrop());
        assert!(pixels >= 2 * 32 * 32, "{pixels}");
        assert_eq!(data_bytes(&plan, 64, 0.0), (4 * 64 * 3 * pixels) as f64);
        // Photographs of 5 MB: as many as the loader may hold, and those that are decoded.
        let mb = 1e6;
        let photographs = data_bytes(&plan, 64, 5.0 * mb);
        let limit = LoaderConfig::default().max_bytes as f64;
        let expected = (64 * 3 * pixels) as f64 + limit + 20.0 * 5.0 * mb * plan.n_data_threads as f64;
        assert_eq!(photographs, expected);
    }

    /// Parts are not negative, and their sum has each once.
    #[test]
    fn the_sum_has_all_parts() {
        let small = resident_of(&plan(16), 0);
        let large = resident_of(&plan(256), 0);
        for parts in [&small, &large] {
            let all = [
                parts.held_bytes,
                parts.step_bytes,
                parts.evaluation_bytes,
                parts.unused_bytes,
                parts.worker_bytes,
                parts.data_bytes,
            ];
            assert!(all.iter().all(|bytes| *bytes >= 0.0), "{parts:?}");
            assert!((parts.bytes() - all.iter().sum::<f64>()).abs() < 1.0, "{parts:?}");
            assert!(parts.held_bytes > 1e6, "this process: {parts:?}");
        }
        assert!(large.step_bytes > 2.0 * small.step_bytes, "{small:?} {large:?}");
    }

    /// The features of a million images are more than the passes of a small step.
    #[test]
    fn a_large_probe_adds_to_the_peak() {
        let plan = plan(16);
        let without = resident_of(&plan, 0);
        let with = resident_of(&plan, 1_000_000);
        let features = 1e6 * 2.0 * 4.0 * plan.recipe.model.width() as f64;
        assert!(with.evaluation_bytes > 0.9 * features, "{with:?}");
        assert!(with.bytes() > without.bytes() + 0.5 * features, "{with:?} {without:?}");
    }
}
