//! Lists and braces of shard lists: `a-{000..012}.tar::{b,c}.tar`.

/// Maximum number of shards in a list, above any real list, so that a typo such as
/// `{0..99999999999}` is an error.
pub(crate) const MAX_SHARDS: usize = 1_000_000;

/// Maximum number of brace groups in one name. No real list has as many; untrusted text may have
/// thousands.
const MAX_GROUPS: usize = 32;

/// Splits at `::`, except within the brackets of an IPv6 host: `http://[::1]/a.tar`.
pub(crate) fn split_list(spec: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut start = 0;
    let mut at = 0;
    while let Some(offset) = spec[at..].find("::") {
        let separator = at + offset;
        at = separator + 2;
        let part = &spec[start..separator];
        if part.contains("://[") && !part.contains(']') {
            continue;
        }
        parts.push(part);
        start = at;
    }
    parts.push(&spec[start..]);
    parts
}

/// Expands all brace groups of `text`.
///
/// # Errors
/// Returns the reason as text.
pub(crate) fn expand_braces(text: &str, out: &mut Vec<String>) -> Result<(), String> {
    if depth(text) > MAX_GROUPS {
        return Err(format!("more than {MAX_GROUPS} brace groups"));
    }
    expand(text, out)
}

/// Returns an upper bound on the recursion depth of [`expand`] for `text`: one call for each group.
fn depth(text: &str) -> usize {
    text.matches('{').count()
}

/// Expands the first brace group of `text` and recurses into the rest.
fn expand(text: &str, out: &mut Vec<String>) -> Result<(), String> {
    let Some(open) = text.find('{') else {
        if text.contains('}') {
            return Err("a closing brace without an opening one".into());
        }
        out.push(text.to_string());
        return Ok(());
    };
    let close = matching_brace(&text[open..]).ok_or("an opening brace without a closing one")? + open;
    let head = &text[..open];
    let body = &text[open + 1..close];
    let tail = &text[close + 1..];
    let mut tails = Vec::new();
    expand(tail, &mut tails)?;
    let choices = alternatives(body)?;
    // A group with a single alternative stays literal, as in the shell: `awk '{print $1}'`.
    let literal = choices.len() == 1 && !body.contains("..");
    for choice in choices {
        let choice = if literal { format!("{{{choice}}}") } else { choice };
        for tail in &tails {
            if out.len() >= MAX_SHARDS {
                return Err(format!("names more than {MAX_SHARDS} shards"));
            }
            out.push(format!("{head}{choice}{tail}"));
        }
    }
    Ok(())
}

/// Returns the position of the brace that closes the one at byte 0.
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

/// Expands `body`, the text between two braces.
fn alternatives(body: &str) -> Result<Vec<String>, String> {
    if let Some((first, last)) = body.split_once("..")
        && !body.contains(['{', ','])
    {
        return range(first, last);
    }
    let mut choices = Vec::new();
    for choice in split_top_level(body) {
        expand(choice, &mut choices)?;
    }
    Ok(choices)
}

/// Splits at the commas outside nested braces.
fn split_top_level(body: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut depth = 0i32;
    let mut start = 0;
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

/// Expands a range of numbers, zero-padded to the longer bound if either starts with a zero, as in
/// the shell.
fn range(first: &str, last: &str) -> Result<Vec<String>, String> {
    let from = first.parse::<u64>().map_err(|_| not_a_number(first, first, last))?;
    let to = last.parse::<u64>().map_err(|_| not_a_number(last, first, last))?;
    if to < from {
        return Err(format!("the range {{{first}..{last}}} runs backwards"));
    }
    if to - from >= MAX_SHARDS as u64 {
        return Err(format!("the range {{{first}..{last}}} names more than {MAX_SHARDS} shards"));
    }
    let width = if first.starts_with('0') || last.starts_with('0') { first.len().max(last.len()) } else { 0 };
    Ok((from..=to).map(|n| format!("{n:0width$}")).collect())
}

/// Returns the reason why `bound` of the range `first..last` is refused.
fn not_a_number(bound: &str, first: &str, last: &str) -> String {
    format!("{bound:?} in {{{first}..{last}}} is not a number")
}
