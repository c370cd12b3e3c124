//! Exact copies by hash and near copies by a perceptual hash, within a set and against another one,
//! such as the test set of a benchmark. The best copy is kept: the one with the most pixels, among
//! those the least compressed one, and among those the one in the folder or shard that is preferred.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use augment::{DecodeRules, Image, Rgb8};
use pipeline::file::AtomicFile;
use pipeline::secrets::redact_list;
use pipeline::words::counted;
use pipeline::{Progress, Shard, Source, Storage};
use serde_json::{Value, json};

use crate::error::PrepError;
use crate::fingerprint::{SampleEntry, fingerprints};
use crate::folder_lock::{FolderLock, lock_for};
use crate::open::split_folders;
use crate::parts::{PartResults, Share, Work, identities, open_folders};
use crate::rewrite::{
    Output, RewriteJob, RewriteTotals, Verdict, check_names, claim, input_identities, rewrite_locked,
};

/// Largest distance of near copies: hashes with more bands have too few bits in each.
pub const MOST_DISTANCE: u32 = 10;

/// Name of the verb.
const VERB: &str = "dedup";

/// Rules that decide which samples are copies.
pub struct CopyRules<'a> {
    /// Shards, and folders of images, to compare against. Samples near one of theirs also count as
    /// copies.
    pub against: &'a [String],
    /// Maximum number of bits in which the hashes of near copies differ, at most [`MOST_DISTANCE`];
    /// 0 finds only exact copies.
    pub max_distance: u32,
    /// Folders and shards of the set, the most preferred first: of copies of the same quality, as
    /// exact copies are, the one in the first of them is kept.
    pub preferred: &'a [String],
}

/// The copies found in a set, after their lists were written. The folder is locked while this
/// exists.
pub struct Copies {
    out: PathBuf,
    settings: Value,
    sources: Vec<Source>,
    /// Folders of images of the set.
    folders: Vec<String>,
    /// Shards to compare against, then those of the set, `sources` and then `folders`.
    shards: Vec<Shard>,
    n_against: usize,
    entries: Vec<SampleEntry>,
    /// In the order of the samples.
    copies: Vec<CopyOf>,
    lock: FolderLock,
}

/// A copy of another sample. Both are indices into `entries`.
struct CopyOf {
    entry: usize,
    original: usize,
    /// Number of bits in which their hashes differ; `None` for exact copies.
    distance: Option<u32>,
}

/// Finds the copies among the samples of `job`, and writes the lists of copies and of kept samples.
/// A part saves the fingerprints of its samples.
///
/// # Errors
/// [`PrepError`] when the folder belongs to another job, when shards cannot be read or lists cannot
/// be written, when the results of parts are missing or of another job, or when the rules are
/// invalid.
pub fn find_copies(
    job: &RewriteJob<'_>,
    rules: &CopyRules<'_>,
    work: Work,
    storage: &Storage,
    progress: &dyn Progress,
) -> Result<Share<Copies>, PrepError> {
    rules.check()?;
    let given = split_folders(job.shards)?;
    let sources = given.sources(storage)?;
    let against = split_folders(rules.against)?;
    let against_sources = against.sources(storage)?;
    let all: Vec<Source> = against_sources.iter().chain(&sources).cloned().collect();
    work.check_overwrite(job.overwrite)?;
    let folder_shards = open_folders(&given, work)?;
    let mut inputs = folder_identities(&folder_shards, job.out)?;
    let mut shards = storage.open_all(&all)?;
    let source_shards = shards.split_off(against_sources.len());
    shards.extend(open_folders(&against, work)?);
    let n_against = shards.len();
    shards.extend(source_shards);
    shards.extend(folder_shards);
    inputs.extend(input_identities(&sources, &shards[n_against..], job.out)?);
    let preference = Preference::new(rules.preferred, &shards, n_against)?;
    let against_specs: Vec<String> = rules.against.iter().map(|spec| redact_list(spec)).collect();
    let mut settings = json!({ "against": against_specs, "max_distance": rules.max_distance });
    // Without it, the settings are what earlier versions recorded.
    if !rules.preferred.is_empty() {
        let specs: Vec<String> = rules.preferred.iter().map(|spec| redact_list(spec)).collect();
        settings["prefer"] = json!(specs);
    }
    if work.n_parts() > 1 {
        settings["parts"] = json!(work.n_parts());
    }
    let lock = lock_for(work, job.out, VERB)?;
    // Samples are identified by the index of their shard among all shards.
    let identity = json!({ "settings": settings, "inputs": identities(&all, work) });
    let results = PartResults::new(job.out, VERB, identity);
    results.check_complete(work)?;
    claim(inputs, job.out, VERB, &settings, job.overwrite)?;
    let share = results.compute(work, shards.len(), |range| fingerprints(&shards, range, progress))?;
    share.try_map(|entries| {
        let entries: Vec<SampleEntry> = entries.into_iter().flatten().collect();
        let entries_fit_shards = entries
            .iter()
            .all(|entry| shards.get(entry.shard).is_some_and(|shard| entry.index < shard.len()));
        if !entries_fit_shards {
            return Err(PrepError::PartsOfOtherShards { folder: job.out.to_path_buf() });
        }
        let ranks = ranks_of_equals(&entries, &shards, &preference);
        let copies = compare_samples(&entries, n_against, rules.max_distance, &ranks);
        let out = job.out.to_path_buf();
        let folders = given.folders;
        let copies = Copies { out, settings, sources, folders, shards, n_against, entries, copies, lock };
        copies.write_lists()?;
        Ok(copies)
    })
}

