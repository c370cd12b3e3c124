//! Starts of a run: one line of `starts.jsonl` for each.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use pipeline::secrets;
use serde::{Deserialize, Serialize};
use trainer::run::host_name;

use super::jsonl;
use crate::ReportError;

/// Name of the file of a run's starts.
const STARTS: &str = "starts.jsonl";

/// A start of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// Time of the start, in seconds since 1970.
    pub at_s: f64,
    /// Release of the program.
    pub version: String,
    /// Name of the machine of rank 0.
    pub host: String,
    /// Number of ranks.
    pub world_size: usize,
    /// Folder that paths are relative to.
    pub folder: PathBuf,
    /// The command of rank 0: the program, then its arguments, without the secrets of addresses.
    pub command: Vec<String>,
}

impl Start {
    /// Returns the start of a run on this machine, at this time, by `command` in `folder`.
    pub fn now(world_size: usize, folder: PathBuf, command: Vec<String>) -> Self {
        Self {
            at_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
            version: env!("CARGO_PKG_VERSION").into(),
            host: host_name(),
            world_size,
            folder,
            command,
        }
    }

    /// Reads the newest start of the run in `workdir`; `None` for a run of an earlier version.
    pub(crate) fn read_newest(workdir: &Path) -> Result<Option<Self>, ReportError> {
        Ok(Self::read_all(workdir)?.pop())
    }

    /// Reads the starts of the run in `workdir`, in their order; none for a run of an earlier
    /// version.
    ///
    /// # Errors
    /// [`ReportError::Read`].
    pub fn read_all(workdir: &Path) -> Result<Vec<Self>, ReportError> {
        let starts: Vec<Self> = jsonl::rows(&workdir.join(STARTS))?;
        // Earlier versions wrote secrets to the file.
        Ok(starts.iter().map(Self::redact_list).collect())
    }

    /// Appends this start to the file of starts in `workdir`.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn note(&self, workdir: &Path) -> std::io::Result<()> {
        use std::io::Write;
        let line = format!("{}\n", serde_json::to_string(&self.redact_list())?);
        pipeline::file::open_append(&workdir.join(STARTS))?.write_all(line.as_bytes())
    }

    fn redact_list(&self) -> Self {
        let command = self.command.iter().map(|word| word_without_secrets(word)).collect();
        Self { command, ..self.clone() }
    }

    /// Returns rank 0's command in shell syntax, which resumes the run under the launcher that
    /// started its ranks.
    pub fn resume_command(&self) -> String {
        let words: Vec<String> = self.command.iter().map(|word| shell_quote(word)).collect();
        format!("cd {} && {}", shell_quote(&self.folder.display().to_string()), words.join(" "))
    }
}

/// Removes the secrets of the addresses in a word of a command: `URL`, `--shards=URL`,
/// `data.shards=["URL", 'URL']`. Text after a `pipe:` command is left out, because it may be part
/// of that command.
fn word_without_secrets(word: &str) -> String {
    let mut written = String::new();
    for piece in word.split_inclusive(['"', '\'']) {
        let (text, quote) = match piece.strip_suffix(['"', '\'']) {
            Some(text) => (text, &piece[text.len()..]),
            None => (piece, ""),
        };
        let (keys, list) = text.split_at(end_of_keys(text));
        let cleaned = secrets::redact_list(list);
        written.extend([keys, &cleaned]);
        if cleaned.contains("pipe:") {
            break;
        }
        written.push_str(quote);
    }
    written
}

/// Returns the index at which the value begins in `--set=data.shards=VALUE`.
fn end_of_keys(text: &str) -> usize {
    let mut start = 0;
    while let Some(len) = text[start..].find('=') {
        if !text[start..start + len].chars().all(is_key_char) {
            break;
        }
        start += len + 1;
    }
    start
}

fn is_key_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.".contains(c)
}

/// Quotes a word for a shell, if that is necessary.
pub fn shell_quote(word: &str) -> String {
    if !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./=:,@%+".contains(c)) {
        word.to_string()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_removed_from_words() {
        for (given, written) in [
            ("--shards", "--shards"),
            ("optim.lr=0.1", "optim.lr=0.1"),
            ("name=\"a b\"", "name=\"a b\""),
            ("http://u:PW@h/a.tar?x=1", "http://h/a.tar?x=1"),
            ("--shards=https://h/{0..3}.tar?sig=PW&se=PW", "--shards=https://h/{0..3}.tar"),
            (
                "data.shards=[\"http://u:PW@h/a.tar\", \"b.tar\"]",
                "data.shards=[\"http://h/a.tar\", \"b.tar\"]",
            ),
            ("--set=data.shards=pipe:curl -u PW h", "--set=data.shards=pipe:curl (…)"),
            ("pipe:curl -H \"Authorization: Bearer PW\" https://h/x.tar", "pipe:curl (…)"),
            ("pipe:curl -H 'X: PW' h", "pipe:curl (…)"),
            ("{pi,x}pe:curl -H \"X: PW\" h", "pipe:curl (…)"),
            ("data.shards=['http://u:PW@h/a.tar', 'b.tar']", "data.shards=['http://h/a.tar', 'b.tar']"),
            ("data.shards=['pipe:curl -u u:PW h']", "data.shards=['pipe:curl (…)"),
        ] {
            assert_eq!(word_without_secrets(given), written);
        }
    }

    fn start(shards: &str) -> Start {
        Start {
            at_s: 1.0,
            version: "0.1.0".into(),
            host: "h".into(),
            world_size: 1,
            folder: "/home/me/my runs".into(),
            command: ["ocelli", "pretrain", "--shards", shards].map(String::from).into(),
        }
    }

    #[test]
    fn newest_start_resumes_the_run() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Start::read_newest(folder.path()).unwrap(), None);
        start("a.tar").note(folder.path()).unwrap();
        start("it's-{0..3}.tar").note(folder.path()).unwrap();
        let last = Start::read_newest(folder.path()).unwrap().unwrap();
        assert_eq!(
            last.resume_command(),
            r"cd '/home/me/my runs' && ocelli pretrain --shards 'it'\''s-{0..3}.tar'"
        );
    }
}
