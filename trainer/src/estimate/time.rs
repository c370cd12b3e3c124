//! Time of a step: its computation and its collectives, in the order of its events.
//!
//! Collectives run one after another beside the computation. While a unit computes, the next one is
//! gathered and the gradient of the last one is reduced; the computation waits for the weights of
//! its unit, and for the sums of statistics over the batch. A collective takes a latency and, for
//! every byte, a share of the bandwidth ([`Fabric`]).

use std::collections::VecDeque;

use ranks::in_flight::MAX_REDUCTIONS_IN_FLIGHT;

use super::Placement;
use super::collectives::{gather, reduction, small_sum, waits};
use super::fabric::{Fabric, Transfer};
use super::placed::PlacedModel;
use crate::cost::ModelCost;
use crate::step::events::Event;

/// Seconds of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepTime {
    /// Seconds of the computation.
    pub compute_s: f64,
    /// Seconds of all collectives.
    pub moving_s: f64,
    /// Seconds that the computation waits for collectives.
    pub waiting_s: f64,
    /// Seconds of the step.
    pub step_s: f64,
}

/// Floating-point operations of matrix products in a step of one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepFlops {
    /// Operations, each counted once.
    pub needed: f64,
    /// Operations with those that are repeated, because units keep no graph.
    pub with_recomputation: f64,
}

/// Returns the floating-point operations of a step of one rank.
pub fn step_flops(model: &ModelCost, placement: &Placement) -> StepFlops {
    let all_kept = Placement { keep: model.trained.backbone.len(), ..*placement };
    StepFlops { needed: flops(model, &all_kept), with_recomputation: flops(model, placement) }
}

fn flops(model: &ModelCost, placement: &Placement) -> f64 {
    let placed = PlacedModel { model, placement };
    placed.n_images() * placed.work(&placed.events()).flops
}

/// Estimates the time of a step in which a rank computes for `compute_s`.
pub fn step_time(model: &ModelCost, placement: &Placement, fabric: &Fabric, compute_s: f64) -> StepTime {
    let placed = PlacedModel { model, placement };
    let fabric = Fabric { ranks_per_node: fabric.ranks_per_node.min(placement.world_size), ..*fabric };
    let small_sum_s = fabric.seconds(&small_sum(placed));
    let events = placed.events();
    let total_flops = placed.work(&events).flops;
    let mut timeline = Timeline::default();
    for event in &events {
        if let Event::Gather { network, unit, .. } = *event {
            timeline.gathers_s.push_back(fabric.seconds(&gather(placed, network, unit)));
        }
    }
    let mut reductions_s = Vec::new();
    for (position, event) in events.iter().enumerate() {
        match *event {
            Event::Gather { .. } => {
                timeline.wait_for_weights();
                if matches!(events.get(position + 1), Some(Event::Gather { .. })) {
                    timeline.look_ahead();
                }
            }
            Event::Reduce { unit } => reductions_s.push(total_s(&fabric, &reduction(placed, unit))),
            _ => {
                let waits = waits(placed, *event);
                let mut before_gather_s = vec![small_sum_s; waits.n_sums];
                let mut after_gather_s = Vec::new();
                let method_s = waits.method.iter().map(|transfer| fabric.seconds(transfer));
                // Exchanges of columns precede the next gather; otherwise it follows the
                // statistics.
                if waits.columns.is_empty() {
                    after_gather_s.extend(method_s);
                } else {
                    before_gather_s.push(total_s(&fabric, &waits.columns));
                    before_gather_s.extend(method_s);
                }
                after_gather_s.extend(vec![small_sum_s; waits.n_backward_sums]);
                let mut stage_s = 0.0;
                if total_flops > 0.0 {
                    let n_stages = before_gather_s.len() + after_gather_s.len() + 1;
                    stage_s = compute_s * placed.work(&[*event]).flops / total_flops / n_stages as f64;
                }
                timeline.run_stages(stage_s, &before_gather_s);
                timeline.look_ahead();
                timeline.submit_reductions(&reductions_s);
                reductions_s.clear();
                timeline.run_stages(stage_s, &after_gather_s);
                timeline.now_s += stage_s;
            }
        }
    }
    // Norms and votes are agreed on once all gradients have arrived.
    timeline.run_stages(0.0, &[reductions_s.iter().sum::<f64>() + small_sum_s]);
    let Timeline { now_s, moving_s, waiting_s, .. } = timeline;
    // Without products there is nothing to place on the timeline.
    StepTime { compute_s, moving_s, waiting_s, step_s: now_s.max(compute_s) }
}

/// Returns the seconds of collectives one after another.
fn total_s(fabric: &Fabric, transfers: &[Transfer]) -> f64 {
    transfers.iter().map(|transfer| fabric.seconds(transfer)).sum()
}

