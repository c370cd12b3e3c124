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
#[command(
    after_help = "Examples:\n  ocelli probe --checkpoint runs/mine --train 'data/train-*.tar' --test 'data/test-*.tar' --baseline\n  ocelli probe --watch runs/mine --train data/train/ --test data/test/ --protocol linear-dino"
)]
pub(crate) struct Args {
    /// A run's work directory, a checkpoint's folder, or weights: a file or folder of `ocelli
    /// export`, DINO, DINOv2, timm, torchvision or transformers.
    #[arg(long, required_unless_present = "watch")]
    pub(super) checkpoint: Option<PathBuf>,
    /// Score every checkpoint of a run once, as it appears, until the run has ended. Any number of
    /// these may work on the same run, on any machine that sees the folder; one that was stopped
    /// goes on.
    #[arg(long, value_name = "WORKDIR", conflicts_with_all = ["checkpoint", "baseline", "label_free", "no_record"])]
    pub(super) watch: Option<PathBuf>,
    #[command(flatten)]
    pub(super) network: NetworkFlags,
    /// Shards with classes, or masks, to fit on.
    #[arg(long, num_args = 1.., required_unless_present_any = ["label_free", "leave_one_out"])]
    pub(super) train: Vec<String>,
    /// Shards with classes, or masks, to report on; with --label-free, any images.
    #[arg(long, num_args = 1.., required = true)]
    pub(super) test: Vec<String>,
    /// Measure what needs no labels, and nothing else: RankMe, α-ReQ, LiDAR, alignment and
    /// uniformity.
    #[arg(long, conflicts_with_all = ["train", "baseline", "protocol", "leave_one_out"])]
    pub(super) label_free: bool,
    /// Name under which the results are recorded [default: the folder and the name of the test
    /// shards].
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,
    #[command(flatten)]
    pub(super) protocols: ProtocolFlags,
    /// Score a randomly initialized network and raw pixels too.
    #[arg(long)]
    pub(super) baseline: bool,
    /// Write nothing into the checkpoint's run: without this, the numbers are added to its
    /// evaluations.jsonl and TensorBoard.
    #[arg(long)]
    pub(super) no_record: bool,
    #[command(flatten)]
    pub(super) cache: CacheFlags,
    #[command(flatten)]
    pub(super) device: DeviceFlag,
    /// End with one line of JSON: every number with its interval, settings, classes and confusions.
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
