//! `ocelli recipe list`: the recipes that ship with the program.

use std::process::ExitCode;

use textwrap::{Options, WordSplitter, termwidth, wrap};

use crate::recipes::BUILT_IN;

/// Longest name before a colon, in bytes.
const LONGEST_NAME: usize = 20;

pub(super) fn run() -> anyhow::Result<ExitCode> {
    let longest = BUILT_IN.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let indent = " ".repeat(longest + 2);
    for (name, text) in BUILT_IN {
        let head = format!("{name:longest$}  ");
        let options = Options::new(termwidth().min(140))
            .word_splitter(WordSplitter::NoHyphenation)
            .initial_indent(&head)
            .subsequent_indent(&indent);
        for line in wrap(&title(text), options) {
            out!("{line}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the first sentence of a recipe's header.
fn title(text: &str) -> String {
    let header = text.lines().map_while(|line| line.strip_prefix("# "));
    let paragraph = header.collect::<Vec<_>>().join(" ");
    // A period within a sentence, as in "et al. 2021", is not followed by a letter.
    let mut end = paragraph.len();
    for (at, _) in paragraph.match_indices(". ") {
        if paragraph[at + 2..].starts_with(char::is_alphabetic) {
            end = at;
            break;
        }
    }
    // Details follow a colon, unless it follows a name.
    let colon = paragraph.match_indices(": ").map(|(at, _)| at).find(|at| *at > LONGEST_NAME);
    paragraph[..end.min(colon.unwrap_or(end))].trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn titles_are_the_first_sentences() {
        assert_eq!(
            title("# DINO (Caron et al. 2021) on\n# images. More.\n#\n# machine\n"),
            "DINO (Caron et al. 2021) on images"
        );
        for (name, text) in BUILT_IN {
            let title = title(text);
            assert!((20..200).contains(&title.len()), "{name}: {title}");
        }
    }
}
