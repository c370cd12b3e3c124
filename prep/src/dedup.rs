//! Exact copies by hash and near copies by a perceptual hash, within a set and against another one,
//! such as the test set of a benchmark. The best copy is kept: the one with the most pixels, and
//! among those the least compressed one.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use augment::{DecodeRules, Image, Rgb8};
use pipeline::file::AtomicFile;
use pipeline::secrets::redact_list;
use pipeline::{Progress, Shard, Source, Storage};
use serde_json::{Value, json};

use crate::error::PrepError;
use crate::fingerprint::{SampleEntry, fingerprints};
use crate::folder_lock::{FolderLock, lock_for};
use crate::parts::{PartResults, Share, Work, identities};
use crate::rewrite::{Output, RewriteJob, RewriteTotals, Verdict, claim, input_identities, rewrite};

/// Name of the verb.
const VERB: &str = "dedup";

/// Rules by which samples are copies.
pub struct CopyRules<'a> {
    /// Shards to compare against. Samples near one of theirs also count as copies.
    pub against: &'a [String],
    /// Maximum number of bits in which the hashes of near copies differ; 0 finds only exact copies.
    pub max_distance: u32,
}

/// Copies in a set of samples, whose lists are written. The folder is locked while this exists.
pub struct Copies {
    out: PathBuf,
    settings: Value,
    sources: Vec<Source>,
    /// Shards to compare against, then those of the set.
    shards: Vec<Shard>,
    n_against: usize,
    entries: Vec<SampleEntry>,
    /// In the order of the samples.
    copies: Vec<Copy>,
    lock: FolderLock,
}

/// A copy of another sample. Both are numbers of entries.
struct Copy {
    entry: usize,
    original: usize,
    /// Number of bits in which their hashes differ; `None` for exact copies.
    distance: Option<u32>,
}

/// Finds the copies among the samples of `job`, and writes the lists of copies and of kept samples.
/// A part saves the fingerprints of its samples.
///
/// # Errors
/// [`PrepError`] when the folder is that of another job, when shards cannot be read or lists cannot
/// be written, or when the results of parts are missing or of another job.
pub fn find_copies(
    job: &RewriteJob<'_>,
    rules: &CopyRules<'_>,
    work: Work,
    storage: &Storage,
    progress: &dyn Progress,
) -> Result<Share<Copies>, PrepError> {
    let sources = storage.sources(job.shards)?;
    let against = if rules.against.is_empty() { Vec::new() } else { storage.sources(rules.against)? };
    let all: Vec<Source> = against.iter().chain(&sources).cloned().collect();
    let n_against = against.len();
    work.check_overwrite(job.overwrite)?;
    let shards = storage.open_all(&all)?;
    let against_specs: Vec<String> = rules.against.iter().map(|spec| redact_list(spec)).collect();
    let mut settings = json!({ "against": against_specs, "max_distance": rules.max_distance });
    if work.n_parts() > 1 {
        settings["parts"] = json!(work.n_parts());
    }
    let inputs = input_identities(&sources, &shards[n_against..], job.out)?;
    let lock = lock_for(work, job.out, VERB)?;
    // Samples are identified by their shard's number among all shards.
    let identity = json!({ "settings": settings, "inputs": identities(&all, work) });
    let results = PartResults::new(job.out, VERB, identity);
    results.check_complete(work)?;
    claim(inputs, job.out, VERB, &settings, job.overwrite)?;
    let share = results.compute(work, shards.len(), |range| fingerprints(&shards, range, progress))?;
    share.try_map(|entries| {
        let entries: Vec<SampleEntry> = entries.into_iter().flatten().collect();
        let have_samples = entries
            .iter()
            .all(|entry| shards.get(entry.shard).is_some_and(|shard| entry.number < shard.len()));
        if !have_samples {
            return Err(PrepError::PartsOfOtherShards { folder: job.out.to_path_buf() });
        }
        let copies = compare_samples(&entries, n_against, rules.max_distance);
        let out = job.out.to_path_buf();
        let copies = Copies { out, settings, sources, shards, n_against, entries, copies, lock };
        copies.write_lists()?;
        Ok(copies)
    })
}

impl Copies {
    /// Returns the number of samples of the set.
    pub fn n_samples(&self) -> usize {
        self.entries.iter().filter(|entry| entry.shard >= self.n_against).count()
    }

