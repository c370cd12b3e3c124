//! `ocelli finetune`: trains a classifier on labeled shards, or a decoder of pixels on shards with
//! masks, from weights of any library, and scores it on others while it trains and at its end. The
//! same command continues a run.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::bail;
use augment::Transform;
use eval::image_sets::{SplitShards, set_name};
use eval::{Classified, F1, ImageSet, MEAN_AVERAGE_PRECISION, TOP_1};
use kernels::device::Device;
use pipeline::Storage;
use serde_json::{Value, json};
use session::{
    Classifier, Fitted, Initial, NetworkSettings, Session, ValidationProbe, classified_images,
    initial_preprocessing, trained_head,
};
use trainer::run::Outcome;
use trainer::run::fault::Fault;
use trainer::run::status::Status;
use trainer::{Length, Plan, Recipe};
use weights::{Format, HeadKind, Preprocessing};

use super::export::{check_format, export_requested};
use super::report::write_or_warn;
use super::segment;
use crate::before_after::FeatureScores;
use crate::cluster::compute;
use crate::console::say;
use crate::initial::hints_for_run;
use crate::network_flags::WeightFlags;
use crate::pictures;
use crate::progress::{Activity, StageBar};
use crate::recipes::SetKeys;
use crate::run_end::{EndedRun, print_scores};
use crate::training::{
    Probes, Trained, describe_best, end_stopped, load_recipe, print_bad_samples, print_early_end,
    print_scored_images, print_validated, probe_bar, result_line, test_name, train_session,
    warn_of_scored_images,
};
use crate::{recipes, values};

/// Share of the labeled images that is held out if no others are given to validate on.
const HELD_OUT: f64 = 0.1;

/// Flags of `finetune`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
        ocelli finetune --checkpoint w.pth --shards photos/ --workdir runs/f\n  \
        ocelli finetune --checkpoint w.pth --shards a/ --val-shards b/ --workdir r\n  \
        ocelli finetune --recipe classify_cifar --shards a --val-shards b --workdir r")]
