//! Recording scores in the run that they belong to.
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use report::{EVALUATIONS, EvaluationRow, score_name};
use trainer::run::telemetry::append_scalars;

use super::network::OpenNetwork;

/// Returns the path of a run's evaluations.
pub(crate) fn path_in(workdir: &Path) -> PathBuf {
    workdir.join(EVALUATIONS)
}

/// Appends rows to a run's evaluations, and scalars at the training step to its TensorBoard files.
pub(crate) fn add(
    workdir: &Path,
    step: u64,
    rows: &[EvaluationRow],
    scalars: &[(String, f64)],
) -> anyhow::Result<()> {
    let path = path_in(workdir);
    let lines: Result<Vec<String>, _> = rows.iter().map(serde_json::to_string).collect();
    let lines: String = lines?.into_iter().map(|line| line + "\n").collect();
    let file = pipeline::file::open_append(&path);
    let written = file.and_then(|mut file| file.write_all(lines.as_bytes()));
    written.with_context(|| format!("cannot write {}", path.display()))?;
    if scalars.is_empty() {
        return Ok(());
    }
    // Scalars have the index of the last step, and steps are counted from 0.
    Ok(append_scalars(workdir, step.saturating_sub(1), scalars)?)
}

/// Returns the numbers of `rows` as scalars, under names that differ from those of the probe within
/// the run.
pub(crate) fn scalars(open: &OpenNetwork, rows: &[EvaluationRow]) -> Vec<(String, f64)> {
    let evaluated = open.manifest.as_ref().and_then(|manifest| manifest.plan.evaluated().ok());
    let evaluated = evaluated.unwrap_or(&open.which);
    let mut scalars = Vec::new();
    for row in rows {
        if let Some(value) = row.number.value() {
            scalars.push((score_name(row, evaluated), value));
        }
    }
    scalars
}
