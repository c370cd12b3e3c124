//! Scores over seeds as text, CSV and LaTeX.

use pipeline::words::{counted, thousands};
use report::{ScoreColumn, SeedRow, SeedScore, SeedTable};

/// Format of a table.
#[derive(Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TableFormat {
    /// Aligned columns, with a legend.
    #[default]
    Text,
    /// Comma-separated values, a line for each row and score.
    Csv,
    /// A `tabular` environment, with the legend as comments.
    Latex,
}

/// How the numbers of a table are made.
const ABOUT: &str = "mean ± standard deviation (n − 1) over seeds, each score after the last step of its run, \
                     or after its best validation with run.patience";

/// Headings of the CSV.
const CSV_HEADINGS: [&str; 13] = [
    "run",
    "method",
    "backbone",
    "seeds",
    "steps",
    "settings",
    "score",
    "measure",
    "about",
    "n",
    "mean",
    "deviation",
    "values",
];

/// Returns the rows of the table, the first of which are headings.
pub(crate) fn text_rows(table: &SeedTable) -> Vec<Vec<String>> {
    let mut headings = vec!["run".to_string(), "seeds".to_string()];
    headings.extend(table.columns.iter().map(|column| column.label.clone()));
    let mut rows = vec![headings];
    for row in &table.rows {
        let mut cells = vec![row.name.clone(), join(&row.seeds)];
        for (column, score) in table.columns.iter().zip(&row.scores) {
            cells.push(match score {
                Some(score) => cell(column, score, row.seeds.len(), "±"),
                None => "-".into(),
            });
        }
        rows.push(cells);
    }
    rows
}

/// Returns lines that say how the numbers are made, and in what the rows differ.
pub(crate) fn legend(table: &SeedTable) -> Vec<String> {
    let mut lines = vec![ABOUT.to_string()];
    for column in &table.columns {
        let measure = match column.measure {
            "" => String::new(),
            measure => format!("{measure} in percent; "),
        };
        lines.push(format!("{}: {measure}{}", column.label, column.about));
    }
    for row in &table.rows {
        let mut facts = vec![format!("{}, {}", row.method, row.backbone), steps_in_words(row)];
        facts.extend(row.settings.iter().map(|(key, value)| format!("{key} = {value}")));
        lines.push(format!("{}: {}", row.name, facts.join("; ")));
    }
    lines
}