/// Returns the rank of each of `entries` among samples of the same quality, the lowest first: those
/// of preferred places, then in the order of the shards and of the samples within them, and by name
/// within a folder of images, whose order is one of training.
fn ranks_of_equals(entries: &[SampleEntry], shards: &[Shard], preference: &Preference) -> Vec<usize> {
    let is_folder: Vec<bool> = shards.iter().map(|shard| Path::new(&shard.name()).is_dir()).collect();
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_cached_key(|index| {
        let entry = &entries[*index];
        let name = match shards.get(entry.shard) {
            Some(shard) if is_folder[entry.shard] => shard.key(entry.index).to_string(),
            _ => String::new(),
        };
        (preference.place(shards, entry), entry.shard, name, *index)
    });
    let mut ranks = vec![0; entries.len()];
    for (rank, index) in order.into_iter().enumerate() {
        ranks[index] = rank;
    }
    ranks
}

/// Checks that copies among `specs` can be removed, which is done by writing shards anew.
///
/// # Errors
/// [`PrepError::CopiesInFolder`] if there is a folder of images among them, or [`PrepError::Io`].
pub fn check_removal(specs: &[String]) -> Result<(), PrepError> {
    refuse_folders(&split_folders(specs)?.folders)
}

/// Returns an error that names the first of `folders`, if there is one.
fn refuse_folders(folders: &[String]) -> Result<(), PrepError> {
    match folders.first() {
        Some(folder) => Err(PrepError::CopiesInFolder { folder: folder.clone() }),
        None => Ok(()),
    }
}

/// Identifies the images of folders, `shards`: by folder, names, lengths and states of the files.
///
/// # Errors
/// [`PrepError::OutputInFolder`] if `out` is in one of the folders, or [`PrepError::Io`].
fn folder_identities(shards: &[Shard], out: &Path) -> Result<Vec<Value>, PrepError> {
    let real_out = real_path_to_be(out)?;
    let mut identities = Vec::new();
    for shard in shards {
        let folder = PathBuf::from(shard.name());
        let real = folder.canonicalize().map_err(|error| PrepError::io("open", &folder, error))?;
        if real_out.starts_with(&real) {
            return Err(PrepError::OutputInFolder { out: out.to_path_buf(), folder });
        }
        identities.push(json!([real.display().to_string(), format!("{:016x}", shard.fingerprint()?)]));
    }
    Ok(identities)
}

/// Returns the real path of `path`, of which only the first folders need to exist.
fn real_path_to_be(path: &Path) -> Result<PathBuf, PrepError> {
    let absolute = std::path::absolute(path).map_err(|error| PrepError::io("find", path, error))?;
    for existing in absolute.ancestors() {
        if let Ok(real) = existing.canonicalize() {
            let rest = absolute.strip_prefix(existing).unwrap_or(Path::new(""));
            return Ok(real.join(rest));
        }
    }
    Ok(absolute)
}

/// Folders and shards whose samples are preferred, and where the samples are.
struct Preference {
    /// Folders and shards, the most preferred first.
    preferred: Vec<Place>,
    /// Location of each shard, or of the folder that is read as a shard; empty without preference.
    shards: Vec<PathBuf>,
}

