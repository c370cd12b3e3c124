//! Shard lists as users write them: brace expansion, `::` lists, schemes, patterns and folders.
//!
//! `data/train-{000000..000146}.tar::s3://bucket/{a,b}.tar` names 149 shards. The grammar is
//! WebDataset's; on a disk, `data/train-*.tar` and `data/` stand for all shards found there.
//! Parquet files of images are shards too.

use std::fmt;
use std::path::{Path, PathBuf};

use url::Url;

use crate::PipelineError;
use crate::address::is_local;
use crate::braces::{MAX_SHARDS, expand_braces, split_list};
use crate::secrets::{self, REMOTE_SCHEMES, redact_list};
use crate::source_name::split_source;

/// Maximum number of characters of a list that a message quotes.
const MAX_SHOWN_CHARS: usize = 500;

/// Location of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ShardUrl {
    /// File on a local disk.
    File(PathBuf),
    /// Object on a server or in an object store: `http`, `https`, `s3`, `gs`, `az`.
    Remote(Url),
    /// Output of a shell command. Commands come from the user's command line only.
    Pipe(String),
}

/// Expands shard lists, in the order written.
///
/// # Errors
/// [`PipelineError::InvalidShardList`] for unbalanced braces, ranges that run backwards, an empty
/// list or an unknown scheme.
pub fn expand(specs: &[String]) -> Result<Vec<ShardUrl>, PipelineError> {
    let mut urls = Vec::new();
    for spec in specs {
        for url in expand_spec(spec).map_err(|reason| invalid_list(spec, reason))? {
            match url {
                ShardUrl::File(path) => {
                    let paths = resolve_path(path).map_err(|reason| invalid_list(spec, reason))?;
                    urls.extend(paths.into_iter().map(ShardUrl::File))
                }
                url => urls.push(url),
            }
            if urls.len() > MAX_SHARDS {
                return Err(invalid_list(spec, format!("names more than {MAX_SHARDS} shards")));
            }
        }
    }
    if urls.is_empty() {
        return Err(invalid_list(&specs.join(" "), "names no shards".into()));
    }
    Ok(urls)
}

/// Returns whether one of `specs` names a command, with or without the name of a source before it.
pub fn contains_command(specs: &[String]) -> bool {
    for spec in specs {
        if names_command(spec) {
            return true;
        }
        if let Some((_, shards)) = split_source(spec)
            && names_command(shards)
        {
            return true;
        }
    }
    false
}

/// Returns whether `spec`, a list without the name of a source, names a command.
fn names_command(spec: &str) -> bool {
    expand_spec(spec).is_ok_and(|urls| urls.iter().any(|url| matches!(url, ShardUrl::Pipe(_))))
}

/// Expands `spec`, but not the folders and patterns in it.
fn expand_spec(spec: &str) -> Result<Vec<ShardUrl>, String> {
    let mut urls = Vec::new();
    for part in split_list(spec).into_iter().filter(|part| !part.is_empty()) {
        let mut expanded = Vec::new();
        expand_braces(part, &mut expanded)?;
        for url in expanded {
            urls.push(ShardUrl::parse(&url)?);
        }
    }
    Ok(urls)
}

/// Creates an error about a list. A reason that may quote a password is replaced.
pub(crate) fn invalid_list(spec: &str, reason: String) -> PipelineError {
    let mut shown = redact_list(spec);
    let reason = if shown == spec { reason } else { "it cannot be read".into() };
    if let Some((end, _)) = shown.char_indices().nth(MAX_SHOWN_CHARS) {
        shown.truncate(end);
        shown.push('…');
    }
    PipelineError::InvalidShardList { spec: shown, reason }
}

/// Returns whether `path` has the name of a shard.
pub fn is_shard(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    name.ends_with(".tar") || name.ends_with(".tar.gz") || name.ends_with(".tgz")
}

/// Returns whether `path` has the name of a Parquet file.
pub fn is_parquet(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "parquet")
}