/// Returns the table as CSV, with headings.
pub(crate) fn csv(table: &SeedTable) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    {
        let mut writer = csv::Writer::from_writer(&mut bytes);
        writer.write_record(CSV_HEADINGS)?;
        for row in &table.rows {
            let settings: Vec<String> =
                row.settings.iter().map(|(key, value)| format!("{key} = {value}")).collect();
            for (column, score) in table.columns.iter().zip(&row.scores) {
                let Some(score) = score else { continue };
                writer.write_record([
                    row.name.clone(),
                    row.method.clone(),
                    row.backbone.clone(),
                    join(&row.seeds),
                    steps(row),
                    settings.join("; "),
                    column.label.clone(),
                    column.measure.to_string(),
                    column.about.clone(),
                    score.values.len().to_string(),
                    score.mean.to_string(),
                    score.deviation.map(|deviation| deviation.to_string()).unwrap_or_default(),
                    join(&score.values),
                ])?;
            }
        }
        writer.flush()?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the table as a `tabular` environment of LaTeX.
pub(crate) fn latex(table: &SeedTable) -> String {
    let mut lines: Vec<String> = legend(table).into_iter().map(|line| format!("% {line}")).collect();
    let numbers = "r".repeat(table.columns.len());
    lines.push(format!("\\begin{{tabular}}{{lr{numbers}}}"));
    lines.push("\\hline".into());
    let mut headings = vec!["run".to_string(), "seeds".to_string()];
    headings.extend(table.columns.iter().map(|column| escape_latex(&column.label)));
    lines.push(format!("{} \\\\", headings.join(" & ")));
    lines.push("\\hline".into());
    for row in &table.rows {
        let mut cells = vec![escape_latex(&row.name), row.seeds.len().to_string()];
        for (column, score) in table.columns.iter().zip(&row.scores) {
            cells.push(match score {
                Some(score) => format!("${}$", cell(column, score, row.seeds.len(), "\\pm")),
                None => "--".into(),
            });
        }
        lines.push(format!("{} \\\\", cells.join(" & ")));
    }
    lines.push("\\hline".into());
    lines.push("\\end{tabular}".into());
    lines.join("\n")
}

/// Formats a score of a row of `n_seeds` runs, with `sign` between mean and deviation: `44.25 ±
/// 0.92`; with the number of its values if some runs lack it.
fn cell(column: &ScoreColumn, score: &SeedScore, n_seeds: usize, sign: &str) -> String {
    let digits = if column.measure.is_empty() { 4 } else { 2 };
    let mut text = format!("{:.digits$}", score.mean);
    if let Some(deviation) = score.deviation {
        text += &format!(" {sign} {deviation:.digits$}");
    }
    if score.values.len() < n_seeds {
        text += &format!(" (n={})", score.values.len());
    }
    text
}

/// Formats the number of steps of the runs of a row for readers: `12,500 steps`.
fn steps_in_words(row: &SeedRow) -> String {
    let [fewest, most] = row.steps;
    let steps = counted(most, "step");
    if fewest == most { steps } else { format!("{} to {steps}", thousands(fewest)) }
}

/// Formats the number of steps of the runs of a row for programs: `12500 steps`.
fn steps(row: &SeedRow) -> String {
    let [fewest, most] = row.steps;
    if fewest == most { format!("{most} steps") } else { format!("{fewest} to {most} steps") }
}

/// Joins numbers by spaces.
fn join<T: ToString>(numbers: &[T]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// Escapes the characters of `text` that have a meaning in LaTeX.
fn escape_latex(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '\\' => escaped.push_str("\\textbackslash{}"),
            '~' => escaped.push_str("\\textasciitilde{}"),
            '^' => escaped.push_str("\\textasciicircum{}"),
            '&' | '%' | '$' | '#' | '_' | '{' | '}' => {
                escaped.push('\\');
                escaped.push(c);
            }
            _ => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn column(label: &str, measure: &'static str) -> ScoreColumn {
        ScoreColumn { label: label.into(), measure, about: "on test".into() }
    }

    fn table() -> SeedTable {
        let row = SeedRow {
            name: "dino_a".into(),
            method: "dino".into(),
            backbone: "vit (0.8 M)".into(),
            seeds: vec![0, 1],
            runs: vec!["runs/dino_a0".into(), "runs/dino_a1".into()],
            steps: [12, 12],
            settings: BTreeMap::new(),
            scores: vec![
                Some(SeedScore { values: vec![43.0, 45.0], mean: 44.0, deviation: Some(2f64.sqrt()) }),
                Some(SeedScore { values: vec![7.5], mean: 7.5, deviation: None }),
                None,
            ],
        };
        let columns = vec![column("knn_20", "accuracy"), column("rankme", ""), column("linear", "accuracy")];
        SeedTable { columns, rows: vec![row], unscored: Vec::new() }
    }

    #[test]
    fn scores_are_rounded_and_incomplete_ones_are_counted() {
        let rows = text_rows(&table());
        assert_eq!(rows[0], ["run", "seeds", "knn_20", "rankme", "linear"]);
        assert_eq!(rows[1], ["dino_a", "0 1", "44.00 ± 1.41", "7.5000 (n=1)", "-"]);
    }

    #[test]
    fn csv_has_all_digits_and_a_line_a_score() {
        let text = csv(&table()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[1].ends_with("knn_20,accuracy,on test,2,44,1.4142135623730951,43 45"), "{}", lines[1]);
        assert!(lines[2].ends_with("rankme,,on test,1,7.5,,7.5"), "{}", lines[2]);
    }

    #[test]
    fn latex_is_escaped() {
        let text = latex(&table());
        assert!(text.contains("run & seeds & knn\\_20 & rankme & linear \\\\"), "{text}");
        assert!(text.contains("dino\\_a & 2 & $44.00 \\pm 1.41$ & $7.5000 (n=1)$ & -- \\\\"), "{text}");
        assert_eq!(
            escape_latex("a%b{c}^~\\"),
            "a\\%b\\{c\\}\\textasciicircum{}\\textasciitilde{}\\textbackslash{}"
        );
    }
}
