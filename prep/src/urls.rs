//! Packing of the images of a list of URLs into shards.
//!
//! Shard `k` holds the images of rows `[k·n, (k+1)·n)` that were fetched and can be decoded, in the
//! order in which they arrived; the key of a sample is the index of its row in the order of
//! `--seed`. Beside it is the list of rows that failed, with reasons, which can be packed again if
//! the addresses have no passwords or signatures: these are left out. A job that was stopped
//! continues with the shards that are missing.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use augment::facts::facts;
use augment::{DecodeRules, Image};
use crossbeam::channel::bounded;
use pipeline::remote::{Client, GetLimits, RetryPolicy};
use pipeline::secrets::address_without_secrets;
use pipeline::shard::classes::Columns;
use pipeline::shard::write::ShardFile;
use pipeline::{Progress, file};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use crate::classes::{Classes, write_classes};
use crate::error::PrepError;
use crate::folder_lock::lock_for;
use crate::host_queue::HostQueue;
use crate::lazy_shard::LazyShard;
use crate::list;
use crate::list::ListRow;
use crate::order::shuffle;
use crate::pack_job::{PackJob, failures_path, is_done, shard_path};
use crate::parts::Work;
use crate::rewrite::claim;

/// Number of shards that may be open at a time: a slow server keeps its shard open, but does not
/// block all work.
const OPEN_SHARDS: usize = 4;

/// Rules for requests.
pub struct WebRules {
    /// Number of images that are fetched at a time.
    pub connections: usize,
    /// Number of images that are fetched from one server at a time.
    pub per_host: usize,
    /// Number of retries per image.
    pub retries: u32,
    /// Limit of the time for an image, all retries included, in seconds.
    pub timeout_s: u64,
    /// Maximum size of an image, in megabytes.
    pub max_mb: u64,
    /// `true` if images are fetched even if their owners opt out.
    pub ignore_opt_out: bool,
    /// Seed of the waits after failures ([`RetryPolicy::jitter_seed`]).
    pub jitter_seed: u64,
}

/// Result of packing images of a list of URLs.
pub struct PackedUrls {
    /// Number of images that were fetched now.
    pub n_fetched: u64,
    /// Number of rows that failed now.
    pub n_failed: u64,
    /// Bytes of the images that were fetched now.
    pub bytes: u64,
    /// Time for fetching, in seconds.
    pub seconds: f64,
    /// Number of rows of this command's share.
    pub n_rows: usize,
    /// Number of them that have failed, now or before.
    pub n_failed_in_all: usize,
    /// Number of shards of the whole job, with those that are left out.
    pub n_shards: usize,
    /// Indices of the shards of this command's share.
    pub shards: Range<usize>,
    /// Number of them that are left out, because none of their rows can be fetched.
    pub n_empty: usize,
    /// List of the rows that have failed, with reasons. A part has a list for each shard.
    pub failures: Option<PathBuf>,
    /// `true` if classes are numbered by a list of names, which is beside the shards.
    pub has_class_names: bool,
}

impl PackedUrls {
    /// Returns the number of rows of this command's share that were in shards before.
    pub fn n_existing(&self) -> u64 {
        self.n_rows as u64 - self.n_fetched - self.n_failed
    }

    /// Returns the counts as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "rows_there": self.n_existing(),
            "fetched": self.n_fetched,
            "failed": self.n_failed,
            "failed_in_all": self.n_failed_in_all,
            "rows": self.n_rows,
            "shards": self.shards.len() - self.n_empty,
        })
    }
}

/// An image that was fetched.
struct Fetched {
    extension: &'static str,
    image: Vec<u8>,
    width_px: u32,
    height_px: u32,
}

/// A shard that is being written.
struct Open {
    shard: LazyShard,
    failures: Vec<Value>,
    n_left: usize,
}

/// Writer of rows in the order of their arrival, each into its shard.
struct Writer<'a> {
    job: &'a PackJob<'a>,
    rows: &'a [ListRow],
    classes: &'a Classes,
    /// Number of rows of a shard.
    n: usize,
    /// Indices of the shards that are not done.
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

