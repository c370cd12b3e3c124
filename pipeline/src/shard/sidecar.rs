//! Sidecars: indices of shards on disk, `<shard>.idx.json` beside each shard.
//!
//! ```json
//! {"version": 1, "shard_bytes": 30720, "xxh3": "0f3a…16 digits…",
//!  "samples": [["000001", [["jpg", 512, 2311, 40961], ["cls", 3584, 1, 77]]]]}
//! ```
//!
//! A member is extension, offset, length and check ([`short_checksum`]). `xxh3`, of the whole file,
//! and the checks are left out if they have not been computed.
//!
//! The check of a member has 16 bits and misses a changed byte with a probability of 1/65,536;
//! `xxh3` in practice never misses a replaced shard. A member that fails its check is a bad sample.

use std::collections::HashMap;
use std::fs;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, Serializer};

use super::index::{IndexBuilder, MAX_MEMBERS, Member, ShardIndex, short_checksum};
use super::open::open_shard;
use super::tar::{TarMember, list_members_in, split_key, text_of_name};
use crate::identity::FileStamp;
use crate::words::counted;
use crate::{PipelineError, file, hash};

const VERSION: u32 = 1;

/// Number of samples whose bytes are compared with a sidecar that may describe another file.
const N_CHECKED: usize = 8;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sidecar {
    version: u32,
    shard_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    xxh3: Option<String>,
    samples: Vec<(String, Vec<MemberEntry>)>,
}

/// Extension, offset, length, check.
#[derive(Deserialize)]
struct MemberEntry(String, u64, u32, #[serde(default)] Option<u16>);

/// Builds the index of the shard at `path` from its headers.
///
/// # Errors
/// As [`crate::shard::tar::list_members_in`]; [`PipelineError::BadMember`] when a sample has an
/// extension twice.
pub fn build(path: &Path) -> Result<ShardIndex, PipelineError> {
    walk(&open_shard(path)?, path, false)
}

/// Builds the index as [`build`] does, and reads the whole shard for its checksums.
///
/// # Errors
/// As [`build`].
pub fn build_checked(path: &Path) -> Result<ShardIndex, PipelineError> {
    build_checked_from(&open_shard(path)?, path)
}

/// Builds the index of an open file like [`build_checked`]; `path` is for messages only.
pub(crate) fn build_checked_from(file: &File, path: &Path) -> Result<ShardIndex, PipelineError> {
    let mut index = walk(file, path, true)?;
    let checksum = hash::xxh3_of_file(file).map_err(|error| PipelineError::io("read", path, error))?;
    index.checksum = Some(checksum);
    Ok(index)
}

/// Builds the index of an open file from its headers; with the checks of members if `checked`.
pub(crate) fn walk(file: &File, path: &Path, checked: bool) -> Result<ShardIndex, PipelineError> {
    let metadata = file.metadata().map_err(|error| PipelineError::io("read", path, error))?;
    let shard_bytes = metadata.len();
    let mut index = IndexBuilder::new();
    let members = list_members_in(file, path)?;
    for sample in group_samples(&members, path) {
        for (extension, member) in sample.members {
            let mut check = None;
            if checked {
                let mut data = vec![0; member.len_bytes as usize];
                file.read_exact_at(&mut data, member.offset_bytes)
                    .map_err(|error| PipelineError::io("read", path, error))?;
                check = Some(short_checksum(&data));
            }
            let entry = Member {
                extension: &extension,
                offset_bytes: member.offset_bytes,
                len_bytes: member.len_bytes,
                check,
            };
            index.push(sample.key, entry).map_err(|reason| PipelineError::BadMember {
                path: path.to_path_buf(),
                member: member.name.clone(),
                reason,
            })?;
        }
        index.end_sample().map_err(|reason| PipelineError::NotATar { path: path.to_path_buf(), reason })?;
    }
    index.finish(shard_bytes).map_err(|reason| PipelineError::NotATar { path: path.to_path_buf(), reason })
}

/// Members of a sample, by extension.
struct SampleMembers<'m> {
    key: &'m str,
    members: Vec<(String, &'m TarMember)>,
}

/// Groups `members` of the shard at `path` into samples. Consecutive members with equal keys form a
/// sample, as in webdataset. Later members with the same key are added to it, unless it already has
/// one of their extensions: then they form another sample with the same key. If consecutive members
/// of a sample have the same name, the last one is used, as tar does in extraction, with a warning.
fn group_samples<'m>(members: &'m [TarMember], path: &Path) -> Vec<SampleMembers<'m>> {
    let mut samples: Vec<SampleMembers<'m>> = Vec::new();
    let mut last_of_key: HashMap<&str, usize> = HashMap::new();
    let mut n_replaced = 0;
    let mut n_hidden = 0;
    let mut run: Option<SampleMembers<'m>> = None;
    let common_bytes = common_folder_bytes(members);
    for member in members {
        let Some((key, extension)) = split_key(&member.name) else { continue };
        if is_in_hidden_folder(&member.name[common_bytes..]) {
            n_hidden += 1;
            continue;
        }
        if run.as_ref().is_none_or(|run| run.key != key) {
            close_run(run.take(), &mut samples, &mut last_of_key);
        }
        let run = run.get_or_insert_with(|| SampleMembers { key, members: Vec::new() });
        // `IndexBuilder::push` refuses a sample with more members.
        let duplicate = run.members.iter_mut().take(MAX_MEMBERS).find(|(known, _)| *known == extension);
        match duplicate {
            Some((_, duplicate)) => {
                *duplicate = member;
                n_replaced += 1;
            }
            None => run.members.push((extension, member)),
        }
    }
    close_run(run, &mut samples, &mut last_of_key);
    if n_replaced > 0 {
        tracing::warn!(
            "shard {}: {} with the name of another in its sample: the last of each is used, as when tar \
             extracts them",
            path.display(),
            counted(n_replaced, "member")
        );
    }
    if n_hidden > 0 {
        let skipped = counted(n_hidden, "member");
        tracing::warn!("shard {}: skipped {skipped} in hidden folders", path.display());
    }
    samples
}

