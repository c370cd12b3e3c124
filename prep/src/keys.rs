//! Keys of samples, from the names of their files.

use std::collections::HashSet;

/// Set of the keys in use, which differ from one another.
#[derive(Default)]
pub struct Keys(HashSet<String>);

impl Keys {
    /// Returns a key for the file `name`: its path without extension, so that a sample can be
    /// traced back to its file. Characters with a special meaning in WebDataset are replaced, and a
    /// number is appended if the key is taken.
    pub fn unique(&mut self, name: &str) -> String {
        let name = name.replace('\\', "/");
        let parts: Vec<String> =
            name.split('/').filter(|part| !matches!(*part, "" | "." | "..")).map(sanitize).collect();
        let mut parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let file = parts.pop().unwrap_or_default();
        // WebDataset ends a key at the first dot.
        let stem = file.rsplit_once('.').map_or(file, |(stem, _)| stem).replace('.', "_");
        let stem = if stem.is_empty() { "_".to_string() } else { stem };
        parts.push(&stem);
        let base = parts.join("/");
        let mut key = base.clone();
        for number in 2.. {
            if self.0.insert(key.clone()) {
                break;
            }
            key = format!("{base}-{number}");
        }
        key
    }
}

/// Strips the underscores of `__name__`, which WebDataset skips, from a part of a path, and
/// replaces control characters.
fn sanitize(part: &str) -> String {
    let part: String = part.chars().map(|c| if c.is_control() { '_' } else { c }).collect();
    // A folder with a dot in front is hidden, and would be skipped where the shard is read.
    let part = match part.strip_prefix('.') {
        Some(rest) if !rest.is_empty() => format!("_{rest}"),
        _ => part,
    };
    if part.len() > 4 && part.starts_with("__") && part.ends_with("__") {
        match part.trim_matches('_') {
            "" => "_".to_string(),
            inner => inner.to_string(),
        }
    } else {
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_unique_and_follow_the_paths_of_files() {
        let mut keys = Keys::default();
        assert_eq!(keys.unique("cats/IMG_1.JPG"), "cats/IMG_1");
        assert_eq!(keys.unique("cats/IMG_1.png"), "cats/IMG_1-2");
        assert_eq!(keys.unique("cats/a.b.jpg"), "cats/a_b");
        assert_eq!(keys.unique("../up/./x.jpg"), "up/x");
        assert_eq!(keys.unique("__meta__/x.jpg"), "meta/x");
        assert_eq!(keys.unique("x\u{1b}[2J.jpg"), "x_[2J");
        assert_eq!(keys.unique(".jpg"), "_jpg");
        assert_eq!(keys.unique("../.cache/a.jpg"), "_cache/a");
        assert_eq!(keys.unique("______/y.jpg"), "_/y");
    }
}
