//! Output of a verb of `ocelli curate`: its flags, the numbers of kept images, and the sheet of
//! pairs by which a threshold is chosen.

use std::path::{Path, PathBuf};

use curate::io::{Columns, ImagePair, LIST, OutputFolder, OutputSettings};
use pipeline::words::{counted, thousands};
use prep::names::shard_list;
use report::picture::sheets::{Pair, image_pairs};
use serde_json::{Value, json};

use crate::progress::StageBar;
use crate::shards::limits::LimitFlags;

/// Flags of the output.
#[derive(clap::Args)]
#[command(
    mut_arg("samples_per_shard", |arg| arg.hide_short_help(true)),
    mut_arg("bytes_per_shard", |arg| arg.hide_short_help(true)),
    mut_arg("renumber", |arg| arg.hide_short_help(true))
)]
pub(crate) struct OutputFlags {
    /// Output folder for lists, pictures and shards. Rerun a stopped command with the same folder
    /// to continue it.
    #[arg(long)]
    pub(crate) out: PathBuf,
    /// Also write the kept images as shards. They are in the output folder, with their keys, labels
    /// and all other members.
    #[arg(long, requires = "shards")]
    pack: bool,
    /// Prefix of the shard names.
    #[arg(long, default_value = "train", hide_short_help = true)]
    prefix: String,
    #[command(flatten)]
    limits: LimitFlags,
    /// Delete the output of another call in the folder and start over.
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Print a line of JSON at the end. It has images, kept, shards, and fields of the command.
    #[arg(long)]
    json: bool,
}

impl OutputFlags {
    pub(crate) fn settings(&self) -> OutputSettings {
        OutputSettings {
            folder: self.out.clone(),
            pack: self.pack,
            prefix: self.prefix.clone(),
            shards: self.limits.options(),
            overwrite: self.overwrite,
        }
    }

    /// Writes the lists, with `columns` for each row, and with --pack the kept images as shards;
    /// prints the numbers of kept images, and `summary` as JSON.
    pub(crate) fn write(
        &self,
        output: &OutputFolder<'_>,
        kept: &[bool],
        columns: &dyn Fn(usize) -> Columns,
        mut summary: Value,
    ) -> anyhow::Result<()> {
        let n_kept = output.write_lists(kept, columns)?;
        let images = counted(kept.len() as u64, "image");
        out!("{} of {images} kept: {}", thousands(n_kept as u64), self.out.join(LIST).display());
        if self.pack {
            let n_shards = output.pack(kept, &StageBar::new())?;
            out!("shards: {}", shard_list(&self.out, &self.prefix, n_shards));
            summary["shards"] = json!(n_shards);
        }
        summary["images"] = json!(kept.len());
        summary["kept"] = json!(n_kept);
        if self.json {
            out!("{summary}");
        }
        Ok(())
    }
}

/// Draws rows of pairs around the threshold, if there are any.
pub(crate) fn draw_pairs(path: &Path, rows: Vec<Vec<ImagePair>>, threshold: f32) -> anyhow::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let mut drawn: Vec<Vec<Pair>> = Vec::with_capacity(rows.len());
    for row in rows {
        let pairs = row.into_iter().map(|pair| Pair { images: pair.images, is_marked: pair.is_above });
        drawn.push(pairs.collect());
    }
    image_pairs(path, &drawn, &format!("pairs by similarity; red: dropped at {threshold}"))?;
    out!("pairs around the threshold: {}", path.display());
    Ok(())
}