/// Computation and collectives side by side.
#[derive(Default)]
struct Timeline {
    now_s: f64,
    /// When the last collective ends.
    free_s: f64,
    moving_s: f64,
    waiting_s: f64,
    /// Seconds of the gathers that are not submitted yet.
    gathers_s: VecDeque<f64>,
    /// End of the gather in transfer.
    gathered_s: Option<f64>,
    /// Ends of the last reductions.
    reduced_s: VecDeque<f64>,
}

impl Timeline {
    /// Queues a collective that takes `seconds`; returns when it ends. With 0 seconds there is no
    /// collective: the end is now.
    fn submit(&mut self, seconds: f64) -> f64 {
        if seconds == 0.0 {
            return self.now_s;
        }
        self.free_s = self.free_s.max(self.now_s) + seconds;
        self.moving_s += seconds;
        self.free_s
    }

    fn wait_until(&mut self, end_s: f64) {
        self.waiting_s += (end_s - self.now_s).max(0.0);
        self.now_s = self.now_s.max(end_s);
    }

    /// Submits the next gather, unless one is in transfer.
    fn look_ahead(&mut self) {
        if self.gathered_s.is_none()
            && let Some(seconds) = self.gathers_s.pop_front()
        {
            self.gathered_s = Some(self.submit(seconds));
        }
    }

    /// Waits for the weights of the next unit.
    fn wait_for_weights(&mut self) {
        self.look_ahead();
        if let Some(end_s) = self.gathered_s.take() {
            self.wait_until(end_s);
        }
    }

    /// Submits reductions, and waits for earlier ones if too many are in flight.
    fn submit_reductions(&mut self, reductions_s: &[f64]) {
        for seconds in reductions_s {
            if self.reduced_s.len() == MAX_REDUCTIONS_IN_FLIGHT {
                let end_s = self.reduced_s.pop_front().unwrap_or_default();
                self.wait_until(end_s);
            }
            let end_s = self.submit(*seconds);
            self.reduced_s.push_back(end_s);
        }
    }

    /// Computes for `stage_s` before each of the collectives that are waited for.
    fn run_stages(&mut self, stage_s: f64, waits_s: &[f64]) {
        for seconds in waits_s {
            self.now_s += stage_s;
            let end_s = self.submit(*seconds);
            self.wait_until(end_s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{UnitCost, preset};
    use crate::method::Collective;

    #[test]
    fn a_step_takes_at_least_its_longer_half_and_at_most_both() {
        for name in ["vit-s", "resnet50", "seer-rg32gf", "vit-7b"] {
            let model = preset(name, None).unwrap();
            for (world_size, group_size, keep) in [(2, 2, 0), (8, 8, 100), (16, 1, 0), (16, 4, 3)] {
                let placement = Placement { group_size, keep, ..Placement::one_image_each(world_size) };
                for gb_s in [0.1, 1.0, 100.0] {
                    let time = step_time(&model, &placement, &Fabric::uniform(4, gb_s, 1e-5), 0.5);
                    assert!(time.step_s >= time.moving_s.max(0.5) - 1e-9, "{name}: {time:?}");
                    assert!(time.step_s <= time.moving_s + 0.5 + 1e-9, "{name}: {time:?}");
                    assert!((time.step_s - time.waiting_s - 0.5).abs() < 1e-9, "{name}: {time:?}");
                }
            }
        }
    }

    /// One rank moves nothing, and waits for nothing.
    #[test]
    fn one_rank_only_computes() {
        let model = preset("seer-rg32gf", None).unwrap();
        let time = step_time(&model, &Placement::one_image_each(1), &Fabric::uniform(1, 1.0, 1e-3), 2.0);
        assert!((time.step_s - 2.0).abs() < 1e-9 && time.moving_s == 0.0, "{time:?}");
    }

    /// By hand: two units on two ranks of two nodes, where moving takes far longer than computing.
    #[test]
    fn moving_is_the_sum_of_all_collectives() {
        let mut backbone = Vec::new();
        for numel in [1_000_000, 2_000_000] {
            backbone.push(UnitCost { numel, flops: 1.0, ..UnitCost::empty("unit") });
        }
        let collectives = vec![Collective::Number];
        let model = ModelCost { collectives, ..ModelCost::with_backbone(backbone) };
        let time = step_time(&model, &Placement::one_image_each(2), &Fabric::uniform(1, 0.001, 0.1), 0.0);
        // 12 MB are gathered twice and reduced once, and half of them move: 18 s; six collectives,
        // and two sums of two messages.
        assert!((time.moving_s - (18.0 + 6.0 * 0.1 + 4.0 * 0.1)).abs() < 1e-2, "{time:?}");
        assert!((time.step_s - time.moving_s).abs() < 1e-9, "{time:?}");
    }
}
