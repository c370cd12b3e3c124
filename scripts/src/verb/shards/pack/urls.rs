//! `ocelli shards pack --urls`: packs the images of a list of URLs into shards.
//!
//! Shard `k` holds the images of rows `[k·n, (k+1)·n)` that were fetched and can be decoded, in the
//! order in which they arrived; the key of a sample is the number of its row in the order of
//! `--seed`. Beside it is the list of rows that failed, with reasons, which can be packed again if
//! the addresses have no passwords or signatures: these are left out. A job that was stopped
//! continues with the shards that are missing.

use pipeline::secrets::address_without_secrets;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use augment::facts::facts;
use augment::{DecodeRules, Image};
use pipeline::remote::{Client, GetLimits, RetryPolicy};
use pipeline::shard::write::ShardFile;
use pipeline::{ColumnNames, file};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::flags::Args;
use crate::progress::bar;
use crate::storage::jitter_seed;
use prep::classes::Classes;
use prep::classes::write_classes;
use prep::folder_lock::lock_for;
use prep::host_queue::HostQueue;
use prep::list;
use prep::list::ListRow;
use prep::names::shard_list;
use prep::order::shuffle;
use prep::parts::Work;
use prep::rewrite::claim;

/// Number of shards that may be open at a time: a slow server keeps its shard open, but does not
/// block all work.
const OPEN_SHARDS: usize = 4;

/// An image that was fetched.
struct Fetched {
    extension: &'static str,
    image: Vec<u8>,
    width_px: u32,
    height_px: u32,
}

/// A shard that is being written.
struct Open {
    file: ShardFile,
    failures: Vec<Value>,
    n_left: usize,
}

/// Writer of rows in the order of their arrival, each into its shard.
struct Writer<'a> {
    args: &'a Args,
    rows: &'a [ListRow],
    classes: &'a Classes,
    /// Number of rows of a shard.
    n: usize,
    /// Numbers of the shards that do not exist.
    missing: Vec<usize>,
    open: BTreeMap<usize, Open>,
    n_closed: usize,
    totals: DownloadTotals,
}

/// Counts of fetched and failed rows.
#[derive(Default)]
struct DownloadTotals {
    n_fetched: u64,
    n_failed: u64,
    bytes: u64,
}

pub(crate) fn run(args: &Args, columns: &ColumnNames) -> anyhow::Result<ExitCode> {
    if !list::is_list(&args.input) {
        bail!("{} is not a .txt, .csv, .tsv or .jsonl list of URLs", args.input.display());
    }
    let mut rows = list::read(&args.input, list::Target::Url, columns)?;
    if rows.is_empty() {
        bail!("{} contains no URLs", args.input.display());
    }
    let work = args.parts.work();
    work.check_overwrite(args.web.overwrite)?;
    let _lock = lock_for(work, &args.out, &args.prefix)?;
    let classes = Classes::from_labels(
        args.classes.as_deref(),
        &args.out,
        args.web.overwrite,
        rows.iter().filter_map(|row| row.label.as_ref()),
    )?;
    // A label without a number is reported before anything is fetched.
    for label in rows.iter().filter_map(|row| row.label.as_ref()) {
        classes.number(label)?;
    }
    shuffle(&mut rows, args.seed);
    let text = fs::read(&args.input).with_context(|| format!("cannot read {}", args.input.display()))?;
    let mut settings = json!({
        "prefix": args.prefix,
        "samples_per_shard": args.samples_per_shard,
        "seed": args.seed,
        "max_mb": args.web.max_mb,
        "ignore_opt_out": args.web.ignore_opt_out,
        // Jobs with different numberings of the classes are different.
        "classes": classes.names().map(|names| format!("{:016x}", xxh3_64(names.join("\n").as_bytes()))),
    });
    if work.n_parts() > 1 {
        settings["parts"] = json!(work.n_parts());
    }
    let inputs = vec![json!(format!("{:016x}", xxh3_64(&text)))];
    claim(inputs, &args.out, "pack --urls", &settings, args.web.overwrite)?;
    if let Some(names) = classes.names() {
        write_classes(&args.out, names)?;
    }
    let start = Instant::now();
    let totals = fetch_all(args, &rows, &classes)?;
    finish(args, &classes, rows.len(), &totals, start.elapsed())
}

