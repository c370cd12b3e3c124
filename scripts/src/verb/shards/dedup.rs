//! `ocelli shards dedup`: finds exact copies by hash and near copies by a perceptual hash, within a
//! set and against another one, such as the test set of a benchmark. The best copy is kept: the one
//! with the most pixels, and among those the least compressed one.
//!
//! The perceptual hash is the difference hash: the image at 9 x 8 gray pixels, one bit for each
//! pair of neighbors in a row. Two images are near when their hashes differ in few bits.

use pipeline::secrets::redact_list;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use augment::Interpolation;
use augment::crop::CropBox;
use augment::resize::BoxResizer;
use augment::{DecodeRules, Image, Planes, Rgb8};
use pipeline::file::AtomicFile;
use pipeline::{Shard, Source, Storage};
use rayon::prelude::*;
use report::picture::sheets;
use serde::{Deserialize, Serialize};
use serde_json::json;
use xxhash_rust::xxh3::xxh3_128;

use crate::parts::{PartFlags, compute_share};
use crate::progress::{StageBar, bar};
use crate::shards::rewrite::{RewriteFlags, print_totals};
use prep::folder_lock::lock_for;
use prep::parts::{PartResults, identities};
use prep::rewrite::{Job, Verdict, claim, input_identities, rewrite};

/// Flags of `shards dedup`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards dedup data/ --out checked/\n  ocelli shards dedup data/ \
        --against test/ --remove --out unique/\n  ocelli shards dedup data/ --out checked/ --part 3/16\n  \
        ocelli shards dedup data/ --out checked/ --join 16")]
pub(crate) struct Args {
    #[command(flatten)]
    flags: RewriteFlags,
    /// Shards to compare against, such as test sets that must stay unseen. Samples near one of
    /// theirs also count as copies.
    #[arg(long, num_args = 1..)]
    against: Vec<String>,
    /// Maximum number of bits, out of 64, in which the hashes of near copies differ; 0 finds only
    /// exact copies.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=10))]
    max_distance: u32,
    /// Also write the shards without the copies, under the same names.
    #[arg(long)]
    remove: bool,
    #[command(flatten)]
    parts: PartFlags,
}

/// Numbers of 128 bits in JSON, as hexadecimal digits.
mod hex_digits {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(number: &u128, out: S) -> Result<S::Ok, S::Error> {
        format!("{number:032x}").serialize(out)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<u128, D::Error> {
        u128::from_str_radix(&String::deserialize(input)?, 16).map_err(D::Error::custom)
    }
}

/// Largest number of groups of copies that are drawn.
const MAX_SHOWN_GROUPS: usize = 24;

/// Largest number of copies that are drawn of a group.
const MAX_SHOWN_COPIES: usize = 7;

/// Fingerprint by which a sample is compared.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Fingerprint {
    #[serde(with = "hex_digits")]
    content: u128,
    /// Numbers of pixels and of bytes: the largest of several copies is kept.
    quality: (u64, u64),
    /// Difference hash; `None` for images too uniform to be distinguished.
    difference: Option<u64>,
}

/// A sample with its position and fingerprint.
#[derive(Serialize, Deserialize)]
struct SampleEntry {
    shard: usize,
    number: usize,
    print: Fingerprint,
}

