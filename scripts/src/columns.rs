//! Tables as wide as the terminal.

/// A column of a table.
pub(crate) struct Column {
    heading: &'static str,
    is_text: bool,
    cells: Vec<String>,
}

impl Column {
    /// Creates a column of numbers, which are aligned to the right.
    pub(crate) fn numbers(heading: &'static str, cells: Vec<String>) -> Self {
        Self { heading, is_text: false, cells }
    }

    /// Creates a column of words, which are aligned to the left.
    pub(crate) fn words(heading: &'static str, cells: Vec<String>) -> Self {
        Self { heading, is_text: true, cells }
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

/// Formats a table of `columns`, all of the same length. A table that is wider than `max_width` is
/// divided into several, one below the other, each of which begins with the first `n_keys` columns.
pub(crate) fn format_table(columns: &[Column], n_keys: usize, max_width: Option<usize>) -> Vec<String> {
    let (keys, others) = columns.split_at(n_keys);
    // Each column is followed by a space.
    let keys_width: usize = keys.iter().map(|key| key.width() + 1).sum();
    let mut lines = Vec::new();
    let mut block: Vec<&Column> = keys.iter().collect();
    let mut block_width = keys_width;
    for column in others {
        let width = block_width + column.width();
        if block.len() > n_keys && max_width.is_some_and(|max_width| width > max_width) {
            lines.extend(format_block(&block));
            lines.push(String::new());
            block = keys.iter().collect();
            block_width = keys_width;
        }
        block_width += column.width() + 1;
        block.push(column);
    }
    lines.extend(format_block(&block));
    lines
}

/// Formats columns side by side.
fn format_block(columns: &[&Column]) -> Vec<String> {
    let n_rows = columns.iter().map(|column| column.cells.len()).max().unwrap_or(0);
    let mut lines = Vec::with_capacity(n_rows + 1);
    let headings: Vec<String> = columns.iter().map(|column| column.padded(column.heading)).collect();
    lines.push(headings.join(" ").trim_end().to_string());
    for row in 0..n_rows {
        let cells: Vec<String> = columns.iter().map(|column| column.padded(&column.cells[row])).collect();
        lines.push(cells.join(" ").trim_end().to_string());
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
        assert_eq!(format_table(&columns, 1, None), whole);
        assert_eq!(format_table(&columns, 1, Some(16)), whole);
        let divided =
            ["ranks    GB", "    1  1.25", "   64 10.00", "", "ranks mode", "    1 none", "   64 full"];
        assert_eq!(format_table(&columns, 1, Some(15)), divided);
        // A column that is too wide by itself is not left out.
        assert_eq!(format_table(&columns, 1, Some(3)), divided);
    }
}
