//! The table of a plan: a line for each way to distribute the model.

use trainer::cost::ModelCost;
use trainer::estimate::CandidateEstimate;

use super::units::{GB, HOUR_S};

/// Prints the table, and the meaning of its columns.
pub(super) fn print(model: &ModelCost, lines: &[CandidateEstimate], details: bool) {
    out!("ranks mode  images keep peak GB moved GB  step s images/s   hours  rank-h");
    lines.iter().for_each(|line| print_line(model, line));
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
    out!("ranks mode  group   state   grads  gather  graphs    copy  compute  moving waiting");
    lines.iter().for_each(print_details);
    out!("");
    out!("state     GB for all networks' weights and moments; grads: for gradients;");
    out!("          gather: for weights in transfer and in use; graphs: for activations;");
    out!("          copy: for the state while a checkpoint is written");
    out!("compute   seconds per step; moving: of communication, overlapping computation;");
    out!("          waiting: seconds that computation waits for communication");
}

fn print_line(model: &ModelCost, line: &CandidateEstimate) {
    let placement = &line.candidate.placement;
    let mut hours = "-".to_string();
    let mut rank_hours = "-".to_string();
    if let Some(run_s) = line.run_s() {
        hours = rounded(run_s / HOUR_S);
        rank_hours = rounded(run_s / HOUR_S * placement.world_size as f64);
    }
    let keep = match placement.keep {
        n if n == model.trained.backbone.len() => "all".into(),
        n if placement.segment > 1 => format!("{n}/{}", placement.segment),
        n => n.to_string(),
    };
    out!(
        "{:>5} {:<5} {:>6} {:>4} {:>7.2} {:>8.2} {:>7.3} {:>8} {:>7} {:>7}{}",
        placement.world_size,
        line.candidate.mode(),
        placement.rank_batch,
        keep,
        line.candidate.memory.peak_bytes() / GB,
        line.traffic.bytes() / GB,
        line.time.step_s,
        rounded(line.images_per_s()),
        hours,
        rank_hours,
        if line.candidate.fits { "" } else { "  too large" }
    );
}

fn print_details(line: &CandidateEstimate) {
    let placement = &line.candidate.placement;
    let memory = &line.candidate.memory;
    out!(
        "{:>5} {:<5} {:>5} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>8.3} {:>7.3} {:>7.3}",
        placement.world_size,
        line.candidate.mode(),
        placement.group_size,
        memory.state_bytes / GB,
        memory.gradient_bytes / GB,
        memory.gathered_bytes / GB,
        memory.pass_bytes() / GB,
        memory.checkpoint_bytes / GB,
        line.time.compute_s,
        line.time.moving_s,
        line.time.waiting_s
    );
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
