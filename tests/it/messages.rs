//! Messages of the program, compared with those in `messages.txt`.
//!
//! A section of that file is a line `[module::test]`, or `[module::test.part]`, and the text of a
//! message; an empty line separates it from the next one. `OCELLI_UPDATE_MESSAGES=1 cargo test -p
//! tests` writes the sections of the tests that it runs, so that other words need no change of a
//! test, and the diff shows them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::Path;

/// Folder of these tests.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/it");

/// First line of the file.
const HEADER: &str = "# Messages of the program, by test. OCELLI_UPDATE_MESSAGES=1 updates them.";

/// Asserts that a message is that of the section `name`. Of a log that ends with an error, the
/// error is compared. An empty log is no message.
pub(crate) fn check_message(name: &str, log: &str) {
    let message = hide_changing_parts(&select_error(log));
    assert!(!message.is_empty(), "there is no message of {name}");
    if std::env::var_os("OCELLI_UPDATE_MESSAGES").is_some() {
        update(name, message);
        return;
    }
    let sections = read_sections();
    let Some(expected) = sections.get(name) else {
        panic!(
            "tests/it/messages.txt has no message of {name}, which is\n{message}\nOCELLI_UPDATE_MESSAGES=1 \
             adds it"
        );
    };
    assert!(
        message == *expected,
        "the message of {name} is\n{message}\ninstead of\n{expected}\nOCELLI_UPDATE_MESSAGES=1 updates \
         tests/it/messages.txt"
    );
}

/// Returns the lines of a log that contain `part`, of which there must be one at least.
pub(crate) fn lines_with(log: &str, part: &str) -> String {
    let lines: Vec<&str> = log.lines().filter(|line| line.contains(part)).collect();
    assert!(!lines.is_empty(), "no line with {part:?} in:\n{log}");
    lines.join("\n")
}

/// Returns the error of a log with the lines that continue it, or the whole log if it has none;
/// without empty lines.
fn select_error(log: &str) -> String {
    let start = log.lines().position(|line| line.starts_with("error:")).unwrap_or(0);
    let lines = log.lines().skip(start).map(str::trim_end).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("\n")
}

/// Replaces what differs between runs and machines: temporary folders, ports, hashes, and numbers
/// of processes in names that GNU tar makes. Also replaces serde's list of all keys, which grows
/// with each new one.
fn hide_changing_parts(text: &str) -> String {
    let folder = std::env::temp_dir().join(".tmp").display().to_string();
    let text = replace_with_rest(text, &folder, char::is_alphanumeric, "[folder]");
    let text = replace_with_rest(&text, "127.0.0.1:", |c| c.is_ascii_digit(), "127.0.0.1:[port]");
    let text = replace_with_rest(&text, "expected one of `", |c| c != ')', "expected one of [keys]");
    let text = replace_with_rest(&text, "GNUSparseFile.", |c| c.is_ascii_digit(), "GNUSparseFile.[pid]");
    hide_hashes(&text.replace(env!("CARGO_TARGET_TMPDIR"), "[target]"))
}

/// Replaces each `start`, and the characters after it for which `is_rest` holds, by `name`.
fn replace_with_rest(text: &str, start: &str, is_rest: fn(char) -> bool, name: &str) -> String {
    let mut replaced = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(start) {
        replaced.push_str(before);
        replaced.push_str(name);
        rest = after.trim_start_matches(is_rest);
    }
    replaced + rest
}

/// Replaces hexadecimal numbers with as many digits as a hash has.
fn hide_hashes(text: &str) -> String {
    let mut hidden = String::new();
    for part in text.split_inclusive(|c: char| !c.is_ascii_hexdigit()) {
        let digits = part.trim_end_matches(|c: char| !c.is_ascii_hexdigit());
        if [16, 32, 64].contains(&digits.len()) {
            hidden.push_str("[hash]");
            hidden.push_str(&part[digits.len()..]);
        } else {
            hidden.push_str(part);
        }
    }
    hidden
}

/// Reads the sections of the file, by name.
fn read_sections() -> BTreeMap<String, String> {
    parse(&std::fs::read_to_string(Path::new(FOLDER).join("messages.txt")).unwrap())
}

fn parse(text: &str) -> BTreeMap<String, String> {
    let mut sections = BTreeMap::new();
    for section in text.trim_end().split("\n\n") {
        let (first, message) = section.split_once('\n').unwrap_or((section, ""));
        if let Some(name) = first.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            sections.insert(name.to_string(), message.to_string());
        }
    }
    sections
}

/// Replaces or adds a section of the file. The file is locked meanwhile: tests run at the same
/// time.
fn update(name: &str, message: String) {
    let path = Path::new(FOLDER).join("messages.txt");
    let mut file = File::options().read(true).write(true).open(path).unwrap();
    file.lock().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    let mut sections = parse(&text);
    sections.insert(name.to_string(), message);
    let mut updated = format!("{HEADER}\n");
    for (name, message) in sections {
        updated += &format!("\n[{name}]\n{message}\n");
    }
    file.set_len(0).unwrap();
    file.rewind().unwrap();
    file.write_all(updated.as_bytes()).unwrap();
}

/// Every section is that of a test or of a function that tests call.
#[test]
fn sections_belong_to_tests() {
    for name in read_sections().keys() {
        let (module, rest) = name.split_once("::").unwrap();
        let (function, _) = rest.split_once('.').unwrap_or((rest, ""));
        let code = std::fs::read_to_string(Path::new(FOLDER).join(format!("{module}.rs"))).unwrap();
        assert!(code.contains(&format!("fn {function}(")), "{name}");
    }
}

/// Nouns that messages count.
const NOUNS: [&str; 11] =
    ["classes", "files", "images", "keys", "members", "parts", "ranks", "rows", "samples", "shards", "steps"];

/// A message says `1 image` and `2 images`, not `1 images` or `1 image(s)`.
#[test]
fn nouns_agree_with_their_numbers() {
    for (name, message) in read_sections() {
        assert!(!message.contains("(s)") && !message.contains("(es)"), "{name}: {message}");
        let words: Vec<&str> = message.split_whitespace().collect();
        for pair in words.windows(2) {
            let noun = pair[1].trim_end_matches(|c: char| !c.is_alphabetic());
            assert!(pair[0] != "1" || !NOUNS.contains(&noun), "{name}: {message}");
        }
    }
}
