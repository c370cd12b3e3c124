//! `ocelli recipe keys`: the reference of all keys.

use std::fmt::Write;
use std::process::ExitCode;

use anyhow::bail;
use textwrap::{Options, WordSplitter, fill, termwidth};
use trainer::recipe::{Key, keys};

/// Flags of `recipe keys`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli recipe keys optim\n  ocelli recipe keys model.drop_path")]
pub(super) struct Args {
    /// Beginning of the keys; all keys by default.
    prefix: Option<String>,
    /// Write the page of the documentation.
    #[arg(long, hide = true)]
    markdown: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let prefix = args.prefix.as_deref().unwrap_or_default();
    let mut keys = keys();
    let paths: Vec<String> = keys.iter().map(|key| key.path.clone()).collect();
    keys.retain(|key| key.path.starts_with(prefix));
    if keys.is_empty() {
        let nearest = paths.iter().max_by(|a, b| {
            let [a, b] = [a, b].map(|path| strsim::jaro_winkler(path, prefix));
            a.total_cmp(&b)
        });
        bail!("no key begins with {prefix}; near is {}", nearest.map_or("none", String::as_str));
    }
    if args.markdown {
        out!("{}", page(&keys).trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let width = termwidth().min(120);
    let options = wrap_options(width).initial_indent("    ").subsequent_indent("    ");
    for key in &keys {
        let head_options = wrap_options(width).subsequent_indent("    ");
        out!("{}", fill(&format!("{}  {}", key.path, describe_values(key)), head_options));
        out!("{}", fill(&key.meaning, &options));
        for (word, meaning) in &key.words {
            let word_options = wrap_options(width).initial_indent("      ").subsequent_indent("        ");
            out!("{}", fill(&format!("\"{word}\": {meaning}"), word_options));
        }
        if !key.belongs_to.is_empty() {
            out!("{}", fill(&format!("with {}", settings(key)), &options));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns options for lines of `width`, which are not broken at hyphens.
fn wrap_options<'a>(width: usize) -> Options<'a> {
    Options::new(width).word_splitter(WordSplitter::NoHyphenation)
}

/// Describes the values of `key`, and its default.
fn describe_values(key: &Key) -> String {
    match (&key.default, key.is_required) {
        (Some(default), _) => format!("{}, default {default}", key.form),
        (None, true) => format!("{}, required", key.form),
        (None, false) => format!("{}, may be absent", key.form),
    }
}

/// Lists the settings with which `key` exists: `method.name = "dino" or "ibot"`.
fn settings(key: &Key) -> String {
    let mut listed: Vec<(&str, Vec<&str>)> = Vec::new();
    for (name, value) in key.belongs_to.iter().filter_map(|setting| setting.split_once(" = ")) {
        match listed.iter_mut().find(|(other, _)| *other == name) {
            Some((_, values)) => values.push(value),
            None => listed.push((name, vec![value])),
        }
    }
    listed
        .iter()
        .map(|(name, values)| match values.split_last() {
            Some((last, rest)) if !rest.is_empty() => format!("{name} = {} or {last}", rest.join(", ")),
            _ => format!("{name} = {}", values.concat()),
        })
        .collect::<Vec<_>>()
        .join("; ")
}

/// Writes the page of all `keys`: a heading for each section.
fn page(keys: &[Key]) -> String {
    let mut page = String::from(
        "# Keys of a recipe\n\nWritten by `ocelli recipe keys --markdown` from the documentation of the code; `ocelli recipe keys PREFIX`\n\
         prints a part of it. A recipe is TOML. `--set KEY=VALUE` changes one key, `--set views.crops.0.size_px=64` one of a list's\n\
         entries. `ocelli recipe new` prints a recipe to begin with, and `plan.toml` of a run is a recipe, too.\n\n\
         A length of time is `{ steps = 500 }`, `{ epochs = 3 }`, `{ samples = 1e6 }` or `{ percent = 5 }` of the run.\n",
    );
    let mut section = "";
    for key in keys {
        let key_section = key.path.split_once('.').map_or("", |(section, _)| section);
        if key_section != section || (key_section.is_empty() && !page.contains("\n## ")) {
            section = key_section;
            let heading =
                if section.is_empty() { "Beside the sections".into() } else { format!("`[{section}]`") };
            let _ = write!(page, "\n## {heading}\n");
        }
        let _ = write!(page, "\n`{}`: {}  \n{}\n", key.path, describe_values(key), key.meaning);
        for (word, meaning) in &key.words {
            let _ = writeln!(page, "- `\"{word}\"`: {meaning}");
        }
        if !key.belongs_to.is_empty() {
            let _ = write!(page, "\nWith `{}`.\n", settings(key).replace("; ", "`; `"));
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page in the documentation is the one that the program writes.
    #[test]
    fn the_page_is_up_to_date() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/recipe.md");
        let written = std::fs::read_to_string(path).unwrap();
        assert_eq!(
            written.trim_end(),
            page(&keys()).trim_end(),
            "run ocelli recipe keys --markdown > docs/recipe.md"
        );
    }

    /// The meaning of every key is stated without references to code.
    #[test]
    fn every_key_has_a_meaning() {
        let keys = keys();
        assert!(keys.len() > 100, "{}", keys.len());
        for key in keys {
            let all = key.words.iter().map(|(_, meaning)| meaning).chain([&key.meaning]);
            for text in all {
                let is_code = text.contains("[`") || text.contains("::") || text.contains("`true` if");
                assert!(text.len() > 3 && !is_code, "{}: {text}", key.path);
            }
        }
    }
}