/// Packs the images of the list of URLs `job.input`; only the number of samples limits a shard.
/// After each row, `report` is called with the number of rows that have failed.
///
/// # Errors
/// [`PrepError`] when the list has no URLs, when the folder belongs to another job, or when shards
/// cannot be written. An image that cannot be fetched is no error.
pub fn pack_urls(
    job: &PackJob<'_>,
    web: &WebRules,
    progress: &dyn Progress,
    report: &dyn Fn(u64),
) -> Result<PackedUrls, PrepError> {
    if !list::is_list(job.input) {
        return Err(PrepError::NotUrls { path: job.input.to_path_buf() });
    }
    let mut rows = list::read(job.input, list::Target::Url, job.columns)?;
    if rows.is_empty() {
        return Err(PrepError::NoUrls { path: job.input.to_path_buf() });
    }
    job.work.check_overwrite(job.overwrite)?;
    let _lock = lock_for(job.work, job.out, job.prefix)?;
    let stated = rows.iter().flat_map(|row| row.classes.iter().flatten());
    let classes = Classes::new(job.classes, job.out, job.overwrite, stated)?;
    // A class without a number is reported before anything is fetched.
    for row in &rows {
        class_member(row, 0, &classes)?;
    }
    shuffle(&mut rows, job.seed);
    claim_folder(job, web, &classes)?;
    if let Some(names) = classes.names() {
        write_classes(job.out, names)?;
    }
    let start = Instant::now();
    let totals = fetch_all(job, web, &rows, &classes, progress, report)?;
    summarize(job, &classes, rows.len(), &totals, start.elapsed())
}

/// Records the job in its folder, or checks that the recorded job is this one.
fn claim_folder(job: &PackJob<'_>, web: &WebRules, classes: &Classes) -> Result<(), PrepError> {
    let text = fs::read(job.input).map_err(|error| PrepError::io("read", job.input, error))?;
    let mut settings = json!({
        // 2 since all columns are kept, 3 since they keep their names.
        "version": 3,
        "prefix": job.prefix,
        "samples_per_shard": job.limits.max_samples,
        "seed": job.seed,
        "max_mb": web.max_mb,
        "ignore_opt_out": web.ignore_opt_out,
        // Jobs with different numberings of the classes are different.
        "classes": classes.names().map(|names| format!("{:016x}", xxh3_64(names.join("\n").as_bytes()))),
    });
    if job.work.n_parts() > 1 {
        settings["parts"] = json!(job.work.n_parts());
    }
    if let Some(column) = &job.columns.image {
        settings["image_column"] = json!(column);
    }
    if let Some(column) = &job.columns.label {
        settings["label_column"] = json!(column);
    }
    let inputs = vec![json!(format!("{:016x}", xxh3_64(&text)))];
    claim(inputs, job.out, "pack --urls", &settings, job.overwrite)
}

