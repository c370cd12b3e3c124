//! `ocelli shards dedup`: finds exact copies by hash, near copies by a perceptual hash, within a
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

use crate::parts::{PartFlags, PartResults, identities};
use crate::progress::bar;
use crate::shards::hold::hold_for;
use crate::shards::rewrite::{Job, RewriteFlags, Verdict, claim, inputs_of, rewrite};

/// Flags of `shards dedup`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli shards dedup data/ --out checked/\n  ocelli shards dedup data/ --against test/ --remove --out unique/\n  ocelli shards dedup data/ --out checked/ --part 3/16\n  ocelli shards dedup data/ --out checked/ --join 16"
)]
pub(crate) struct Args {
    #[command(flatten)]
    flags: RewriteFlags,
    /// Shards, such as test sets that must stay unseen; samples near one of theirs count as copies
    /// too.
    #[arg(long, num_args = 1..)]
    against: Vec<String>,
    /// Number of bits, out of 64, in which near copies may differ; 0 finds exact copies only.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=10))]
    max_distance: u32,
    /// Write the shards without the copies, under their names.
    #[arg(long)]
    remove: bool,
    #[command(flatten)]
    parts: PartFlags,
}

/// Numbers of 128 bits in JSON, as hexadecimal digits.
mod in_digits {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(number: &u128, out: S) -> Result<S::Ok, S::Error> {
        format!("{number:032x}").serialize(out)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<u128, D::Error> {
        u128::from_str_radix(&String::deserialize(input)?, 16).map_err(D::Error::custom)
    }
}

/// Largest number of groups of copies that are drawn, and of copies in each.
const MAX_SHOWN_GROUPS: usize = 24;
const MAX_SHOWN_COPIES: usize = 7;

/// Fingerprint by which a sample is compared.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Fingerprint {
    #[serde(with = "in_digits")]
    content: u128,
    /// Pixels, then bytes: the largest of several copies is kept.
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

/// A copy, its original, and the number of bits in which they differ; `None` for exact copies.
struct Copy {
    entry: usize,
    of: usize,
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
    let inputs = inputs_of(&sources, &shards[against.len()..], job.out)?;
    let held = hold_for(work, job.out, job.verb)?;
    // Samples are known by their shard's number among all shards.
    let about = json!({ "settings": job.settings, "inputs": identities(&all, work) });
    let results = PartResults::new(job.out, job.verb, about);
    results.check_complete(work)?;
    claim(inputs, job.out, job.verb, &job.settings, job.overwrite)?;
    let Some(entries) = results.of(work, shards.len(), |range| fingerprints(&shards, range))? else {
        return Ok(ExitCode::SUCCESS);
    };
    let entries: Vec<SampleEntry> = entries.into_iter().flatten().collect();
    if !entries.iter().all(|entry| shards.get(entry.shard).is_some_and(|shard| entry.number < shard.len())) {
        bail!("parts in {} are of other shards: remove them, and do the parts again", job.out.display());
    }
    let copies = find(&entries, against.len(), args.max_distance);
    write_lists(&args.flags.out, &shards, &entries, &copies, against.len())?;
    let n_exact = copies.iter().filter(|copy| copy.distance.is_none()).count();
    let n_near = copies.len() - n_exact;
    let n_samples = entries.iter().filter(|entry| entry.shard >= against.len()).count();
    out!("{n_samples} samples: {n_exact} exact and {n_near} near copies");
    out!("report: {}", args.flags.out.join("copies.jsonl").display());
    let picture = args.flags.out.join("copies.png");
    if draw(&picture, &shards, &entries, &copies)? {
        out!("groups: {}, the kept image is framed in green", picture.display());
    }
    if args.remove {
        let gone: HashSet<(String, usize)> = copies
            .iter()
            .map(|copy| (shards[entries[copy.entry].shard].name(), entries[copy.entry].number))
            .collect();
        // The folder is claimed already; claiming it again must not clear it.
        let job = Job { overwrite: false, ..job };
        // `rewrite` locks the folder itself.
        drop(held);
        let totals = rewrite(&sources, storage, &job, |item| {
            if gone.contains(&(item.shard.name(), item.number)) {
                Verdict::Drop("a copy: see copies.jsonl".into())
            } else {
                Verdict::Keep
            }
        })?;
        totals.print(false);
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
    for number_of_shard in range {
        let shard = &shards[number_of_shard];
        let found: anyhow::Result<Vec<_>> = (0..shard.len())
            .into_par_iter()
            .map(|number: usize| -> anyhow::Result<Option<SampleEntry>> {
                progress.inc(1);
                if shard.image_bytes(number).is_none() {
                    return Ok(None);
                }
                let encoded = match shard.image(number) {
                    Err(error) if error.is_sample_error() => return Ok(None),
                    encoded => encoded?,
                };
                let image =
                    Image::decode_any(&encoded.files(), &DecodeRules::default()).ok().map(Image::picture);
                let n_pixels =
                    image.as_ref().map_or(0, |image| u64::from(image.width_px) * u64::from(image.height_px));
                let difference = image.and_then(|image| difference_hash(&image));
                let quality = (n_pixels, encoded.len() as u64);
                let print = Fingerprint { content: xxh3_128(encoded.bytes()), quality, difference };
                Ok(Some(SampleEntry { shard: number_of_shard, number, print }))
            })
            .collect();
        entries.extend(found?.into_iter().flatten());
    }
    progress.finish_and_clear();
    Ok(entries)
}

/// Difference hash; `None` if nearly all neighbors are alike, as in a blank image, because
/// such images would all be copies of one another.
fn difference_hash(image: &Rgb8) -> Option<u64> {
    const MIN_ONES: u32 = 6;
    let whole = CropBox::from_size([image.width_px, image.height_px]);
    let mut small = Planes::default();
    BoxResizer::default().resize(image, whole, [9, 8], Interpolation::Bilinear, &mut small).ok()?;
    let [r, g, b] = small.channels();
    let gray: Vec<u16> =
        r.iter().zip(g).zip(b).map(|((r, g), b)| u16::from(*r) + u16::from(*g) + u16::from(*b)).collect();
    let bits = gray.chunks_exact(9).flat_map(|row| row.windows(2).map(|pair| pair[0] > pair[1]));
    let hash = bits.fold(0u64, |hash, bit| hash << 1 | u64::from(bit));
    (MIN_ONES..=64 - MIN_ONES).contains(&hash.count_ones()).then_some(hash)
}

/// Finds copies, in the order of the samples. Each is compared with the samples that are kept, the
/// best first, so that a chain of near images does not join ones that are far apart; a sample with
/// the bytes of a copy is a copy of the same image, and exact. Samples of the first `n_against`
/// shards are always kept.
fn find(entries: &[SampleEntry], n_against: usize, max_distance: u32) -> Vec<Copy> {
    // Hashes that differ in d bits agree in one of d + 1 bands.
    let n_bands = max_distance + 1;
    let band = |hash: u64, i: u32| {
        let low = 64 * i / n_bands;
        let high = 64 * (i + 1) / n_bands;
        let width = high - low;
        (i, (hash >> low) & (u64::MAX >> (64 - width)))
    };
    // By content: the sample that is kept for it.
    let mut contents: HashMap<u128, usize> = HashMap::new();
    let mut bands: HashMap<(u32, u64), Vec<usize>> = HashMap::new();
    let mut copies = Vec::new();
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|number| {
        let entry = &entries[*number];
        (entry.shard >= n_against, Reverse(entry.print.quality), *number)
    });
    for number in order {
        let entry = &entries[number];
        let of_others = entry.shard >= n_against;
        if let Some(of) = contents.get(&entry.print.content).filter(|_| of_others) {
            copies.push(Copy { entry: number, of: *of, distance: None });
            continue;
        }
        let near = entry.print.difference.filter(|_| max_distance > 0).and_then(|hash| {
            let candidates = (0..n_bands).filter_map(|i| bands.get(&band(hash, i))).flatten();
            let distances = candidates.filter_map(|of| {
                let distance = (entries[*of].print.difference? ^ hash).count_ones();
                (distance <= max_distance).then_some((distance, *of))
            });
            distances.min()
        });
        if let Some((distance, of)) = near.filter(|_| of_others) {
            copies.push(Copy { entry: number, of, distance: Some(distance) });
            contents.insert(entry.print.content, of);
            continue;
        }
        contents.entry(entry.print.content).or_insert(number);
        if let Some(hash) = entry.print.difference {
            (0..n_bands).for_each(|i| bands.entry(band(hash, i)).or_default().push(number));
        }
    }
    copies.sort_by_key(|copy| copy.entry);
    copies
}

/// Draws the first groups of copies, a row each: the kept image, then the copies. Returns `true` if
/// there are any.
fn draw(path: &Path, shards: &[Shard], entries: &[SampleEntry], copies: &[Copy]) -> anyhow::Result<bool> {
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for copy in copies {
        groups.entry(copy.of).or_default().push(copy.entry);
    }
    let image = |number: usize| {
        let entry = &entries[number];
        let shard = &shards[entry.shard];
        let encoded = shard.image(entry.number).ok()?;
        let image = Image::decode_any(&encoded.files(), &DecodeRules::default()).ok()?;
        Some((shard.key(entry.number).to_string(), image.picture()))
    };
    let row = |(of, copies): (&usize, &Vec<usize>)| -> Vec<(String, Rgb8)> {
        let shown = std::iter::once(of).chain(copies.iter().take(MAX_SHOWN_COPIES));
        shown.filter_map(|number| image(*number)).collect()
    };
    let rows: Vec<Vec<(String, Rgb8)>> =
        groups.iter().take(MAX_SHOWN_GROUPS).map(row).filter(|row| row.len() > 1).collect();
    if rows.is_empty() {
        return Ok(false);
    }
    let legend = format!("{} of {} groups of copies", rows.len(), groups.len());
    sheets::image_groups(path, &rows, &legend)?;
    Ok(true)
}

/// Writes `copies.jsonl`, and `keep.txt` with shard and key of every sample that is kept.
fn write_lists(
    out: &Path,
    shards: &[Shard],
    entries: &[SampleEntry],
    copies: &[Copy],
    n_against: usize,
) -> anyhow::Result<()> {
    let name =
        |entry: &SampleEntry| (shards[entry.shard].name(), shards[entry.shard].key(entry.number).to_string());
    let mut report = AtomicFile::create(&out.join("copies.jsonl"))?;
    for copy in copies {
        let (shard, key) = name(&entries[copy.entry]);
        let (of_shard, of_key) = name(&entries[copy.of]);
        let row = json!({
            "shard": shard, "key": key, "of_shard": of_shard, "of_key": of_key, "distance": copy.distance,
        });
        writeln!(report, "{row}")?;
    }
    report.finish()?;
    let gone: HashSet<usize> = copies.iter().map(|copy| copy.entry).collect();
    let mut keep = AtomicFile::create(&out.join("keep.txt"))?;
    for (number, entry) in entries.iter().enumerate() {
        if entry.shard >= n_against && !gone.contains(&number) {
            let (shard, key) = name(entry);
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
        let found: Vec<_> = find(&entries, 1, 3).iter().map(|c| (c.entry, c.of, c.distance)).collect();
        assert_eq!(found, [(1, 0, None), (2, 0, Some(3)), (4, 3, Some(1))]);
        let exact: Vec<_> = find(&entries, 1, 0).iter().map(|c| (c.entry, c.of, c.distance)).collect();
        assert_eq!(exact, [(1, 0, None)]);
    }

    /// The large image in the middle is kept; a small one and its exact copy are removed.
    #[test]
    fn of_copies_the_best_one_stays() {
        const A: u64 = 0x0f0f_0f0f_0f0f_0f0f;
        let sized = |content, difference, quality| {
            let mut entry = entry(0, content, difference);
            entry.print.quality = quality;
            entry
        };
        let entries = [
            sized(1, A ^ 1, (100, 9)),
            sized(2, A, (400, 90)),
            sized(1, A ^ 1, (100, 9)),
            sized(3, A, (400, 70)),
        ];
        let found: Vec<_> = find(&entries, 0, 3).iter().map(|c| (c.entry, c.of, c.distance)).collect();
        assert_eq!(found, [(0, 1, Some(1)), (2, 1, None), (3, 1, Some(0))]);
    }

    #[test]
    fn blank_images_have_no_difference_hash() {
        assert_eq!(difference_hash(&Rgb8::new(40, 30, vec![90; 3600])), None);
        let data = (0..40 * 30).flat_map(|i| [(i * 37 % 251) as u8; 3]).collect();
        assert!(difference_hash(&Rgb8::new(40, 30, data)).is_some());
    }
}