impl Preference {
    /// Creates the preference for `preferred` among `shards`, of which the first `n_against` are
    /// not of the set.
    ///
    /// # Errors
    /// [`PrepError::NoPreferred`] for a folder or a shard without any sample of the set.
    fn new(preferred: &[String], shards: &[Shard], n_against: usize) -> Result<Self, PrepError> {
        let mut preference = Self { preferred: Vec::new(), shards: Vec::new() };
        if preferred.is_empty() {
            return Ok(preference);
        }
        preference.shards = shards.iter().map(|shard| real_path_or_name(&shard.name())).collect();
        for spec in preferred {
            let place = Place { path: real_path_or_name(spec), link: link_or_name(spec) };
            let mut set = preference.shards.iter().zip(shards).skip(n_against);
            let has_samples = set.any(|(location, shard)| {
                (0..shard.len()).any(|index| place.holds(location, shard.key(index)))
            });
            if !has_samples {
                return Err(PrepError::NoPreferred { spec: redact_list(spec) });
            }
            preference.preferred.push(place);
        }
        Ok(preference)
    }

    /// Returns the place of a sample of `shards` among the preferred folders and shards; their
    /// number if it is in none of them.
    fn place(&self, shards: &[Shard], entry: &SampleEntry) -> usize {
        let n_preferred = self.preferred.len();
        let Some(location) = self.shards.get(entry.shard) else { return n_preferred };
        let key = shards[entry.shard].key(entry.index);
        let place = self.preferred.iter().position(|preferred| preferred.holds(location, key));
        place.unwrap_or(n_preferred)
    }
}

/// A preferred folder or shard.
struct Place {
    /// Its real path.
    path: PathBuf,
    /// Its path within the real path of its folder, which differs if it is a link.
    link: PathBuf,
}

impl Place {
    /// Returns whether the sample `key` of the shard or folder at `location` is in this place: a
    /// folder of shards, a shard, a folder of images or one below it.
    fn holds(&self, location: &Path, key: &str) -> bool {
        let sample = location.join(key.trim_start_matches('/'));
        [&self.path, &self.link]
            .into_iter()
            .any(|place| location.starts_with(place) || sample.starts_with(place))
    }
}

/// Returns the path of a shard or folder on a disk with all links resolved but its own, or the name
/// of any other shard.
fn link_or_name(name: &str) -> PathBuf {
    let path = Path::new(name);
    let (Some(folder), Some(last)) = (path.parent(), path.file_name()) else { return PathBuf::from(name) };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    match folder.canonicalize() {
        Ok(folder) => folder.join(last),
        Err(_) => PathBuf::from(name),
    }
}

/// Returns the real path of a shard or folder on a disk, or the name of any other shard.
fn real_path_or_name(name: &str) -> PathBuf {
    Path::new(name).canonicalize().unwrap_or_else(|_| PathBuf::from(name))
}

