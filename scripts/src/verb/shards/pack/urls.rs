//! `ocelli shards pack --urls`: packs the images of a list of URLs into shards.

use std::process::ExitCode;

use pipeline::ColumnNames;
use prep::names::shard_list;
use prep::parts::Work;
use prep::urls::{PackedUrls, WebRules, pack_urls};
use serde_json::json;

use super::flags::Args;
use crate::progress::StageBar;
use crate::storage::jitter_seed;

pub(crate) fn run(args: &Args, columns: &ColumnNames) -> anyhow::Result<ExitCode> {
    let web = WebRules {
        connections: args.web.connections,
        per_host: args.web.per_host,
        retries: args.web.retries,
        timeout_s: args.web.timeout_s,
        max_mb: args.web.max_mb,
        ignore_opt_out: args.web.ignore_opt_out,
        jitter_seed: jitter_seed(),
    };
    let progress = StageBar::new();
    let packed = pack_urls(&args.job(columns), &web, &progress, &|n_failed| {
        progress.set_message(format!("{n_failed} failed"));
    })?;
    drop(progress);
    print(args, &packed);
    // Some rows always fail; if all fail, there is no data set.
    let is_part = matches!(args.parts.work(), Work::Part(_));
    let is_empty = packed.n_failed_in_all == packed.n_rows && !is_part;
    Ok(if is_empty { ExitCode::from(3) } else { ExitCode::SUCCESS })
}

/// Prints the counts of this command's share, and how to retry the rows that have failed.
fn print(args: &Args, packed: &PackedUrls) {
    let PackedUrls { n_fetched, n_failed, seconds, n_rows, n_failed_in_all, n_shards, shards, .. } = packed;
    out!(
        "{n_fetched} images fetched, {n_failed} failed; {:.1} MB in {seconds:.1} s ({:.1} images/s)",
        packed.bytes as f64 / 1e6,
        *n_fetched as f64 / seconds
    );
    if let Work::Part(part) = args.parts.work() {
        let n_written = shards.len();
        out!("part {part}: {n_written} of {n_shards} shard(s); {n_failed_in_all} of {n_rows} rows failed");
    } else {
        out!("{}", shard_list(&args.out, &args.prefix, *n_shards));
    }
    if let Some(list) = &packed.failures
        && *n_failed_in_all > 0
    {
        let list = list.display();
        out!("{n_failed_in_all} of {n_rows} rows failed in total; reasons: {list}");
        // The list may hold only some of the classes, whose numbers would change.
        let mut same_classes = String::new();
        if packed.has_class_names {
            same_classes = format!(" --classes {}", args.out.join("classes.txt").display());
        }
        out!("to retry them: ocelli shards pack {list} --urls{same_classes} --out ...");
    }
    let n_existing = *n_rows as u64 - n_fetched - n_failed;
    if n_existing > 0 {
        out!("{n_existing} rows were already done");
    }
    if args.json {
        let line = json!({
            "rows_there": n_existing,
            "fetched": n_fetched, "failed": n_failed, "failed_in_all": n_failed_in_all,
            "rows": n_rows, "shards": shards.len(),
        });
        out!("{line}");
    }
}
