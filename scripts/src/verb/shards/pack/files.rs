//! Packing of a folder of images, or a list of paths, into shards.

use std::process::ExitCode;

use pipeline::ColumnNames;
use pipeline::shard::write::ShardLimits;
use serde_json::json;

use super::flags::Args;
use crate::parts::Work;
use crate::shards::names::shard_list;
use crate::shards::pack::{Packed, pack};
use crate::shards::pack_job::PackJob;

pub(crate) fn run(args: &Args, columns: &ColumnNames) -> anyhow::Result<ExitCode> {
    let max_bytes = if args.bytes_per_shard == 0 { u64::MAX } else { args.bytes_per_shard };
    let packed = pack(&PackJob {
        input: &args.input,
        columns,
        out: &args.out,
        prefix: &args.prefix,
        limits: ShardLimits { max_samples: args.samples_per_shard.max(1), max_bytes },
        classes: args.classes.as_deref(),
        overwrite: args.web.overwrite,
        seed: args.seed,
        joins_bands: args.bands,
        work: args.parts.work(),
    })?;
    print(args, &packed);
    Ok(ExitCode::SUCCESS)
}

fn print(args: &Args, packed: &Packed) {
    let Packed { n_samples, n_classes, n_shards, shards, n_existing, .. } = packed;
    let existing =
        if *n_existing > 0 { format!(", {n_existing} of them there already") } else { String::new() };
    match args.parts.work() {
        Work::Part(part) => out!(
            "part {part}: {n_samples} samples of {n_classes} class(es) in {} of {n_shards} shard(s){existing}",
            shards.len()
        ),
        Work::Join(_) => out!("{n_samples} samples of {n_classes} class(es) in {n_shards} shard(s):"),
        Work::Whole => out!("{n_samples} samples of {n_classes} class(es) in {n_shards} shard(s){existing}:"),
    }
    if !matches!(args.parts.work(), Work::Part(_)) {
        out!("{}", shard_list(&args.out, &args.prefix, *n_shards));
    }
    packed.print_notes();
    if args.json {
        let n_failed = packed.failures.as_ref().map_or(0, |(_, n)| *n);
        let line = json!({
            "samples": n_samples,
            "classes": n_classes,
            "shards": shards.len(),
            "shards_there": n_existing,
            "failed": n_failed,
            "skipped": packed.skipped,
        });
        out!("{line}");
    }
}
