//! `ocelli export`: writes a backbone, with its classifier or decoder, for other programs, with a
//! model card.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use augment::Transform;
use eval::image_sets::open_images;
use eval::{OWN_METRICS, Protocol, Split, check_image_size};
use networks::ModelConfig;
use pipeline::Storage;
use pipeline::secrets::redact_list;
use pipeline::words::{counted, thousands};
use serde_json::json;
use session::{Backbone, ExportSettings, check_export, find_workdir};
use trainer::checkpoint::Manifest;
use trainer::{Plan, Recipe};
use weights::{Card, Format, Hints, Precision, Score};

use crate::console::say;
use crate::network_flags::WeightFlags;
use crate::progress::Activity;
use crate::run_end::path_in_run;

/// Flags of `export`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli export --checkpoint runs/mine --format timm --out backbone/\n  \
        ocelli export --checkpoint runs/mine --out backbone.onnx --precision int8")]
pub(crate) struct Args {
    /// Run, checkpoint, or weights of another library.
    #[arg(long, value_name = "PATH")]
    checkpoint: PathBuf,
    /// Output file, NAME.safetensors, NAME.onnx or NAME.pth; or an output folder for timm or
    /// transformers.
    #[arg(long)]
    out: PathBuf,
    /// Format: safetensors, timm, torchvision, transformers, dinov2, dinov3 or onnx [default: from
    /// the extension of --out].
    #[arg(long)]
    format: Option<Format>,
    /// Precision of the stored weights: f32, f16, bf16, or int8 (ONNX only). ONNX always computes
    /// in f32.
    #[arg(long, default_value = "f32")]
    precision: Precision,
    /// Leave out the classifier or the decoder of a run.
    #[arg(long)]
    backbone_only: bool,
    /// Return probabilities of classes instead of logits (ONNX only). They are the softmax of the
    /// logits, or their sigmoids if an image may have several classes. --softmax is another name.
    #[arg(long, alias = "softmax", conflicts_with = "backbone_only")]
    probabilities: bool,
    /// Replace existing files.
    #[arg(long)]
    overwrite: bool,
    /// Input image size in pixels, instead of the model's.
    #[arg(long, value_name = "PX", hide_short_help = true)]
    image_px: Option<u32>,
    #[command(flatten)]
    weights: WeightFlags,
    /// Labeled shards to fit k-NN on, to score the weights as trained and as stored.
    #[arg(long, value_name = "SHARDS", num_args = 1.., requires = "test")]
    train: Vec<String>,
    /// Labeled shards to test k-NN on.
    #[arg(long, value_name = "SHARDS", num_args = 1.., requires = "train")]
    test: Vec<String>,
    /// Print a line of JSON at the end: format, precision, files, scores.
    #[arg(long)]
    json: bool,
}

