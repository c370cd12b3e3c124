//! Shard lists as users write them: brace expansion, `::` lists, schemes, and `wids` index files.
//!
//! `data/train-{000000..000146}.tar::extra/{a,b}.tar` names 149 shards. The grammar is
//! WebDataset's; remote schemes are refused by name until a store reads them.

use std::path::PathBuf;

use crate::PipelineError;

/// More shards than any real list has; a typing error such as `{0..99999999999}` stops here.
const MAX_SHARDS: usize = 10_000_000;

/// Expands shard lists into local paths, in the order written.
///
/// # Errors
/// [`PipelineError::BadUrl`] for unbalanced braces, ranges that run backwards, an empty list or a
/// scheme that this build does not read; for a `.json` file as [`crate::wids::shards`].
pub fn expand(specs: &[String]) -> Result<Vec<PathBuf>, PipelineError> {
    let mut paths = Vec::new();
    for spec in specs {
        let bad = |reason: String| PipelineError::BadUrl { spec: spec.clone(), reason };
        for part in spec.split("::").filter(|part| !part.is_empty()) {
            let mut expanded = Vec::new();
            expand_braces(part, &mut expanded).map_err(bad)?;
            for url in expanded {
                let path = local_path(&url).map_err(bad)?;
                match path.extension() {
                    Some(extension) if extension == "json" => paths.extend(crate::wids::shards(&path)?),
                    _ => paths.push(path),
                }
            }
            if paths.len() > MAX_SHARDS {
                return Err(bad(format!("names more than {MAX_SHARDS} shards")));
            }
        }
    }
    if paths.is_empty() {
        return Err(PipelineError::BadUrl { spec: specs.join(" "), reason: "names no shard".into() });
    }
    Ok(paths)
}

/// The path that a URL of this machine names.
pub(crate) fn local_path(url: &str) -> Result<PathBuf, String> {
    if let Some(path) = url.strip_prefix("file://").or_else(|| url.strip_prefix("file:")) {
        return Ok(PathBuf::from(path));
    }
    match url.split_once(':') {
        Some((scheme, _)) if scheme.len() > 1 && scheme.chars().all(|c| c.is_ascii_alphanumeric()) => {
            Err(format!("scheme {scheme}: is not supported; copy the shards to a local folder"))
        }
        _ => Ok(PathBuf::from(url)),
    }
}

/// Expands the first brace group of `text` and recurses into what follows.
fn expand_braces(text: &str, out: &mut Vec<String>) -> Result<(), String> {
    let Some(open) = text.find('{') else {
        if text.contains('}') {
            return Err("a closing brace without an opening one".into());
        }
        out.push(text.to_string());
        return Ok(());
    };
    let close = matching_brace(&text[open..]).ok_or("an opening brace without a closing one")? + open;
    let (head, body, tail) = (&text[..open], &text[open + 1..close], &text[close + 1..]);
    let mut tails = Vec::new();
    expand_braces(tail, &mut tails)?;
    for choice in alternatives(body)? {
        for tail in &tails {
            if out.len() >= MAX_SHARDS {
                return Err(format!("names more than {MAX_SHARDS} shards"));
            }
            out.push(format!("{head}{choice}{tail}"));
        }
    }
    Ok(())
}

/// Position of the brace that closes the one at byte 0.
fn matching_brace(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

fn alternatives(body: &str) -> Result<Vec<String>, String> {
    if let Some((first, last)) = body.split_once("..")
        && !body.contains(['{', ','])
    {
        return range(first, last);
    }
    let mut choices = Vec::new();
    for choice in split_top_level(body) {
        expand_braces(choice, &mut choices)?;
    }
    Ok(choices)
}

/// Splits at the commas that stand outside nested braces.
fn split_top_level(body: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0i32, 0);
    for (at, c) in body.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&body[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&body[start..]);
    parts
}

/// `000..012` keeps the zero padding of its first number, as the shell does.
fn range(first: &str, last: &str) -> Result<Vec<String>, String> {
    let number = |text: &str| {
        text.parse::<u64>().map_err(|_| format!("{text:?} in {{{first}..{last}}} is not a number"))
    };
    let (from, to) = (number(first)?, number(last)?);
    if to < from {
        return Err(format!("the range {{{first}..{last}}} runs backwards"));
    }
    if to - from >= MAX_SHARDS as u64 {
        return Err(format!("the range {{{first}..{last}}} names more than {MAX_SHARDS} shards"));
    }
    let width = if first.starts_with('0') || last.starts_with('0') { first.len().max(last.len()) } else { 0 };
    Ok((from..=to).map(|n| format!("{n:0width$}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(spec: &str) -> Vec<String> {
        expand(&[spec.to_string()])
            .expect("valid")
            .into_iter()
            .map(|path| path.display().to_string())
            .collect()
    }

    #[test]
    fn braces_ranges_and_lists_expand_in_order() {
        assert_eq!(names("t-{008..010}.tar"), ["t-008.tar", "t-009.tar", "t-010.tar"]);
        assert_eq!(names("{a,b}-{1..2}"), ["a-1", "a-2", "b-1", "b-2"]);
        assert_eq!(names("x.tar::{y,z{0..1}}.tar"), ["x.tar", "y.tar", "z0.tar", "z1.tar"]);
        assert_eq!(names("file:///tmp/a.tar"), ["/tmp/a.tar"]);
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_its_reason() {
        for (spec, reason) in [
            ("a{1..2.tar", "without a closing"),
            ("a}.tar", "without an opening"),
            ("{5..3}.tar", "backwards"),
            ("{a..3}.tar", "not a number"),
            ("{0..99999999999}.tar", "more than"),
            ("s3://bucket/{0..3}.tar", "scheme s3"),
            ("", "names no shard"),
        ] {
            let error = expand(&[spec.to_string()]).expect_err(spec).to_string();
            assert!(error.contains(reason), "{spec}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_answered_without_a_panic(text in "[{},.0-9a-z:]{0,24}") {
            let _ = expand(&[text]);
        }

        #[test]
        fn a_range_names_each_number_once(from in 0u64..500, n in 1u64..200) {
            let names = names(&format!("{{{from}..{}}}", from + n - 1));
            let expected: Vec<String> = (from..from + n).map(|i| i.to_string()).collect();
            if from > 0 { prop_assert_eq!(names, expected); } else { prop_assert_eq!(names.len() as u64, n); }
        }
    }
}
