//! `ocelli finetune` with a recipe that learns from masks: trains a decoder of pixels on shards
//! with masks, and scores it on others while it trains and at its end.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use augment::Transform;
use eval::image_sets::{open_images, report_bits};
use eval::{ImageSet, MEAN_IOU, PIXEL_ACCURACY, Segmented};
use kernels::device::DeviceChoice;
use pipeline::Storage;
use pipeline::words::counted;
use serde_json::{Value, json};
use session::{
    Fitted, NetworkSettings, Segmenter, Session, ValidationProbe, held_out_segmented_images, segmented_images,
};
use trainer::run::Outcome;
use trainer::run::status::Status;
use weights::Format;

use super::export::export_requested;
use super::report::write_or_warn;
use crate::pictures;
use crate::progress::{Activity, StageBar};
use crate::run_end::{EndedRun, print_scores};
use crate::training::{
    Probes, Trained, describe_best, end_stopped, print_bad_samples, print_early_end, print_scored_images,
    print_validated, probe_bar, result_line, test_name, train_session, warn_of_scored_images,
};

/// Largest number of classes whose scores are all printed.
const MAX_PRINTED: usize = 20;

/// Number of images that are drawn with their masks.
const N_DRAWN: usize = 12;

/// What is to be done beside training.
pub(super) struct Request<'a> {
    /// Folder of the run.
    pub(super) workdir: &'a Path,
    /// Shards with masks to validate on; empty if a part of the images is held out.
    pub(super) val_shards: &'a [String],
    /// Shards with masks to score the decoder on once, at the end.
    pub(super) test_shards: &'a [String],
    /// Device on which it is scored.
    pub(super) device: DeviceChoice,
    /// Format of the export after the last step.
    pub(super) export: Option<Format>,
    /// Whether the result is printed as JSON.
    pub(super) json: bool,
    /// Start of the program.
    pub(super) start: Instant,
}

/// Trains as `session` says, and does the rest of `request`.
pub(super) fn run(session: Session, request: &Request<'_>, storage: &Storage) -> anyhow::Result<ExitCode> {
    let workdir = request.workdir;
    let rank = session.launch.rank;
    let mut scored: Option<ScoredImages> = None;
    let Trained { plan, outcome, dataset } = train_session(session, storage, |fitted| {
        // Before the first step: their masks may not fit.
        if rank == 0 {
            scored = Some(ScoredImages::open(request, fitted, storage)?);
        }
        let images = scored.as_ref().map(|scored| scored.validation.clone());
        let probe = ValidationProbe::new(fitted.plan(), images, workdir, probe_bar);
        let n_images = probe.n_images();
        Ok(Probes { probes: vec![Box::new(probe)], n_images })
    })?;
    if outcome == Outcome::Stopped {
        return Ok(end_stopped(rank, workdir));
    }
    // Rank 0 has opened them.
    let Some(scored) = scored else { return Ok(ExitCode::SUCCESS) };
    print_bad_samples(workdir);
    let status = Status::read(workdir)?;
    print_early_end(&status);
    let device = request.device.open(0)?.device;
    let segmenter = Segmenter::open(workdir, &NetworkSettings::default(), &device)?;
    let step = segmenter.network.step().unwrap_or_default();
    let segmented = score(&segmenter, workdir, &scored.validation, "validation")?;
    let mut tested = None;
    if let Some(test) = &scored.test {
        tested = Some(score(&segmenter, workdir, test, "test")?);
    }
    let classes = segmenter.head.classes.clone();
    drop(segmenter);
    write_or_warn(workdir, storage, &device);
    print_scores(workdir);
    let exported = export_requested(workdir, request.export)?;
    let ended = EndedRun {
        workdir,
        plan: &plan,
        dataset: &dataset,
        probe_train: &[],
        probe_test: &[],
        is_exported: exported.is_some(),
    };
    ended.print_next();
    let best = describe_best(&status, step);
    if let Some(best) = &best {
        out!("{}", best.words);
    }
    print_segmented(&segmented, &classes, &scored.validation);
    if let (Some(tested), Some(test)) = (&tested, &scored.test) {
        print_segmented(tested, &classes, test);
    }
    if request.json {
        let mut line = result_line(&status, workdir, request.start, exported.as_deref(), best.as_ref());
        add_scores(&mut line, &segmented);
        if let Some(tested) = &tested {
            line["test"] = json!({});
            add_scores(&mut line["test"], tested);
        }
        out!("{line}");
    } else {
        print_validated(&status, &plan, workdir);
    }
    Ok(ExitCode::SUCCESS)
}

/// Images on which the decoder of a run is scored.
struct ScoredImages {
    /// Images to validate on while the run trains, and after it.
    validation: ImageSet,
    /// Images of --test-shards, to score on once.
    test: Option<ImageSet>,
}