/// Returns whether a score, by its name in a model card, is that of a classifier or decoder.
fn is_score_of_head(name: &str) -> bool {
    let metric = name.split(" on ").next().unwrap_or_default();
    OWN_METRICS.contains(&metric)
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let format = Format::for_path(&args.out, args.format).map_err(anyhow::Error::msg)?;
    let mut backbone = args.weights.settings().open_backbone(&args.checkpoint)?;
    if args.backbone_only {
        backbone.classifier = None;
        backbone.decoder = None;
    }
    check_probabilities(args, format, &backbone)?;
    let mut card = model_card(&args.checkpoint, &backbone)?;
    if args.backbone_only {
        card.scores.retain(|score| !is_score_of_head(&score.name));
    }
    if let Some(px) = args.image_px {
        check_image_size(px as usize, backbone.model.stride_px())?;
        backbone.preprocessing.transform = Transform::new(px);
        backbone.preprocessing.validate().map_err(anyhow::Error::msg)?;
        (backbone.model, backbone.tensors) =
            weights::resized(&backbone.model, std::mem::take(&mut backbone.tensors), px as usize);
    }
    let precision = args.precision;
    let scores = if args.train.is_empty() { Vec::new() } else { score(args, &backbone, storage)? };
    card.scores.extend(scores.iter().cloned());
    let returns_probabilities = args.probabilities;
    let settings = ExportSettings { format, precision, returns_probabilities, overwrite: args.overwrite };
    let files = backbone.export(&args.out, &settings, &card)?;
    for score in &scores {
        out!("{:<5} {}: {}", score.precision.name(), score.name, score.value);
    }
    let written: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    out!("{} written: {}", backbone.network_name, written.join(", "));
    note_epsilon(format, &backbone.model);
    if args.json {
        let scores: Vec<_> = scores
            .iter()
            .map(|score| {
                json!({ "precision": score.precision.name(), "name": score.name,
                "value": score.value })
            })
            .collect();
        out!(
            "{}",
            json!({ "format": format.name(), "precision": precision.name(), "files": written,
                "scores": scores })
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks that probabilities, if they are requested, have scores and a graph to be computed in.
fn check_probabilities(args: &Args, format: Format, backbone: &Backbone) -> anyhow::Result<()> {
    if !args.probabilities {
        return Ok(());
    }
    if backbone.classifier.is_none() {
        bail!("--probabilities: {} has no classifier", args.checkpoint.display());
    }
    if format != Format::Onnx {
        bail!("--probabilities: {} holds weights without operations; only onnx computes them", format.name());
    }
    Ok(())
}

/// Notes that a format does not record the ε of layer norms, if it is not that of its library.
fn note_epsilon(format: Format, model: &ModelConfig) {
    if format == Format::Dinov3
        && let ModelConfig::Vit(config) = model
        && (config.norm_epsilon - 1e-5).abs() > 1e-9
    {
        say(format!(
            "note: the layer norms use ε = {:e}, which this format cannot record (DINOv3's own networks \
             use 1e-5): use the constructor in the model card, or pass --norm-epsilon {:e} when ocelli \
             reads the file",
            config.norm_epsilon, config.norm_epsilon
        ));
    }
}

/// Checks that the requested format of the export, if there is one, can hold the network of
/// `recipe`.
pub(crate) fn check_format(requested: Option<Format>, recipe: &Recipe) -> anyhow::Result<()> {
    let Some(format) = requested else { return Ok(()) };
    let Err(error) = check_export(recipe, format) else { return Ok(()) };
    let mut possible = Format::ALL.to_vec();
    possible.retain(|format| check_export(recipe, *format).is_ok());
    let names: Vec<&str> = possible.into_iter().map(Format::name).collect();
    bail!("--export {}: {error}; choose one of {}", format.name(), names.join(", "));
}

/// Exports the network of the run in `workdir` if a format is requested; returns the file or
/// folder.
pub(crate) fn export_requested(workdir: &Path, requested: Option<Format>) -> anyhow::Result<Option<PathBuf>> {
    let Some(format) = requested else { return Ok(None) };
    let path = {
        let _activity = Activity::new("exporting …");
        export_beside(workdir, format)?
    };
    say(format!("exported for {}: {}", format.name(), path.display()));
    Ok(Some(path))
}

/// Exports the network of the run in `workdir` into that folder, as `export` does without flags;
/// returns the path. An earlier export of the run is replaced, like its report.
fn export_beside(workdir: &Path, format: Format) -> anyhow::Result<PathBuf> {
    let backbone = Backbone::open(workdir, &Hints::default())?;
    let card = model_card(workdir, &backbone)?;
    let path = path_in_run(workdir, format, backbone.head_kind());
    backbone.export(&path, &ExportSettings::replacing(format), &card)?;
    note_epsilon(format, &backbone.model);
    Ok(path)
}

/// Collects the facts about `backbone`, which comes from `path`.
pub(crate) fn model_card(path: &Path, backbone: &Backbone) -> anyhow::Result<Card> {
    let version = env!("CARGO_PKG_VERSION").to_string();
    let Some(manifest) = &backbone.manifest else {
        let name = path.file_stem().map(|name| name.to_string_lossy().into_owned());
        let name = name.unwrap_or_else(|| "backbone".into());
        let data = Some(format!("Weights of {}, converted.", backbone.provenance.library));
        let origins = backbone.provenance.origins(path, &backbone.tensors);
        return Ok(Card { name, data, origins, version, ..Card::default() });
    };
    let scores = match find_workdir(path) {
        Some(workdir) => report::scores_at(workdir, &backbone.network_name, manifest.step)?,
        None => Vec::new(),
    };
    let scores =
        scores.into_iter().map(|score| Score::new(score.name, score.value, score.interval, Precision::F32));
    let plan = &manifest.plan;
    Ok(Card {
        name: plan.recipe.name.clone(),
        plan: Some(plan.to_toml()),
        data: Some(trained_on(manifest)),
        origins: backbone.provenance.began_with.clone(),
        scores: scores.collect(),
        version,
    })
}

/// Describes the conversion of the first layer of a run's initial weights to other channels; empty
/// if it was not converted.
fn describe_first_layer(plan: &Plan) -> String {
    if let Some(init) = &plan.recipe.init
        && let Some(rule) = init.first_layer
    {
        let weights = &init.weights;
        return format!(
            " Training started from {weights}, whose first layer was converted to {} channels: {rule}.",
            plan.recipe.data.channels
        );
    }
    String::new()
}

/// Describes the training images of a checkpoint.
fn trained_on(manifest: &Manifest) -> String {
    let plan = &manifest.plan;
    let images = manifest.step * plan.recipe.optim.batch_size as u64;
    // The plan, which the card contains as well, lists all shards.
    let shards: Vec<String> = plan.recipe.data.shards.iter().map(|spec| redact_list(spec)).collect();
    let shards = match shards.as_slice() {
        [first, _, .., last] => {
            format!("{}, from {first} to {last}", counted(shards.len() as u64, "shard"))
        }
        shards => shards.join(", "),
    };
    format!(
        "Trained on {} ({}) for {} of {} of {}: {:.1} epochs.{}",
        counted(plan.n_samples, "image"),
        shards,
        thousands(manifest.step),
        counted(plan.total_steps, "step"),
        counted(plan.recipe.optim.batch_size as u64, "image"),
        images as f64 / plan.n_samples.max(1) as f64,
        describe_first_layer(plan),
    )
}

/// Scores the weights by k-NN, as trained and as stored.
fn score(args: &Args, backbone: &Backbone, storage: &Storage) -> anyhow::Result<Vec<Score>> {
    let Transform { resize_px, size_px } = backbone.preprocessing.transform;
    let transform = Transform { resize_px: resize_px.max(size_px), size_px };
    let train = open_images(&args.train, transform, backbone.rules(), storage)?;
    let test = open_images(&args.test, transform, backbone.rules(), storage)?;
    let protocols = [Protocol::named("knn").map_err(anyhow::Error::msg)?];
    let split = Split::for_protocols(&protocols, train, test)?;
    Ok(backbone.score_as_stored(&split, &protocols, args.precision)?)
}
