//! `ocelli report`: one HTML page about a run, about several side by side, or about weights.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use eval::image_sets::{set_name, with_names};
use eval::{FeatureKind, ImageSet, Source, features};
use kernels::device::Device;
use pipeline::words::counted;
use pipeline::{Dataset, Storage};
use prep::open::open_dataset;
use report::{Gallery, GalleryOptions, Report, Run, is_page, write_page};
use serde_json::json;
use session::{EvaluatedNetwork, open_local};

use crate::cluster::compute::DeviceFlag;
use crate::console::say;
use crate::network_flags::NetworkFlags;
use crate::pictures::{self, CANDIDATES, candidates_after};
use crate::progress::{Activity, StageBar};
use crate::weights_report::WeightsReport;

/// Default number of images of each sheet.
const N_IMAGES: usize = 8;

/// Flags of `report`.
#[derive(Default, clap::Args)]
#[command(after_help = "Examples:\n  ocelli report runs/mine\n  ocelli report runs/first runs/second --out \
        both.html\n  ocelli report --checkpoint dinov2_vits14_pretrain.pth --images photos/")]
pub(crate) struct Args {
    /// Work directories, or folders containing them.
    #[arg(required_unless_present = "checkpoint", value_name = "WORKDIR")]
    workdirs: Vec<PathBuf>,
    /// Weights to show in place of runs: a file or folder from `ocelli export`, DINO, DINOv2,
    /// DINOv3, timm, torchvision or transformers, a run or a checkpoint.
    #[arg(long, value_name = "WEIGHTS", conflicts_with = "workdirs", requires = "images")]
    checkpoint: Option<PathBuf>,
    /// HTML file to write [default: report.html in the work directory, or in the current folder for
    /// several runs]; with --checkpoint, the folder for the page and its pictures [default:
    /// NAME-report in the current folder].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace the files of an earlier report, with --checkpoint.
    #[arg(long, requires = "checkpoint")]
    overwrite: bool,
    /// Images to show, instead of the run's own: a folder, or shards.
    #[arg(long, num_args = 1.., value_name = "SHARDS")]
    images: Vec<String>,
    /// Number of images per sheet.
    #[arg(long, default_value_t = N_IMAGES, value_name = "N")]
    n_images: usize,
    /// Number of images to search for nearest neighbors, evenly spread over all.
    #[arg(long, default_value_t = CANDIDATES, value_name = "N")]
    candidates: u64,
    /// Skip the pictures that need the network and images: patch features, attention, neighbors,
    /// views.
    #[arg(long, conflicts_with_all = ["images", "n_images", "candidates"])]
    no_pictures: bool,
    #[command(flatten)]
    network: NetworkFlags,
    #[command(flatten)]
    device: DeviceFlag,
    /// Print a line of JSON at the end: file, bytes, runs; with --checkpoint: files.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    if let Some(checkpoint) = &args.checkpoint {
        let report = WeightsReport {
            checkpoint,
            settings: args.network.settings(),
            images: &args.images,
            n_images: args.n_images.max(1),
            n_candidates: args.candidates,
            out: args.out.as_deref(),
            overwrite: args.overwrite,
        };
        let files = report.write(storage, &args.device.open()?.device)?;
        print_files(&files, args.json);
        return Ok(ExitCode::SUCCESS);
    }
    let mut runs = Vec::new();
    for folder in &args.workdirs {
        let workdirs = Run::workdirs_in(folder);
        if workdirs.is_empty() {
            bail!("no run in {}: neither it nor its subfolders have a plan.toml", folder.display());
        }
        let is_requested = workdirs == [folder.clone()];
        for workdir in workdirs {
            match Run::open(&workdir) {
                Ok(run) => runs.push(run),
                Err(error) if is_requested => return Err(error.into()),
                Err(error) => say(format!("warning: skipping {}: {error}", workdir.display())),
            }
        }
    }
    if runs.is_empty() {
        bail!("no runs to report on");
    }
    let out = match (&args.out, runs.as_slice()) {
        (Some(out), _) => out.clone(),
        (None, [run]) => run.workdir.join("report.html"),
        (None, _) => PathBuf::from("report.html"),
    };
    if out.exists() && !is_page(&out) {
        bail!("{} exists and is not an Ocelli report; choose another --out", out.display());
    }
    let device = args.device.open()?.device;
    // A page is not replaced by one without the pictures that were asked for.
    if !args.images.is_empty() && !args.no_pictures {
        open_images(&args.images, storage)?;
    }
    let mut reports: Vec<Report> = Vec::with_capacity(runs.len());
    for run in runs {
        reports.push(create_report(args, run, storage, &device, None));
    }
    let n_bytes = write_page(&out, &reports)?;
    if args.json {
        out!("{}", json!({ "file": out.display().to_string(), "bytes": n_bytes, "runs": reports.len() }));
    } else {
        let n_runs = if reports.len() == 1 { "one run".into() } else { format!("{} runs", reports.len()) };
        out!("{n_runs}, {:.1} MB: {}", n_bytes as f64 / 1e6, out.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the page and the pictures of weights.
fn print_files(files: &[PathBuf], is_json: bool) {
    let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    if is_json {
        out!("{}", json!({ "files": names }));
        return;
    }
    for name in names {
        out!("{name}");
    }
}

/// Writes the page of the run in `workdir` into it, as `report` does without flags, and
/// `neighbors.png` of the same images if `draws_neighbors`. After a short run, neighbors are
/// searched among fewer images.
pub(crate) fn write_beside(
    workdir: &Path,
    draws_neighbors: bool,
    storage: &Storage,
    device: &Device,
) -> anyhow::Result<PathBuf> {
    let out = workdir.join("report.html");
    if out.exists() && !is_page(&out) {
        bail!("{} exists and is not an Ocelli report", out.display());
    }
    let run = Run::open(workdir)?;
    let candidates = candidates_after(run.status.step, run.status.plan.recipe.optim.batch_size);
    let args = Args { n_images: N_IMAGES, candidates, ..Args::default() };
    let sheet = draws_neighbors.then_some(workdir);
    let report = create_report(&args, run, storage, device, sheet);
    write_page(&out, &[report])?;
    Ok(out)
}

/// Writes the page of the run in `workdir` as [`write_beside`], with its neighbors; a failure is
/// reported.
pub(crate) fn write_or_warn(workdir: &Path, storage: &Storage, device: &Device) {
    match write_beside(workdir, true, storage, device) {
        Ok(page) => say(format!("report: {}", page.display())),
        Err(error) => say(format!("warning: could not write the report: {error:#}")),
    }
}

/// Opens the images `specs` of `--images`.
fn open_images(specs: &[String], storage: &Storage) -> anyhow::Result<Dataset> {
    for spec in specs {
        // Addresses, lists in braces and patterns are expanded where they are opened.
        let is_path = !spec.contains("://") && !spec.contains(['{', '*', '?', '[', ':']);
        if is_path && !Path::new(spec).exists() {
            bail!("--images {spec} does not exist");
        }
    }
    Ok(open_dataset(specs, storage)?)
}

/// Creates the report of a run with its shards, if available, and its pictures. Its neighbors are
/// drawn into `sheet` as well.
fn create_report(args: &Args, run: Run, storage: &Storage, device: &Device, sheet: Option<&Path>) -> Report {
    let folder = run.start.as_ref().map(|start| start.folder.clone()).unwrap_or_default();
    let run_shards = match open_local(&run.status.plan.recipe.data, &folder, storage) {
        Ok((dataset, paths)) => Ok((Arc::new(dataset), paths)),
        Err(error) => Err(format!("{error}; choose images with `ocelli report --images`")),
    };
    let mut gallery = None;
    if !args.no_pictures {
        let images = if args.images.is_empty() {
            run_shards.clone()
        } else {
            match open_dataset(&args.images, storage) {
                Ok(dataset) => Ok((Arc::new(dataset), args.images.clone())),
                Err(error) => Err(error.to_string()),
            }
        };
        gallery = Some(images.and_then(|(dataset, specs)| {
            create_gallery(args, &run, dataset, &specs, storage, device, sheet)
                .map_err(|error| format!("{error:#}"))
        }));
    }
    if let Some(Err(reason)) = &gallery {
        say(format!("warning: {}: no pictures: {reason}", run.workdir.display()));
    }
    Report { run, gallery, dataset: run_shards.ok().map(|(dataset, _)| dataset) }
}

/// Creates the pictures of the images of `dataset`, the shards `specs`.
fn create_gallery(
    args: &Args,
    run: &Run,
    dataset: Arc<Dataset>,
    specs: &[String],
    storage: &Storage,
    device: &Device,
    sheet: Option<&Path>,
) -> anyhow::Result<Gallery> {
    let open = EvaluatedNetwork::open(&run.workdir, &args.network.settings(), device)?;
    let name = set_name(specs);
    let n = args.candidates.max(args.n_images as u64);
    let images = ImageSet::open_some(Source::Shards(dataset), open.transform, open.rules, name, n)?;
    let images = with_names(images, specs, storage)?;
    let multicrop = open.multicrop();
    let seed = run.status.plan.recipe.seed;
    let options = GalleryOptions { n_images: args.n_images.max(1), multicrop: Some(&multicrop), seed };
    let n_images = counted(images.len() as u64, "image");
    say(format!("{}: drawing pictures of {n_images} from {}", run.name(), images.name));
    let bar = StageBar::named("pictures");
    let table = features(None, &open.network, &images, FeatureKind::LAST_LEVEL, &bar)?;
    drop(bar);
    let _activity = Activity::new("drawing patches, attention, neighbors and views …");
    let step = open.step().unwrap_or_default();
    if let Some(workdir) = sheet {
        pictures::neighbors(workdir, &images, &table, step);
    }
    let mut gallery = Gallery::new(&open.network, &images, table, options)?;
    gallery.network_description =
        format!("the {} at step {step}, with {}", open.network_name, open.transform);
    Ok(gallery)
}