/// Returns the length of the longest common folder of all members, with its slash. It may be
/// hidden: an archive may have been made of a hidden folder.
fn common_folder_bytes(members: &[TarMember]) -> usize {
    let mut folders = members.iter().map(|member| folder_with_slash(&member.name));
    let Some(mut common) = folders.next() else { return 0 };
    for folder in folders {
        while !folder.starts_with(common) {
            common = folder_with_slash(&common[..common.len().saturating_sub(1)]);
        }
    }
    common.len()
}

/// Returns the folder of `path` with its slash; an empty text if there is none.
fn folder_with_slash(path: &str) -> &str {
    match path.rfind('/') {
        Some(slash) => &path[..=slash],
        None => "",
    }
}

/// Returns whether a folder of `path` is hidden, such as `.ipynb_checkpoints`, which is also
/// skipped in folders of images.
fn is_in_hidden_folder(path: &str) -> bool {
    let Some((folders, _)) = path.rsplit_once('/') else { return false };
    folders.split('/').any(|part| part.starts_with('.') && !matches!(part, "." | ".."))
}

/// Adds `run`, consecutive members with the same key, to the last sample with that key if the
/// extensions differ, and otherwise as a new sample.
fn close_run<'m>(
    run: Option<SampleMembers<'m>>,
    samples: &mut Vec<SampleMembers<'m>>,
    last_of_key: &mut HashMap<&'m str, usize>,
) {
    let Some(run) = run else { return };
    if let Some(index) = last_of_key.get(run.key) {
        let sample = &mut samples[*index];
        let is_duplicate = run
            .members
            .iter()
            .any(|(extension, _)| sample.members.iter().any(|(known, _)| known == extension));
        if !is_duplicate {
            sample.members.extend(run.members);
            return;
        }
    }
    last_of_key.insert(run.key, samples.len());
    samples.push(run);
}

/// Returns the path of the sidecar of the shard at `path`.
pub fn path_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".idx.json");
    PathBuf::from(name)
}

