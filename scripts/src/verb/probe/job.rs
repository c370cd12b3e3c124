//! A scoring job: networks, images and protocols.
use std::path::PathBuf;
use std::sync::Arc;

use eval::{ImageSet, Protocol, Source, Split};
use kernels::device::Device;
use pipeline::Storage;

use crate::cluster::compute::DeviceFlag;
use crate::evaluation::flags::{CacheFlags, ProtocolFlags};
use crate::evaluation::image_sets::{report_image_set_bits, with_names};
use crate::evaluation::network::{NetworkFlags, OpenNetwork};
use crate::evaluation::scores::set_name;
use prep::classes::report_class_folders;
use prep::open::open_dataset;

/// Flags of `probe`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli probe --checkpoint runs/mine --train 'data/train-*.tar' --test \
        'data/test-*.tar' --baseline\n  ocelli probe --watch runs/mine --train data/train/ --test \
        data/test/ --protocol linear-dino")]
pub(crate) struct Args {
    /// A run's work directory, a checkpoint folder, or weights: a file or folder from `ocelli
    /// export`, DINO, DINOv2, timm, torchvision or transformers.
    #[arg(long, required_unless_present = "watch")]
    pub(super) checkpoint: Option<PathBuf>,
    /// Score every checkpoint of a run once, as it appears, until the run ends. Any number of
    /// watchers can share a run, on any machine that sees the folder; a restarted one picks up
    /// where it stopped.
    #[arg(long, value_name = "WORKDIR", conflicts_with_all = ["checkpoint", "baseline", "label_free",
        "no_record"])]
    pub(super) watch: Option<PathBuf>,
    #[command(flatten)]
    pub(super) network: NetworkFlags,
    /// Shards with classes or masks to train on.
    #[arg(long, num_args = 1.., required_unless_present_any = ["label_free", "leave_one_out"])]
    pub(super) train: Vec<String>,
    /// Shards with classes or masks to test on; with --label-free, any images.
    #[arg(long, num_args = 1.., required = true)]
    pub(super) test: Vec<String>,
    /// Compute only measures that need no labels: RankMe, α-ReQ, LiDAR, alignment and uniformity.
    #[arg(long, conflicts_with_all = ["train", "baseline", "protocol", "leave_one_out"])]
    pub(super) label_free: bool,
    /// Name to record the results under [default: the folder and name of the test shards].
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,
    #[command(flatten)]
    pub(super) protocols: ProtocolFlags,
    /// Also score a randomly initialized network and raw pixels.
    #[arg(long)]
    pub(super) baseline: bool,
    /// Do not add the scores to the run's evaluations.jsonl and TensorBoard files.
    #[arg(long)]
    pub(super) no_record: bool,
    #[command(flatten)]
    pub(super) cache: CacheFlags,
    #[command(flatten)]
    pub(super) device: DeviceFlag,
    /// Print a line of JSON at the end: every score with its interval, settings, classes and
    /// confusions.
    #[arg(long)]
    pub(super) json: bool,
}

/// Resources that scoring needs besides the flags.
pub(super) struct Means<'a> {
    pub(super) storage: &'a Storage,
    pub(super) protocols: Vec<Protocol>,
    pub(super) device: Device,
    pub(super) cache: Option<eval::FeatureCache>,
}

/// Returns the images to fit on and to report on, with the preprocessing of `open`.
pub(super) fn split(
    args: &Args,
    open: &OpenNetwork,
    protocols: &[Protocol],
    storage: &Storage,
) -> anyhow::Result<Split> {
    let test = images(&args.test, test_name(args), open, storage)?;
    let train = if args.protocols.leave_one_out {
        test.clone()
    } else {
        images(&args.train, set_name(&args.train), open, storage)?
    };
    let split = Split::for_protocols(protocols, train, test)?;
    let overrides_transform = args.network.resize_px.is_some();
    Ok(Split { seed: args.protocols.seed, overrides_transform, ..split })
}

/// Returns the images of shards as the set `name`, with the preprocessing of `open`.
pub(super) fn images(
    specs: &[String],
    name: String,
    open: &OpenNetwork,
    storage: &Storage,
) -> anyhow::Result<ImageSet> {
    let dataset = Arc::new(open_dataset(specs, storage)?);
    report_class_folders(&dataset, &name)?;
    let source = Source::Shards(dataset);
    let images = ImageSet::open(source, open.transform, open.rules, name)?;
    report_image_set_bits(&images)?;
    with_names(images, specs, storage)
}

/// Returns the name of the test set.
pub(super) fn test_name(args: &Args) -> String {
    args.name.clone().unwrap_or_else(|| set_name(&args.test))
}
