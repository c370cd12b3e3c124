//! What people are told beside the output.

/// Writes a line to stderr in one piece, so that what ranks say at the same time stays in lines.
pub(crate) fn say(line: impl Into<String>) {
    let mut line = line.into();
    line.push('\n');
    eprint!("{line}");
}