/// A copy of another sample. Both are numbers of entries.
struct Copy {
    entry: usize,
    original: usize,
    /// Number of bits in which their hashes differ; `None` for exact copies.
    distance: Option<u32>,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let sources = storage.sources(&args.flags.shards)?;
    let against = if args.against.is_empty() { Vec::new() } else { storage.sources(&args.against)? };
    let all: Vec<Source> = against.iter().chain(&sources).cloned().collect();
    let work = args.parts.work();
    work.check_overwrite(args.flags.overwrite)?;
    let shards = storage.open_all(&all)?;
    let against_specs: Vec<String> = args.against.iter().map(|spec| redact_list(spec)).collect();
    let mut settings = json!({ "against": against_specs, "max_distance": args.max_distance });
    if work.n_parts() > 1 {
        settings["parts"] = json!(work.n_parts());
    }
    let job = Job { out: &args.flags.out, verb: "dedup", settings, overwrite: args.flags.overwrite };
    let inputs = input_identities(&sources, &shards[against.len()..], job.out)?;
    let lock = lock_for(work, job.out, job.verb)?;
    // Samples are identified by their shard's number among all shards.
    let identity = json!({ "settings": job.settings, "inputs": identities(&all, work) });
    let results = PartResults::new(job.out, job.verb, identity);
    results.check_complete(work)?;
    claim(inputs, job.out, job.verb, &job.settings, job.overwrite)?;
    let Some(entries) = compute_share(&results, work, shards.len(), |range| fingerprints(&shards, range))?
    else {
        return Ok(ExitCode::SUCCESS);
    };
    let entries: Vec<SampleEntry> = entries.into_iter().flatten().collect();
    let have_samples =
        entries.iter().all(|entry| shards.get(entry.shard).is_some_and(|shard| entry.number < shard.len()));
    if !have_samples {
        bail!("the parts in {} belong to other shards: remove them and rerun the parts", job.out.display());
    }
    let copies = find_copies(&entries, against.len(), args.max_distance);
    write_lists(&args.flags.out, &shards, &entries, &copies, against.len())?;
    let n_exact = copies.iter().filter(|copy| copy.distance.is_none()).count();
    let n_near = copies.len() - n_exact;
    let n_samples = entries.iter().filter(|entry| entry.shard >= against.len()).count();
    out!("{n_samples} samples: {n_exact} exact and {n_near} near copies");
    out!("report: {}", args.flags.out.join("copies.jsonl").display());
    let picture = args.flags.out.join("copies.png");
    if draw_groups(&picture, &shards, &entries, &copies)? {
        out!("groups: {} (the kept image is framed in green)", picture.display());
    }
    if args.remove {
        let removed: HashSet<(String, usize)> = copies
            .iter()
            .map(|copy| (shards[entries[copy.entry].shard].name(), entries[copy.entry].number))
            .collect();
        // The folder is claimed already; claiming it again must not clear it.
        let job = Job { overwrite: false, ..job };
        // `rewrite` locks the folder itself.
        drop(lock);
        let totals = rewrite(&sources, storage, &job, &StageBar::new(), |item| {
            if removed.contains(&(item.shard.name(), item.number)) {
                Verdict::Drop("a copy: see copies.jsonl".into())
            } else {
                Verdict::Keep
            }
        })?;
        print_totals(&totals, false);
    }
    if args.flags.json {
        out!("{}", json!({ "samples": n_samples, "exact": n_exact, "near": n_near }));
    }
    Ok(ExitCode::SUCCESS)
}

/// Computes the fingerprints of the samples in the shards `range` of `shards`.
fn fingerprints(shards: &[Shard], range: Range<usize>) -> anyhow::Result<Vec<SampleEntry>> {
    let progress = bar(shards[range.clone()].iter().map(|shard| shard.len() as u64).sum(), "dedup");
    let mut entries = Vec::new();
    for shard_number in range {
        let shard = &shards[shard_number];
        let in_shard: anyhow::Result<Vec<Option<SampleEntry>>> = (0..shard.len())
            .into_par_iter()
            .map(|number: usize| -> anyhow::Result<Option<SampleEntry>> {
                progress.inc(1);
                let print = fingerprint(shard, number)?;
                Ok(print.map(|print| SampleEntry { shard: shard_number, number, print }))
            })
            .collect();
        entries.extend(in_shard?.into_iter().flatten());
    }
    progress.finish_and_clear();
    Ok(entries)
}

/// Computes the fingerprint of sample `number` of `shard`; `None` if it has no image that can be
/// read.
fn fingerprint(shard: &Shard, number: usize) -> anyhow::Result<Option<Fingerprint>> {
    if shard.image_bytes(number).is_none() {
        return Ok(None);
    }
    let encoded = match shard.image(number) {
        Err(error) if error.is_sample_error() => return Ok(None),
        encoded => encoded?,
    };
    let mut n_pixels = 0;
    let mut difference = None;
    if let Ok(image) = Image::decode_any(&encoded.files(), &DecodeRules::default()) {
        let image = image.picture();
        n_pixels = u64::from(image.width_px) * u64::from(image.height_px);
        difference = difference_hash(&image);
    }
    let quality = (n_pixels, encoded.len() as u64);
    Ok(Some(Fingerprint { content: xxh3_128(encoded.bytes()), quality, difference }))
}

