//! `ocelli export`: a backbone for other programs, with a page that says what it is.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::bail;
use eval::{ImageSet, Protocol, Silent, Source, Split, Transform};
use pipeline::{Dataset, Storage};
use serde_json::json;
use trainer::ModelConfig;
use trainer::Network;
use trainer::checkpoint::{Checkpoint, Manifest};
use trainer::device::{Device, Opened};
use trainer::network::NamedTensor;
use weights::{Card, Export, Format, Precision, Preprocessing, Score, rounded};

use crate::evaluation::network::{WeightFlags, workdir_of};
use crate::evaluation::scores::set_name;

/// Flags of `export`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A run's work directory, a checkpoint's folder, or weights of another library.
    #[arg(long)]
    checkpoint: PathBuf,
    /// The file to write, NAME.safetensors, NAME.onnx or NAME.pth; or a folder for timm or transformers.
    #[arg(long)]
    out: PathBuf,
    /// safetensors, timm, torchvision, transformers, dinov2 or onnx [default: as the extension of --out says].
    #[arg(long)]
    format: Option<FormatName>,
    /// Numbers that weights are stored in: f32, f16, bf16, or, in ONNX, int8. ONNX computes in f32 in any case.
    #[arg(long, default_value = "f32")]
    precision: PrecisionName,
    /// Replace files that are there.
    #[arg(long)]
    overwrite: bool,
    /// Export the student even if the method has a teacher.
    #[arg(long)]
    student: bool,
    /// Side of the square that the network is to see, in place of the model's.
    #[arg(long, value_name = "PX")]
    image_px: Option<u32>,
    #[command(flatten)]
    weights: WeightFlags,
    /// Shards with classes to score the weights with, as trained and as stored: k-NN fits on these.
    #[arg(long, num_args = 1.., requires = "test")]
    train: Vec<String>,
    /// Shards with classes to report on.
    #[arg(long, num_args = 1.., requires = "train")]
    test: Vec<String>,
    /// End with one line of JSON: format, precision, files, scores.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy)]
struct FormatName(Format);

impl FromStr for FormatName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Format::ALL.into_iter().find(|format| format.name() == text);
        found.map(Self).ok_or_else(|| format!("one of {}", Format::ALL.map(Format::name).join(", ")))
    }
}

#[derive(Clone, Copy)]
struct PrecisionName(Precision);

impl FromStr for PrecisionName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Precision::ALL.into_iter().find(|precision| precision.name() == text);
        found.map(Self).ok_or_else(|| format!("one of {}", Precision::ALL.map(Precision::name).join(", ")))
    }
}