/// Fetches the rows of all missing shards.
fn fetch_all(args: &Args, rows: &[ListRow], classes: &Classes) -> anyhow::Result<DownloadTotals> {
    let mut writer = Writer::new(args, rows, classes);
    args.parts.work().check_done(rows.len().div_ceil(writer.n), &writer.missing)?;
    let urls: Vec<&str> = rows.iter().map(|row| row.target.as_str()).collect();
    let waiting: Vec<usize> = writer.missing.iter().flat_map(|shard| writer.row_range(*shard)).collect();
    let progress = bar(waiting.len() as u64, "pack");
    let queue = HostQueue::new(&urls, waiting, args.web.per_host);
    queue.set_horizon(writer.horizon());
    let client = client(args)?;
    let n_threads = args.web.connections.max(1);
    let (sender, results) = crossbeam::channel::bounded(n_threads);
    std::thread::scope(|scope| -> anyhow::Result<()> {
        for _ in 0..n_threads {
            let sender = sender.clone();
            let queue = &queue;
            let client = &client;
            scope.spawn(move || {
                while let Some(turn) = queue.take() {
                    let number = turn.item;
                    let fetched = fetch(&rows[number].target, client, args);
                    drop(turn);
                    if sender.send((number, fetched)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut written = Ok(());
        for (number, fetched) in results.iter() {
            match writer.add(number, fetched) {
                Ok(true) => queue.set_horizon(writer.horizon()),
                Ok(false) => {}
                Err(error) => {
                    written = Err(error);
                    break;
                }
            }
            progress.inc(1);
            progress.set_message(format!("{} failed", writer.totals.n_failed));
        }
        // After an error the remaining results are not read: threads that wait for a row, or for
        // the receiver, must end.
        queue.close();
        drop(results);
        written
    })?;
    progress.finish_and_clear();
    Ok(writer.totals)
}

/// Creates the client for requests as the flags say.
fn client(args: &Args) -> anyhow::Result<Client> {
    let policy = RetryPolicy {
        max_failures: args.web.retries,
        // No server has been contacted before.
        max_first_failures: args.web.retries,
        first_wait: Duration::from_millis(250),
        max_wait: Duration::from_secs(10),
        stall: Duration::from_secs(15),
        jitter_seed: jitter_seed(),
        warns: false,
        ..RetryPolicy::default()
    };
    Ok(Client::new(Vec::new(), policy)?)
}

/// Fetches and decodes an image.
fn fetch(url: &str, client: &Client, args: &Args) -> Result<Fetched, String> {
    let limits = GetLimits {
        max_bytes: args.web.max_mb << 20,
        timeout: Duration::from_secs(args.web.timeout_s.max(1)),
        honors_opt_out: !args.web.ignore_opt_out,
    };
    let image = client.get(url, &limits)?;
    let facts = facts(&image).map_err(|error| error.to_string())?;
    Image::decode_any(&[&image], &DecodeRules::default()).map_err(|error| error.to_string())?;
    let extension = if facts.format == "jpeg" { "jpg" } else { facts.format };
    Ok(Fetched { extension, image, width_px: facts.width_px, height_px: facts.height_px })
}

impl<'a> Writer<'a> {
    fn new(args: &'a Args, rows: &'a [ListRow], classes: &'a Classes) -> Self {
        let n = args.samples_per_shard.max(1) as usize;
        let shards = args.parts.work().range(rows.len().div_ceil(n));
        let missing = shards.filter(|shard| !tar_path(args, *shard).exists()).collect();
        let open = BTreeMap::new();
        let totals = DownloadTotals::default();
        Self { args, rows, classes, n, missing, open, n_closed: 0, totals }
    }

    /// Returns the rows of a shard.
    fn row_range(&self, shard: usize) -> Range<usize> {
        shard * self.n..self.rows.len().min((shard + 1) * self.n)
    }

    /// Returns the first row that may not be fetched yet.
    fn horizon(&self) -> usize {
        self.missing.get(self.n_closed + OPEN_SHARDS).map_or(usize::MAX, |shard| shard * self.n)
    }

    /// Writes a fetched row, or notes its failure. Returns `true` if that completes its shard.
    fn add(&mut self, number: usize, fetched: Result<Fetched, String>) -> anyhow::Result<bool> {
        let shard = number / self.n;
        let n_left = self.row_range(shard).len();
        let open = match self.open.entry(shard) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let file = ShardFile::create(&tar_path(self.args, shard))?;
                entry.insert(Open { file, failures: Vec::new(), n_left })
            }
        };
        let row = &self.rows[number];
        match fetched {
            Err(reason) => {
                self.totals.n_failed += 1;
                let mut failure = row_columns(row);
                failure["reason"] = json!(reason);
                if failure["url"] != json!(row.target) {
                    // The address without its secrets does not suffice to fetch the image.
                    failure["row"] = json!(number);
                }
                open.failures.push(failure);
            }
            Ok(fetched) => {
                self.totals.n_fetched += 1;
                self.totals.bytes += fetched.image.len() as u64;
                write(&mut open.file, number, row, &fetched, self.classes)?;
            }
        }
        open.n_left -= 1;
        if open.n_left > 0 {
            return Ok(false);
        }
        if let Some(open) = self.open.remove(&shard) {
            open.finish(&failures_path(self.args, shard))?;
        }
        self.n_closed += 1;
        Ok(true)
    }
}

/// Describes a row without the secrets of its address: shards are shared.
fn row_columns(row: &ListRow) -> Value {
    let mut columns = json!({ "url": address_without_secrets(&row.target) });
    for (name, cell) in [("label", &row.label), ("caption", &row.caption)] {
        if let Some(cell) = cell {
            columns[name] = json!(cell);
        }
    }
    columns
}

/// Adds a fetched row to its shard.
fn write(
    file: &mut ShardFile,
    number: usize,
    row: &ListRow,
    fetched: &Fetched,
    classes: &Classes,
) -> anyhow::Result<()> {
    let mut columns = row_columns(row);
    columns["width"] = json!(fetched.width_px);
    columns["height"] = json!(fetched.height_px);
    let columns = columns.to_string();
    let label = match &row.label {
        Some(label) => Some(classes.number(label)?.to_string()),
        None => None,
    };
    let mut members: Vec<(&str, &[u8])> = vec![(fetched.extension, &fetched.image)];
    members.extend(label.iter().map(|label| ("cls", label.as_bytes())));
    members.extend(row.caption.iter().map(|caption| ("txt", caption.as_bytes())));
    members.push(("json", columns.as_bytes()));
    Ok(file.add(&format!("{number:09}"), &members)?)
}

impl Open {
    /// Finishes the shard. The list of failures is written first, so that a complete shard has its
    /// list.
    fn finish(self, list: &Path) -> anyhow::Result<()> {
        let text: String = self.failures.iter().flat_map(|row| [row.to_string(), "\n".into()]).collect();
        file::replace(list, text.as_bytes()).with_context(|| format!("cannot write {}", list.display()))?;
        self.file.finish()?;
        Ok(())
    }
}

fn tar_path(args: &Args, shard: usize) -> PathBuf {
    args.out.join(format!("{}-{shard:06}.tar", args.prefix))
}

fn failures_path(args: &Args, shard: usize) -> PathBuf {
    tar_path(args, shard).with_extension("failures.jsonl")
}

/// Writes the lists of failures of all shards as one, and prints how to retry them.
fn report_failures(args: &Args, classes: &Classes, failures: &str, n_rows: usize) -> anyhow::Result<()> {
    let path = args.out.join("failures.jsonl");
    file::replace(&path, failures.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
    let n_failed = failures.lines().count();
    if n_failed > 0 {
        out!("{n_failed} of {n_rows} rows failed in total; reasons: {}", path.display());
        // The list may hold only some of the classes, whose numbers would change.
        let same_classes = match classes.names() {
            Some(_) => format!(" --classes {}", args.out.join("classes.txt").display()),
            None => String::new(),
        };
        out!("to retry them: ocelli shards pack {} --urls{same_classes} --out ...", path.display());
    }
    Ok(())
}

/// Prints the counts of this command's share, and joins the lists of failures unless it is a part.
fn finish(
    args: &Args,
    classes: &Classes,
    n_rows: usize,
    totals: &DownloadTotals,
    elapsed: Duration,
) -> anyhow::Result<ExitCode> {
    let n = args.samples_per_shard.max(1) as usize;
    let n_shards = n_rows.div_ceil(n);
    let work = args.parts.work();
    let shards = work.range(n_shards);
    // Rows of this command's share.
    let n_rows = n_rows.min(shards.end * n).saturating_sub(shards.start * n);
    let failures: String = shards
        .clone()
        .map(|shard| fs::read_to_string(failures_path(args, shard)).unwrap_or_default())
        .collect();
    let seconds = elapsed.as_secs_f64();
    out!(
        "{} images fetched, {} failed; {:.1} MB in {seconds:.1} s ({:.1} images/s)",
        totals.n_fetched,
        totals.n_failed,
        totals.bytes as f64 / 1e6,
        totals.n_fetched as f64 / seconds
    );
    let n_failed = failures.lines().count();
    match work {
        Work::Part(part) => {
            out!("part {part}: {} of {n_shards} shard(s); {n_failed} of {n_rows} rows failed", shards.len());
        }
        Work::Whole | Work::Join(_) => {
            out!("{}", shard_list(&args.out, &args.prefix, n_shards));
            report_failures(args, classes, &failures, n_rows)?;
        }
    }
    let n_existing = n_rows as u64 - totals.n_fetched - totals.n_failed;
    if n_existing > 0 {
        out!("{n_existing} rows were already done");
    }
    if args.json {
        let line = json!({
            "rows_there": n_existing,
            "fetched": totals.n_fetched, "failed": totals.n_failed, "failed_in_all": n_failed,
            "rows": n_rows, "shards": shards.len(),
        });
        out!("{line}");
    }
    // Some rows always fail; if all fail, there is no data set.
    let is_part = matches!(work, Work::Part(_));
    Ok(if n_failed == n_rows && !is_part { ExitCode::from(3) } else { ExitCode::SUCCESS })
}