    /// Returns the number of exact copies.
    pub fn n_exact(&self) -> usize {
        self.copies.iter().filter(|copy| copy.distance.is_none()).count()
    }

    /// Returns the number of near copies.
    pub fn n_near(&self) -> usize {
        self.copies.len() - self.n_exact()
    }

    /// Returns the path of the list of copies, one line of JSON each.
    pub fn list(&self) -> PathBuf {
        self.out.join("copies.jsonl")
    }

    /// Returns the numbers of the samples of each group: the kept one, then its copies.
    pub fn groups(&self) -> Vec<Vec<usize>> {
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for copy in &self.copies {
            groups.entry(copy.original).or_insert_with(|| vec![copy.original]).push(copy.entry);
        }
        groups.into_values().collect()
    }

    /// Returns the key and the image of sample `number`; `None` if the image cannot be read.
    pub fn keyed_image(&self, number: usize) -> Option<(String, Rgb8)> {
        let entry = &self.entries[number];
        let shard = &self.shards[entry.shard];
        let encoded = shard.image(entry.number).ok()?;
        let image = Image::decode_any(&encoded.files(), &DecodeRules::default()).ok()?;
        Some((shard.key(entry.number).to_string(), image.picture()))
    }

    /// Writes the shards without the copies, under the same names.
    ///
    /// # Errors
    /// [`PrepError`] when shards cannot be read or written.
    pub fn remove(self, storage: &Storage, progress: &dyn Progress) -> Result<RewriteTotals, PrepError> {
        let removed: HashSet<(String, usize)> = self
            .copies
            .iter()
            .map(|copy| {
                let entry = &self.entries[copy.entry];
                (self.shards[entry.shard].name(), entry.number)
            })
            .collect();
        // The folder is claimed already; claiming it again must not clear it.
        let output = Output { out: &self.out, verb: VERB, settings: self.settings, overwrite: false };
        // `rewrite` locks the folder itself.
        drop(self.lock);
        rewrite(&self.sources, storage, &output, progress, |item| {
            if removed.contains(&(item.shard.name(), item.number)) {
                Verdict::Drop("a copy: see copies.jsonl".into())
            } else {
                Verdict::Keep
            }
        })
    }

    /// Returns the shard's name and the key of a sample.
    fn name_and_key(&self, entry: &SampleEntry) -> (String, &str) {
        let shard = &self.shards[entry.shard];
        (shard.name(), shard.key(entry.number))
    }

    /// Writes `copies.jsonl`, and `keep.txt` with shard and key of every sample that is kept.
    fn write_lists(&self) -> Result<(), PrepError> {
        let list = self.list();
        self.write_copies(&list).map_err(|error| PrepError::file_system(&list, error))?;
        let kept = self.out.join("keep.txt");
        self.write_kept(&kept).map_err(|error| PrepError::file_system(&kept, error))
    }

    fn write_copies(&self, path: &Path) -> std::io::Result<()> {
        let mut list = AtomicFile::create(path)?;
        for copy in &self.copies {
            let (shard, key) = self.name_and_key(&self.entries[copy.entry]);
            let (original_shard, original_key) = self.name_and_key(&self.entries[copy.original]);
            let row = json!({
                "shard": shard,
                "key": key,
                "of_shard": original_shard,
                "of_key": original_key,
                "distance": copy.distance,
            });
            writeln!(list, "{row}")?;
        }
        list.finish()
    }

    fn write_kept(&self, path: &Path) -> std::io::Result<()> {
        let removed: HashSet<usize> = self.copies.iter().map(|copy| copy.entry).collect();
        let mut list = AtomicFile::create(path)?;
        for (number, entry) in self.entries.iter().enumerate() {
            if entry.shard >= self.n_against && !removed.contains(&number) {
                let (shard, key) = self.name_and_key(entry);
                writeln!(list, "{shard}\t{key}")?;
            }
        }
        list.finish()
    }
}