/// Fetches the rows of all missing shards.
fn fetch_all(
    job: &PackJob<'_>,
    web: &WebRules,
    rows: &[ListRow],
    classes: &Classes,
    progress: &dyn Progress,
    report: &dyn Fn(u64),
) -> Result<DownloadTotals, PrepError> {
    let mut writer = Writer::new(job, rows, classes);
    job.work.check_done(rows.len().div_ceil(writer.n), &writer.missing)?;
    let urls: Vec<&str> = rows.iter().map(|row| row.target.as_str()).collect();
    let waiting: Vec<usize> = writer.missing.iter().flat_map(|shard| writer.row_range(*shard)).collect();
    progress.begin("pack", waiting.len() as u64);
    let queue = HostQueue::new(&urls, waiting, web.per_host);
    queue.set_horizon(writer.horizon());
    let client = client(web)?;
    let n_threads = web.connections.max(1);
    let (sender, results) = bounded(n_threads);
    std::thread::scope(|scope| -> Result<(), PrepError> {
        for _ in 0..n_threads {
            let sender = sender.clone();
            let queue = &queue;
            let client = &client;
            scope.spawn(move || {
                while let Some(turn) = queue.take() {
                    let index = turn.item;
                    let fetched = fetch(&rows[index].target, client, web);
                    drop(turn);
                    if sender.send((index, fetched)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut written = Ok(());
        for (index, fetched) in results.iter() {
            match writer.add(index, fetched) {
                Ok(true) => queue.set_horizon(writer.horizon()),
                Ok(false) => {}
                Err(error) => {
                    written = Err(error);
                    break;
                }
            }
            progress.advance(1);
            report(writer.totals.n_failed);
        }
        // After an error the remaining results are not read: threads that wait for a row, or for
        // the receiver, must end.
        queue.close();
        drop(results);
        written
    })?;
    Ok(writer.totals)
}

/// Creates the client for requests.
fn client(web: &WebRules) -> Result<Client, PrepError> {
    let policy = RetryPolicy {
        max_failures: web.retries,
        // No server has been contacted before.
        max_first_failures: web.retries,
        first_wait: Duration::from_millis(250),
        max_wait: Duration::from_secs(10),
        stall: Duration::from_secs(15),
        jitter_seed: web.jitter_seed,
        warns: false,
        ..RetryPolicy::default()
    };
    Client::new(Vec::new(), policy).map_err(PrepError::Client)
}

/// Fetches and decodes an image.
fn fetch(url: &str, client: &Client, web: &WebRules) -> Result<Fetched, String> {
    let limits = GetLimits {
        max_bytes: web.max_mb << 20,
        timeout: Duration::from_secs(web.timeout_s.max(1)),
        honors_opt_out: !web.ignore_opt_out,
    };
    let image = client.get(url, &limits)?;
    let facts = facts(&image).map_err(|error| error.to_string())?;
    Image::decode_any(&[&image], &DecodeRules::default()).map_err(|error| error.to_string())?;
    let extension = if facts.format == "jpeg" { "jpg" } else { facts.format };
    Ok(Fetched { extension, image, width_px: facts.width_px, height_px: facts.height_px })
}

impl<'a> Writer<'a> {
    fn new(job: &'a PackJob<'a>, rows: &'a [ListRow], classes: &'a Classes) -> Self {
        let n = samples_per_shard(job);
        let shards = job.work.range(rows.len().div_ceil(n));
        let open = BTreeMap::new();
        let totals = DownloadTotals::default();
        let mut writer = Self { job, rows, classes, n, missing: Vec::new(), open, n_closed: 0, totals };
        for shard in shards {
            if !is_done(job, shard, writer.row_range(shard).len()) {
                writer.missing.push(shard);
            }
        }
        writer
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
    fn add(&mut self, index: usize, fetched: Result<Fetched, String>) -> Result<bool, PrepError> {
        let shard = index / self.n;
        let n_left = self.row_range(shard).len();
        let path = shard_path(self.job, shard);
        let open = self.open.entry(shard).or_insert_with(|| Open {
            shard: LazyShard::new(path),
            failures: Vec::new(),
            n_left,
        });
        let row = &self.rows[index];
        match fetched {
            Err(reason) => {
                self.totals.n_failed += 1;
                let mut failure = row_columns(row);
                replace_column(&mut failure, "reason", "list_reason", json!(reason));
                if address_without_secrets(&row.target) != row.target {
                    // The address without its secrets does not suffice to fetch the image.
                    replace_column(&mut failure, "row", "list_row", json!(index));
                }
                open.failures.push(Value::Object(failure));
            }
            Ok(fetched) => {
                self.totals.n_fetched += 1;
                self.totals.bytes += fetched.image.len() as u64;
                write(open.shard.file()?, index, row, &fetched, self.classes)?;
            }
        }
        open.n_left -= 1;
        if open.n_left > 0 {
            return Ok(false);
        }
        if let Some(open) = self.open.remove(&shard) {
            open.finish(&failures_path(self.job, shard))?;
        }
        self.n_closed += 1;
        Ok(true)
    }
}

/// Returns the columns of a row without the secrets of the addresses in them: shards are shared.
fn row_columns(row: &ListRow) -> Columns {
    let mut columns = row.columns.clone();
    columns.values_mut().for_each(redact);
    add_column(&mut columns, "url", "image_url", json!(address_without_secrets(&row.target)));
    columns
}

/// Adds a column called `name`, or `other_name` if the list has one of that name. Columns of the
/// list stay as they are.
fn add_column(columns: &mut Columns, name: &str, other_name: &str, value: Value) {
    let name = if columns.contains_key(name) { other_name } else { name };
    columns.entry(name).or_insert(value);
}

/// Sets the column `name`, which a list of failures that is packed again has from before. The value
/// that the list has for it is then called `list_name`, unless the list has that column, too.
fn replace_column(columns: &mut Columns, name: &str, list_name: &str, value: Value) {
    if let Some(listed) = columns.insert(name.to_string(), value) {
        columns.entry(list_name).or_insert(listed);
    }
}

/// Removes the secrets of all addresses in `value`.
fn redact(value: &mut Value) {
    match value {
        Value::String(text) => *text = redact_words(text),
        Value::Array(values) => values.iter_mut().for_each(redact),
        Value::Object(columns) => columns.values_mut().for_each(redact),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Returns `text` without the secrets of the addresses in it.
fn redact_words(text: &str) -> String {
    let mut redacted = String::with_capacity(text.len());
    for piece in text.split_inclusive(char::is_whitespace) {
        let word = piece.trim_end();
        let space = &piece[word.len()..];
        if word.contains("://") {
            redacted.push_str(&address_without_secrets(word));
        } else {
            redacted.push_str(word);
        }
        redacted.push_str(space);
    }
    redacted
}

/// Adds a fetched row to its shard.
fn write(
    file: &mut ShardFile,
    index: usize,
    row: &ListRow,
    fetched: &Fetched,
    classes: &Classes,
) -> Result<(), PrepError> {
    let mut columns = row_columns(row);
    add_column(&mut columns, "width", "image_width", json!(fetched.width_px));
    add_column(&mut columns, "height", "image_height", json!(fetched.height_px));
    let columns = Value::Object(columns).to_string();
    let class = class_member(row, index, classes)?;
    let mut members: Vec<(&str, &[u8])> = vec![(fetched.extension, &fetched.image)];
    members.extend(class.iter().map(|class| ("cls", class.as_bytes())));
    let caption = row.caption.as_deref().map(redact_words);
    members.extend(caption.iter().map(|caption| ("txt", caption.as_bytes())));
    members.push(("json", columns.as_bytes()));
    Ok(file.add(&key(index), &members)?)
}

/// Returns the key of the sample of a row, by its index.
fn key(index: usize) -> String {
    format!("{index:09}")
}

/// Returns the text of the class member of a row, by its index.
fn class_member(row: &ListRow, index: usize, classes: &Classes) -> Result<Option<String>, PrepError> {
    classes.member_text(row.classes.as_deref(), &key(index), &row.columns)
}

impl Open {
    /// Finishes the shard, unless it has no sample. The list of failures is written first, so that
    /// a complete shard has its list.
    fn finish(self, list: &Path) -> Result<(), PrepError> {
        let text: String = self.failures.iter().flat_map(|row| [row.to_string(), "\n".into()]).collect();
        file::replace(list, text.as_bytes()).map_err(|error| PrepError::io("write", list, error))?;
        self.shard.finish()?;
        Ok(())
    }
}

/// Returns the number of rows of a shard.
fn samples_per_shard(job: &PackJob<'_>) -> usize {
    job.limits.max_samples.max(1) as usize
}

/// Counts the rows of this command's share, and joins the lists of failures unless it is a part.
fn summarize(
    job: &PackJob<'_>,
    classes: &Classes,
    n_rows: usize,
    totals: &DownloadTotals,
    elapsed: Duration,
) -> Result<PackedUrls, PrepError> {
    let n = samples_per_shard(job);
    let n_shards = n_rows.div_ceil(n);
    let shards = job.work.range(n_shards);
    let mut failures = String::new();
    let mut n_empty = 0;
    for shard in shards.clone() {
        failures.push_str(&fs::read_to_string(failures_path(job, shard)).unwrap_or_default());
        if !shard_path(job, shard).exists() {
            n_empty += 1;
        }
    }
    let mut list = None;
    if !matches!(job.work, Work::Part(_)) {
        let path = job.out.join("failures.jsonl");
        file::replace(&path, failures.as_bytes()).map_err(|error| PrepError::io("write", &path, error))?;
        list = Some(path);
    }
    Ok(PackedUrls {
        n_fetched: totals.n_fetched,
        n_failed: totals.n_failed,
        bytes: totals.bytes,
        seconds: elapsed.as_secs_f64(),
        n_rows: n_rows.min(shards.end * n).saturating_sub(shards.start * n),
        n_failed_in_all: failures.lines().count(),
        n_shards,
        shards,
        n_empty,
        failures: list,
        has_class_names: classes.names().is_some(),
    })
}
