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
    datasets: Vec<Part>,
}

#[derive(Deserialize)]
struct WidsShard {
    url: String,
    filesize: Option<u64>,
    md5sum: Option<String>,
}

#[derive(Deserialize)]
struct Part {
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
    let mut found = Vec::new();
    collect(list, read, 0, &mut found)?;
    Ok(found)
}

fn collect(
    list: &ShardUrl,
    read: &impl Fn(&ShardUrl) -> Result<Vec<u8>, PipelineError>,
    depth: usize,
    found: &mut Vec<Source>,
) -> Result<(), PipelineError> {
    let bad = |reason: String| PipelineError::InvalidShardList { spec: list.to_string(), reason };
    if depth > MAX_DEPTH || found.len() > MAX_SHARDS {
        return Err(bad("its lists name one another in a circle, or too many shards".into()));
    }
    let mut index: Index = serde_json::from_slice(&read(list)?).map_err(|error| bad(error.to_string()))?;
    if index.kind != "wids-shard-index-v1" {
        return Err(bad(format!("its __kind__ is {:?}, not \"wids-shard-index-v1\"", index.kind)));
    }
    index.base = index.base.filter(|base| !base.is_empty());
    let base = match &index.base {
        // A base is a folder, with or without a trailing slash.
        Some(base) => list.join(&format!("{}/", base.trim_end_matches('/'))).map_err(bad)?,
        None => list.clone(),
    };
    let named = |url: &str| match (&index.base, &base) {
        (Some(_), ShardUrl::File(folder)) => ShardUrl::File(folder.join("list")).join(url).map_err(bad),
        _ => base.join(url).map_err(bad),
    };
    let parts = index.datasets.iter();
    let lists = std::iter::once((&index.shardlist, None))
        .chain(parts.map(|part| (&part.shardlist, part.source_url.as_deref())));
    for (entries, source_url) in lists {
        for entry in entries {
            found.push(Source {
                url: named(&entry.url)?,
                len_bytes: entry.filesize,
                md5: entry.md5sum.clone().filter(|sum| !sum.is_empty()),
            });
        }
        if let Some(source_url) = source_url {
            collect(&named(source_url)?, read, depth + 1, found)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEAD: &str = r#""__kind__":"wids-shard-index-v1","wids_version":1"#;

    /// Returns the shards of `list`; `lists` holds the name and the text of each list.
    fn shards_of(list: &str, lists: &[(&str, &str)]) -> Result<Vec<String>, PipelineError> {
        let found = shards(&ShardUrl::parse(list).expect("a URL"), &|url: &ShardUrl| {
            let text = lists.iter().find(|(name, _)| *name == url.to_string());
            let (_, rest) = text.ok_or(PipelineError::MissingShard { path: url.to_string().into() })?;
            Ok(format!("{{{HEAD},{rest}}}").into_bytes())
        })?;
        Ok(found.into_iter().map(|source| source.url.to_string()).collect())
    }

    #[test]
    fn lists_nest_and_stand_where_they_stand() {
        let lists = [
            ("d/outer.json", r#""shardlist":[{"url":"a.tar"}],"datasets":[{"source_url":"inner.json"}]"#),
            ("d/inner.json", r#""base":"e","shardlist":[{"url":"b.tar","nsamples":1,"filesize":20}]"#),
            ("https://h/d/x.json", r#""shardlist":[{"url":"a.tar"},{"url":"s3://bucket/b.tar"}]"#),
            ("https://h/d/y.json", r#""base":"https://i/f","shardlist":[{"url":"a.tar"}]"#),
        ];
        assert_eq!(shards_of("d/outer.json", &lists).expect("a list"), ["d/a.tar", "d/e/b.tar"]);
        let remote = shards_of("https://h/d/x.json", &lists).expect("a list");
        assert_eq!(remote, ["https://h/d/a.tar", "s3://bucket/b.tar"]);
        assert_eq!(shards_of("https://h/d/y.json", &lists).expect("a list"), ["https://i/f/a.tar"]);
    }

    #[test]
    fn circles_commands_and_files_of_this_machine_are_refused() {
        let lists = [
            ("circle.json", r#""datasets":[{"source_url":"circle.json"}]"#),
            ("command.json", r#""shardlist":[{"url":"pipe:rm x"}]"#),
            ("https://h/x.json", r#""shardlist":[{"url":"file:///etc/passwd"}]"#),
            ("https://h/y.json", r#""base":"file:///etc","shardlist":[{"url":"passwd"}]"#),
        ];
        for (list, reason) in [
            ("circle.json", "circle"),
            ("command.json", "commands"),
            ("https://h/x.json", "cannot name file:"),
            ("https://h/y.json", "cannot name file:"),
        ] {
            let error = shards_of(list, &lists).expect_err(list).to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let list = ShardUrl::parse("x.json").expect("a path");
            let _ = shards(&list, &|_: &ShardUrl| Ok(bytes.clone()));
        }
    }
}
