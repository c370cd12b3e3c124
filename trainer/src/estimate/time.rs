//! Time of a step: its computation and its collectives, in the order of its events.
//!
//! Collectives run one after another beside the computation. While a unit computes, the next one is
//! gathered and the gradient of the last one is reduced; the computation waits for the weights of
//! its unit, and for the sums of statistics over the batch. A collective takes a latency and, for
//! every byte, a share of the bandwidth ([`Fabric`]).

use std::collections::VecDeque;

use ranks::prefetch::MAX_REDUCTIONS_IN_FLIGHT;
use ranks::wire::Wire;

use super::Placement;
use super::fabric::{Fabric, Members};
use super::placed::{PlacedModel, Work, sum_work};
use crate::cost::{ModelCost, NetworkCost, UnitCost};
use crate::method::Collective;
use crate::step::schedule::{Event, StepNetwork};

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
    let work = step_work(PlacedModel { model, placement });
    let images = placement.rank_batch as f64;
    StepFlops { needed: images * (work.flops - work.repeated_flops), with_recomputation: images * work.flops }
}

/// Returns the work of all events of a step for one image.
pub(super) fn step_work(placed: PlacedModel<'_>) -> Work {
    sum_work(placed.events().into_iter().map(|event| placed.work(event)))
}

/// Estimates the time of a step in which a rank computes for `compute_s`.
pub fn step_time(model: &ModelCost, placement: &Placement, fabric: &Fabric, compute_s: f64) -> StepTime {
    let placed = PlacedModel { model, placement };
    let events = placed.events();
    let collectives = Collectives::new(placed, fabric);
    let total_flops = step_work(placed).flops;
    let mut walk = Walk { collectives: &collectives, timeline: Timeline::default(), ahead_s: None };
    let mut in_flight = VecDeque::new();
    let mut held_s: Vec<f64> = Vec::new();
    for (position, event) in events.iter().enumerate() {
        let rest = &events[position + 1..];
        match *event {
            Event::Gather { network, unit, .. } => {
                walk.wait_for_weights(network, unit);
                if matches!(rest.first(), Some(Event::Gather { .. })) {
                    walk.look_ahead(rest);
                }
            }
            Event::Reduce { unit } => held_s.push(collectives.reduce_s(unit)),
            _ => {
                let waits = collectives.waits(*event);
                let mut stage_s = 0.0;
                if total_flops > 0.0 {
                    let n_stages = waits.before_gather_s.len() + waits.after_gather_s.len() + 1;
                    stage_s = compute_s * placed.work(*event).flops / total_flops / n_stages as f64;
                }
                walk.run_stages(stage_s, &waits.before_gather_s);
                walk.look_ahead(rest);
                for reduce_s in held_s.drain(..) {
                    if in_flight.len() == MAX_REDUCTIONS_IN_FLIGHT {
                        walk.timeline.wait_until(in_flight.pop_front().unwrap_or_default());
                    }
                    in_flight.push_back(walk.timeline.submit(reduce_s));
                }
                walk.run_stages(stage_s, &waits.after_gather_s);
                walk.timeline.compute(stage_s);
            }
        }
    }
    // Norms and votes are agreed on once all gradients have arrived.
    let mut timeline = walk.timeline;
    let agreed_s = timeline.submit(held_s.iter().sum::<f64>() + collectives.small_sum_s());
    timeline.wait_until(agreed_s);
    let Timeline { now_s, moving_s, waiting_s, .. } = timeline;
    // Without products there is nothing to place on the timeline.
    StepTime { compute_s, moving_s, waiting_s, step_s: now_s.max(compute_s) }
}

/// A step, followed event by event.
struct Walk<'a> {
    collectives: &'a Collectives<'a>,
    timeline: Timeline,
    /// End of the gather in transfer.
    ahead_s: Option<f64>,
}

