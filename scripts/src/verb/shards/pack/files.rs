//! Packing of a folder of images, or a list of paths, into shards.

use std::process::ExitCode;

use pipeline::ColumnNames;
use prep::names::shard_list;
use prep::pack::{Packed, no_images, pack};
use prep::parts::Work;
use serde_json::json;

use super::flags::Args;
use crate::console::say;
use crate::progress::StageBar;

pub(crate) fn run(args: &Args, columns: &ColumnNames) -> anyhow::Result<ExitCode> {
    let job = args.job(columns);
    let packed = pack(&job, &StageBar::new())?;
    if packed.n_samples == 0 {
        print_first_failure(&packed);
        if !matches!(job.work, Work::Part(_)) {
            return Err(no_images(&job).into());
        }
    }
    print(args, &packed);
    Ok(ExitCode::SUCCESS)
}

/// Prints why the first image could not be packed.
fn print_first_failure(packed: &Packed) {
    if let Some((_, n)) = &packed.failures
        && let Some(first) = &packed.first_failure
    {
        say(format!("first of {n} failed images: {first}"));
    }
}

fn print(args: &Args, packed: &Packed) {
    let Packed { n_samples, n_classes, n_shards, shards, n_existing, .. } = packed;
    let existing =
        if *n_existing > 0 { format!(", {n_existing} of them already done") } else { String::new() };
    match args.parts.work() {
        Work::Part(part) => out!(
            "part {part}: {n_samples} samples of {n_classes} class(es) in {} of {n_shards} \
             shard(s){existing}",
            shards.len()
        ),
        Work::Join(_) => out!("{n_samples} samples of {n_classes} class(es) in {n_shards} shard(s):"),
        Work::Whole => out!("{n_samples} samples of {n_classes} class(es) in {n_shards} shard(s){existing}:"),
    }
    if !matches!(args.parts.work(), Work::Part(_)) {
        out!("{}", shard_list(&args.out, &args.prefix, *n_shards));
    }
    packed.report();
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