/// Reads the sidecar of the shard at `path` if there is one and it describes the current state of
/// the file; otherwise builds the index. A sidecar that is older than the last change of the file
/// is compared with the headers of the tar and with some members.
///
/// # Errors
/// [`PipelineError::BadIndex`] for a sidecar that cannot be parsed or points outside the
/// shard; otherwise as [`build`].
pub fn open(path: &Path) -> Result<ShardIndex, PipelineError> {
    let Ok(metadata) = fs::metadata(path) else {
        return Err(PipelineError::MissingShard { path: path.to_path_buf() });
    };
    if let Some(index) = load_current(path, &FileStamp::from_metadata(&metadata))? {
        return Ok(index);
    }
    match load(path)? {
        Some(index) => check_outdated(index, path),
        None => build(path),
    }
}

/// Reads the sidecar of the shard at `path`, whose state is `stamp`, if it was written after the
/// last change of the shard: then its checksum covers the current bytes.
///
/// # Errors
/// As [`load`].
pub(crate) fn load_current(path: &Path, stamp: &FileStamp) -> Result<Option<ShardIndex>, PipelineError> {
    let Ok(metadata) = fs::metadata(path_of(path)) else { return Ok(None) };
    if !stamp.is_no_newer_than(&FileStamp::from_metadata(&metadata)) {
        return Ok(None);
    }
    Ok(load(path)?.filter(|index| index.shard_bytes == stamp.len_bytes()))
}

/// Returns `index`, an outdated sidecar of the shard at `path`, or a new index if it describes
/// another file.
fn check_outdated(index: ShardIndex, path: &Path) -> Result<ShardIndex, PipelineError> {
    let file = open_shard(path)?;
    let actual_bytes = file.metadata().map_err(|error| PipelineError::io("read", path, error))?.len();
    if index.shard_bytes != actual_bytes {
        // The sidecar describes another file: this one was truncated or rewritten. The walk over
        // the headers fails at a truncated member.
        let rebuilt = build(path)?;
        if actual_bytes < index.shard_bytes && rebuilt.len() < index.len() {
            // The file was truncated between two members, which no header shows.
            return Err(PipelineError::Truncated {
                path: path.to_path_buf(),
                member: index.key(rebuilt.len()).to_string(),
                needed_bytes: index.shard_bytes,
                actual_bytes,
            });
        }
        warn_outdated(path);
        return Ok(rebuilt);
    }
    // Copies may have sidecars that are older than their shards. A few members are compared first:
    // reading all headers would take as long as reading the shards.
    let has_checks =
        !index.is_empty() && index.members(0).next().is_some_and(|member| member.check.is_some());
    if has_checks && some_members_match(&file, path, &index)? {
        return Ok(index);
    }
    let rebuilt = walk(&file, path, false)?;
    if has_checks || !rebuilt.has_same_members_as(&index) {
        warn_outdated(path);
        return Ok(rebuilt);
    }
    Ok(index)
}

fn warn_outdated(path: &Path) {
    tracing::warn!(
        "{} is outdated: {} has been replaced since. Reading the shard instead; rebuild the index with \
         `ocelli shards index --overwrite`",
        path_of(path).display(),
        path.file_name().unwrap_or_default().to_string_lossy()
    );
}

/// Returns whether the header before `member` states its length and its name. A name that is too
/// long for a header is not compared.
fn header_matches(file: &File, key: &str, member: &Member<'_>) -> bool {
    let mut header = ::tar::Header::new_old();
    let Some(at) = member.offset_bytes.checked_sub(512) else { return false };
    if file.read_exact_at(header.as_mut_bytes(), at).is_err() {
        return false;
    }
    let name = format!("{key}.{}", member.extension);
    let stored = text_of_name(&header.path_bytes());
    let has_name =
        stored.trim_start_matches("./").to_lowercase() == name.trim_start_matches("./").to_lowercase();
    header.entry_size().is_ok_and(|len| len == member.len_bytes) && (has_name || name.len() > 90)
}

/// Returns the hash of the bytes of the shard at `path`, if its sidecar states one for the current
/// state of the file.
pub fn current_checksum(path: &Path) -> Option<u64> {
    let metadata = fs::metadata(path).ok()?;
    load_current(path, &FileStamp::from_metadata(&metadata)).ok()??.checksum
}

/// Sets the modification time of the sidecar of the shard at `path` to the current time, which
/// makes it newer than a shard that was renamed after the sidecar was written.
pub fn touch(path: &Path) {
    // If this fails, the sidecar is compared with the shard when it is read.
    let _ = File::options()
        .append(true)
        .open(path_of(path))
        .and_then(|file| file.set_modified(std::time::SystemTime::now()));
}

