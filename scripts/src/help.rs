//! Help of the program: short with `-h`, complete with `--help`. The options of all commands are on
//! a page of their own, `ocelli help options`.

use clap::builder::StyledStr;
use clap::{Arg, Args, Command};

use crate::console::ConsoleFlags;
use crate::storage::StorageFlags;

/// Largest width of a page, in characters.
pub(crate) const MAX_WIDTH: usize = 100;

/// Last line of the help of every command.
const MORE: &str = "Options of all commands, for messages and caches: `ocelli help options`";

/// Arranges the help of `command` and of its subcommands: `-h` shows the first sentence about each
/// option and `--help` all of them, and both end with a line about the options of all commands.
pub(crate) fn arrange(command: Command) -> Command {
    let after_help = match command.get_after_help() {
        Some(examples) => format!("{examples}\n\n{MORE}"),
        None => MORE.to_string(),
    };
    command.after_help(after_help).mut_args(with_short_help).mut_subcommands(arrange)
}

/// Returns the page about the options of all commands, which every other page hides.
pub(crate) fn options_page() -> StyledStr {
    let command = Command::new("options").max_term_width(MAX_WIDTH).disable_help_flag(true);
    let command = command.help_template("Options of all commands, before or after their own\n\n{all-args}");
    let mut command = ConsoleFlags::augment_args(StorageFlags::augment_args(command)).mut_args(shown);
    command.render_long_help()
}

/// Returns `arg` such that help shows it.
pub(crate) fn shown(arg: Arg) -> Arg {
    arg.hide(false)
}

/// Returns `arg` with the first sentence of its help as its short help.
fn with_short_help(arg: Arg) -> Arg {
    let text = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let sentence = first_sentence(&text);
    // Manual pages show the long help alone of an option that the short help hides.
    if arg.get_long_help().is_some() || (sentence.len() == text.len() && !arg.is_hide_short_help_set()) {
        return arg;
    }
    let short_help = sentence.to_string();
    arg.help(short_help).long_help(text)
}

/// Returns the first sentence of `text`, without its period.
fn first_sentence(text: &str) -> &str {
    for (end, _) in text.match_indices(". ") {
        let next = text[end + 2..].chars().next();
        if next.is_some_and(|c| c.is_uppercase() || c == '`') {
            return &text[..end];
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::first_sentence;

    #[test]
    fn sentences_end_before_a_capital() {
        assert_eq!(first_sentence("Seed, e.g. 3. Can be repeated"), "Seed, e.g. 3");
        assert_eq!(first_sentence("Device: cpu. `auto` finds one"), "Device: cpu");
        assert_eq!(first_sentence("The recipe's init.weights"), "The recipe's init.weights");
    }
}