impl Walk<'_> {
    /// Waits for the weights of a unit.
    fn wait_for_weights(&mut self, network: StepNetwork, unit: usize) {
        let ready_s = match self.ahead_s.take() {
            Some(ready_s) => ready_s,
            None => self.timeline.submit(self.collectives.gather_s(network, unit)),
        };
        self.timeline.wait_until(ready_s);
    }

    /// Submits the next gather among the events in `rest`.
    fn look_ahead(&mut self, rest: &[Event]) {
        if self.ahead_s.is_some() {
            return;
        }
        for event in rest {
            if let Event::Gather { network, unit, .. } = *event {
                self.ahead_s = Some(self.timeline.submit(self.collectives.gather_s(network, unit)));
                return;
            }
        }
    }

    /// Computes for `stage_s` before each of the collectives that are waited for.
    fn run_stages(&mut self, stage_s: f64, waits_s: &[f64]) {
        for wait_s in waits_s {
            self.timeline.compute(stage_s);
            let end_s = self.timeline.submit(*wait_s);
            self.timeline.wait_until(end_s);
        }
    }
}

/// Seconds of the collectives that a computation waits for, one after another.
#[derive(Default)]
struct Waits {
    /// Those before the next gather is submitted.
    before_gather_s: Vec<f64>,
    /// Those after that.
    after_gather_s: Vec<f64>,
}

/// Seconds of collectives.
struct Collectives<'a> {
    placed: PlacedModel<'a>,
    fabric: &'a Fabric,
    everyone: Members,
    /// Ranks that share a sharded copy.
    group: Members,
    /// Ranks that hold the same shard.
    replicas: Members,
    /// Number of ranks among which columns of heads are divided.
    n_parts: usize,
    /// Ranks with the same columns.
    column_peers: Members,
}

/// Exchanges of a few numbers within a column group for the targets that a divided head gives: of
/// rows, as with three iterations of Sinkhorn-Knopp, of means and of gauges.
const N_TARGET_SUMS: usize = 5;

impl<'a> Collectives<'a> {
    fn new(placed: PlacedModel<'a>, fabric: &'a Fabric) -> Self {
        let placement = placed.placement;
        let Placement { world_size, group_size, .. } = *placement;
        let n_parts = placement.n_parts(placed.model);
        // Ranks with the same columns are neighbors in each shard group.
        let run = (group_size / n_parts).max(1);
        let n_runs = world_size / n_parts / run;
        Self {
            placed,
            fabric,
            everyone: Members::new(world_size, 1, placement, fabric),
            group: Members::new(group_size, 1, placement, fabric),
            replicas: Members::new(world_size / group_size, group_size, placement, fabric),
            n_parts,
            column_peers: Members::with_runs(run, n_runs, group_size, placement, fabric),
        }
    }

    /// Returns the seconds of a sum of a few numbers over all ranks.
    fn small_sum_s(&self) -> f64 {
        self.everyone.small_sum_s(self.fabric)
    }

    /// Returns the collectives that the computation of an event waits for.
    fn waits(&self, event: Event) -> Waits {
        let backbone = self.placed.backbone();
        let mut waits = Waits::default();
        match event {
            Event::Infer { network, unit } => {
                let network = self.placed.network(StepNetwork::Other(network));
                if !network.is_frozen {
                    waits.before_gather_s = self.sums_s(&network.backbone[unit..=unit]);
                }
            }
            Event::InferHeads { network } => {
                let network = self.placed.network(StepNetwork::Other(network));
                if !network.is_frozen {
                    waits.before_gather_s = self.sums_s(&network.head);
                }
                waits.before_gather_s.extend(self.columns_s(network, false));
            }
            Event::Forward { unit, .. } | Event::Backward { unit, .. } => {
                waits.before_gather_s = self.sums_s(&backbone[unit..=unit]);
            }
            Event::Loss => {
                let trained = &self.placed.model.trained;
                let sums_s = self.sums_s(&trained.head);
                let columns_s = self.columns_s(trained, true);
                waits.before_gather_s.extend(&sums_s);
                // Exchanges of columns precede the next gather; otherwise it follows the
                // statistics.
                let rest_s = match columns_s {
                    Some(columns_s) => {
                        waits.before_gather_s.push(columns_s);
                        &mut waits.before_gather_s
                    }
                    None => &mut waits.after_gather_s,
                };
                for collective in &self.placed.model.collectives {
                    rest_s.push(self.method_s(*collective));
                }
                waits.after_gather_s.extend(&sums_s);
            }
            Event::Repeat { .. } | Event::Gather { .. } | Event::Reduce { .. } => {}
        }
        waits
    }

