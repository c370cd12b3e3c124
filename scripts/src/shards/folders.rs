//! Folders of images in place of shards.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use pipeline::shard::write::ShardLimits;
use xxhash_rust::xxh3::xxh3_64;

use super::files::is_image;
use super::pack::{PackJob, pack};
use crate::console::say;

/// Largest number of samples of a shard, so small that a small folder yields several, among which samples are shuffled.
const SAMPLES_PER_SHARD: u64 = 2_000;

/// Largest size of a shard, in bytes.
const BYTES_PER_SHARD: u64 = 1 << 30;

/// Replaces folders of images among `specs` by shards. They are packed into `out`, a folder each, if `packs`; complete
/// shards of an earlier start are used as they are.
pub(crate) fn replace_folders(specs: &[String], out: &Path, packs: bool) -> anyhow::Result<Vec<String>> {
    specs.iter().map(|spec| pack_folder(spec, out, packs)).collect()
}

fn pack_folder(spec: &str, out: &Path, packs: bool) -> anyhow::Result<String> {
    let folder = PathBuf::from(spec);
    if !folder.is_dir() || !has_images_but_no_shards(&folder)? {
        return Ok(spec.into());
    }
    let real = folder.canonicalize().with_context(|| format!("cannot open {spec}"))?;
    let name = real.file_name().map_or_else(|| "images".into(), |name| name.to_string_lossy().into_owned());
    // A hash of the path distinguishes folders of the same name.
    let place = xxh3_64(real.as_os_str().as_encoded_bytes()) as u32;
    let target = out.join(format!("{name}-{place:08x}"));
    // Names the folder of the images, and marks the shards as complete.
    let mark = target.join("packed-from.txt");
    let is_there = std::fs::read_to_string(&mark).is_ok_and(|from| from.trim_end() == real.to_string_lossy());
    if !is_there && !packs {
        bail!(
            "{spec} holds images: over several ranks, pack them into shards first, with `ocelli shards pack`"
        );
    }
    if !is_there {
        let begun = target.join("packing");
        // Only remains of an interrupted start are removed.
        if begun.exists() {
            std::fs::remove_dir_all(&target)
                .with_context(|| format!("cannot remove {}", target.display()))?;
        } else if target.exists() {
            bail!("{} is in the way of the shards of {spec}; choose another --workdir", target.display());
        }
        std::fs::create_dir_all(&target)
            .and_then(|()| std::fs::write(&begun, []))
            .with_context(|| format!("cannot write {}", begun.display()))?;
        say(format!("{spec} holds images: they are packed into shards in {}", target.display()));
        let packed = pack(&PackJob {
            input: &folder,
            out: &target,
            prefix: "train",
            limits: ShardLimits { max_samples: SAMPLES_PER_SHARD, max_bytes: BYTES_PER_SHARD },
            classes: None,
            overwrite: false,
            seed: 0,
        })?;
        packed.tell();
        std::fs::write(&mark, format!("{}\n", real.display()))
            .and_then(|()| std::fs::remove_file(&begun))
            .with_context(|| format!("cannot write {}", mark.display()))?;
    }
    Ok(target.display().to_string())
}

/// Returns `true` if there are images below `folder`, and no shard in it.
fn has_images_but_no_shards(folder: &Path) -> anyhow::Result<bool> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    if entries.flatten().any(|entry| pipeline::url::is_shard(&entry.path())) {
        return Ok(false);
    }
    let mut files = walkdir::WalkDir::new(folder).follow_links(true).into_iter().flatten();
    Ok(files.any(|file| is_image(file.path())))
}
