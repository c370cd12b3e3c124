//! Folders of images in the place of shards.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use pipeline::shard::write::ShardLimits;
use xxhash_rust::xxh3::xxh3_64;

use super::files::is_image;
use super::pack::{PackJob, pack};
use crate::console::say;

/// Samples of a shard: few enough that a small folder gives several, between which samples are shuffled.
const SAMPLES_PER_SHARD: u64 = 2_000;

/// Bytes of a shard at the most.
const BYTES_PER_SHARD: u64 = 1 << 30;

/// `specs` with shards in the place of folders of images. They are packed into `out`, a folder each, if `packs`; what is
/// there whole already is taken as it is.
pub(crate) fn in_shards(specs: &[String], out: &Path, packs: bool) -> anyhow::Result<Vec<String>> {
    specs.iter().map(|spec| in_shard(spec, out, packs)).collect()
}

fn in_shard(spec: &str, out: &Path, packs: bool) -> anyhow::Result<String> {
    let folder = PathBuf::from(spec);
    if !folder.is_dir() || !holds_images_alone(&folder)? {
        return Ok(spec.into());
    }
    let real = folder.canonicalize().with_context(|| format!("cannot open {spec}"))?;
    let name = real.file_name().map_or_else(|| "images".into(), |name| name.to_string_lossy().into_owned());
    // Folders of the same name are told apart by where they lie.
    let place = xxh3_64(real.as_os_str().as_encoded_bytes()) as u32;
    let target = out.join(format!("{name}-{place:08x}"));
    // Says of which folder they are, and that they are whole.
    let mark = target.join("packed-from.txt");
    let is_there = std::fs::read_to_string(&mark).is_ok_and(|from| from.trim_end() == real.to_string_lossy());
    if !is_there && !packs {
        bail!(
            "{spec} holds images: over several ranks, make shards of them first, with `ocelli shards pack`"
        );
    }
    if !is_there {
        let begun = target.join("packing");
        // What a start that was cut off has left, and nothing else.
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

/// Whether there are images below `folder`, and no shard in it.
fn holds_images_alone(folder: &Path) -> anyhow::Result<bool> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    if entries.flatten().any(|entry| pipeline::url::is_shard(&entry.path())) {
        return Ok(false);
    }
    let mut files = walkdir::WalkDir::new(folder).follow_links(true).into_iter().flatten();
    Ok(files.any(|file| is_image(file.path())))
}
