//! Flags of `shards pack`.

use std::path::PathBuf;

use pipeline::ColumnNames;
use pipeline::shard::write::ShardLimits;
use prep::pack::PackJob;

use crate::parts::PartFlags;

/// Flags of `shards pack`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards pack photos/ --out shards/\n  ocelli shards pack list.csv \
        --out shards/ --prefix train\n  ocelli shards pack urls.csv --urls --out shards/"
)]
pub(crate) struct Args {
    /// Folder of images (flat, or one sub-folder per class); a .csv, .tsv or .jsonl list with a
    /// column `path` and optionally `label`; or a .txt list. Paths are relative to the list.
    input: PathBuf,
    /// Output folder for the shards.
    #[arg(long)]
    pub(super) out: PathBuf,
    /// Prefix of the shard names.
    #[arg(long, default_value = "train")]
    pub(super) prefix: String,
    /// Maximum number of samples per shard.
    #[arg(long, default_value_t = 10_000)]
    samples_per_shard: u64,
    /// Maximum size of a shard in bytes, counting image files; 0 for no limit. Ignored with --urls,
    /// where only the number of samples counts.
    #[arg(long, default_value_t = 1 << 30)]
    bytes_per_shard: u64,
    /// Class list that defines the numbering, one name per line, such as the classes.txt of another
    /// pack. Without it, numeric labels are kept as they are, and names are numbered
    /// alphabetically.
    #[arg(long)]
    classes: Option<PathBuf>,
    /// Seed for the order in which samples are packed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Combine single-band files, such as tile.b02.tif and tile.b08.tif, into one sample. Channels
    /// are in the order of the file names, with numbers sorted by value.
    #[arg(long, conflicts_with = "urls")]
    bands: bool,
    /// Print a line of JSON at the end.
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) parts: PartFlags,
    #[command(flatten)]
    pub(super) web: WebFlags,
}

impl Args {
    /// Returns the job that the flags describe; `columns` are those that the user has named.
    pub(super) fn job<'a>(&'a self, columns: &'a ColumnNames) -> PackJob<'a> {
        let max_bytes = if self.bytes_per_shard == 0 { u64::MAX } else { self.bytes_per_shard };
        PackJob {
            input: &self.input,
            columns,
            out: &self.out,
            prefix: &self.prefix,
            limits: ShardLimits { max_samples: self.samples_per_shard, max_bytes },
            classes: self.classes.as_deref(),
            overwrite: self.web.overwrite,
            seed: self.seed,
            joins_bands: self.bands,
            work: self.parts.work(),
        }
    }
}

/// Flags of packing from the web.
#[derive(clap::Args)]
pub(crate) struct WebFlags {
    /// Fetch the URLs in the list's column `url`. The columns `label` and `caption` are kept if
    /// present.
    #[arg(long, help_heading = "From the web")]
    pub(super) urls: bool,
    /// Number of images to fetch at a time.
    #[arg(long, default_value_t = 64, requires = "urls", help_heading = "From the web")]
    pub(super) connections: usize,
    /// Number of images to fetch from one server at a time.
    #[arg(long, default_value_t = 8, requires = "urls", help_heading = "From the web")]
    pub(super) per_host: usize,
    /// Number of retries per image.
    #[arg(long, default_value_t = 2, requires = "urls", help_heading = "From the web")]
    pub(super) retries: u32,
    /// Timeout in seconds for fetching an image, including all retries.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..),
        requires = "urls", help_heading = "From the web")]
    pub(super) timeout_s: u64,
    /// Maximum size of an image, in megabytes.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..),
        requires = "urls", help_heading = "From the web")]
    pub(super) max_mb: u64,
    /// Fetch images even if their owners opt out with an X-Robots-Tag (noai, noimageai, noindex,
    /// noimageindex, none).
    #[arg(long, requires = "urls", help_heading = "From the web")]
    pub(super) ignore_opt_out: bool,
    /// Delete the output of another pack in the folder and start over.
    #[arg(long, requires = "urls", help_heading = "From the web")]
    overwrite: bool,
}