pub(crate) struct Args {
    /// Weights to start from. They are a file or folder from DINO, DINOv2, DINOv3, timm,
    /// torchvision, transformers or `ocelli export`, or a run. A recipe with a backbone of its own
    /// starts from random weights without them.
    #[arg(long, value_name = "WEIGHTS")]
    checkpoint: Option<PathBuf>,
    /// Labeled shards or folders to train on, instead of the recipe's. A folder has one sub-folder
    /// per class; shards have classes as for `ocelli probe`. An image may have several with `--set
    /// method.loss=binary_cross_entropy`. The recipe segment takes images with masks: members
    /// seg.png, mask.png or output.png of shards, or files such as a.seg.png beside a.jpg.
    #[arg(long, num_args = 1..)]
    shards: Vec<String>,
    /// Labeled shards to validate on [default: part of --shards]. Folders will do, too; without
    /// any, a tenth of the training images is held out. Their classes are those of the training
    /// images; the recipe segment takes shards with masks. The network is scored on them while it
    /// trains, every run.probe_every_steps steps, and at its end; run.patience ends a run that does
    /// not become better. data.validation sets the share that is held out without them.
    #[arg(long, value_name = "SHARDS", num_args = 1..)]
    val_shards: Vec<String>,
    /// Labeled shards or folders to score on once, at the end. Nothing is chosen by their score.
    #[arg(long, value_name = "SHARDS", num_args = 1..)]
    test_shards: Vec<String>,
    /// Folder for the plan, metrics and checkpoints. If it already holds a run, the run resumes.
    #[arg(long)]
    workdir: PathBuf,
    /// Recipe: a name, such as finetune or segment, or a file.
    #[arg(long, default_value = "finetune")]
    recipe: String,
    /// Time of the whole run, instead of the recipe's optim.length. A few steps, a checkpoint and
    /// the validation are timed, and as many steps as fit are written into the plan; a run that is
    /// resumed takes as many, however long it was interrupted. Scores of --test-shards and
    /// --baseline and an export come on top.
    #[arg(long, value_name = "HOURS", value_parser = values::hours)]
    hours: Option<f64>,
    /// Override a recipe value: `--set optim.batch_size=32`. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Export at the end: safetensors, timm, torchvision, transformers or onnx. The folder is
    /// export-FORMAT of the work directory. A network that labels pixels is exported as safetensors
    /// or onnx.
    #[arg(long, value_name = "FORMAT")]
    export: Option<Format>,
    /// Also score features before and after training. The weights that the run began with and its
    /// own backbone are scored by nearest neighbors and a linear probe, which are fitted on the
    /// training images; one table shows them beside the classifier.
    #[arg(long)]
    baseline: bool,
    #[command(flatten)]
    weights: WeightFlags,
    #[command(flatten)]
    compute: compute::ComputeFlags,
    /// Resume a run even if its optim.length has increased. Schedules that depend on the length of
    /// the run jump.
    #[arg(long, hide_short_help = true)]
    lengthen: bool,
    /// Inject a fault: `kill:rank=1,step=5,phase=backward`; also hang, slow, nan, product. Phases:
    /// targets, forward, head, backward, data, update, checkpoint.
    #[arg(long, value_name = "WHAT:WHERE", hide_short_help = true)]
    inject_fault: Option<Fault>,
    /// Print a line of JSON at the end. It has steps, seconds, workdir, top1 and interval; with
    /// --export also export, with --baseline baseline, with --test-shards test, and with
    /// run.patience best_step. If an image may have several classes, mAP and F1 are in place of
    /// top1; for masks, miou, by_class and pixel_accuracy are.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    recipes::check_length(args.hours, &args.overrides)?;
    let initial = Initial {
        weights: args.checkpoint.clone(),
        hints: hints_for_run(&args.weights)?,
        fork: None,
        lengthen: args.lengthen,
    };
    let mut recipe = load_recipe(&args.recipe, &args.overrides, &args.shards, &args.workdir, &initial)?;
    if let Some(hours) = args.hours {
        recipe.optim.length = Length::from_hours(hours);
    }
    let head = check_head(args, &recipe)?;
    choose_validation(args, &mut recipe)?;
    let launch = compute::launch()?;
    let rank = launch.rank;
    let weights = recipe.init.as_ref().map(|init| init.weights.as_str());
    if let Some(preprocessing) = initial_preprocessing(&initial, &args.workdir, weights)? {
        let keys = SetKeys::read(&args.recipe, &args.overrides)?;
        let notes = adopt_preprocessing(&mut recipe, &preprocessing, &keys);
        if rank == 0 {
            notes.into_iter().for_each(say);
        }
    }
    check_format(args.export, &recipe)?;
    let session = Session {
        recipe,
        workdir: args.workdir.clone(),
        device: args.compute.open(&launch)?,
        engine: args.compute.engine,
        launch,
        initial,
        fault: args.inject_fault.clone(),
        stop: Arc::default(),
        started: start,
    };
    if head == HeadKind::Decoder {
        let request = segment::Request {
            workdir: &args.workdir,
            val_shards: &args.val_shards,
            test_shards: &args.test_shards,
            device: args.compute.device,
            export: args.export,
            json: args.json,
            start,
        };
        return segment::run(session, &request, storage);
    }
    run_classifier(args, session, storage)
}