impl CopyRules<'_> {
    /// Checks that the distance is not too large.
    fn check(&self) -> Result<(), PrepError> {
        let max_distance = self.max_distance;
        if max_distance > MOST_DISTANCE {
            return Err(PrepError::TooDistant { max_distance, limit: MOST_DISTANCE });
        }
        Ok(())
    }
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
    pub fn list_path(&self) -> PathBuf {
        self.out.join("copies.jsonl")
    }

    /// Returns each group of sample indices: the kept one, then its copies.
    pub fn groups(&self) -> Vec<Vec<usize>> {
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for copy in &self.copies {
            groups.entry(copy.original).or_insert_with(|| vec![copy.original]).push(copy.entry);
        }
        groups.into_values().collect()
    }

    /// Returns the key and the image of sample `index`; `None` if the image cannot be read.
    pub fn keyed_image(&self, index: usize) -> Option<(String, Rgb8)> {
        let entry = &self.entries[index];
        let shard = &self.shards[entry.shard];
        let encoded = shard.image(entry.index).ok()?;
        let image = Image::decode_any(&encoded.files(), &DecodeRules::default()).ok()?;
        Some((shard.key(entry.index).to_string(), image.picture()))
    }

    /// Describes sample `index` within its group: `kept`, `exact copy`, `near copy, 2 bits apart`.
    pub fn role(&self, index: usize) -> String {
        match self.copies.iter().find(|copy| copy.entry == index) {
            Some(CopyOf { distance: None, .. }) => "exact copy".into(),
            Some(CopyOf { distance: Some(distance), .. }) => {
                format!("near copy, {} apart", counted(u64::from(*distance), "bit"))
            }
            None if self.entries[index].shard < self.n_against => "of the other set".into(),
            None => "kept".into(),
        }
    }

    /// Returns the path of the list of the samples that are kept: see [`KeyList`].
    ///
    /// [`KeyList`]: crate::samples::KeyList
    pub fn kept_path(&self) -> PathBuf {
        self.out.join("keep.txt")
    }

    /// Writes the shards without the copies, under the same names.
    ///
    /// # Errors
    /// [`PrepError`] when the set has a folder of images ([`check_removal`]), when two shards have
    /// the same name, or when shards cannot be read or written.
    pub fn remove(self, progress: &dyn Progress) -> Result<RewriteTotals, PrepError> {
        refuse_folders(&self.folders)?;
        check_names(&self.sources)?;
        let removed: HashSet<(String, usize)> = self
            .copies
            .iter()
            .map(|copy| {
                let entry = &self.entries[copy.entry];
                (self.shards[entry.shard].name(), entry.index)
            })
            .collect();
        // The folder is claimed already; claiming it again must not clear it.
        let output = Output { out: &self.out, verb: VERB, settings: self.settings, overwrite: false };
        let shards = &self.shards[self.n_against..];
        rewrite_locked(&self.sources, shards, &output, &self.lock, progress, |item| {
            if removed.contains(&(item.shard.name(), item.index)) {
                Verdict::Drop("a copy: see copies.jsonl".into())
            } else {
                Verdict::Keep
            }
        })
    }

    /// Returns the shard's name and the key of a sample.
    fn name_and_key(&self, entry: &SampleEntry) -> (String, &str) {
        let shard = &self.shards[entry.shard];
        (shard.name(), shard.key(entry.index))
    }

    /// Writes `copies.jsonl`, and `keep.txt` with shard and key of every sample that is kept, or
    /// with the key alone if the set is one folder of images: in shards packed from it, samples
    /// have the same keys.
    fn write_lists(&self) -> Result<(), PrepError> {
        let list = self.list_path();
        self.write_copies(&list).map_err(|error| PrepError::file_system(&list, error))?;
        let kept = self.kept_path();
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
        let is_one_folder = self.sources.is_empty() && self.folders.len() == 1;
        let mut list = AtomicFile::create(path)?;
        for (index, entry) in self.entries.iter().enumerate() {
            if entry.shard < self.n_against || removed.contains(&index) {
                continue;
            }
            let (shard, key) = self.name_and_key(entry);
            if is_one_folder {
                writeln!(list, "{key}")?;
            } else {
                writeln!(list, "{shard}\t{key}")?;
            }
        }
        list.finish()
    }
}

/// Finds copies, in the order of the samples. Samples are compared, the best first, with those that
/// are kept, so that a chain of near images does not join images that are far apart. A sample with
/// the bytes of a copy is an exact copy of the same original. Samples of the first `n_against`
/// shards are always kept. Of samples of the same quality, those with the lowest of `ranks` are
/// kept, one for each entry.
fn compare_samples(
    entries: &[SampleEntry],
    n_against: usize,
    max_distance: u32,
    ranks: &[usize],
) -> Vec<CopyOf> {
    let mut kept = KeptIndex { max_distance, originals: HashMap::new(), by_band: HashMap::new() };
    let mut copies = Vec::new();
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|index| {
        let entry = &entries[*index];
        (entry.shard >= n_against, Reverse(entry.fingerprint.quality), ranks[*index], *index)
    });
    for index in order {
        let entry = &entries[index];
        let content = entry.fingerprint.content;
        if entry.shard >= n_against {
            if let Some(original) = kept.originals.get(&content) {
                copies.push(CopyOf { entry: index, original: *original, distance: None });
                continue;
            }
            if let Some((distance, original)) = nearest_kept(&kept, entries, entry) {
                copies.push(CopyOf { entry: index, original, distance: Some(distance) });
                kept.originals.insert(content, original);
                continue;
            }
        }
        kept.originals.entry(content).or_insert(index);
        for band in bands(entry.fingerprint.difference, max_distance) {
            kept.by_band.entry(band).or_default().push(index);
        }
    }
    copies.sort_by_key(|copy| copy.entry);
    copies
}

/// Kept samples, by what others are compared with.
struct KeptIndex {
    max_distance: u32,
    /// Kept sample of each content; for the content of a copy, the original of the copy.
    originals: HashMap<u128, usize>,
    /// Kept samples by each band of their hash.
    by_band: HashMap<Band, Vec<usize>>,
}