/// Returns the difference hash; `None` if nearly all neighbors are equal, as in a blank image,
/// because such images would all be copies of one another.
fn difference_hash(image: &Rgb8) -> Option<u64> {
    const MIN_ONES: u32 = 6;
    let crop = CropBox::from_size([image.width_px, image.height_px]);
    let mut small = Planes::default();
    BoxResizer::default().resize(image, crop, [9, 8], Interpolation::Bilinear, &mut small).ok()?;
    let [r, g, b] = small.channels();
    let gray: Vec<u16> =
        r.iter().zip(g).zip(b).map(|((r, g), b)| u16::from(*r) + u16::from(*g) + u16::from(*b)).collect();
    let mut hash = 0u64;
    for row in gray.chunks_exact(9) {
        for pair in row.windows(2) {
            hash = hash << 1 | u64::from(pair[0] > pair[1]);
        }
    }
    (MIN_ONES..=64 - MIN_ONES).contains(&hash.count_ones()).then_some(hash)
}

/// Finds copies, in the order of the samples. Samples are compared, the best first, with those that
/// are kept, so that a chain of near images does not join images that are far apart. A sample with
/// the bytes of a copy is an exact copy of the same original. Samples of the first `n_against`
/// shards are always kept.
fn find_copies(entries: &[SampleEntry], n_against: usize, max_distance: u32) -> Vec<Copy> {
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

/// Draws the first groups of copies, a row each: the kept image, then the copies. Returns `true` if
/// there are any.
fn draw_groups(
    path: &Path,
    shards: &[Shard],
    entries: &[SampleEntry],
    copies: &[Copy],
) -> anyhow::Result<bool> {
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for copy in copies {
        groups.entry(copy.original).or_default().push(copy.entry);
    }
    let mut rows: Vec<Vec<(String, Rgb8)>> = Vec::new();
    for (original, copies) in groups.iter().take(MAX_SHOWN_GROUPS) {
        let shown = std::iter::once(original).chain(copies.iter().take(MAX_SHOWN_COPIES));
        let row: Vec<(String, Rgb8)> =
            shown.filter_map(|number| keyed_image(shards, &entries[*number])).collect();
        if row.len() > 1 {
            rows.push(row);
        }
    }
    if rows.is_empty() {
        return Ok(false);
    }
    let legend = format!("{} of {} groups of copies", rows.len(), groups.len());
    sheets::image_groups(path, &rows, &legend)?;
    Ok(true)
}

/// Returns the key and the image of a sample; `None` if the image cannot be read.
fn keyed_image(shards: &[Shard], entry: &SampleEntry) -> Option<(String, Rgb8)> {
    let shard = &shards[entry.shard];
    let encoded = shard.image(entry.number).ok()?;
    let image = Image::decode_any(&encoded.files(), &DecodeRules::default()).ok()?;
    Some((shard.key(entry.number).to_string(), image.picture()))
}

/// Returns the shard's name and the key of a sample.
fn name_and_key<'a>(shards: &'a [Shard], entry: &SampleEntry) -> (String, &'a str) {
    let shard = &shards[entry.shard];
    (shard.name(), shard.key(entry.number))
}

/// Writes `copies.jsonl`, and `keep.txt` with shard and key of every sample that is kept.
fn write_lists(
    out: &Path,
    shards: &[Shard],
    entries: &[SampleEntry],
    copies: &[Copy],
    n_against: usize,
) -> anyhow::Result<()> {
    let mut report = AtomicFile::create(&out.join("copies.jsonl"))?;
    for copy in copies {
        let (shard, key) = name_and_key(shards, &entries[copy.entry]);
        let (original_shard, original_key) = name_and_key(shards, &entries[copy.original]);
        let row = json!({
            "shard": shard,
            "key": key,
            "of_shard": original_shard,
            "of_key": original_key,
            "distance": copy.distance,
        });
        writeln!(report, "{row}")?;
    }
    report.finish()?;
    let removed: HashSet<usize> = copies.iter().map(|copy| copy.entry).collect();
    let mut keep = AtomicFile::create(&out.join("keep.txt"))?;
    for (number, entry) in entries.iter().enumerate() {
        if entry.shard >= n_against && !removed.contains(&number) {
            let (shard, key) = name_and_key(shards, entry);
            writeln!(keep, "{shard}\t{key}")?;
        }
    }
    Ok(keep.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let copies = find_copies(entries, n_against, max_distance);
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

    #[test]
    fn blank_images_have_no_difference_hash() {
        assert_eq!(difference_hash(&Rgb8::new(40, 30, vec![90; 3600])), None);
        let data = (0..40 * 30).flat_map(|i| [(i * 37 % 251) as u8; 3]).collect();
        assert!(difference_hash(&Rgb8::new(40, 30, data)).is_some());
    }
}