/// Trains the classifier of `session`, scores it, and prints what came out.
fn run_classifier(args: &Args, session: Session, storage: &Storage) -> anyhow::Result<ExitCode> {
    let start = session.started;
    let rank = session.launch.rank;
    let beginning = session.initial.clone();
    let mut images: Option<ScoredImages> = None;
    let Trained { plan, outcome, dataset } = train_session(session, storage, |fitted| {
        // Before the first step: their classes may not fit.
        if rank == 0 {
            images = Some(ScoredImages::open(args, fitted, storage)?);
        }
        let validation = images.as_ref().map(|images| images.validation.clone());
        let probe = ValidationProbe::new(fitted.plan(), validation, &args.workdir, probe_bar);
        let n_images = probe.n_images();
        Ok(Probes { probes: vec![Box::new(probe)], n_images })
    })?;
    if outcome == Outcome::Stopped {
        return Ok(end_stopped(rank, &args.workdir));
    }
    // Rank 0 has opened them.
    let Some(images) = images else { return Ok(ExitCode::SUCCESS) };
    print_bad_samples(&args.workdir);
    let status = Status::read(&args.workdir)?;
    print_early_end(&status);
    let device = args.compute.device.open(0)?.device;
    let scores = Scores::measure(&args.workdir, &plan, &beginning, &images, &device)?;
    write_or_warn(&args.workdir, storage, &device);
    print_scores(&args.workdir);
    let exported = export_requested(&args.workdir, args.export)?;
    let shards = plan.recipe.data.shard_lists();
    let ended = EndedRun {
        workdir: &args.workdir,
        plan: &plan,
        dataset: &dataset,
        probe_train: &shards,
        probe_test: &args.val_shards,
        is_exported: exported.is_some(),
    };
    ended.print_next();
    let best = describe_best(&status, scores.step);
    if let Some(best) = &best {
        out!("{}", best.words);
    }
    scores.print(&images);
    if args.json {
        let mut line = result_line(&status, &args.workdir, start, exported.as_deref(), best.as_ref());
        scores.add_to(&mut line);
        out!("{line}");
    } else {
        print_validated(&status, &plan, &args.workdir);
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the kind of head that a run of `recipe` trains, and checks that the run in the work
/// directory, if there is one, trains the same.
fn check_head(args: &Args, recipe: &Recipe) -> anyhow::Result<HeadKind> {
    let Some(head) = trained_head(recipe) else {
        bail!(
            "recipe {} trains without labels, as `ocelli pretrain` does: to train a classifier, pass \
             --recipe finetune, or leave it out; to label pixels, pass --recipe segment",
            recipe.name
        );
    };
    if let Ok(run) = Status::read(&args.workdir)
        && trained_head(&run.plan.recipe) != Some(head)
    {
        bail!(
            "{} holds a run that learns {} (recipe {}), and this one learns {}: choose another --workdir",
            args.workdir.display(),
            what_is_learned(trained_head(&run.plan.recipe)),
            run.plan.recipe.name,
            what_is_learned(Some(head))
        );
    }
    if head == HeadKind::Decoder && args.baseline {
        bail!(
            "--baseline scores features by the classes of images, and recipe {} learns from masks: leave it \
             out, and score features by `ocelli probe --protocol segmentation`",
            recipe.name
        );
    }
    Ok(head)
}

/// Says what a run with this head learns.
fn what_is_learned(head: Option<HeadKind>) -> &'static str {
    match head {
        Some(HeadKind::Classifier) => "classes of images",
        Some(HeadKind::Decoder) => "classes of pixels",
        None => "without labels",
    }
}

/// Has `recipe` hold out a part of the images to validate on, unless others are given for that.
fn choose_validation(args: &Args, recipe: &mut Recipe) -> anyhow::Result<()> {
    let share = recipe.data.validation;
    let holds_out = share.is_some_and(|share| share > 0.0);
    let mut began_with = None;
    if let Ok(run) = Status::read(&args.workdir)
        && trained_head(&run.plan.recipe).is_some()
    {
        began_with = Some(run.plan.recipe.data.validation.unwrap_or_default());
    }
    if !args.val_shards.is_empty() {
        if let Some(share) = began_with
            && share > 0.0
        {
            bail!(
                "the run in {} holds out {share} of its images to validate on: leave out --val-shards; \
                 --test-shards scores others at its end",
                args.workdir.display()
            );
        }
        if holds_out {
            bail!(
                "data.validation holds out a part of the training images to validate on, and --val-shards \
                 are other images: leave out --val-shards, or --set data.validation=0"
            );
        }
        return Ok(());
    }
    if holds_out {
        return Ok(());
    }
    if share.is_some() {
        bail!(
            "data.validation=0 leaves no images to validate on: give --val-shards, or a share above 0 and up \
             to 0.5"
        );
    }
    if began_with == Some(0.0) {
        bail!("the run in {} started with --val-shards: give them as before", args.workdir.display());
    }
    recipe.data.validation = Some(HELD_OUT);
    Ok(())
}

/// Images on which the classifier of a run is scored.
struct ScoredImages {
    /// Images to validate on while the run trains, and after it.
    validation: ImageSet,
    /// Images of --test-shards, to score on once.
    test: Option<ImageSet>,
    /// Images that the run is trained on, to fit the probes of --baseline on.
    train: Option<ImageSet>,
}

impl ScoredImages {
    /// Opens the images for the run of `fitted`.
    fn open(args: &Args, fitted: &Fitted, storage: &Storage) -> anyhow::Result<Self> {
        let _activity = Activity::new("opening the validation images …");
        let validation = match fitted.held_out_images() {
            Some(held_out) => held_out,
            None => open_images(&args.val_shards, set_name(&args.val_shards), fitted, storage)?,
        };
        let mut test = None;
        if !args.test_shards.is_empty() {
            let name = test_name(&args.test_shards, &validation.name);
            test = Some(open_images(&args.test_shards, name, fitted, storage)?);
        }
        let train = if args.baseline { fitted.training_images() } else { None };
        Ok(Self { validation, test, train })
    }
}

/// Takes over the preprocessing of the weights: the channels, bits, decoding and normalization of
/// images, and their size for views that are larger. What the recipe's text or a setting states, as
/// `keys` tells, is kept; only the views of a built-in recipe, which is for weights of any size,
/// are reduced. Returns a note on each value that has changed.
fn adopt_preprocessing(
    recipe: &mut Recipe,
    preprocessing: &Preprocessing,
    keys: &SetKeys<'_>,
) -> Vec<String> {
    let before = recipe.clone();
    let data = &mut recipe.data;
    let pixels = &preprocessing.pixels;
    let n_channels = pixels.normalization.n_channels();
    if !keys.contains("data.channels") && recipe.model.n_channels() == n_channels {
        data.channels = n_channels;
    }
    if !keys.contains("data.normalization") && data.channels == n_channels {
        data.normalization = pixels.normalization.clone();
    }
    if !keys.contains("data.bits") {
        data.depth = pixels.depth;
    }
    let decoding = preprocessing.decoding;
    if !keys.contains("data.apply_exif") {
        data.apply_exif = decoding.apply_exif;
    }
    if !keys.contains("data.background") {
        data.background = decoding.background;
    }
    if !keys.contains("data.bits_used") {
        data.bits_used = decoding.bits_used;
    }
    if !keys.contains("data.no_data") {
        data.no_data = decoding.no_data;
    }
    let mut notes = changed_data(&before, recipe);
    // The positions of a network may be of smaller images than its file says.
    let size_px = preprocessing.transform.size_px.min(recipe.model.image_px() as u32);
    let limited = recipe.views.limit_sizes(size_px, |crop| keys.contains_own(&size_key(crop)));
    if let Some(crop) = limited.first() {
        let key = size_key(*crop);
        notes.push(format!("note: views have {size_px} px, as for the weights; --set {key}=… sets it"));
    }
    notes
}

/// Returns the key of the size of the views that are listed at `crop`.
fn size_key(crop: usize) -> String {
    format!("views.crops.{crop}.size_px")
}

/// Returns a note on each key of the data whose value differs in two recipes.
fn changed_data(before: &Recipe, after: &Recipe) -> Vec<String> {
    let known = before.values();
    let mut notes = Vec::new();
    for (key, value) in after.values() {
        let is_known = known.iter().any(|(other, known)| *other == key && *known == value);
        if key.starts_with("data.") && !is_known {
            notes.push(format!("note: {key} is {value}, as for the weights; --set {key}=… sets it"));
        }
    }
    notes
}

/// Opens the images of `shards` as the set `name`, to score the classifier of the run of `fitted`
/// on, and warns of what makes the scores misleading.
fn open_images(
    shards: &[String],
    name: String,
    fitted: &Fitted,
    storage: &Storage,
) -> anyhow::Result<ImageSet> {
    let plan = fitted.plan();
    let images = SplitShards { test: shards.to_vec(), test_name: Some(name), ..SplitShards::default() };
    let transform = Transform::new(plan.recipe.evaluated_px() as u32);
    let images = images.open_test(transform, plan.recipe.data.rules(), storage)?;
    // The plan of a run has the classes of its images.
    let classes = plan.recipe.method.classes().unwrap_or_default();
    let images = classified_images(images, classes, plan.recipe.method.is_multi_label())?;
    warn_of_scored_images(fitted, &images)?;
    Ok(images)
}

/// Scores `classifier`, that of the run in `workdir`, on `images`, with a bar called `name`,
/// records the result in the run, and draws the images with the largest losses.
fn score(
    classifier: &Classifier,
    workdir: &Path,
    images: &ImageSet,
    name: &'static str,
) -> anyhow::Result<Classified> {
    let classified = classifier.score(images, None, &StageBar::named(name))?;
    let rows = classifier.rows(&classified, images, workdir)?;
    classifier.network.record(workdir, &rows)?;
    let step = classifier.network.step().unwrap_or_default();
    pictures::worst(workdir, images, &classified.worst, step);
    Ok(classified)
}

/// Scores of the classifier of a run, after its last step or after the best one.
struct Scores {
    /// Number of steps after which the classifier is scored.
    step: u64,
    validation: Classified,
    /// Scores on the images of --test-shards.
    test: Option<Classified>,
    /// Scores of the features before and after training, with --baseline.
    features: Option<FeatureScores>,
}

impl Scores {
    /// Scores the classifier of the run of `plan` in `workdir`, which began with `beginning`, on
    /// `images`, and records the results in the run.
    fn measure(
        workdir: &Path,
        plan: &Plan,
        beginning: &Initial,
        images: &ScoredImages,
        device: &Device,
    ) -> anyhow::Result<Self> {
        let classifier = Classifier::open(workdir, &NetworkSettings::default(), device)?;
        let validation = score(&classifier, workdir, &images.validation, "validation")?;
        let mut test = None;
        if let Some(images) = &images.test {
            test = Some(score(&classifier, workdir, images, "test")?);
        }
        let mut features = None;
        if let Some(train) = images.train.clone() {
            features = Some(FeatureScores::measure(
                plan,
                beginning,
                &classifier,
                train,
                &images.validation,
                workdir,
                device,
            )?);
        }
        let step = classifier.network.step().unwrap_or_default();
        Ok(Self { step, validation, test, features })
    }

    /// Prints the scores on `images`.
    fn print(&self, images: &ScoredImages) {
        print_classified(&self.validation, &images.validation);
        if let (Some(classified), Some(images)) = (&self.test, &images.test) {
            print_classified(classified, images);
        }
        if let Some(features) = &self.features {
            features.print(&self.validation);
        }
    }

    /// Adds the scores to `line`, a JSON object.
    fn add_to(&self, line: &mut Value) {
        add_scores(line, &self.validation);
        if let Some(features) = &self.features {
            line["baseline"] = features.to_json();
        }
        if let Some(test) = &self.test {
            line["test"] = json!({});
            add_scores(&mut line["test"], test);
        }
    }
}

/// Adds the scores of `classified` to `line`, a JSON object.
fn add_scores(line: &mut Value, classified: &Classified) {
    match &classified.decisions {
        Some(decisions) => {
            line[MEAN_AVERAGE_PRECISION] = json!(classified.outcome.value());
            line[F1] = json!(decisions.f1());
        }
        None => line[TOP_1] = json!(classified.outcome.value()),
    }
    line["interval"] = json!(classified.outcome.interval());
}

/// Prints the share of `images` that are classified correctly, or the mean average precision and
/// the F1 if an image may have several classes, with their intervals.
fn print_classified(classified: &Classified, images: &ImageSet) {
    let n_classes = classified.outcome.n_classes();
    print_scored_images(images, classified.n_images, n_classes, classified.n_bad);
    let [low, high] = classified.outcome.interval();
    let value = classified.outcome.value();
    match &classified.decisions {
        Some(decisions) => {
            out!("mean average precision in %  {value:.2} ({low:.1} - {high:.1})");
            let [low, high] = decisions.interval();
            let f1 = decisions.f1();
            out!("F1 of classes above 50 % in %  {f1:.2} ({low:.1} - {high:.1})");
        }
        None => out!("top-1 in %  {value:.2} ({low:.1} - {high:.1})"),
    }
    out!("expected calibration error in %  {:.2}", classified.calibration.ece);
}
