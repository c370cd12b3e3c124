//! `ocelli runs`: lists the runs below a folder, one per line.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use report::{Overview, Run};
use serde_json::{Value, json};

use crate::console::{chain, say};

/// Flags of `runs`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli runs\n  ocelli runs experiments/ --json")]
pub(crate) struct Args {
    /// Folder of work directories, up to four levels deep, or a work directory.
    #[arg(default_value = "runs")]
    folder: PathBuf,
    /// Print a JSON array instead of a table.
    #[arg(long)]
    json: bool,
}

/// Headings of the table.
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
    let mut rows = Vec::new();
    for (workdir, overview) in &runs {
        if let Ok(overview) = overview {
            rows.push(cells(&args.folder, workdir, overview));
        }
    }
    print_aligned(&rows);
    for (workdir, overview) in &runs {
        match overview {
            Ok(overview) if overview.why != overview.state => {
                out!("{} {}", workdir.display(), overview.why);
            }
            Ok(_) => {}
            Err(error) => say(format!("warning: {}: {}", workdir.display(), chain(error))),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the row of a run in the table. A run is named by its path below `folder`.
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
        format!("{}/{}", overview.step, overview.total_steps),
        overview.loss.map_or_else(|| "-".into(), |loss| format!("{loss:.4}")),
        overview.best.as_ref().map_or_else(|| "-".into(), |best| format!("{} {}", best.metric, best.course)),
        state,
        overview.seconds_left.map_or_else(|| "-".into(), duration),
    ]
}

/// Prints the table with aligned columns.
fn print_aligned(rows: &[[String; 8]]) {
    let headings = HEADINGS.map(String::from);
    let mut widths = [0; 8];
    for row in std::iter::once(&headings).chain(rows) {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    for row in std::iter::once(&headings).chain(rows) {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        out!("{}", cells.join("  ").trim_end());
    }
}

/// Formats a duration: `40 s`, `12 min`, `5.0 h`, `3.0 days`.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}