/// Finds copies, in the order of the samples. Samples are compared, the best first, with those that
/// are kept, so that a chain of near images does not join images that are far apart. A sample with
/// the bytes of a copy is an exact copy of the same original. Samples of the first `n_against`
/// shards are always kept.
fn compare_samples(entries: &[SampleEntry], n_against: usize, max_distance: u32) -> Vec<Copy> {
    let n_bands = max_distance + 1;
    // Kept sample of each content.
    let mut originals: HashMap<u128, usize> = HashMap::new();
    // Kept samples by a band of their hash.
    let mut by_band: HashMap<Band, Vec<usize>> = HashMap::new();
    let mut copies = Vec::new();
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|number| {
        let entry = &entries[*number];
        (entry.shard >= n_against, Reverse(entry.print.quality), *number)
    });
    for number in order {
        let entry = &entries[number];
        let content = entry.print.content;
        let can_be_copy = entry.shard >= n_against;
        if can_be_copy && let Some(original) = originals.get(&content) {
            copies.push(Copy { entry: number, original: *original, distance: None });
            continue;
        }
        // Distance and number of the nearest kept sample.
        let mut nearest: Option<(u32, usize)> = None;
        if let Some(hash) = entry.print.difference
            && can_be_copy
            && max_distance > 0
        {
            for i in 0..n_bands {
                for candidate in by_band.get(&Band::from_hash(hash, i, n_bands)).into_iter().flatten() {
                    let Some(other) = entries[*candidate].print.difference else { continue };
                    let distance = (other ^ hash).count_ones();
                    let is_nearer = nearest.is_none_or(|nearest| (distance, *candidate) < nearest);
                    if distance <= max_distance && is_nearer {
                        nearest = Some((distance, *candidate));
                    }
                }
            }
        }
        if let Some((distance, original)) = nearest {
            copies.push(Copy { entry: number, original, distance: Some(distance) });
            originals.insert(content, original);
            continue;
        }
        originals.entry(content).or_insert(number);
        if let Some(hash) = entry.print.difference {
            for i in 0..n_bands {
                by_band.entry(Band::from_hash(hash, i, n_bands)).or_default().push(number);
            }
        }
    }
    copies.sort_by_key(|copy| copy.entry);
    copies
}

/// One of the bands into which a hash is divided: of two hashes that differ in d bits, at least one
/// of d + 1 bands is equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Band {
    number: u32,
    bits: u64,
}

impl Band {
    /// Returns band `number` of `n_bands` of `hash`.
    fn from_hash(hash: u64, number: u32, n_bands: u32) -> Self {
        let low = 64 * number / n_bands;
        let high = 64 * (number + 1) / n_bands;
        let width = high - low;
        Self { number, bits: (hash >> low) & (u64::MAX >> (64 - width)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fingerprint::Fingerprint;

    fn entry(shard: usize, content: u128, difference: u64) -> SampleEntry {
        SampleEntry {
            shard,
            number: 0,
            print: Fingerprint { content, quality: (1, 1), difference: Some(difference) },
        }
    }

    /// Returns each copy with its original and their distance.
    fn found_copies(
        entries: &[SampleEntry],
        n_against: usize,
        max_distance: u32,
    ) -> Vec<(usize, usize, Option<u32>)> {
        let copies = compare_samples(entries, n_against, max_distance);
        copies.iter().map(|copy| (copy.entry, copy.original, copy.distance)).collect()
    }

    #[test]
    fn copies_are_exact_near_or_of_the_other_set() {
        const A: u64 = 0x0f0f_0f0f_0f0f_0f0f;
        let entries = [
            entry(0, 1, A),
            // Exact, near by three bits that lie in three bands, and just too far.
            entry(1, 1, A),
            entry(1, 2, A ^ (1 | 1 << 20 | 1 << 40)),
            entry(1, 3, A ^ 0b1111),
            // Near to the previous one: a chain that starts again there.
            entry(1, 4, A ^ 0b11111),
        ];
        assert_eq!(found_copies(&entries, 1, 3), [(1, 0, None), (2, 0, Some(3)), (4, 3, Some(1))]);
        assert_eq!(found_copies(&entries, 1, 0), [(1, 0, None)]);
    }

    /// The large image in the middle is kept; a small one and its exact copy are removed.
    #[test]
    fn the_best_copy_is_kept() {
        const A: u64 = 0x0f0f_0f0f_0f0f_0f0f;
        let mut entries = [entry(0, 1, A ^ 1), entry(0, 2, A), entry(0, 1, A ^ 1), entry(0, 3, A)];
        for (entry, quality) in entries.iter_mut().zip([(100, 9), (400, 90), (100, 9), (400, 70)]) {
            entry.print.quality = quality;
        }
        assert_eq!(found_copies(&entries, 0, 3), [(0, 1, Some(1)), (2, 1, None), (3, 1, Some(0))]);
    }
}
