//! The table of a plan: a line for each way to distribute the model.

use pipeline::words::thousands;
use trainer::cost::ModelCost;
use trainer::estimate::CandidateEstimate;

use super::units::{GB, HOUR_S};
use crate::columns::{Arrangement, Column, print_columns};
use crate::console::print_paragraph;
use crate::progress::format_duration;

/// Rows are told apart by ranks and mode.
const ARRANGEMENT: Arrangement = Arrangement { n_keys: 2, gap: 1 };

/// Width of the names of columns in their explanations.
const NAME_WIDTH: usize = 10;

/// Prints the table, and the meaning of its columns.
pub(super) fn print(model: &ModelCost, lines: &[CandidateEstimate], details: bool) {
    print_columns(&estimate_columns(model, lines), ARRANGEMENT);
    out!("");
    explain(
        "mode",
        "none: each rank holds all weights; grad: gradients and moments are sharded over ranks; \
        full: weights too; group: full within groups",
    );
    explain("images", "per step and rank");
    explain(
        "keep",
        "backbone units that keep their activations; others recompute them once, or with /n, n \
        at a time: all but every n-th twice, using less memory",
    );
    explain("peak GB", "per rank; saving a checkpoint needs another copy of the state");
    explain("moved GB", "received by a rank per step");
    explain("time", "of the whole run; rank-h: hours times ranks (GPU-hours)");
    if !details {
        return;
    }
    out!("");
    print_columns(&detail_columns(lines), ARRANGEMENT);
    out!("");
    explain(
        "state",
        "GB for all networks' weights and moments; grads: for gradients; gather: for weights in \
        transfer and in use; graphs: for activations; copy: for the state while a checkpoint is written",
    );
    explain(
        "compute",
        "seconds per step; moving: of communication, overlapping computation; waiting: seconds \
        that computation waits for communication",
    );
}

/// Prints the meaning of a column.
fn explain(name: &str, meaning: &str) {
    print_paragraph(NAME_WIDTH, &format!("{name:<NAME_WIDTH$}{meaning}"));
}

/// Returns the columns of ranks and mode.
fn key_columns(lines: &[CandidateEstimate]) -> [Column; 2] {
    let ranks = lines.iter().map(|line| thousands(line.candidate.placement.world_size as u64));
    let modes = lines.iter().map(|line| line.candidate.mode().to_string());
    [Column::numbers("ranks", ranks.collect()), Column::words("mode", modes.collect())]
}

/// Returns the columns of the estimates.
fn estimate_columns(model: &ModelCost, lines: &[CandidateEstimate]) -> Vec<Column> {
    let mut images = Vec::new();
    let mut keep = Vec::new();
    let mut peak = Vec::new();
    let mut moved = Vec::new();
    let mut step = Vec::new();
    let mut rate = Vec::new();
    let mut times = Vec::new();
    let mut rank_hours = Vec::new();
    let mut fits = Vec::new();
    for line in lines {
        let placement = &line.candidate.placement;
        images.push(thousands(placement.rank_batch as u64));
        keep.push(match placement.keep {
            n if n == model.trained.backbone.len() => "all".into(),
            n if placement.segment > 1 => format!("{n}/{}", placement.segment),
            n => n.to_string(),
        });
        peak.push(format!("{:.2}", line.candidate.memory.peak_bytes() / GB));
        moved.push(format!("{:.2}", line.traffic.bytes() / GB));
        step.push(format!("{:.3}", line.time.step_s));
        rate.push(rounded(line.images_per_s()));
        times.push(line.run_s().map_or_else(|| "-".into(), format_duration));
        let rank_h = line.run_s().map(|run_s| run_s / HOUR_S * placement.world_size as f64);
        rank_hours.push(rank_h.map_or_else(|| "-".into(), rounded));
        fits.push(if line.candidate.fits { String::new() } else { "too large".into() });
    }
    let mut columns = Vec::from(key_columns(lines));
    columns.extend([
        Column::numbers("images", images),
        Column::numbers("keep", keep),
        Column::numbers("peak GB", peak),
        Column::numbers("moved GB", moved),
        Column::numbers("step s", step),
        Column::numbers("images/s", rate),
        Column::numbers("time", times),
        Column::numbers("rank-h", rank_hours),
    ]);
    // A column of nothing could be the only one of a divided table.
    if fits.iter().any(|text| !text.is_empty()) {
        columns.push(Column::words("", fits));
    }
    columns
}

/// Returns the columns of memory and time in detail.
fn detail_columns(lines: &[CandidateEstimate]) -> Vec<Column> {
    let mut group = Vec::new();
    let mut state = Vec::new();
    let mut gradients = Vec::new();
    let mut gathered = Vec::new();
    let mut graphs = Vec::new();
    let mut copy = Vec::new();
    let mut compute = Vec::new();
    let mut moving = Vec::new();
    let mut waiting = Vec::new();
    for line in lines {
        let memory = &line.candidate.memory;
        group.push(thousands(line.candidate.placement.group_size as u64));
        state.push(format!("{:.2}", memory.state_bytes / GB));
        gradients.push(format!("{:.2}", memory.gradient_bytes / GB));
        gathered.push(format!("{:.2}", memory.gathered_bytes / GB));
        graphs.push(format!("{:.2}", memory.pass_bytes() / GB));
        copy.push(format!("{:.2}", memory.checkpoint_bytes / GB));
        compute.push(format!("{:.3}", line.time.compute_s));
        moving.push(format!("{:.3}", line.time.moving_s));
        waiting.push(format!("{:.3}", line.time.waiting_s));
    }
    let mut columns = Vec::from(key_columns(lines));
    columns.extend([
        Column::numbers("group", group),
        Column::numbers("state", state),
        Column::numbers("grads", gradients),
        Column::numbers("gather", gathered),
        Column::numbers("graphs", graphs),
        Column::numbers("copy", copy),
        Column::numbers("compute", compute),
        Column::numbers("moving", moving),
        Column::numbers("waiting", waiting),
    ]);
    columns
}

/// Formats a number with three significant digits, or all of those before the point, with thousands
/// separated.
fn rounded(value: f64) -> String {
    match value {
        v if v >= 100.0 => thousands(v.round() as u64),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!([0.123, 12.34, 1234.5].map(rounded), ["0.12", "12.3", "1,235"]);
    }
}
