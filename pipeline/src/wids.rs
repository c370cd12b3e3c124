//! Shard lists in the form of `wids`: a JSON file that names shards with their sizes.
//!
//! ```json
//! {"__kind__": "wids-shard-index-v1", "wids_version": 1, "base": "...",
//!  "shardlist": [{"url": "a.tar", "nsamples": 10, "filesize": 30720, "md5sum": "..."}],
//!  "datasets": [{"source_url": "other.json"}, {"shardlist": [...]}]}
//! ```
//!
//! URLs are relative to `base`, or to the file. A shard whose length differs from `filesize` is an
//! error; `md5sum` is not checked here.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::PipelineError;

/// Lists that name one another are followed this deep.
const MAX_DEPTH: usize = 8;

#[derive(Deserialize)]
struct Index {
    #[serde(rename = "__kind__")]
    kind: String,
    base: Option<String>,
    #[serde(default)]
    shardlist: Vec<Entry>,
    #[serde(default)]
    datasets: Vec<Part>,
}

#[derive(Deserialize)]
struct Entry {
    url: String,
    filesize: Option<u64>,
}

#[derive(Deserialize)]
struct Part {
    source_url: Option<String>,
    #[serde(default)]
    shardlist: Vec<Entry>,
}

/// The shards that the list at `path` names, in its order.
///
/// # Errors
/// [`PipelineError::Io`] when it cannot be read, [`PipelineError::BadIndex`] when it is no such
/// list or a shard has another length, [`PipelineError::MissingShard`].
pub fn shards(path: &Path) -> Result<Vec<PathBuf>, PipelineError> {
    let mut found = Vec::new();
    collect(path, 0, &mut found)?;
    Ok(found)
}

fn collect(path: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<(), PipelineError> {
    let bad = |reason: String| PipelineError::BadIndex { path: path.to_path_buf(), reason };
    if depth > MAX_DEPTH {
        return Err(bad("its lists name one another in a circle".into()));
    }
    let text = std::fs::read(path).map_err(|error| PipelineError::io("read", path, error))?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
    if index.kind != "wids-shard-index-v1" {
        return Err(bad(format!("its __kind__ is {:?}, not \"wids-shard-index-v1\"", index.kind)));
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    let base = index.base.map_or_else(|| folder.to_path_buf(), |base| folder.join(base));
    let add = |entry: &Entry, found: &mut Vec<PathBuf>| -> Result<(), PipelineError> {
        let shard = crate::url::local_path(&entry.url).map_err(bad)?;
        let shard = base.join(shard);
        let Ok(meta) = std::fs::metadata(&shard) else {
            return Err(PipelineError::MissingShard { path: shard });
        };
        if entry.filesize.is_some_and(|len| len != meta.len()) {
            let (says, has) = (entry.filesize.unwrap_or_default(), meta.len());
            return Err(bad(format!("it says that {} has {says} bytes, which has {has}", shard.display())));
        }
        found.push(shard);
        Ok(())
    };
    for entry in &index.shardlist {
        add(entry, found)?;
    }
    for part in &index.datasets {
        for entry in &part.shardlist {
            add(entry, found)?;
        }
        if let Some(source) = &part.source_url {
            let source = crate::url::local_path(source).map_err(bad)?;
            collect(&base.join(source), depth + 1, found)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lists_nest_and_sizes_are_checked() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let at = |name: &str| folder.path().join(name);
        for (name, len) in [("a.tar", 10), ("b.tar", 20)] {
            std::fs::write(at(name), vec![0; len]).expect("written");
        }
        let head = r#""__kind__":"wids-shard-index-v1","wids_version":1"#;
        let write = |name: &str, rest: &str| {
            std::fs::write(at(name), format!("{{{head},{rest}}}")).expect("written");
        };
        write("inner.json", r#""shardlist":[{"url":"b.tar","nsamples":1,"filesize":20}]"#);
        write("outer.json", r#""shardlist":[{"url":"a.tar"}],"datasets":[{"source_url":"inner.json"}]"#);
        assert_eq!(shards(&at("outer.json")).expect("a list"), [at("a.tar"), at("b.tar")]);
        write("wrong.json", r#""shardlist":[{"url":"b.tar","filesize":21}]"#);
        assert!(shards(&at("wrong.json")).expect_err("size").to_string().contains("21 bytes"));
        write("circle.json", r#""datasets":[{"source_url":"circle.json"}]"#);
        assert!(shards(&at("circle.json")).expect_err("circle").to_string().contains("circle"));
        write("gone.json", r#""shardlist":[{"url":"c.tar"}]"#);
        assert!(shards(&at("gone.json")).expect_err("gone").to_string().contains("c.tar"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let folder = tempfile::tempdir().expect("temporary folder");
            let path = folder.path().join("x.json");
            std::fs::write(&path, bytes).expect("written");
            let _ = shards(&path);
        }
    }
}
