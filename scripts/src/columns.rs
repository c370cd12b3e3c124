//! Tables as wide as the terminal.

use crate::console::output_width;

/// A column of a table.
pub(crate) struct Column {
    heading: String,
    is_text: bool,
    cells: Vec<String>,
}

impl Column {
    /// Creates a column of numbers, which are aligned to the right.
    pub(crate) fn numbers(heading: impl Into<String>, cells: Vec<String>) -> Self {
        Self { heading: heading.into(), is_text: false, cells }
    }

    /// Creates a column of words, which are aligned to the left.
    pub(crate) fn words(heading: impl Into<String>, cells: Vec<String>) -> Self {
        Self { heading: heading.into(), is_text: true, cells }
    }

    /// Returns the width of the column in characters.
    fn width(&self) -> usize {
        let cells = self.cells.iter().map(|cell| cell.chars().count());
        cells.chain([self.heading.chars().count()]).max().unwrap_or(0)
    }

    fn padded(&self, text: &str) -> String {
        let width = self.width();
        if self.is_text { format!("{text:<width$}") } else { format!("{text:>width$}") }
    }
}

/// Arrangement of a table.
#[derive(Clone, Copy)]
pub(crate) struct Arrangement {
    /// Number of columns that tell the rows apart: the first ones.
    pub(crate) n_keys: usize,
    /// Number of spaces between columns.
    pub(crate) gap: usize,
}

/// Prints a table of `columns`, all of the same length. A table that is wider than standard output
/// is divided into several, one below the other, each of which begins with the columns that tell
/// the rows apart.
pub(crate) fn print_columns(columns: &[Column], arrangement: Arrangement) {
    for line in format_table(columns, arrangement, output_width()) {
        out!("{line}");
    }
}

/// Formats a table of `columns`, divided where it is wider than `max_width`.
fn format_table(columns: &[Column], arrangement: Arrangement, max_width: Option<usize>) -> Vec<String> {
    let Arrangement { n_keys, gap } = arrangement;
    let (keys, others) = columns.split_at(n_keys);
    // Each column is followed by a gap.
    let keys_width: usize = keys.iter().map(|key| key.width() + gap).sum();
    let mut lines = Vec::new();
    let mut block: Vec<&Column> = keys.iter().collect();
    let mut block_width = keys_width;
    for column in others {
        let width = block_width + column.width();
        if block.len() > n_keys && max_width.is_some_and(|max_width| width > max_width) {
            lines.extend(format_block(&block, gap));
            lines.push(String::new());
            block = keys.iter().collect();
            block_width = keys_width;
        }
        block_width += column.width() + gap;
        block.push(column);
    }
    lines.extend(format_block(&block, gap));
    lines
}

/// Formats columns side by side, with `gap` spaces between two.
fn format_block(columns: &[&Column], gap: usize) -> Vec<String> {
    let between = " ".repeat(gap);
    let n_rows = columns.iter().map(|column| column.cells.len()).max().unwrap_or(0);
    let mut lines = Vec::with_capacity(n_rows + 1);
    let headings: Vec<String> = columns.iter().map(|column| column.padded(&column.heading)).collect();
    lines.push(headings.join(&between).trim_end().to_string());
    for row in 0..n_rows {
        let cells: Vec<String> = columns.iter().map(|column| column.padded(&column.cells[row])).collect();
        lines.push(cells.join(&between).trim_end().to_string());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn wide_tables_are_divided_and_columns_stay_aligned() {
        let columns = [
            Column::numbers("ranks", strings(&["1", "64"])),
            Column::numbers("GB", strings(&["1.25", "10.00"])),
            Column::words("mode", strings(&["none", "full"])),
        ];
        let whole = ["ranks    GB mode", "    1  1.25 none", "   64 10.00 full"];
        let arrangement = Arrangement { n_keys: 1, gap: 1 };
        assert_eq!(format_table(&columns, arrangement, None), whole);
        assert_eq!(format_table(&columns, arrangement, Some(16)), whole);
        let divided =
            ["ranks    GB", "    1  1.25", "   64 10.00", "", "ranks mode", "    1 none", "   64 full"];
        assert_eq!(format_table(&columns, arrangement, Some(15)), divided);
        // A column that is too wide by itself is not left out.
        assert_eq!(format_table(&columns, arrangement, Some(3)), divided);
        let wide_gap = Arrangement { n_keys: 1, gap: 2 };
        let apart = ["ranks     GB  mode", "    1   1.25  none", "   64  10.00  full"];
        assert_eq!(format_table(&columns, wide_gap, Some(18)), apart);
        assert_eq!(format_table(&columns, wide_gap, Some(17)).len(), 7);
    }
}