/// A network that is to be exported.
pub(crate) struct Subject {
    model: ModelConfig,
    tensors: Vec<NamedTensor>,
    preprocessing: Preprocessing,
    which: &'static str,
    card: Card,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let format = Format::of(&args.out, args.format.map(|format| format.0)).map_err(anyhow::Error::msg)?;
    let device = Opened::cpu().device;
    let mut subject = match weights::is_weights(&args.checkpoint) {
        true => of_weights(args)?,
        false => of_checkpoint(&args.checkpoint, args.student, &device)?,
    };
    if let Some(px) = args.image_px {
        let stride_px = subject.model.stride_px();
        if px == 0 || !(px as usize).is_multiple_of(stride_px) {
            bail!(eval::EvalError::ImageSize { image_px: px as usize, stride_px });
        }
        subject.preprocessing = Preprocessing::of_size(px, subject.preprocessing.normalization);
        (subject.model, subject.tensors) =
            weights::resized(&subject.model, std::mem::take(&mut subject.tensors), px as usize);
    }
    let precision = args.precision.0;
    let scores = match args.train.is_empty() {
        true => Vec::new(),
        false => scored(args, &subject, storage, &device)?,
    };
    subject.card.scores.extend(scores.iter().cloned());
    let files = write(&subject, &args.out, format, precision, args.overwrite)?;
    for score in &scores {
        out!("{:<5} {}: {}", score.precision.name(), score.name, score.value);
    }
    let written: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    out!("{} written: {}", subject.which, written.join(", "));
    if args.json {
        let scores: Vec<_> = scores
            .iter()
            .map(|score| json!({ "precision": score.precision.name(), "name": score.name, "value": score.value }))
            .collect();
        out!(
            "{}",
            json!({ "format": format.name(), "precision": precision.name(), "files": written, "scores": scores })
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes `subject` to `out`; returns the files.
pub(crate) fn write(
    subject: &Subject,
    out: &Path,
    format: Format,
    precision: Precision,
    overwrite: bool,
) -> anyhow::Result<Vec<PathBuf>> {
    if let Some(parent) = out.parent().filter(|parent| !parent.as_os_str().is_empty() && !parent.is_dir()) {
        bail!("there is no folder {}", parent.display());
    }
    let export = Export {
        model: &subject.model,
        tensors: &subject.tensors,
        preprocessing: subject.preprocessing,
        which: subject.which,
        precision,
        card: &subject.card,
    };
    Ok(weights::write(out, format, &export, overwrite)?)
}

/// The network of a run or of a checkpoint.
pub(crate) fn of_checkpoint(path: &Path, student: bool, device: &Device) -> anyhow::Result<Subject> {
    let checkpoint = Checkpoint::open(path)?;
    let (network, which) = Network::of_checkpoint(&checkpoint, student, 1, device)?;
    let manifest = &checkpoint.manifest;
    let preprocessing = Preprocessing::of_size(network.model.image_px() as u32, network.normalization);
    let mut card = card_of(manifest);
    if let Some(workdir) = workdir_of(path) {
        let scores = report::scores_at(workdir, which, manifest.step)?;
        card.scores = scores
            .into_iter()
            .map(|(name, value, interval)| Score {
                name,
                value: read_out(value, interval),
                precision: Precision::F32,
            })
            .collect();
    }
    Ok(Subject { tensors: network.tensors(), model: network.model, preprocessing, which, card })
}

/// The network of a file or folder of weights.
fn of_weights(args: &Args) -> anyhow::Result<Subject> {
    let read = args.weights.read(&args.checkpoint, args.student)?;
    let name = args.checkpoint.file_stem().map(|name| name.to_string_lossy().into_owned());
    let card = Card {
        name: name.unwrap_or_else(|| "backbone".into()),
        data: Some(format!("Weights of {}, converted.", read.origin)),
        version: env!("CARGO_PKG_VERSION").into(),
        ..Card::default()
    };
    let (model, tensors, preprocessing) = (read.model, read.tensors, read.preprocessing);
    Ok(Subject { model, tensors, preprocessing, which: read.which, card })
}

/// What a checkpoint says of its run.
fn card_of(manifest: &Manifest) -> Card {
    let plan = &manifest.plan;
    let images = manifest.step * plan.recipe.optim.batch_size as u64;
    let data = format!(
        "Trained on {} images ({}) for {} of {} steps of {} images: {:.1} epochs.",
        plan.n_samples,
        plan.recipe.data.shards.join(", "),
        manifest.step,
        plan.total_steps,
        plan.recipe.optim.batch_size,
        images as f64 / plan.n_samples.max(1) as f64,
    );
    Card {
        name: plan.recipe.name.clone(),
        plan: Some(plan.to_toml()),
        data: Some(data),
        scores: Vec::new(),
        version: env!("CARGO_PKG_VERSION").into(),
    }
}

/// k-NN of the weights as trained, and as they are stored.
fn scored(args: &Args, subject: &Subject, storage: &Storage, device: &Device) -> anyhow::Result<Vec<Score>> {
    let usual = Transform::new(subject.preprocessing.size_px);
    let transform = Transform { resize_px: subject.preprocessing.resize_px.max(usual.size_px), ..usual };
    let images = |specs: &[String]| -> anyhow::Result<ImageSet> {
        let source = Source::Shards(Arc::new(Dataset::open(specs, storage)?));
        Ok(ImageSet::open(source, transform, augment::DecodeRules::default(), set_name(specs))?)
    };
    let protocols = [Protocol::named("knn").map_err(anyhow::Error::msg)?];
    let split = Split::of(&protocols, images(&args.train)?, images(&args.test)?)?;
    let mut precisions = vec![Precision::F32];
    precisions.extend(Some(args.precision.0).filter(|precision| *precision != Precision::F32));
    let mut scores = Vec::new();
    for precision in precisions {
        let stored = |tensor: &NamedTensor| NamedTensor {
            values: rounded(&tensor.values, &tensor.shape, precision),
            ..tensor.clone()
        };
        let tensors: Vec<NamedTensor> = subject.tensors.iter().map(stored).collect();
        let normalization = subject.preprocessing.normalization;
        let network = Network::with_tensors(&subject.model, normalization, &tensors, 0, device)?;
        let found = split.score(&network, &protocols, None, &Silent)?;
        scores.extend(found.numbers().map(|(_, scored)| Score {
            name: format!("{} on {}, {transform}", scored.metric, split.test.name),
            value: read_out(scored.outcome.value(), Some(scored.outcome.interval())),
            precision,
        }));
    }
    Ok(scores)
}

/// A number with its interval.
fn read_out(value: f64, interval: Option<[f64; 2]>) -> String {
    match interval {
        Some([low, high]) => format!("{value:.2} ({low:.1} - {high:.1})"),
        None => format!("{value:.4}"),
    }
}
