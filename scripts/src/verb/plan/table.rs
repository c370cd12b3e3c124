//! The table of a plan: a line for each way to distribute the model, as text and as JSON.

use serde_json::{Value, json};
use trainer::cost::ModelCost;
use trainer::estimate::{Memory, StepTime, Traffic, memory, traffic};

use super::hardware::{GB, Hardware};
use super::rows::PlanRow;

const HOUR_S: f64 = 3600.0;

/// A way to distribute a model, with its estimates.
pub(super) struct Line {
    row: PlanRow,
    /// Backbone units that keep their graph, as text.
    keep: String,
    memory: Memory,
    moved: Traffic,
    time: StepTime,
    /// Number of steps of the run, if it is known.
    steps: Option<u64>,
}

impl Line {
    /// Estimates memory, traffic and time of `row` on `hardware`, and the whole run of `steps`.
    pub(super) fn new(model: &ModelCost, row: PlanRow, hardware: &Hardware, steps: Option<u64>) -> Self {
        let placement = &row.placement;
        Self {
            keep: match placement.keep {
                n if n == model.trained.backbone.len() => "all".into(),
                n if placement.segment > 1 => format!("{n}/{}", placement.segment),
                n => n.to_string(),
            },
            memory: memory(model, placement),
            moved: traffic(model, placement),
            time: hardware.step(model, placement),
            row,
            steps,
        }
    }

    fn moved_bytes(&self) -> f64 {
        self.moved.bytes()
    }

    fn images_per_s(&self) -> f64 {
        (self.row.placement.rank_batch * self.row.placement.world_size) as f64 / self.time.step_s
    }

    fn run_s(&self) -> Option<f64> {
        self.steps.map(|steps| steps as f64 * self.time.step_s)
    }

    fn print(&self) {
        let placement = &self.row.placement;
        let mut hours = "-".to_string();
        let mut rank_hours = "-".to_string();
        if let Some(run_s) = self.run_s() {
            hours = rounded(run_s / HOUR_S);
            rank_hours = rounded(run_s / HOUR_S * placement.world_size as f64);
        }
        out!(
            "{:>5} {:<5} {:>6} {:>4} {:>7.2} {:>8.2} {:>7.3} {:>8} {:>7} {:>7}{}",
            placement.world_size,
            self.row.mode,
            placement.rank_batch,
            self.keep,
            self.memory.peak_bytes() / GB,
            self.moved_bytes() / GB,
            self.time.step_s,
            rounded(self.images_per_s()),
            hours,
            rank_hours,
            if self.row.fits { "" } else { "  too large" }
        );
    }

    fn print_details(&self) {
        let placement = &self.row.placement;
        let memory = &self.memory;
        let time = &self.time;
        out!(
            "{:>5} {:<5} {:>5} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>8.3} {:>7.3} {:>7.3}",
            placement.world_size,
            self.row.mode,
            placement.group_size,
            memory.state_bytes / GB,
            memory.gradient_bytes / GB,
            memory.gathered_bytes / GB,
            memory.pass_bytes() / GB,
            memory.checkpoint_bytes / GB,
            time.compute_s,
            time.moving_s,
            time.waiting_s
        );
    }

    /// Returns all numbers as JSON.
    pub(super) fn json(&self) -> Value {
        let Self { row, memory, moved, time, .. } = self;
        let placement = &row.placement;
        json!({
            "ranks": placement.world_size,
            "mode": row.mode,
            "group": placement.group_size,
            "rank_batch": placement.rank_batch,
            "keep": placement.keep,
            "segment": placement.segment,
            "fits": row.fits,
            "state_bytes": memory.state_bytes,
            "gradient_bytes": memory.gradient_bytes,
            "gathered_bytes": memory.gathered_bytes,
            "input_bytes": memory.input_bytes,
            "activation_bytes": memory.activation_bytes,
            "work_bytes": memory.work_bytes,
            "buffer_bytes": memory.buffer_bytes,
            "peak_bytes": memory.peak_bytes(),
            "checkpoint_bytes": memory.checkpoint_bytes,
            "gather_bytes": moved.gather_bytes,
            "reduce_bytes": moved.reduce_bytes,
            "replica_bytes": moved.replica_bytes,
            "column_bytes": moved.column_bytes,
            "other_bytes": moved.other_bytes,
            "n_gathers": moved.n_gathers,
            "n_reduces": moved.n_reduces,
            "n_other": moved.n_other,
            "compute_s": time.compute_s,
            "moving_s": time.moving_s,
            "waiting_s": time.waiting_s,
            "step_s": time.step_s,
            "images_per_s": self.images_per_s(),
            "steps": self.steps,
            "run_s": self.run_s(),
        })
    }
}

/// Prints the table, and the meaning of its columns.
pub(super) fn print(lines: &[Line], details: bool) {
    out!(
        "{:>5} {:<5} {:>6} {:>4} {:>7} {:>8} {:>7} {:>8} {:>7} {:>7}",
        "ranks",
        "mode",
        "images",
        "keep",
        "peak GB",
        "moved GB",
        "step s",
        "images/s",
        "hours",
        "rank-h"
    );
    lines.iter().for_each(Line::print);
    out!("");
    out!("mode      none: each rank holds all weights; grad: gradients and moments are");
    out!("          sharded over ranks; full: weights too; group: full within groups");
    out!("images    per step and rank");
    out!("keep      backbone units that keep their activations; others recompute them once, or");
    out!("          with /n, n at a time: all but every n-th twice, using less memory");
    out!("peak GB   per rank; saving a checkpoint needs another copy of the state");
    out!("moved GB  received by a rank per step");
    out!("hours     for the whole run; rank-h: hours times ranks (GPU-hours)");
    if !details {
        return;
    }
    out!("");
    out!(
        "{:>5} {:<5} {:>5} {:>7} {:>7} {:>7} {:>7} {:>7} {:>8} {:>7} {:>7}",
        "ranks",
        "mode",
        "group",
        "state",
        "grads",
        "gather",
        "graphs",
        "copy",
        "compute",
        "moving",
        "waiting"
    );
    lines.iter().for_each(Line::print_details);
    out!("");
    out!("state     GB for all networks' weights and moments; grads: for gradients;");
    out!("          gather: for weights in transfer and in use; graphs: for activations;");
    out!("          copy: for the state while a checkpoint is written");
    out!("compute   seconds per step; moving: of communication, overlapping computation;");
    out!("          waiting: seconds that computation waits for communication");
}

/// Formats a number with three significant digits, or all of those before the point.
fn rounded(value: f64) -> String {
    let digits = match value {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!([0.123, 12.34, 1234.5].map(rounded), ["0.12", "12.3", "1234"]);
    }
}