/// Returns the shards of `path`: the file itself, all of a folder, or all matches of a pattern,
/// sorted by name.
fn resolve_path(path: PathBuf) -> Result<Vec<PathBuf>, String> {
    if path.is_dir() {
        let entries = std::fs::read_dir(&path).map_err(|error| error.to_string())?;
        let files = entries.flatten().map(|entry| entry.path());
        let files = files.filter(|path| path.is_file() && !is_hidden(path));
        let (mut paths, others): (Vec<PathBuf>, Vec<PathBuf>) = files.partition(|path| is_shard(path));
        if paths.is_empty() {
            paths = others.into_iter().filter(|path| is_parquet(path)).collect();
        }
        paths.sort();
        return if paths.is_empty() {
            Err("the folder holds no shards (.tar); pack images into shards with `ocelli shards pack`".into())
        } else {
            Ok(paths)
        };
    }
    let text = path.to_string_lossy();
    if !text.contains(['*', '?', '[']) || path.exists() {
        return Ok(vec![path]);
    }
    let matches = glob::glob(&text).map_err(|error| error.to_string())?;
    let mut paths: Vec<PathBuf> = matches
        .flatten()
        .filter(|path| path.is_file() && (text.contains("/.") || !is_hidden(path)))
        .collect();
    // A pattern that ends in `*` also matches files that are not shards.
    paths.retain(|path| is_shard(path) || (!text.ends_with('*') && path.extension().is_some()));
    if paths.is_empty() { Err("the pattern matches no files".into()) } else { Ok(paths) }
}

impl ShardUrl {
    /// Parses one URL, without braces and lists.
    ///
    /// # Errors
    /// Returns the reason as text.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(command) = text.strip_prefix("pipe:") {
            return Ok(Self::Pipe(command.to_string()));
        }
        if let Some(path) = text.strip_prefix("file://").or_else(|| text.strip_prefix("file:")) {
            return Ok(Self::File(PathBuf::from(path)));
        }
        match text.split_once(':') {
            Some((scheme, rest)) if REMOTE_SCHEMES.contains(&scheme.to_ascii_lowercase().as_str()) => {
                if !rest.starts_with("//") {
                    return Err(format!("a URL must begin with {scheme}://"));
                }
                let url = if scheme.to_ascii_lowercase().starts_with("http") {
                    Url::parse(text)
                } else {
                    // Object keys are taken literally; only web servers have queries.
                    Url::parse(&text.replace('%', "%25").replace('#', "%23").replace('?', "%3F"))
                };
                let url = url.map_err(|error| error.to_string())?;
                match url.host_str() {
                    Some(host) if !host.is_empty() => Ok(Self::Remote(url)),
                    _ => Err(format!("no host or bucket after {scheme}://")),
                }
            }
            Some((scheme, _)) if scheme.len() > 1 && scheme.chars().all(|c| c.is_ascii_alphanumeric()) => {
                Err(format!("scheme {scheme}: is not one of file, {}, pipe", REMOTE_SCHEMES.join(", ")))
            }
            _ => Ok(Self::File(PathBuf::from(text))),
        }
    }

    /// Returns the last part of the path; `pipe` for a command, which has no path.
    pub fn file_name(&self) -> String {
        match self {
            Self::File(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            Self::Remote(url) => url.path().rsplit('/').next().unwrap_or_default().to_string(),
            Self::Pipe(_) => "pipe".into(),
        }
    }

    /// Returns the name for an uncompressed shard made from this one, which ends in `.tar`.
    pub fn tar_name(&self) -> String {
        let name = self.file_name();
        let stem =
            [".tar.gz", ".tgz", ".tar", ".parquet"].iter().find_map(|ending| name.strip_suffix(ending));
        format!("{}.tar", stem.unwrap_or(&name))
    }

    /// Returns whether the bytes are compressed, by the file name.
    pub fn is_gzip(&self) -> bool {
        let name = self.file_name();
        !matches!(self, Self::Pipe(_)) && (name.ends_with(".gz") || name.ends_with(".tgz"))
    }

    /// Returns whether the URL names a Parquet file, by the file name.
    pub fn is_parquet(&self) -> bool {
        !matches!(self, Self::Pipe(_)) && self.file_name().ends_with(".parquet")
    }

    /// Returns whether the shard is stored as an uncompressed tar, which is read without a
    /// conversion.
    pub(crate) fn is_plain_tar(&self) -> bool {
        !self.is_gzip() && !self.is_parquet()
    }

    /// Returns whether the URL names a wids list of shards, by the file name.
    pub fn is_list(&self) -> bool {
        !matches!(self, Self::Pipe(_)) && self.file_name().ends_with(".json")
    }

    /// Returns the location with `suffix` appended to its path; `None` for a command.
    pub(crate) fn with_suffix(&self, suffix: &str) -> Option<Self> {
        match self {
            Self::File(path) => {
                let mut name = path.as_os_str().to_owned();
                name.push(suffix);
                Some(Self::File(PathBuf::from(name)))
            }
            Self::Remote(url) => {
                let mut url = url.clone();
                url.set_path(&format!("{}{suffix}", url.path()));
                Some(Self::Remote(url))
            }
            Self::Pipe(_) => None,
        }
    }

    /// Resolves `reference`, an entry of the list at this location. Lists are untrusted: none can
    /// name commands, and a remote one cannot name local files.
    ///
    /// # Errors
    /// Returns the reason as text.
    pub(crate) fn join(&self, reference: &str) -> Result<Self, String> {
        let is_absolute = match reference.split_once(':') {
            Some((scheme, _)) => scheme.len() > 1,
            None => false,
        };
        if is_absolute {
            return match (self, Self::parse(reference)?) {
                (_, Self::Pipe(_)) => Err("a list cannot name commands".into()),
                (Self::Remote(_), Self::File(_)) => {
                    Err(format!("a remote list cannot name {}", redact_list(reference)))
                }
                (Self::Remote(base), Self::Remote(url)) => check_remote_entry(base, url),
                (_, url) => Ok(url),
            };
        }
        match self {
            Self::Remote(base) => {
                let url = base.join(reference).map_err(|error| error.to_string())?;
                check_remote_entry(base, url)
            }
            Self::File(base) => {
                let folder = base.parent().unwrap_or(Path::new(""));
                Ok(Self::File(folder.join(reference)))
            }
            Self::Pipe(_) => Err("a command has no folder".into()),
        }
    }
}

