//! A folder of images, or a list of paths, into shards.

use std::collections::BTreeSet;
use std::process::ExitCode;

use anyhow::bail;
use pipeline::shard::IMAGE_EXTENSIONS;
use pipeline::shard::write::{ShardLimits, ShardWriter};
use serde_json::json;

use super::flags::Args;
use crate::console::bar;
use crate::shards::classes::{Classes, write_classes};
use crate::shards::files::{entries, extension};
use crate::shards::names::shard_list;
use crate::shards::order::shuffle;

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut entries = entries(&args.input)?;
    if entries.is_empty() {
        bail!(pipeline::PipelineError::Empty {
            n_shards: 0,
            wanted: IMAGE_EXTENSIONS.join(", "),
            first: args.input.display().to_string(),
        });
    }
    let classes = Classes::of(
        args.classes.as_deref(),
        &args.out,
        args.web.overwrite,
        entries.iter().filter_map(|entry| entry.class.as_ref()),
    )?;
    shuffle(&mut entries, args.seed);
    let limits = ShardLimits { max_samples: args.samples_per_shard.max(1), max_bytes: args.bytes_per_shard };
    let mut writer = ShardWriter::new(&args.out, &args.prefix, limits)?;
    let progress = bar(entries.len() as u64, "pack");
    for (number, entry) in entries.iter().enumerate() {
        let image =
            std::fs::read(&entry.path).map_err(|e| pipeline::PipelineError::io("read", &entry.path, e))?;
        let extension = extension(&entry.path).unwrap_or_default();
        let label = entry.class.as_ref().map(|class| classes.number(class)).transpose()?;
        let label = label.map(|label| label.to_string());
        let mut members: Vec<(&str, &[u8])> = vec![(&extension, &image)];
        members.extend(label.iter().map(|label| ("cls", label.as_bytes())));
        writer.add(&format!("{number:08}"), &members)?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    if let Classes::Named(names) = &classes {
        write_classes(&args.out, names)?;
    }
    let n_samples = writer.n_samples();
    let paths = writer.finish()?;
    let n_classes = entries.iter().filter_map(|e| e.class.as_ref()).collect::<BTreeSet<_>>().len();
    out!("{n_samples} samples of {n_classes} class(es) in {} shard(s):", paths.len());
    out!("{}", shard_list(&args.out, &args.prefix, paths.len()));
    if args.json {
        out!("{}", json!({ "samples": n_samples, "classes": n_classes, "shards": paths.len() }));
    }
    Ok(ExitCode::SUCCESS)
}