/// Returns the distance and the index of the kept sample that is nearest to `entry`, the first
/// among equals; `None` if none is near.
fn nearest_kept(kept: &KeptIndex, entries: &[SampleEntry], entry: &SampleEntry) -> Option<(u32, usize)> {
    let hash = entry.fingerprint.difference?;
    let mut nearest: Option<(u32, usize)> = None;
    for band in bands(Some(hash), kept.max_distance) {
        for candidate in kept.by_band.get(&band).into_iter().flatten() {
            let Some(other) = entries[*candidate].fingerprint.difference else { continue };
            let distance = (other ^ hash).count_ones();
            let is_nearer = nearest.is_none_or(|nearest| (distance, *candidate) < nearest);
            if distance <= kept.max_distance && is_nearer {
                nearest = Some((distance, *candidate));
            }
        }
    }
    nearest
}

/// One of the bands into which a hash is divided: of two hashes that differ in d bits, at least one
/// of d + 1 bands is equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Band {
    index: u32,
    bits: u64,
}

/// Returns the bands of `hash`, by which hashes that differ in at most `max_distance` bits are
/// found; none without a hash, or if only exact copies are searched.
fn bands(hash: Option<u64>, max_distance: u32) -> Vec<Band> {
    let Some(hash) = hash.filter(|_| max_distance > 0) else { return Vec::new() };
    let n_bands = max_distance + 1;
    let mut bands = Vec::with_capacity(n_bands as usize);
    for index in 0..n_bands {
        let low = 64 * index / n_bands;
        let high = 64 * (index + 1) / n_bands;
        let width = high - low;
        bands.push(Band { index, bits: (hash >> low) & (u64::MAX >> (64 - width)) });
    }
    bands
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fingerprint::Fingerprint;

    fn entry(shard: usize, content: u128, difference: u64) -> SampleEntry {
        SampleEntry {
            shard,
            index: 0,
            fingerprint: Fingerprint { content, quality: (1, 1), difference: Some(difference) },
        }
    }

    /// Returns each copy with its original and their distance.
    fn found_copies(
        entries: &[SampleEntry],
        n_against: usize,
        max_distance: u32,
    ) -> Vec<(usize, usize, Option<u32>)> {
        let places = vec![0; entries.len()];
        let copies = compare_samples(entries, n_against, max_distance, &places);
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
            entry.fingerprint.quality = quality;
        }
        assert_eq!(found_copies(&entries, 0, 3), [(0, 1, Some(1)), (2, 1, None), (3, 1, Some(0))]);
    }

    /// The preferred of two exact copies is kept, but a larger near copy is kept before it.
    #[test]
    fn a_preferred_copy_is_kept_among_equals() {
        const A: u64 = 0x0f0f_0f0f_0f0f_0f0f;
        let mut entries = [entry(0, 1, A), entry(0, 1, A), entry(0, 2, !A), entry(0, 3, !A)];
        entries[3].fingerprint.quality = (9, 9);
        let copies = compare_samples(&entries, 0, 3, &[2, 0, 1, 2]);
        let found: Vec<(usize, usize)> = copies.iter().map(|copy| (copy.entry, copy.original)).collect();
        assert_eq!(found, [(0, 1), (2, 3)]);
    }

    #[test]
    fn samples_are_within_folders_shards_and_folders_of_a_key() {
        for (preferred, is_expected) in [
            ("data", true),
            ("data/a.tar", true),
            ("data/a.tar/cat", true),
            ("data/a", false),
            ("data/b.tar", false),
            ("data/a.tar/dog", false),
        ] {
            let place = Place { path: preferred.into(), link: "elsewhere".into() };
            assert_eq!(place.holds(Path::new("data/a.tar"), "cat/1"), is_expected, "{preferred}");
            let link = Place { path: "elsewhere".into(), link: preferred.into() };
            assert_eq!(link.holds(Path::new("data/a.tar"), "cat/1"), is_expected, "{preferred}");
        }
    }

    /// A folder of the set that is a link to another place is found by its own name.
    #[test]
    fn links_keep_their_names() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("originals")).unwrap();
        std::os::unix::fs::symlink(folder.path().join("originals"), folder.path().join("link")).unwrap();
        let real = folder.path().canonicalize().unwrap();
        let name = folder.path().join("link").display().to_string();
        assert_eq!(link_or_name(&name), real.join("link"));
        assert_eq!(real_path_or_name(&name), real.join("originals"));
    }
}