    /// Returns the seconds of the statistics of `units` in a pass, one after another.
    fn sums_s(&self, units: &[UnitCost]) -> Vec<f64> {
        let n_sums: usize = units.iter().map(|unit| unit.n_sums).sum();
        vec![self.small_sum_s(); n_sums]
    }

    /// Returns the seconds of a collective of the method.
    fn method_s(&self, collective: Collective) -> f64 {
        let (members, n_values) = match collective {
            Collective::Sum(n_values) => (self.everyone, n_values as f64),
            Collective::ColumnSum(n_values) => (self.column_peers, n_values as f64 / self.n_parts as f64),
            Collective::SumOfShares(n_values) => (self.column_peers, n_values as f64),
            Collective::Number => return self.small_sum_s(),
            Collective::Gather(n_values) => {
                let n_images = self.placed.placement.rank_batch * self.placed.placement.world_size;
                let bytes = (n_values * n_images * Wire::F32.bytes()) as f64;
                return self.everyone.gather_s(bytes, self.fabric);
            }
        };
        members.sum_s(n_values * Wire::F32.bytes() as f64, self.fabric)
    }

    /// Returns the seconds until the weights of a unit arrive; 0 if they are there.
    fn gather_s(&self, network: StepNetwork, unit: usize) -> f64 {
        let placement = self.placed.placement;
        if !placement.gathers() {
            return 0.0;
        }
        let is_backbone = unit < self.placed.network(network).backbone.len();
        let precision = placement.precision;
        let wire = if is_backbone { precision.gather } else { precision.head_gather };
        let unit = self.placed.unit(network, unit);
        self.sharers(unit).gather_s(unit.bytes_moved(wire, placement.group_size), self.fabric)
    }

    /// Returns the ranks from which a rank gathers the unit: neighbors.
    fn sharers(&self, unit: &UnitCost) -> Members {
        let placement = self.placed.placement;
        match unit.n_shards(placement.group_size) {
            n_shards if n_shards == placement.group_size => self.group,
            n_shards => Members::new(n_shards, 1, placement, self.fabric),
        }
    }

    /// Returns the seconds of the exchanges within a column group for the divided heads of a
    /// network: their inputs, with a graph the gradients at them, and a few numbers of each row;
    /// `None` if no head is divided.
    fn columns_s(&self, network: &NetworkCost, has_graph: bool) -> Option<f64> {
        let placement = self.placed.placement;
        let is_divided = |unit: &&UnitCost| 1 < unit.n_parts && unit.n_parts <= placement.group_size;
        let divided: Vec<&UnitCost> = network.head.iter().filter(is_divided).collect();
        let first = divided.first()?;
        let mut seconds = 0.0;
        if has_graph {
            // The scores of all heads of a micro-batch are completed together.
            let n_graphs = (first.n_parts * placement.rank_micro_batches) as f64;
            seconds += n_graphs * self.column_group(first).small_sum_s(self.fabric);
        }
        for unit in divided {
            let group = self.column_group(unit);
            let images = (unit.n_parts * placement.rank_batch) as f64;
            let input_bytes = unit.input.wide * Wire::F32.bytes() as f64 * images;
            seconds += group.gather_s(input_bytes, self.fabric);
            if has_graph {
                seconds += group.exchange_s(input_bytes, self.fabric);
            }
            // The trained network gives no targets, unless its heads run a second time for that.
            if !has_graph || unit.runs_twice {
                seconds += N_TARGET_SUMS as f64 * group.small_sum_s(self.fabric);
            }
        }
        Some(seconds)
    }

    /// Returns the ranks that divide the columns of `unit`.
    fn column_group(&self, unit: &UnitCost) -> Members {
        let placement = self.placed.placement;
        Members::new(unit.n_parts, unit.n_shards(placement.group_size), placement, self.fabric)
    }

