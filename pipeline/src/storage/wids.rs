//! Shard lists in the format of `wids`: a JSON file that names shards with their sizes.
//!
//! ```json
//! {"__kind__": "wids-shard-index-v1", "wids_version": 1, "base": "...",
//!  "shardlist": [{"url": "a.tar", "nsamples": 10, "filesize": 30720, "md5sum": "..."}],
//!  "datasets": [{"source_url": "other.json"}, {"shardlist": [...]}]}
//! ```
//!
//! URLs are relative to `base`, or to the file. A shard whose length differs from `filesize` or
//! whose content differs from `md5sum` is an error: the length when it is opened, the content when
//! it is fetched or verified.

use serde::Deserialize;

use crate::PipelineError;
use crate::braces::MAX_SHARDS;
use crate::source::Source;
use crate::url::ShardUrl;

/// Maximum nesting depth of lists that name other lists.
const MAX_DEPTH: usize = 8;

#[derive(Deserialize)]
struct Index {
    #[serde(rename = "__kind__")]
    kind: String,
    base: Option<String>,
    #[serde(default)]
    shardlist: Vec<WidsShard>,
    #[serde(default)]
    datasets: Vec<WidsDataset>,
}

#[derive(Deserialize)]
struct WidsShard {
    url: String,
    filesize: Option<u64>,
    md5sum: Option<String>,
}

#[derive(Deserialize)]
struct WidsDataset {
    source_url: Option<String>,
    #[serde(default)]
    shardlist: Vec<WidsShard>,
}

/// Returns the shards that the list at `list` names, in its order. `read` returns the text of a
/// list.
///
/// # Errors
/// Errors of `read`; [`PipelineError::InvalidShardList`] if the text is not such a list.
pub(crate) fn shards(
    list: &ShardUrl,
    read: &impl Fn(&ShardUrl) -> Result<Vec<u8>, PipelineError>,
) -> Result<Vec<Source>, PipelineError> {
    let mut sources = Vec::new();
    collect(list, read, 0, &mut sources)?;
    Ok(sources)
}

/// Appends the shards that the list at `list` names to `sources`.
fn collect(
    list: &ShardUrl,
    read: &impl Fn(&ShardUrl) -> Result<Vec<u8>, PipelineError>,
    depth: usize,
    sources: &mut Vec<Source>,
) -> Result<(), PipelineError> {
    if depth > MAX_DEPTH || sources.len() > MAX_SHARDS {
        let reason = "its lists form a cycle, or name too many shards".into();
        return Err(invalid_list(list, reason));
    }
    let index: Index =
        serde_json::from_slice(&read(list)?).map_err(|error| invalid_list(list, error.to_string()))?;
    if index.kind != "wids-shard-index-v1" {
        let reason = format!("its __kind__ is {:?}, not \"wids-shard-index-v1\"", index.kind);
        return Err(invalid_list(list, reason));
    }
    let base = match index.base.as_deref() {
        None | Some("") => list.clone(),
        Some(base) => {
            // A base is a folder, with or without a trailing slash.
            let folder = format!("{}/", base.trim_end_matches('/'));
            match list.join(&folder).map_err(|reason| invalid_list(list, reason))? {
                // URLs are relative to the folder of a file.
                ShardUrl::File(folder) => ShardUrl::File(folder.join("list")),
                url => url,
            }
        }
    };
    push_shards(&index.shardlist, list, &base, sources)?;
    for dataset in &index.datasets {
        push_shards(&dataset.shardlist, list, &base, sources)?;
        if let Some(source_url) = &dataset.source_url {
            let nested = base.join(source_url).map_err(|reason| invalid_list(list, reason))?;
            collect(&nested, read, depth + 1, sources)?;
        }
    }
    Ok(())
}

/// Appends `entries` of the list at `list` to `sources`. Their URLs are relative to `base`.
fn push_shards(
    entries: &[WidsShard],
    list: &ShardUrl,
    base: &ShardUrl,
    sources: &mut Vec<Source>,
) -> Result<(), PipelineError> {
    for entry in entries {
        let url = base.join(&entry.url).map_err(|reason| invalid_list(list, reason))?;
        let md5 = entry.md5sum.clone().filter(|sum| !sum.is_empty());
        sources.push(Source { url, len_bytes: entry.filesize, md5 });
    }
    Ok(())
}

fn invalid_list(list: &ShardUrl, reason: String) -> PipelineError {
    PipelineError::InvalidShardList { spec: list.to_string(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEAD: &str = r#""__kind__":"wids-shard-index-v1","wids_version":1"#;

    /// Returns the shards of `list`; `lists` holds the name and the text of each list.
    fn shard_names(list: &str, lists: &[(&str, &str)]) -> Result<Vec<String>, PipelineError> {
        let sources = shards(&ShardUrl::parse(list).expect("a URL"), &|url: &ShardUrl| {
            let text = lists.iter().find(|(name, _)| *name == url.to_string());
            let (_, rest) = text.ok_or(PipelineError::MissingShard { path: url.to_string().into() })?;
            Ok(format!("{{{HEAD},{rest}}}").into_bytes())
        })?;
        Ok(sources.into_iter().map(|source| source.url.to_string()).collect())
    }

    #[test]
    fn nested_lists_resolve_relative_urls() {
        let lists = [
            ("d/outer.json", r#""shardlist":[{"url":"a.tar"}],"datasets":[{"source_url":"inner.json"}]"#),
            ("d/inner.json", r#""base":"e","shardlist":[{"url":"b.tar","nsamples":1,"filesize":20}]"#),
            ("https://h/d/x.json", r#""shardlist":[{"url":"a.tar"},{"url":"s3://bucket/b.tar"}]"#),
            ("https://h/d/y.json", r#""base":"https://i/f","shardlist":[{"url":"a.tar"}]"#),
        ];
        assert_eq!(shard_names("d/outer.json", &lists).expect("a list"), ["d/a.tar", "d/e/b.tar"]);
        let remote = shard_names("https://h/d/x.json", &lists).expect("a list");
        assert_eq!(remote, ["https://h/d/a.tar", "s3://bucket/b.tar"]);
        assert_eq!(shard_names("https://h/d/y.json", &lists).expect("a list"), ["https://i/f/a.tar"]);
    }

    #[test]
    fn cycles_commands_and_local_files_are_refused() {
        let lists = [
            ("circle.json", r#""datasets":[{"source_url":"circle.json"}]"#),
            ("command.json", r#""shardlist":[{"url":"pipe:rm x"}]"#),
            ("https://h/x.json", r#""shardlist":[{"url":"file:///etc/passwd"}]"#),
            ("https://h/y.json", r#""base":"file:///etc","shardlist":[{"url":"passwd"}]"#),
        ];
        for (list, cause) in [
            ("circle.json", "cycle"),
            ("command.json", "cannot name commands"),
            ("https://h/x.json", "cannot name file:"),
            ("https://h/y.json", "cannot name file:"),
        ] {
            let error = shard_names(list, &lists).expect_err(list);
            let PipelineError::InvalidShardList { spec, reason } = &error else { panic!("{error}") };
            assert_eq!(spec, list);
            assert!(reason.contains(cause), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_cause_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let list = ShardUrl::parse("x.json").expect("a path");
            let _ = shards(&list, &|_: &ShardUrl| Ok(bytes.clone()));
        }
    }
}
