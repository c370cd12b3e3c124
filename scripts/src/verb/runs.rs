//! `ocelli runs`: lists the runs below a folder, one per line, or their scores over seeds.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use pipeline::words::thousands;
use report::{Overview, Run, SeedTable};
use serde_json::{Value, json};

use crate::columns::{Arrangement, Column, print_columns};
use crate::console::{chain, print_paragraph, say};
use crate::progress::format_duration;
use crate::seed_table::{self, TableFormat};

/// Flags of `runs`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli runs\n  ocelli runs experiments/ --json\n  ocelli runs experiments/ \
        --table\n  ocelli runs experiments/ --table --format latex"
)]
pub(crate) struct Args {
    /// Folder of work directories, up to four levels deep, or a work directory.
    #[arg(default_value = "runs")]
    folder: PathBuf,
    /// List scores over seeds: a row for all runs that differ only in their seed, with the mean ±
    /// standard deviation of each of their scores after the last step.
    #[arg(long)]
    table: bool,
    /// Format of --table: text, csv (a line for each row and score) or latex.
    #[arg(
        long,
        value_enum,
        default_value_t,
        requires = "table",
        conflicts_with = "json",
        value_name = "FORMAT"
    )]
    format: TableFormat,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Headings of the list.
const HEADINGS: [&str; 8] =
    ["run", "method", "backbone", "step", "loss", "score: first → best → last", "state", "left"];

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if !args.folder.is_dir() {
        bail!("no such folder: {}", args.folder.display());
    }
    let workdirs = Run::workdirs_in(&args.folder);
    if workdirs.is_empty() {
        bail!("no run in {}: none of its folders has a plan.toml", args.folder.display());
    }
    if args.table {
        return print_seeds(args, &workdirs);
    }
    let runs: Vec<(PathBuf, anyhow::Result<Overview>)> = workdirs
        .into_iter()
        .map(|workdir| {
            let overview =
                Run::open(&workdir).map(|run| Overview::from_run(&run)).map_err(anyhow::Error::from);
            (workdir, overview)
        })
        .collect();
    if args.json {
        let mut rows = Vec::new();
        for (workdir, overview) in &runs {
            let mut row = match overview {
                Ok(overview) => json!(overview),
                Err(error) => json!({ "error": chain(error) }),
            };
            row["workdir"] = json!(workdir.display().to_string());
            rows.push(row);
        }
        out!("{}", Value::Array(rows));
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![HEADINGS.map(String::from).to_vec()];
    for (workdir, overview) in &runs {
        if let Ok(overview) = overview {
            rows.push(cells(&args.folder, workdir, overview).to_vec());
        }
    }
    print_aligned(&rows);
    for (workdir, overview) in &runs {
        match overview {
            Ok(overview) if overview.why != overview.state => {
                print_paragraph(2, &format!("{} {}", workdir.display(), overview.why));
            }
            Ok(_) => {}
            Err(error) => say(format!("warning: {}: {}", workdir.display(), chain(error))),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the scores of the runs in `workdirs` over seeds.
fn print_seeds(args: &Args, workdirs: &[PathBuf]) -> anyhow::Result<ExitCode> {
    let mut runs = Vec::new();
    for workdir in workdirs {
        match Run::open(workdir) {
            Ok(run) => runs.push(run),
            Err(error) => say(format!("warning: {}: {}", workdir.display(), chain(&error.into()))),
        }
    }
    let table = SeedTable::new(&args.folder, &runs);
    if table.rows.is_empty() {
        bail!(
            "no run in {} has a score after its last step: score each with `ocelli probe --checkpoint RUN \
             --train SHARDS --test SHARDS`",
            args.folder.display()
        );
    }
    if !table.unscored.is_empty() {
        say(format!(
            "note: not in the table, because they have no score after their last step: {}",
            table.unscored.join(", ")
        ));
    }
    if args.json {
        out!("{}", json!(table));
        return Ok(ExitCode::SUCCESS);
    }
    match args.format {
        TableFormat::Text => {
            print_aligned(&seed_table::text_rows(&table));
            for line in seed_table::legend(&table) {
                print_paragraph(2, &line);
            }
        }
        TableFormat::Csv => out!("{}", seed_table::csv(&table)?.trim_end()),
        TableFormat::Latex => out!("{}", seed_table::latex(&table)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the row of a run in the list. A run is named by its path below `folder`.
fn cells(folder: &Path, workdir: &Path, overview: &Overview) -> [String; 8] {
    let below = workdir.strip_prefix(folder).ok().filter(|path| !path.as_os_str().is_empty());
    let state = if overview.collapsed {
        format!("{}, collapsed", overview.state)
    } else {
        overview.state.to_string()
    };
    [
        below.map_or_else(|| overview.name.clone(), |path| path.display().to_string()),
        overview.method.clone(),
        overview.backbone.clone(),
        format!("{}/{}", thousands(overview.step), thousands(overview.total_steps)),
        overview.loss.map_or_else(|| "-".into(), |loss| format!("{loss:.4}")),
        score_cell(overview),
        state,
        overview.seconds_left.map_or_else(|| "-".into(), format_duration),
    ]
}

/// Returns the score of a run, or else its search of views.
fn score_cell(overview: &Overview) -> String {
    if let Some(best) = &overview.best {
        return format!("{} {}", best.metric, best.course);
    }
    match &overview.learning {
        Some(learning) => format!(
            "views {} (random {:.1}, of {})",
            learning.course, learning.random_percent, learning.n_images
        ),
        None => "-".into(),
    }
}

/// Prints rows of the same length, the first of which are headings, with aligned columns.
fn print_aligned(rows: &[Vec<String>]) {
    let Some((headings, rows)) = rows.split_first() else { return };
    let mut columns = Vec::with_capacity(headings.len());
    for (index, heading) in headings.iter().enumerate() {
        let cells = rows.iter().map(|row| row[index].clone()).collect();
        columns.push(Column::words(heading.as_str(), cells));
    }
    print_columns(&columns, Arrangement { n_keys: 1, gap: 2 });
}