/// Returns whether the members of some samples, evenly spaced and including the last one, have the
/// headers and the checks that `index` states.
fn some_members_match(file: &File, path: &Path, index: &ShardIndex) -> Result<bool, PipelineError> {
    let n_checked = index.len().min(N_CHECKED);
    for i in 0..=n_checked {
        let sample = (i * index.len() / n_checked).min(index.len() - 1);
        for member in index.members(sample) {
            let Some(check) = member.check else { continue };
            if !header_matches(file, index.key(sample), &member) {
                return Ok(false);
            }
            let mut data = vec![0; member.len_bytes as usize];
            file.read_exact_at(&mut data, member.offset_bytes)
                .map_err(|error| PipelineError::io("read", path, error))?;
            if short_checksum(&data) != check {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Reads the sidecar of the shard at `path`, whether the shard exists or not. `None` if
/// there is no sidecar.
///
/// # Errors
/// [`PipelineError::BadIndex`], [`PipelineError::Io`].
pub fn load(path: &Path) -> Result<Option<ShardIndex>, PipelineError> {
    let sidecar = path_of(path);
    let text = match fs::read(&sidecar) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(PipelineError::io("read", &sidecar, error)),
    };
    parse(&text).map(Some).map_err(|reason| PipelineError::BadIndex { path: sidecar, reason })
}

/// Parses a sidecar. Never panics, whatever the bytes.
///
/// # Errors
/// Returns the reason as text.
pub fn parse(text: &[u8]) -> Result<ShardIndex, String> {
    let sidecar: Sidecar = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if sidecar.version != VERSION {
        return Err(format!("version {} is not {VERSION}", sidecar.version));
    }
    let mut index = IndexBuilder::new();
    for (key, members) in &sidecar.samples {
        for entry in members {
            let member = entry.to_member();
            let end = member.offset_bytes.checked_add(member.len_bytes);
            if end.is_none_or(|end| end > sidecar.shard_bytes) {
                return Err(format!("sample {key}, member {} lies outside the shard", member.extension));
            }
            index
                .push(key, member)
                .map_err(|reason| format!("sample {key}, member {}: {reason}", member.extension))?;
        }
        index.end_sample()?;
    }
    let mut index = index.finish(sidecar.shard_bytes)?;
    index.checksum = match sidecar.xxh3 {
        Some(digits) => {
            Some(u64::from_str_radix(&digits, 16).map_err(|_| format!("xxh3 {digits:?} is not a hash"))?)
        }
        None => None,
    };
    Ok(index)
}

/// Writes the sidecar of the shard at `path`, through a temporary file.
///
/// # Errors
/// [`PipelineError::Io`].
pub fn save(index: &ShardIndex, path: &Path) -> Result<(), PipelineError> {
    let target = path_of(path);
    let mut samples = Vec::with_capacity(index.len());
    for i in 0..index.len() {
        let members = index.members(i).map(MemberEntry::from_member).collect();
        samples.push((index.key(i).to_string(), members));
    }
    let xxh3 = index.checksum.map(|checksum| format!("{checksum:016x}"));
    let sidecar = Sidecar { version: VERSION, shard_bytes: index.shard_bytes, xxh3, samples };
    let mut text =
        serde_json::to_vec(&sidecar).map_err(|error| PipelineError::io("write", &target, error.into()))?;
    text.push(b'\n');
    file::replace(&target, &text).map_err(|error| PipelineError::io("write", &target, error))
}

impl MemberEntry {
    fn from_member(member: Member<'_>) -> Self {
        Self(member.extension.to_string(), member.offset_bytes, member.len_bytes as u32, member.check)
    }

    fn to_member(&self) -> Member<'_> {
        let Self(extension, offset_bytes, len, check) = self;
        Member { extension, offset_bytes: *offset_bytes, len_bytes: u64::from(*len), check: *check }
    }
}

impl Serialize for MemberEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(extension, offset_bytes, len, check) = self;
        match check {
            Some(check) => (extension, offset_bytes, len, check).serialize(serializer),
            None => (extension, offset_bytes, len).serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Groups members with these names; returns the key of each sample, and the extensions of its
    /// members with their numbers, counted from 1.
    fn grouped(names: &[&str]) -> Vec<String> {
        let mut members = Vec::new();
        for (name, number) in names.iter().zip(1..) {
            members.push(TarMember { name: name.to_string(), offset_bytes: 512 * number, len_bytes: 1 });
        }
        let mut samples = Vec::new();
        for sample in group_samples(&members, Path::new("s.tar")) {
            let mut text = sample.key.to_string();
            for (extension, member) in sample.members {
                text += &format!(" {extension}@{}", member.offset_bytes / 512);
            }
            samples.push(text);
        }
        samples
    }

    /// An archive of all images followed by all classes is joined; samples with the same key remain
    /// separate; the last of duplicated members is used.
    #[test]
    fn members_of_a_sample_need_not_be_consecutive() {
        assert_eq!(grouped(&["a.jpg", "b.jpg", "a.cls", "b.cls"]), ["a jpg@1 cls@3", "b jpg@2 cls@4"]);
        assert_eq!(
            grouped(&["a.jpg", "a.cls", "b.jpg", "a.jpg", "a.cls"]),
            ["a jpg@1 cls@2", "b jpg@3", "a jpg@4 cls@5"]
        );
        assert_eq!(grouped(&["a.jpg", "b.jpg", "a.jpg", "a.cls"]), ["a jpg@1", "b jpg@2", "a jpg@3 cls@4"]);
        assert_eq!(grouped(&["a.jpg", "a.cls", "a.jpg"]), ["a jpg@3 cls@2"]);
    }

    #[test]
    fn hidden_folders_are_skipped_unless_they_contain_all_members() {
        assert_eq!(grouped(&["d/a.jpg", "d/.trash/b.jpg", "./c.jpg"]), ["d/a jpg@1", "./c jpg@3"]);
        assert_eq!(
            grouped(&["u/.cache/a.jpg", "u/.cache/x/b.jpg"]),
            ["u/.cache/a jpg@1", "u/.cache/x/b jpg@2"]
        );
    }

    #[test]
    fn a_member_outside_the_shard_is_refused() {
        let text = br#"{"version":1,"shard_bytes":100,"samples":[["a",[["jpg",0,101]]]]}"#;
        assert!(parse(text).expect_err("outside").contains("jpg lies outside"));
    }

    /// Older versions wrote sidecars without checksums; no version writes checksums of only some
    /// members.
    #[test]
    fn all_members_have_checks_or_none() {
        let plain = br#"{"version":1,"shard_bytes":2000,"samples":[["a",[["jpg",512,1]]]]}"#;
        let index = parse(plain).expect("no checks");
        assert_eq!((index.checksum, index.members(0).next().and_then(|m| m.check)), (None, None));
        let mixed = br#"{"version":1,"shard_bytes":2000,"samples":[["a",[["jpg",512,1,7],["cls",1024,1]]]]}"#;
        assert!(parse(mixed).is_err());
        let hash = br#"{"version":1,"shard_bytes":2000,"xxh3":"zz","samples":[]}"#;
        assert!(parse(hash).expect_err("no hash").contains("zz"));
    }

    proptest! {
        #[test]
        fn no_sidecar_bytes_cause_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn saved_sidecars_are_read_back(lens in proptest::collection::vec(1u64..500, 1..20), checked: bool) {
            let folder = tempfile::tempdir().expect("temporary folder");
            let shard = folder.path().join("s.tar");
            let mut builder = IndexBuilder::new();
            let mut at = 512;
            for (i, len) in lens.iter().enumerate() {
                let check = checked.then_some(i as u16 * 7);
                for (extension, len_bytes) in [("jpg", *len), ("cls", 1)] {
                    let member = Member { extension, offset_bytes: at, len_bytes, check };
                    builder.push(&format!("k{i}"), member).expect("valid");
                    at += 512;
                }
            }
            std::fs::write(&shard, vec![0; at as usize]).expect("written");
            let mut index = builder.finish(at).expect("valid");
            index.checksum = checked.then_some(at);
            save(&index, &shard).expect("saved");
            prop_assert_eq!(open(&shard).expect("opened"), index);
        }
    }
}
