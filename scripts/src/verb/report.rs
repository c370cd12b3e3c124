//! `ocelli report`: one HTML page about a run, or about several side by side.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use eval::{ImageSet, Source};
use pipeline::{Dataset, Storage};
use report::{Gallery, GalleryRules, Report, Run, html};
use serde_json::json;
use trainer::device::Device;

use crate::cluster::compute::DeviceFlag;
use crate::console::say;
use crate::evaluation::flags::NetworkFlags;
use crate::evaluation::scores::set_name;

/// What every page begins with, and what nobody else's file does.
const BEGINNING: usize = 300;

/// Flags of `report`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Work directories, or folders of them.
    #[arg(required = true, value_name = "WORKDIR")]
    workdirs: Vec<PathBuf>,
    /// The page [default: report.html in the work directory; report.html here for several].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Shards of the images that are shown, in place of the run's own.
    #[arg(long, num_args = 1.., value_name = "SHARDS")]
    images: Vec<String>,
    /// Images of each sheet of pictures.
    #[arg(long, default_value_t = 8, value_name = "N")]
    n_images: usize,
    /// Images among which nearest neighbors are looked for, evenly spread over all.
    #[arg(long, default_value_t = 1000, value_name = "N")]
    candidates: u64,
    /// Leave out what needs the network and images: patch features, attention, neighbors, views.
    #[arg(long, conflicts_with_all = ["images", "n_images", "candidates"])]
    no_pictures: bool,
    #[command(flatten)]
    network: NetworkFlags,
    #[command(flatten)]
    device: DeviceFlag,
    /// End with one line of JSON: file, bytes, runs.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let mut runs = Vec::new();
    for folder in &args.workdirs {
        let found = Run::workdirs_in(folder);
        if found.is_empty() {
            bail!("there is no run in {}: it has no plan.toml, nor has a folder in it", folder.display());
        }
        for workdir in found {
            runs.push(Run::open(&workdir)?);
        }
    }
    let out = match (&args.out, runs.as_slice()) {
        (Some(out), _) => out.clone(),
        (None, [run]) => run.workdir.join("report.html"),
        (None, _) => PathBuf::from("report.html"),
    };
    if out.exists() && !is_ours(&out) {
        bail!("{} exists and is no report; choose another --out", out.display());
    }
    let device = args.device.open()?.device;
    let reports: Vec<Report> = runs.into_iter().map(|run| of_run(args, run, storage, &device)).collect();
    let made_at_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let page = html(&reports, made_at_s);
    pipeline::file::replace(&out, page.as_bytes())
        .with_context(|| format!("cannot write {}", out.display()))?;
    if args.json {
        println!("{}", json!({ "file": out, "bytes": page.len(), "runs": reports.len() }));
    } else {
        let n_runs = if reports.len() == 1 { "one run".into() } else { format!("{} runs", reports.len()) };
        println!("{n_runs}, {:.1} MB: {}", page.len() as f64 / 1e6, out.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether an earlier report may be replaced by a new one.
fn is_ours(path: &Path) -> bool {
    let bytes = std::fs::read(path).unwrap_or_default();
    let beginning = String::from_utf8_lossy(&bytes[..bytes.len().min(BEGINNING)]).into_owned();
    beginning.contains("<title>Ocelli report</title>")
}

/// The run with its shards, where they are at hand, and its pictures.
fn of_run(args: &Args, run: Run, storage: &Storage, device: &Device) -> Report {
    let specs = match args.images.is_empty() {
        true => run_shards(&run),
        false => args.images.clone(),
    };
    // To open a shard on a server may be to fetch it.
    let opened = match args.images.is_empty() && !specs.iter().all(|spec| is_path(spec)) {
        true => Err("the shards are on a server; --images says what to show".to_string()),
        false => {
            Dataset::open(&specs, storage).map_err(|error| format!("{error}; --images says what to show"))
        }
    };
    let gallery = match &opened {
        _ if args.no_pictures => Err("they were not asked for (--no-pictures)".into()),
        Err(why) => Err(why.clone()),
        Ok(_) => gallery(args, &run, &specs, storage, device).map_err(|error| format!("{error:#}")),
    };
    if let (Err(why), false) = (&gallery, args.no_pictures) {
        say(format!("warning: {}: no pictures: {why}", run.workdir.display()));
    }
    Report { run, gallery, dataset: opened.ok().filter(Dataset::is_local) }
}

/// The run's shards, as they are found from here.
fn run_shards(run: &Run) -> Vec<String> {
    let folder = run.start.as_ref().map(|start| start.folder.clone()).unwrap_or_default();
    let shards = run.status.plan.recipe.data.shards.iter();
    // Paths are relative to where the run was started.
    shards
        .map(|spec| match is_path(spec) {
            true => folder.join(spec).to_string_lossy().into_owned(),
            false => spec.clone(),
        })
        .collect()
}

/// Whether a shard is named by its path.
fn is_path(spec: &str) -> bool {
    !spec.contains("://") && !spec.starts_with("pipe:")
}

fn gallery(
    args: &Args,
    run: &Run,
    specs: &[String],
    storage: &Storage,
    device: &Device,
) -> anyhow::Result<Gallery> {
    let open = args.network.open(&run.workdir, device)?;
    let dataset = Arc::new(Dataset::open(specs, storage)?);
    let (name, n) = (set_name(specs), args.candidates.max(args.n_images as u64));
    let images = ImageSet::open_some(Source::Shards(dataset), open.transform, open.rules, name, n)?;
    let multicrop = open.multicrop();
    let seed = run.status.plan.recipe.seed;
    let rules = GalleryRules { n_images: args.n_images.max(1), multicrop: &multicrop, seed };
    say(format!("{}: pictures of {} images of {}", run.name(), images.len(), images.name));
    let of = format!(
        "{} images of {}, seen by the {} of step {} through {}.",
        images.len(),
        images.name,
        open.which,
        open.step().unwrap_or_default(),
        open.transform
    );
    let mut gallery = Gallery::of(&open.network, &images, rules)?;
    gallery.of = of;
    Ok(gallery)
}