/// Returns whether a file is hidden, such as `._train.tar`, which macOS creates beside `train.tar`.
fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// Returns `url`, an entry of the list at `base`, as a shard. Fails if it is an address of this
/// machine or its link-local network and the list is not.
fn check_remote_entry(base: &Url, url: Url) -> Result<ShardUrl, String> {
    if is_local(&url) && !is_local(base) {
        let host = url.host_str().unwrap_or_default();
        return Err(format!("a remote list cannot name {host}, a local or link-local address"));
    }
    Ok(ShardUrl::Remote(url))
}

impl fmt::Display for ShardUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Remote(url) => write!(f, "{}", secrets::name_of_url(url)),
            Self::Pipe(command) => write!(f, "{}", secrets::display_name_of_command(command)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> ShardUrl {
        ShardUrl::parse(text).expect(text)
    }

    fn names(spec: &str) -> Vec<String> {
        expand(&[spec.to_string()])
            .expect("valid")
            .into_iter()
            .map(|url| match url {
                ShardUrl::Pipe(command) => format!("pipe:{command}"),
                url => url.to_string(),
            })
            .collect()
    }

    #[test]
    fn braces_ranges_and_lists_expand_in_order() {
        assert_eq!(names("t-{008..010}.tar"), ["t-008.tar", "t-009.tar", "t-010.tar"]);
        assert_eq!(names("{a,b}-{1..2}"), ["a-1", "a-2", "b-1", "b-2"]);
        assert_eq!(names("x.tar::{y,z{0..1}}.tar"), ["x.tar", "y.tar", "z0.tar", "z1.tar"]);
        assert_eq!(names("file:///tmp/a.tar"), ["/tmp/a.tar"]);
        assert_eq!(
            names("pipe:ls {a,b} | awk '{print $1}' > ${X}"),
            ["pipe:ls a | awk '{print $1}' > ${X}", "pipe:ls b | awk '{print $1}' > ${X}"]
        );
        assert_eq!(names("{1..1}"), ["1"]);
        let key = ShardUrl::parse("s3://b/a#1?x%20.tar").expect("a key");
        let ShardUrl::Remote(url) = key else { panic!("{key}") };
        assert_eq!(url.path(), "/a%231%3Fx%2520.tar");
        assert_eq!(
            names("http://[::1]:80/{a,b}.tar::s3://bucket/c d.tar::pipe:cat x.tar"),
            ["http://[::1]/a.tar", "http://[::1]/b.tar", "s3://bucket/c%20d.tar", "pipe:cat x.tar"]
        );
    }

    #[test]
    fn file_names_come_from_the_path() {
        let url = parse("https://u:secret@host/a/b.tar.gz?x=1");
        assert_eq!((url.file_name().as_str(), url.tar_name().as_str()), ("b.tar.gz", "b.tar"));
        assert_eq!(url.to_string(), "https://host/a/b.tar.gz?x=1");
        assert!(url.is_gzip() && !parse("b.tar").is_gzip() && parse("dir/index.json").is_list());
        assert_eq!(url.with_suffix(".idx").expect("a place").to_string(), "https://host/a/b.tar.gz.idx?x=1");
        let signed = parse("https://host/a.tar?X-Amz-Signature=0123&Expires=1");
        assert!(!signed.to_string().contains("0123"), "{signed}");
    }

    #[test]
    fn commands_are_found_anywhere_in_a_list() {
        for spec in ["pipe:cat x", "a.tar::pipe:cat x", "{pi,pi}pe:cat x", "{a.tar,pipe:x}"] {
            assert!(contains_command(&["b.tar".into(), spec.into()]), "{spec}");
        }
        assert!(!contains_command(&["http://host/pipe:x.tar".into(), "a-{0..3}.tar".into()]));
    }

    /// Lists are untrusted text.
    #[test]
    fn list_entries_are_neither_commands_nor_local_files_of_a_remote_list() {
        let remote = parse("https://host/set/index.json");
        let local = parse("set/index.json");
        assert_eq!(remote.join("a.tar"), Ok(parse("https://host/set/a.tar")));
        assert_eq!(remote.join("s3://bucket/a.tar"), Ok(parse("s3://bucket/a.tar")));
        assert_eq!(local.join("../a.tar"), Ok(parse("set/../a.tar")));
        for list in [&remote, &local] {
            assert!(list.join("pipe:rm -rf x").is_err());
        }
        assert!(remote.join("file:/etc/passwd").is_err());
    }

    #[test]
    fn invalid_lists_are_rejected_with_a_reason() {
        for (spec, cause) in [
            ("a{1..2.tar", "without a closing"),
            ("a}.tar", "without an opening"),
            ("{5..3}.tar", "{5..3} runs backwards"),
            ("{a..3}.tar", "\"a\" in {a..3} is not a number"),
            ("{0..99999999999}.tar", "more than 1000000 shards"),
            ("ftp://host/{0..3}.tar", "scheme ftp:"),
            ("s3:///a.tar", "no host or bucket"),
            ("http://[::1/a.tar", "IPv6"),
            ("", "names no shards"),
        ] {
            let error = expand(&[spec.to_string()]).expect_err(spec);
            assert!(
                matches!(&error, PipelineError::InvalidShardList { reason, .. } if reason.contains(cause)),
                "{spec}: {error}"
            );
        }
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text in "(http://|s3://|pipe:|file:)?[{},.0-9a-z:/\\[\\]%@?#é]{0,24}") {
            if let Ok(urls) = expand(&[text]) {
                for url in urls {
                    let _ = (url.to_string(), url.tar_name(), url.join("a.tar"));
                }
            }
        }

        #[test]
        fn ranges_contain_each_number_once(from in 0u64..500, n in 1u64..200) {
            let names = names(&format!("{{{from}..{}}}", from + n - 1));
            let expected: Vec<String> = (from..from + n).map(|i| i.to_string()).collect();
            if from > 0 { prop_assert_eq!(names, expected); } else { prop_assert_eq!(names.len() as u64, n); }
        }
    }
}