impl ScoredImages {
    /// Opens the images for the run of `fitted`, and checks their masks.
    fn open(request: &Request<'_>, fitted: &Fitted, storage: &Storage) -> anyhow::Result<Self> {
        let _activity = Activity::new("checking the masks of the validation images …");
        // The plan of a run has the classes of its masks.
        let classes = fitted.plan().recipe.method.pixel_classes().unwrap_or_default();
        let validation = match fitted.held_out_images() {
            Some(held_out) => held_out_segmented_images(held_out, classes)?,
            None => {
                let images = open_set(request.val_shards, fitted, storage)?;
                checked_images(images, classes, fitted)?
            }
        };
        let mut test = None;
        if !request.test_shards.is_empty() {
            let mut images = open_set(request.test_shards, fitted, storage)?;
            images.name = test_name(request.test_shards, &validation.name);
            test = Some(checked_images(images, classes, fitted)?);
        }
        Ok(Self { validation, test })
    }
}

/// Opens the images of `shards`, to score the decoder of the run of `fitted` on.
fn open_set(shards: &[String], fitted: &Fitted, storage: &Storage) -> anyhow::Result<ImageSet> {
    let recipe = &fitted.plan().recipe;
    let transform = Transform::new(recipe.evaluated_px() as u32);
    let images = open_images(shards, transform, recipe.data.rules(), storage)?;
    report_bits(&images)?;
    Ok(images)
}

/// Returns those of `images` that have a mask, after a check that it fits the decoder of the run of
/// `fitted`, which knows `classes`, and warns of what makes the scores misleading.
fn checked_images(images: ImageSet, classes: &[String], fitted: &Fitted) -> anyhow::Result<ImageSet> {
    let images = segmented_images(images, classes)?;
    warn_of_scored_images(fitted, &images)?;
    Ok(images)
}

/// Scores `segmenter`, that of the run in `workdir`, on `images`, with a bar called `name`, records
/// the result in the run, and draws the images with the smallest shares of right pixels.
fn score(
    segmenter: &Segmenter,
    workdir: &Path,
    images: &ImageSet,
    name: &'static str,
) -> anyhow::Result<Segmented> {
    let segmented = segmenter.score(images, &StageBar::named(name))?;
    let rows = segmenter.rows(&segmented, images, workdir)?;
    segmenter.network.record(workdir, &rows)?;
    let step = segmenter.network.step().unwrap_or_default();
    let mut drawn = Vec::new();
    for image in segmented.worst.iter().take(N_DRAWN) {
        drawn.push(image.image);
    }
    let pictures = segmenter.pictures(images, &drawn)?;
    pictures::masks(workdir, &images.name, &pictures, step);
    Ok(segmented)
}

/// Adds the scores of `segmented` to `line`, a JSON object.
fn add_scores(line: &mut Value, segmented: &Segmented) {
    let counts = &segmented.counts;
    line[MEAN_IOU] = json!(counts.mean_iou());
    line["interval"] = json!(counts.interval());
    line["by_class"] = json!(counts.by_class());
    line[PIXEL_ACCURACY] = json!(counts.accuracy());
    line["pixel_accuracy_interval"] = json!(counts.accuracy_interval());
}

/// Prints the scores of the decoder on `images`, with their intervals, and those of its classes.
fn print_segmented(segmented: &Segmented, classes: &[String], images: &ImageSet) {
    let counts = &segmented.counts;
    print_scored_images(images, segmented.n_images, classes.len(), segmented.n_bad);
    let [low, high] = counts.interval();
    out!("mIoU in %  {:.2} ({low:.1} - {high:.1})", counts.mean_iou());
    let [low, high] = counts.accuracy_interval();
    out!("pixel accuracy in %  {:.2} ({low:.1} - {high:.1})", counts.accuracy());
    print_classes(&counts.by_class(), classes);
}

/// Prints the intersections over unions of `classes`, or the smallest if there are many. Classes of
/// which the masks have no pixels have none.
fn print_classes(by_class: &[Option<f64>], classes: &[String]) {
    let mut scored: Vec<(&String, f64)> = Vec::new();
    for (class, iou) in classes.iter().zip(by_class) {
        if let Some(iou) = iou {
            scored.push((class, *iou));
        }
    }
    let n_scored = scored.len();
    if n_scored > MAX_PRINTED {
        // The order is stable: classes of equal numbers keep theirs.
        scored.sort_by(|a, b| a.1.total_cmp(&b.1));
        scored.truncate(MAX_PRINTED);
        out!("IoU in %, the smallest {MAX_PRINTED} of {}", counted(n_scored as u64, "class"));
    } else {
        out!("IoU in %");
    }
    let width = scored.iter().map(|(class, _)| class.chars().count()).max().unwrap_or_default();
    for (class, iou) in scored {
        out!("  {class:<width$}  {iou:6.2}");
    }
}
