//! Packing of a folder of images, or a list of paths, into shards.

use std::process::ExitCode;

use pipeline::shard::write::ShardLimits;
use serde_json::json;

use super::flags::Args;
use crate::shards::names::shard_list;
use crate::shards::pack::{PackJob, Packed, pack};

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let packed = pack(&PackJob {
        input: &args.input,
        out: &args.out,
        prefix: &args.prefix,
        limits: ShardLimits { max_samples: args.samples_per_shard.max(1), max_bytes: args.bytes_per_shard },
        classes: args.classes.as_deref(),
        overwrite: args.web.overwrite,
        seed: args.seed,
        joins_bands: args.bands,
    })?;
    let Packed { n_samples, n_classes, paths, .. } = &packed;
    out!("{n_samples} samples of {n_classes} class(es) in {} shard(s):", paths.len());
    out!("{}", shard_list(&args.out, &args.prefix, paths.len()));
    packed.tell();
    if args.json {
        let n_failed = packed.failures.as_ref().map_or(0, |(_, n)| *n);
        let line = json!({
            "samples": n_samples,
            "classes": n_classes,
            "shards": paths.len(),
            "failed": n_failed,
            "skipped": packed.skipped,
        });
        out!("{line}");
    }
    Ok(ExitCode::SUCCESS)
}
