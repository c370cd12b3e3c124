//! Flags of `shards pack`.

use std::path::PathBuf;

use crate::parts::PartFlags;

/// Flags of `shards pack`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards pack photos/ --out shards/\n  ocelli shards pack list.csv --out shards/ --prefix train\n  ocelli shards pack urls.csv --urls --out shards/"
)]
pub(crate) struct Args {
    /// Folder (plain, or one sub-folder per class), or a .csv, .tsv or .jsonl list with the columns
    /// `path` and, if there are labels, `label`, or a .txt list. Paths are relative to the list.
    pub(super) input: PathBuf,
    /// Folder that receives the shards.
    #[arg(long)]
    pub(super) out: PathBuf,
    /// Prefix of the shards' names.
    #[arg(long, default_value = "train")]
    pub(super) prefix: String,
    /// Largest number of samples of a shard.
    #[arg(long, default_value_t = 10_000)]
    pub(super) samples_per_shard: u64,
    /// Largest size of a shard in bytes, by the lengths of the images' files; 0 for any size. With
    /// --urls, only the number of samples counts.
    #[arg(long, default_value_t = 1 << 30)]
    pub(super) bytes_per_shard: u64,
    /// List that numbers the classes, one name per line: the classes.txt of another pack. Without
    /// it, labels that are all numbers are kept, and names are numbered in alphabetical order.
    #[arg(long)]
    pub(super) classes: Option<PathBuf>,
    /// Seed of the order in which samples are packed.
    #[arg(long, default_value_t = 0)]
    pub(super) seed: u64,
    /// Join files that hold one band of an image each, such as tile.b02.tif and tile.b08.tif, into
    /// one sample: its channels in the order of their names, in which numbers count by value.
    #[arg(long, conflicts_with = "urls")]
    pub(super) bands: bool,
    /// End with one line of JSON.
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) parts: PartFlags,
    #[command(flatten)]
    pub(super) web: WebFlags,
}

/// Flags of packing from the web.
#[derive(clap::Args)]
pub(crate) struct WebFlags {
    /// Fetch the URLs in the list's column `url`. `label` and `caption` are kept if they
    /// are present.
    #[arg(long, help_heading = "From the web")]
    pub(super) urls: bool,
    /// Number of images that are fetched at a time.
    #[arg(long, default_value_t = 64, requires = "urls", help_heading = "From the web")]
    pub(super) connections: usize,
    /// Number of images that are fetched from one server at a time.
    #[arg(long, default_value_t = 8, requires = "urls", help_heading = "From the web")]
    pub(super) per_host: usize,
    /// Number of attempts after the first one.
    #[arg(long, default_value_t = 2, requires = "urls", help_heading = "From the web")]
    pub(super) retries: u32,
    /// Seconds that fetching an image may take, with all attempts.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..), requires = "urls", help_heading = "From the web")]
    pub(super) timeout_s: u64,
    /// Largest size of an image, in megabytes.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..), requires = "urls", help_heading = "From the web")]
    pub(super) max_mb: u64,
    /// Fetch images whose owners forbid it by an X-Robots-Tag (noai, noimageai, noindex,
    /// noimageindex, none).
    #[arg(long, requires = "urls", help_heading = "From the web")]
    pub(super) ignore_opt_out: bool,
    /// Start over in a folder that holds the output of another pack, which is deleted.
    #[arg(long, requires = "urls", help_heading = "From the web")]
    pub(super) overwrite: bool,
}