    /// Returns the seconds of the sum of a gradient over the ranks of a group, then over replicas.
    fn reduce_s(&self, unit: usize) -> f64 {
        let Placement { group_size, precision, exact_sums, .. } = *self.placed.placement;
        let is_backbone = unit < self.placed.backbone().len();
        let wire = if is_backbone { precision.reduce } else { precision.head_reduce };
        let unit = self.placed.unit(StepNetwork::Trained, unit);
        let bytes = unit.bytes_moved(wire, group_size);
        let sharers = self.sharers(unit);
        // Sums in a fixed order are exchanges; others are rings, which only f32 has.
        let in_group_s = if exact_sums || wire != Wire::F32 {
            sharers.exchange_s(bytes, self.fabric)
        } else {
            sharers.gather_s(bytes, self.fabric)
        };
        let n_shards = unit.n_shards(group_size) as f64;
        let exchange_s = self.replicas.exchange_s(bytes / n_shards, self.fabric);
        // The sum is sent back in f32.
        let sum_bytes = unit.bytes_moved(Wire::F32, group_size) / n_shards;
        in_group_s + exchange_s + self.replicas.gather_s(sum_bytes, self.fabric)
    }
}

/// Computation and collectives side by side.
#[derive(Default)]
struct Timeline {
    now_s: f64,
    /// When the last collective ends.
    free_s: f64,
    moving_s: f64,
    waiting_s: f64,
}

impl Timeline {
    fn compute(&mut self, seconds: f64) {
        self.now_s += seconds;
    }

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
}

#[cfg(test)]
mod tests {
    use super::*;
    use ranks::topology::Sharding;

    use crate::cost::preset;
    use crate::estimate::Latency;
    use crate::step::precision::Precision;

    fn placement(world_size: usize, group_size: usize, keep: usize) -> Placement {
        Placement {
            world_size,
            group_size,
            sharding: if group_size > 1 { Sharding::Full } else { Sharding::None },
            keep,
            segment: 1,
            rank_batch: 16,
            rank_micro_batches: 1,
            workers: 1,
            precision: Precision::default(),
            exact_sums: true,
            offload: false,
        }
    }

    /// Fabric whose links all have `gb_s` and `latency_s`.
    fn fabric(ranks_per_node: usize, gb_s: f64, latency_s: f64) -> Fabric {
        Fabric {
            ranks_per_node,
            local_bytes_per_s: gb_s * 1e9,
            node_bytes_per_s: gb_s * 1e9,
            local_latency: Latency { short_s: latency_s, long_s: latency_s },
            node_latency: Latency { short_s: latency_s, long_s: latency_s },
        }
    }

    #[test]
    fn a_step_takes_at_least_its_longer_half_and_at_most_both() {
        for name in ["vit-s", "resnet50", "seer-rg32gf", "vit-7b"] {
            let model = preset(name, None).unwrap();
            for (world, group, keep) in [(2, 2, 0), (8, 8, 100), (16, 1, 0), (16, 4, 3)] {
                for gb_s in [0.1, 1.0, 100.0] {
                    let placement = placement(world, group, keep);
                    let time = step_time(&model, &placement, &fabric(4, gb_s, 1e-5), 0.5);
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
        let time = step_time(&model, &placement(1, 1, 0), &fabric(1, 1.0, 1e-3), 2.0);
        assert!((time.step_s - 2.0).abs() < 1e-9 && time.moving_s == 0.0, "{time:?}");
    }

    /// By hand: two units on two ranks of two nodes, where moving takes far longer than computing.
    #[test]
    fn moving_is_the_sum_of_all_collectives() {
        let unit = |numel: usize| UnitCost { numel, flops: 1.0, ..UnitCost::empty("unit") };
        let network = NetworkCost {
            name: "student".into(),
            is_frozen: false,
            backbone: vec![unit(1_000_000), unit(2_000_000)],
            head: Vec::new(),
        };
        let model = ModelCost {
            name: "by hand".into(),
            trained: network,
            others: Vec::new(),
            n_moments: 2,
            pixels: 0.0,
            collectives: vec![Collective::Number],
            masked: None,
        };
        let time = step_time(&model, &placement(2, 2, 0), &fabric(1, 0.001, 0.1), 0.0);
        // 12 MB are gathered twice and reduced once, and half of them move: 18 s; six collectives,
        // and two sums of two messages.
        assert!((time.moving_s - (18.0 + 6.0 * 0.1 + 4.0 * 0.1)).abs() < 1e-2, "{time:?}");
        assert!((time.step_s - time.moving_s).abs() < 1e-9, "{time:?}");
    }
}
