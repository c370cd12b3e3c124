//! Titles of recipes.

/// Longest name before a colon, in bytes.
const LONGEST_NAME: usize = 20;

/// Returns the first sentence of the comment with which the text of a recipe begins.
pub fn title(text: &str) -> String {
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
    }
}
